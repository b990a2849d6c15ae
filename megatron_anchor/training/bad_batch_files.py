"""The files of --dump-bad-batch: one .npz for programs and one .json for people, no pickle.

`NAME.npz` holds tokens, labels, loss_mask, position_ids [B, S], cu_seqlens [B, ceil(S / 2) + 1],
sample [B] and, for a loss, losses [B, s] of the rank that found it; B counts the samples named.
`NAME.json` is written last: it names corpus, split and sample, and of each document slice its
number, slots and text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megatron_anchor.packing.dataset import PackedDataset
from megatron_anchor.packing.inspection import describe_sample, document_borders
from megatron_anchor.whole_files import atomic_write

FORMAT = "megatron_anchor bad batch 1"
FIELDS = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens")


@dataclass
class SampleRecord:
    """One sample of a packed dataset, read again by its number."""

    dataset: PackedDataset
    number: int
    bad_slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 ascending slots whose loss is not finite, of those that one rank holds"""
    losses: np.ndarray | None = None
    """float32 [s], of the slots that one rank holds"""

    @cached_property
    def sample(self) -> dict[str, Tensor]:
        """Its fields; see `PackedDataset`."""
        return self.dataset[self.number]

    @cached_property
    def slices(self) -> list[dict[str, Any]]:
        """Its document slices: slots, document (None where documents are mixed) and text."""
        decode = self._decode if hasattr(self.dataset.config.tokenizer, "detokenize") else None
        rows = describe_sample(self.dataset, self.number, decode=decode)
        return [{k: row[k] for k in ("slots", "document", "text") if k in row} for row in rows]

    @property
    def documents(self) -> list[int]:
        """Numbers of its documents in the corpus, in order."""
        return self.dataset.slices(self.number).document.tolist()

    @property
    def bad_documents(self) -> list[int]:
        """Those that hold a slot whose loss is not finite, where documents are kept apart."""
        if not self.dataset.config.pattern.masks_documents:
            return []
        ends = document_borders(self.dataset.slices(self.number))[1:]
        rows = np.unique(np.searchsorted(ends, self.bad_slots, side="right"))
        documents = self.documents
        return [documents[row] for row in rows if row < len(documents)]

    def in_words(self, most: int) -> str:
        """One line: sample, corpus and at most so many documents."""
        bad = self.bad_documents
        text = (
            f"sample {self.number} of the {self.dataset.index_split.name} split of "
            f"{self.dataset.dataset_path}: documents {_some(self.documents, most)}"
        )
        if len(self.bad_slots):
            text += f"; not finite from slot {self.bad_slots[0]} on"
        return text + (f", in documents {_some(bad, most)}" if bad else "")

    def as_json(self) -> dict[str, Any]:
        """All that is known of it but the numbers of the .npz."""
        return {
            "corpus": self.dataset.dataset_path,
            "split": self.dataset.index_split.name,
            "sample": self.number,
            "documents": self.documents,
            "documents_not_finite": self.bad_documents,
            "slots_not_finite": _ranges(self.bad_slots),
            "slices": self.slices,
        }

    def _decode(self, tokens: list[int]) -> str:
        """Text of tokens, empty where the tokenizer can give none."""
        try:
            return str(self.dataset.config.tokenizer.detokenize(tokens))
        except NotImplementedError:
            return ""


def write_bad_batch(
    folder: Path,
    name: str,
    records: list[SampleRecord],
    *,
    described: dict[str, Any],
) -> Path:
    """Write samples of one sequence length, each file whole or not at all.

    Args:
        folder: made when missing.
        name: of both files, without suffix.
        records: the samples.
        described: what else the .json says.

    Returns:
        The .json.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {
        k: np.stack([record.sample[k].numpy() for record in records]) for k in FIELDS
    }
    arrays["sample"] = np.array([record.number for record in records], np.int64)
    losses = [record.losses for record in records if record.losses is not None]
    if losses:
        arrays["losses"] = np.stack(losses)
    with atomic_write(folder / f"{name}.npz") as stream:
        np.savez(stream, **arrays)
    record = {"format": FORMAT, **described, "samples": [one.as_json() for one in records]}
    with atomic_write(folder / f"{name}.json") as stream:
        stream.write((json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    return folder / f"{name}.json"


def _some(numbers: list[int], most: int) -> str:
    """The first numbers, and how many more there are."""
    shown = ", ".join(map(str, numbers[:most]))
    return shown + (f" and {len(numbers) - most} more" if len(numbers) > most else "")


def _ranges(slots: np.ndarray) -> list[list[int]]:
    """[first, last + 1] of every run of ascending slots."""
    if not len(slots):
        return []
    cuts = np.flatnonzero(np.diff(slots) > 1) + 1
    return [[int(run[0]), int(run[-1]) + 1] for run in np.split(slots, cuts)]
