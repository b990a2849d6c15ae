"""Order of documents and samples over one or more epochs, with Megatron's habits.

Documents are shuffled over all epochs together, samples are shuffled too, and the last epoch is
kept apart (documents and samples) when only a small part of it is needed. The random numbers are
drawn from one `numpy.random.RandomState(seed)` in the order of
megatron/core/datasets/gpt_dataset.py, `_build_document_sample_shuffle_indices`.

Legend: D documents of the corpus, O documents in reading order (all epochs), N samples.
"""

from typing import NamedTuple

import numpy as np

from megatron_anchor.packing.best_fit import fit
from megatron_anchor.packing.index import ANCHOR_ALONE, Packed, concatenate, count_slots

SEPARATE_FINAL_EPOCH_BELOW = 0.80
"""Share of the last epoch's samples under which it is kept apart (Megatron's threshold)."""


class SamplePlan(NamedTuple):
    """All that says which sample is which; each field is stored as one array."""

    document_index: np.ndarray
    """int32 [O], documents sample by sample."""
    sample_index: np.ndarray
    """int64 [N + 1, 2], where samples begin (see `index` and `best_fit`)."""
    shuffle_index: np.ndarray
    """uint32 or int64 [N], the sample behind each number that a user asks for."""
    figures: np.ndarray
    """int64 [5], the fields of `PlanFigures`."""


class PlanFigures(NamedTuple):
    """What the samples of a plan, all epochs together, are made of."""

    samples: int
    slices: int
    """document slices in all samples"""
    cut_documents: int
    """documents (counted once an epoch) with more than one slice"""
    occupied: int
    """slots that hold heads and tokens"""
    fewest_samples: int
    """lower bound on the samples that any packing of this kind needs"""

    @property
    def above_lower_bound(self) -> float:
        """Share of samples more than the lower bound."""
        return self.samples / self.fewest_samples - 1

    def summary(self, *, sequence_length: int) -> str:
        """One line for the log."""
        if not self.samples:
            return "no samples"
        padding = 1 - self.occupied / (self.samples * sequence_length)
        return (
            f"{self.slices} document slices in {self.samples} samples "
            f"({self.slices / self.samples:.1f} a sample; {self.cut_documents} documents cut), "
            f"padding {padding:.2%}, {self.above_lower_bound:.2%} more samples than the lower bound"
        )


def plan_samples(
    documents: np.ndarray,
    content_lengths_D: np.ndarray,
    *,
    sequence_length: int,
    num_samples: int | None,
    random_seed: int,
    packing: str = "concat",
    head_slots_D: np.ndarray = ANCHOR_ALONE,
    alignment: int = 1,
) -> SamplePlan:
    """Order the documents, pack them into samples and order these.

    Args:
        documents: int32, numbers of the documents to use (one epoch), repeated ones as often as
            they stand there; where none has content there are no samples, whatever `num_samples`
            says.
        content_lengths_D: int32 tokens of every document of the corpus behind its anchor.
        sequence_length: S, slots of a sample.
        num_samples: samples needed, from as many epochs as that takes; None = one epoch.
        random_seed: seed of all shuffling.
        packing: one of `patterns.PACKINGS`.
        head_slots_D: int32 slots in front of every document's first token, or one number for all.
        alignment: each document slice takes a multiple of it.
    """
    slots = count_slots(documents, content_lengths_D, head_slots_D, alignment)
    if slots == 0:
        nothing = np.zeros(len(PlanFigures._fields), np.int64)
        return SamplePlan(
            documents[:0], np.zeros((1, 2), np.int64), np.zeros(0, np.uint32), nothing
        )

    def pack(order: np.ndarray) -> Packed:
        return (fit if packing == "best-fit" else concatenate)(
            order,
            content_lengths_D,
            sequence_length=sequence_length,
            slots=slots * (len(order) // len(documents)),
            head_slots_D=head_slots_D,
            alignment=alignment,
        )

    # Samples hold at least so many slots of whole documents (the others are repeated heads and
    # padding), so this many epochs may do, but need not.
    least = sequence_length - 2 * int(head_slots_D.max()) - alignment + 2
    if packing == "best-fit":
        least = sequence_length // 2
    num_epochs = max(1, ((num_samples or 0) - 1) * max(1, least) // slots + 1)
    while True:
        random_state = np.random.RandomState(random_seed)
        separate = num_samples is not None and _separates_final_epoch(
            slots, num_epochs, sequence_length=sequence_length, num_samples=num_samples
        )
        document_index = order_documents(documents, num_epochs, separate, random_state)
        final_epoch = (num_epochs - 1) * len(documents)
        if separate and packing == "best-fit":
            # Windows are packed by size, not in order: keep the last epoch out of them.
            parts = [pack(document_index[:final_epoch]), pack(document_index[final_epoch:])]
            packed, shuffled_first = _join(*parts), len(parts[0].sample_index) - 1
        else:
            packed = pack(document_index)
            shuffled_first = len(packed.sample_index) - 1
            if separate:
                shuffled_first = int(np.searchsorted(packed.sample_index[:-1, 0], final_epoch))
        total = len(packed.sample_index) - 1
        if num_samples is None or total >= num_samples:
            break
        num_epochs = -(-num_epochs * num_samples // total)
    figures = PlanFigures(
        total, packed.slices, packed.cut_documents, packed.occupied, packed.fewest_samples
    )
    return SamplePlan(
        packed.document_index,
        packed.sample_index,
        order_samples(shuffled_first, total, random_state),
        np.array(figures, dtype=np.int64),
    )


def _join(first: Packed, second: Packed) -> Packed:
    """The samples of both, one after another."""
    later = second.sample_index + np.array([len(first.document_index), 0])
    return Packed(
        np.concatenate([first.document_index, second.document_index]),
        np.concatenate([first.sample_index[:-1], later]),
        *(a + b for a, b in zip(first[2:], second[2:], strict=True)),
    )


def _separates_final_epoch(
    slots_per_epoch: int, num_epochs: int, *, sequence_length: int, num_samples: int
) -> bool:
    """Whether so little of the last epoch is needed that it must not mix with the others."""
    if num_epochs == 1:
        return False
    before_final = ((num_epochs - 1) * slots_per_epoch) // sequence_length
    samples_per_epoch = slots_per_epoch // sequence_length
    return num_samples - before_final < int(SEPARATE_FINAL_EPOCH_BELOW * samples_per_epoch)


def order_documents(
    documents: np.ndarray,
    num_epochs: int,
    separate_final_epoch: bool,
    random_state: np.random.RandomState,
) -> np.ndarray:
    """int32 [num_epochs * len(documents)]: all epochs shuffled together, or the last one apart."""
    if separate_final_epoch and num_epochs > 1:
        earlier = order_documents(documents, num_epochs - 1, False, random_state)
        return np.concatenate([earlier, order_documents(documents, 1, False, random_state)])
    document_index = np.tile(documents.astype(np.int32, copy=False), num_epochs)
    random_state.shuffle(document_index)
    return document_index


def order_samples(
    shuffled_first: int, total: int, random_state: np.random.RandomState
) -> np.ndarray:
    """Shuffle [0, shuffled_first) and [shuffled_first, total) each for itself."""
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    shuffle_index = np.arange(total, dtype=dtype)
    random_state.shuffle(shuffle_index[:shuffled_first])
    if shuffled_first < total:
        random_state.shuffle(shuffle_index[shuffled_first:])
    return shuffle_index
