"""Which sample is which, epoch by epoch.

Each epoch is planned on its own: its documents are shuffled, packed from the first slot of a new
sample, and its samples are shuffled. The plan of epoch e depends on the corpus, the settings, the
seed and e. A run can therefore be extended at any time without changing the samples it has read.
The price is padding in the last sample of every epoch.

Epoch 0 draws its random numbers as Megatron does for a run of one epoch
(megatron/core/datasets/gpt_dataset.py, `_build_document_sample_shuffle_indices`). Megatron shuffles
the documents of all epochs of a run together, so every order there depends on the run's length.

Legend: D documents of the corpus, O documents in reading order, N samples, E epochs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_anchor.packing.best_fit import fit
from megatron_anchor.packing.index import ANCHOR_ALONE, concatenate, count_slots


class SamplePlan(NamedTuple):
    """The samples of one or more epochs, one after another; each field is stored as an array."""

    document_index: np.ndarray
    """int32 [O], documents sample by sample."""
    sample_index: np.ndarray
    """int64 [N + 1, 2], where samples begin (see `index` and `best_fit`)."""
    shuffle_index: np.ndarray
    """uint32 or int64 [N], the sample behind each number that a user asks for."""
    figures: np.ndarray
    """int64 [E, 5], the fields of `PlanFigures` for each epoch."""


class PlanFigures(NamedTuple):
    """What the samples of an epoch are made of."""

    samples: int
    slices: int
    """document slices in all samples"""
    cut_documents: int
    """documents with more than one slice"""
    occupied: int
    """slots that hold prefixes and tokens"""
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


def plan_epochs(
    documents: np.ndarray,
    content_lengths_D: np.ndarray,
    *,
    epochs: range,
    sequence_length: int,
    random_seed: int,
    packing: str = "concat",
    prefix_slots_D: np.ndarray = ANCHOR_ALONE,
    alignment: int = 1,
) -> SamplePlan:
    """Order the documents of each epoch, pack them into samples and order these.

    Args:
        documents: int32, numbers of the documents of an epoch, repeated ones as often as they
            occur. Where none has content there are no samples.
        content_lengths_D: int32 tokens of every document of the corpus behind its anchor.
        epochs: numbers of the epochs, at least one.
        sequence_length: S, slots of a sample.
        random_seed: seed of all shuffling.
        packing: one of `patterns.PACKINGS`.
        prefix_slots_D: int32 slots in front of every document's first token, or one number for all.
        alignment: each document slice takes a multiple of it.
    """
    slots = count_slots(documents, content_lengths_D, prefix_slots_D, alignment)
    if slots == 0:
        nothing = np.zeros((len(epochs), len(PlanFigures._fields)), np.int64)
        return SamplePlan(
            documents[:0], np.zeros((1, 2), np.int64), np.zeros(0, np.uint32), nothing
        )
    pack = fit if packing == "best-fit" else concatenate
    plans = []
    for epoch in epochs:
        random_state = random_state_of(epoch, random_seed=random_seed)
        packed = pack(
            shuffled(documents.astype(np.int32), random_state),
            content_lengths_D,
            sequence_length=sequence_length,
            slots=slots,
            prefix_slots_D=prefix_slots_D,
            alignment=alignment,
        )
        samples = len(packed.sample_index) - 1
        order = shuffled(np.arange(samples, dtype=_number_type(samples)), random_state)
        figures = np.array([[samples, *packed[2:]]], dtype=np.int64)
        plans.append(SamplePlan(packed.document_index, packed.sample_index, order, figures))
    return plans[0] if len(plans) == 1 else _join(plans)


def random_state_of(epoch: int, *, random_seed: int) -> np.random.RandomState:
    """The random numbers of one epoch; NumPy keeps the streams of RandomState for ever (NEP 19)."""
    if epoch == 0:
        return np.random.RandomState(random_seed)
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([random_seed, epoch])))


def shuffled(numbers: np.ndarray, random_state: np.random.RandomState) -> np.ndarray:
    """The array itself, shuffled in place."""
    random_state.shuffle(numbers)
    return numbers


def _number_type(samples: int) -> type[np.integer]:
    """Megatron's type for the numbers of so many samples."""
    return np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64


def _join(plans: Sequence[SamplePlan]) -> SamplePlan:
    """The samples of all plans, one after another."""
    first_document = np.cumsum([0, *(len(plan.document_index) for plan in plans)])
    first_sample = np.cumsum([0, *(len(plan.shuffle_index) for plan in plans)])
    begins = [
        plan.sample_index[:-1] + np.array([first, 0])
        for plan, first in zip(plans, first_document, strict=False)
    ]
    number_type = _number_type(int(first_sample[-1]))
    orders = [
        plan.shuffle_index.astype(number_type) + number_type(first)
        for plan, first in zip(plans, first_sample, strict=False)
    ]
    return SamplePlan(
        np.concatenate([plan.document_index for plan in plans]),
        np.concatenate([*begins, [[first_document[-1], 0]]]),
        np.concatenate(orders),
        np.concatenate([plan.figures for plan in plans]),
    )
