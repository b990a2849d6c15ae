"""Equal attention work for all data-parallel ranks, without changing which samples make a batch.

With masked documents the work of a sample is sum of l^2 over its segments, plus a part that is
linear in its slots; it differs from sample to sample, and a step takes as long as its slowest rank.
Inside a global batch any order of the samples gives the same gradient, so it may be chosen:

  ranks          from the heaviest sample on, each goes to the rank with the least work that still
                 has room; then pairs of samples are swapped between ranks while that helps
  micro-batches  the same inside each rank; the heaviest micro-batches of all ranks run together

Megatron's sampler gives rank r of R the slots [r m, (r + 1) m) of every m R consecutive numbers
(m = micro-batch size). `BalancedDataset` renumbers the samples so that these are its own.

Cost: the work of a sample comes from the index; about 50 us a sample, no token is read.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_anchor.errors import UserError
from megatron_anchor.packing.length_schedule import ScheduledDataset, cut_lengths

_MOST_SWAPS = 16
"""swaps for each rank; more bring nothing that one could measure"""

_WORTH_A_SWAP = 1e-3
"""share of the heaviest rank's work that a swap must save"""


@dataclass(frozen=True, kw_only=True)
class Balancing:
    """How Megatron's sampler distributes the samples of a batch."""

    global_batch_size: int
    """samples of a global batch, a multiple of micro_batch_size x ranks"""
    micro_batch_size: int
    """samples of a micro-batch"""
    ranks: int
    """data-parallel size"""
    first: int = 0
    """number of a sample where a global batch begins"""
    linear: float = 0.0
    """work of a slot apart from attention, in units of l^2"""


class Imbalance(NamedTuple):
    """Largest work of a rank relative to the mean of all ranks; 1 is perfect."""

    before: float
    after: float


IMBALANCE_FIGURES = ("imbalance_before", "imbalance_after")
"""What a `BalancedDataset` adds to its samples, in millionths."""


def partition(work: np.ndarray, *, num_groups: int) -> np.ndarray:
    """int64 [num_groups, items of a group], the items, with nearly equal work in every row.

    Args:
        work: float64, work of each item.
        num_groups: rows; divides the number of items.
    """
    size = len(work) // num_groups
    assert size * num_groups == len(work), f"{len(work)} items for {num_groups} groups"
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    load = np.zeros(num_groups)
    for item in np.argsort(-work, kind="stable"):
        row = int(np.argmin(load))
        groups[row].append(int(item))
        load[row] += work[item]
        if len(groups[row]) == size:
            load[row] += np.inf
    table = np.array(groups, dtype=np.int64).reshape(num_groups, size)
    for _ in range(_MOST_SWAPS * num_groups):
        if not _swap(table, work):
            break
    return table


def _swap(table: np.ndarray, work: np.ndarray) -> bool:
    """Swap one item of the heaviest row for one of another row, if that makes the row lighter."""
    load = work[table].sum(axis=1)
    heavy = int(load.argmax())
    # The larger of both rows' loads after each possible swap: [other row, its item, heavy's item].
    change = work[table[heavy]][None, None, :] - work[table][:, :, None]
    after = np.maximum(load[heavy] - change, load[:, None, None] + change)
    after[heavy] = np.inf
    row, theirs, ours = np.unravel_index(int(after.argmin()), after.shape)
    if after[row, theirs, ours] >= load[heavy] * (1 - _WORTH_A_SWAP):
        return False
    table[heavy, ours], table[row, theirs] = table[row, theirs], table[heavy, ours]
    return True


def order_batch(work: np.ndarray, settings: Balancing) -> np.ndarray:
    """int64 [global batch], which sample of the batch stands in each place.

    Args:
        work: float64 [global batch], work of each sample.
        settings: sizes.
    """
    rows = partition(work, num_groups=settings.ranks)
    steps = len(work) // (settings.ranks * settings.micro_batch_size)
    places = np.empty((steps, settings.ranks, settings.micro_batch_size), dtype=np.int64)
    for rank, row in enumerate(rows):
        micro_batches = row[partition(work[row], num_groups=steps)]
        heaviest_first = np.argsort(-work[micro_batches].sum(axis=1), kind="stable")
        places[:, rank] = micro_batches[heaviest_first]
    return places.ravel()


def imbalance(work: np.ndarray, settings: Balancing) -> float:
    """Largest work of a rank over the mean, when the samples stand in the given order."""
    places = work.reshape(-1, settings.ranks, settings.micro_batch_size)
    load = places.sum(axis=(0, 2))
    return float(load.max() / load.mean())


