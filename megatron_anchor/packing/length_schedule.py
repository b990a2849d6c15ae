"""Documents that grow with training: a bound on what a token sees, by the samples consumed.

Short contexts first, long ones later (SkyLadder, arXiv 2503.15450) learns faster and costs less.
The bound cuts segments of the finished samples and nothing else: which samples there are, their
order and their targets stay, and every token is a target once. It is the same for all samples of a
global batch. Evaluation has no bound.

  anchored  under patterns with one anchor each further piece begins with a copy of it, in the place
            of the token before the piece's first target
  cut       under the others there are only more borders; positions go on

A last piece of a single slot, which would see nothing, joins the piece before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_anchor.errors import UserError
from megatron_anchor.packing.layout import Layout

FORMS = "linear:FIRST:LAST:SAMPLES, or steps:0=FIRST,SAMPLES=NEXT,..."
LENGTH_LIMIT = "length_limit"
"""Figure of a scheduled sample: its bound, in slots."""


@dataclass(frozen=True)
class LengthSchedule:
    """Bounds by the number of samples consumed."""

    points: tuple[tuple[int, int], ...]
    """(samples, slots), ascending by samples, from 0 on."""
    is_linear: bool
    """Whether the bound grows from point to point, or holds until the next one."""

    @classmethod
    def parse(cls, text: str) -> LengthSchedule:
        """Read --document-length-schedule.

        Raises:
            UserError: it has another form, or its numbers mean nothing.
        """
        kind, _, rest = text.partition(":")
        points: tuple[tuple[int, int], ...]
        try:
            if kind == "linear":
                first, last, samples = map(int, rest.split(":"))
                points = ((0, first), (samples, last))
            elif kind == "steps":
                pairs = [point.split("=") for point in rest.split(",")]
                points = tuple((int(samples), int(length)) for samples, length in pairs)
            else:
                raise ValueError(kind)
        except ValueError as error:
            raise UserError(f"--document-length-schedule {text}: expected {FORMS}") from error
        starts = [samples for samples, _ in points]
        if starts[0] != 0 or starts != sorted(set(starts)):
            raise UserError(
                f"--document-length-schedule {text}: samples must begin at 0 and ascend"
            )
        if min(length for _, length in points) < 2:
            raise UserError(
                f"--document-length-schedule {text}: a piece takes 2 slots or more, an anchor and "
                "a token"
            )
        return cls(points, kind == "linear")

    def at(self, consumed: int, *, alignment: int = 1) -> int:
        """Slots of the longest segment once so many samples are consumed.

        Args:
            consumed: samples before the global batch.
            alignment: of documents; the bound is a multiple of it.
        """
        samples, lengths = zip(*self.points, strict=True)
        if self.is_linear:
            length = int(np.interp(consumed, samples, lengths))
        else:
            length = lengths[int(np.searchsorted(samples, consumed, side="right")) - 1]
        return max(length // alignment * alignment, 2, alignment)

    @property
    def last(self) -> int:
        """The bound at the end."""
        return self.points[-1][1]


def refusals(text: str | None, *, sequence_length: int) -> Iterator[str]:
    """Say what is wrong with --document-length-schedule."""
    if text is None:
        return
    try:
        schedule = LengthSchedule.parse(text)
    except UserError as error:
        yield str(error)
        return
    if schedule.last < sequence_length:
        yield (
            f"--document-length-schedule {text}: it ends at {schedule.last}, so documents of "
            f"--seq-length {sequence_length} would never be seen whole; end at {sequence_length}"
        )


def cut_lengths(lengths: np.ndarray, longest: int) -> np.ndarray:
    """int64, lengths of the pieces of segments, in order.

    Args:
        lengths: integers, slots of the segments.
        longest: slots of a piece, 2 or more; the last one of a segment may have one slot more.
    """
    count = np.maximum((lengths + longest - 2) // longest, 1)
    pieces = np.full(int(count.sum()), longest, dtype=np.int64)
    pieces[np.cumsum(count) - 1] = lengths - (count - 1) * longest
    return pieces


def cut(arrays: dict[str, np.ndarray], layout: Layout, longest: int) -> np.ndarray:
    """Bound the segments of a sample, in place.

    Args:
        arrays: what `lay_out` made.
        layout: what all samples share.
        longest: see `cut_lengths`.

    Returns:
        int64, the slots that now hold a copy of the anchor.
    """
    length = layout.sequence_length
    borders = np.unique(arrays["cu_seqlens"])
    pieces = cut_lengths(np.diff(borders), longest)
    found = np.concatenate(([0], np.cumsum(pieces)))
    arrays["cu_seqlens"] = np.full_like(arrays["cu_seqlens"], length)
    arrays["cu_seqlens"][: len(found)] = found
    arrays["max_seqlen"] = np.array(pieces.max(), dtype=np.int32)
    pattern = layout.pattern
    if not pattern.one_anchor or pattern.separates_anchors:
        return np.zeros(0, dtype=np.int64)
    anchors = np.setdiff1d(found, borders)
    arrays["tokens"][anchors] = layout.anchor_token_id
    arrays["position_ids"][anchors] = layout.anchor_position
    arrays["router_mask"][anchors] = False
    return anchors


class ScheduledDataset(torch.utils.data.Dataset):
    """The samples of a packed dataset (or blend), each bounded by the samples before its batch.

    Args:
        dataset: a `PackedDataset`, or a Megatron `BlendedDataset` of such, in training's order.
        schedule: the bounds.
        global_batch_size: samples of a batch.
        first: number of a sample where a batch begins.
    """

    def __init__(
        self, dataset: Any, schedule: LengthSchedule, *, global_batch_size: int, first: int = 0
    ) -> None:
        self.dataset = dataset
        self.schedule = schedule
        self._batch, self._first = global_batch_size, first

    def __len__(self) -> int:
        """Samples, as before."""
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the inner dataset's."""
        if name in ("dataset", "schedule", "_batch", "_first"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def longest(self, idx: int) -> int | None:
        """The bound of a sample, None where it bounds nothing."""
        consumed = idx - (idx - self._first) % self._batch
        config = self.dataset.config
        bound = self.schedule.at(max(consumed, 0), alignment=config.alignment)
        return bound if bound < config.sequence_length else None

    def __getitem__(self, idx: int) -> Mapping[str, torch.Tensor]:
        """The bounded sample, and its bound as `length_limit`."""
        longest, inner, number, source = self.longest(idx), self.dataset, idx, {}
        if hasattr(inner, "dataset_sample_index"):
            corpus = inner.dataset_index[idx]
            source = {"dataset_id": corpus}
            inner, number = inner.datasets[corpus], int(inner.dataset_sample_index[idx])
        limit = torch.tensor(longest or inner.config.sequence_length, dtype=torch.int32)
        return source | inner.sample(number, longest=longest) | {LENGTH_LIMIT: limit}
