"""Order of documents and samples over one or more epochs, with Megatron's habits.

Documents are shuffled over all epochs together, samples are shuffled too, and the last epoch is
kept apart (documents and samples) when only a small part of it is needed. The random numbers are
drawn from one `numpy.random.RandomState(seed)` in the order of
megatron/core/datasets/gpt_dataset.py, `_build_document_sample_shuffle_indices`.

Legend: D documents of the corpus, O documents in reading order (all epochs), N samples.
"""

from typing import NamedTuple

import numpy as np

from megatron_anchor.packing.index import count_slots, cut_into_samples

SEPARATE_FINAL_EPOCH_BELOW = 0.80
"""Share of the last epoch's samples under which it is kept apart (Megatron's threshold)."""


class SamplePlan(NamedTuple):
    """All that says which sample is which; each field is stored as one array."""

    document_index: np.ndarray
    """int32 [O], documents in reading order."""
    sample_index: np.ndarray
    """int64 [N + 1, 2], where samples begin (see `index`)."""
    shuffle_index: np.ndarray
    """uint32 or int64 [N], the sample behind each number that a user asks for."""


def plan_samples(
    documents: np.ndarray,
    content_lengths_D: np.ndarray,
    *,
    sequence_length: int,
    num_samples: int | None,
    random_seed: int,
) -> SamplePlan:
    """Order the documents, cut them into samples and order these.

    Args:
        documents: int32, numbers of the documents to use (one epoch); where none has content
            there are no samples, whatever `num_samples` says.
        content_lengths_D: int32 tokens of every document of the corpus behind its anchor.
        sequence_length: S, slots of a sample.
        num_samples: samples needed, from as many epochs as that takes; None = one epoch.
        random_seed: seed of all shuffling.
    """
    slots = count_slots(documents, content_lengths_D)
    if slots == 0:
        return SamplePlan(documents[:0], np.zeros((1, 2), np.int64), np.zeros(0, np.uint32))
    # Cutting repeats up to one anchor a sample, so this many epochs may do, but need not.
    num_epochs = max(1, ((num_samples or 0) - 1) * (sequence_length - 1) // slots + 1)
    while True:
        random_state = np.random.RandomState(random_seed)
        separate = num_samples is not None and _separates_final_epoch(
            slots, num_epochs, sequence_length=sequence_length, num_samples=num_samples
        )
        document_index = order_documents(documents, num_epochs, separate, random_state)
        sample_index = cut_into_samples(
            document_index,
            content_lengths_D,
            sequence_length=sequence_length,
            slots=slots * num_epochs,
        )
        total = len(sample_index) - 1
        if num_samples is None or total >= num_samples:
            break
        num_epochs = -(-num_epochs * num_samples // total)
    shuffled_first = total
    if separate:
        final_epoch = (num_epochs - 1) * len(documents)
        shuffled_first = int(np.searchsorted(sample_index[:-1, 0], final_epoch))
    return SamplePlan(
        document_index, sample_index, order_samples(shuffled_first, total, random_state)
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