class BalancedDataset(torch.utils.data.Dataset):
    """The samples of a packed dataset (or blend), reordered inside each global batch.

    Args:
        dataset: a `PackedDataset`, or a Megatron `BlendedDataset` of such.
        settings: sizes.

    Raises:
        UserError: the global batch is no multiple of ranks x micro-batch size.
    """

    def __init__(self, dataset: Any, settings: Balancing) -> None:
        step = settings.ranks * settings.micro_batch_size
        if settings.global_batch_size % step:
            raise UserError(
                f"--balance-attention-work: got a global batch of {settings.global_batch_size} "
                f"samples, expected a multiple of {step} ({settings.ranks} data-parallel ranks x "
                f"micro-batches of {settings.micro_batch_size})"
            )
        self.dataset = dataset
        self.settings = settings
        self._ordered = lru_cache(maxsize=8)(self._order)

    def __len__(self) -> int:
        """Samples, as before."""
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the inner dataset's."""
        if name in ("dataset", "settings", "_ordered"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        """The sample that stands at place `idx`, and its global batch's imbalance.

        `imbalance_before` and `imbalance_after` are int32 scalars in millionths, 0 where the batch
        is not complete and stays as it is.
        """
        size = self.settings.global_batch_size
        batch, place = divmod(idx - self.settings.first, size)
        begin = batch * size + self.settings.first
        if begin < 0 or begin + size > len(self):
            sample, found = self.dataset[idx], Imbalance(0, 0)
        else:
            order, found = self._ordered(begin)
            sample = self.dataset[begin + int(order[place])]
        millionths = (round(value * 1e6) for value in found)
        figures = (torch.tensor(value, dtype=torch.int32) for value in millionths)
        return sample | dict(zip(IMBALANCE_FIGURES, figures, strict=True))

    def work(self, begin: int) -> np.ndarray:
        """float64 [global batch], work of the samples from `begin` on."""
        samples = range(begin, begin + self.settings.global_batch_size)
        linear = self.settings.linear
        return np.array([sample_work(self.dataset, n, linear=linear) for n in samples])

    def _order(self, begin: int) -> tuple[np.ndarray, Imbalance]:
        """Order of a batch, and how far from equal the ranks' work is without and with it."""
        work = self.work(begin)
        order = order_batch(work, self.settings)
        return order, Imbalance(
            imbalance(work, self.settings), imbalance(work[order], self.settings)
        )

    def imbalances(self, batches: int) -> list[Imbalance]:
        """Of the first so many global batches."""
        size = self.settings.global_batch_size
        begins = range(self.settings.first, len(self) - size + 1, size)[:batches]
        return [self._order(begin)[1] for begin in begins]

    def report(self, batches: int = 16) -> str:
        """One line for the log: the imbalance before and after, over the first global batches."""
        found = self.imbalances(batches)
        if not found:
            return "no whole global batch to balance"
        before, after = np.mean(found, axis=0)
        return (
            f"work of {self.settings.ranks} data-parallel ranks, max/mean over the first "
            f"{len(found)} global batches: {before:.3f} in order, {after:.3f} balanced"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave the cache of orders behind."""
        return {"dataset": self.dataset, "settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin with an empty cache of orders."""
        self.dataset, self.settings = state["dataset"], state["settings"]
        self._ordered = lru_cache(maxsize=8)(self._order)


def sample_work(dataset: Any, idx: int, *, linear: float, longest: int | None = None) -> float:
    """Work of a sample in units of l^2: of its segments, and `linear` per slot.

    Args:
        dataset: a `PackedDataset` or a blend of such.
        idx: number of the sample.
        linear: work of a slot apart from attention.
        longest: slots of the longest segment, where they are bounded.
    """
    if isinstance(dataset, ScheduledDataset):
        bound = dataset.longest(idx)
        return sample_work(dataset.dataset, idx, linear=linear, longest=bound)
    if hasattr(dataset, "dataset_sample_index"):
        inner = dataset.datasets[dataset.dataset_index[idx]]
        number = int(dataset.dataset_sample_index[idx])
        return sample_work(inner, number, linear=linear, longest=longest)
    length = dataset.config.sequence_length
    slots = dataset.slices(idx).slots
    segments = dataset.config.pattern.segment_lengths(slots, sequence_length=length)
    if longest is not None:
        segments = cut_lengths(segments, longest)
    pairs = dataset.config.attention_windows.pairs(segments)
    # Without windows this is the sum of l^2.
    return float(2 * pairs - segments.sum() + linear * length)
