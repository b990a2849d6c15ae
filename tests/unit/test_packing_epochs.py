"""Plans of epochs: against Megatron's own functions, against counting, and each for itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index

from megatron_anchor.packing.epochs import (
    PlanFigures,
    SamplePlan,
    plan_epochs,
    random_state_of,
    shuffled,
)
from megatron_anchor.packing.index import GATHERED_AT_ONCE, concatenate, count_slots


def plan(
    lengths: list[int],
    *,
    sequence_length: int,
    epochs: range = range(1),
    seed: int = 7,
    packing: str = "concat",
) -> SamplePlan:
    """A plan over documents with `lengths` tokens behind their anchors."""
    return plan_epochs(
        np.arange(len(lengths), dtype=np.int32),
        np.array(lengths, dtype=np.int32),
        epochs=epochs,
        sequence_length=sequence_length,
        random_seed=seed,
        packing=packing,
    )


def assert_equal(first: SamplePlan, second: SamplePlan) -> None:
    for name, one, other in zip(SamplePlan._fields, first, second, strict=True):
        assert one.dtype == other.dtype, name
        assert np.array_equal(one, other), name


@pytest.mark.parametrize("seed", [0, 9, 2**32 - 1])
def test_the_first_epoch_is_ordered_as_megatron_orders_a_run_of_one(seed: int) -> None:
    documents = np.arange(3, 40, dtype=np.int32)
    ours, theirs = random_state_of(0, random_seed=seed), np.random.RandomState(seed)
    order = _build_document_index(documents, 1, theirs, False)
    assert np.array_equal(shuffled(documents.copy(), ours), order)
    numbers = _build_shuffle_index(11, 11, theirs)
    assert np.array_equal(shuffled(np.arange(11, dtype=numbers.dtype), ours), numbers)
    ones = plan([9] * 37, sequence_length=10, seed=seed)
    assert ones.shuffle_index.dtype == numbers.dtype
    assert np.array_equal(ones.document_index, order - 3)


lengths_strategy = st.lists(st.integers(0, 30), min_size=1, max_size=10)


@settings(deadline=None, max_examples=200)
@given(
    lengths_strategy,
    st.integers(2, 12),
    st.integers(0, 3),
    st.integers(1, 5),
    st.sampled_from(["concat", "best-fit"]),
    st.integers(0, 3),
)
def test_epochs_planned_together_are_those_planned_alone(
    lengths: list[int], sequence_length: int, first: int, count: int, packing: str, seed: int
) -> None:
    common = {"sequence_length": sequence_length, "packing": packing, "seed": seed}
    together = plan(lengths, epochs=range(first, first + count), **common)
    documents = samples = 0
    for number in range(count):
        alone = plan(lengths, epochs=range(first + number, first + number + 1), **common)
        size = len(alone.shuffle_index)
        here = slice(samples, samples + size)
        assert np.array_equal(together.figures[number], alone.figures[0])
        assert PlanFigures(*alone.figures[0]).samples == size
        assert np.array_equal(together.shuffle_index[here], alone.shuffle_index + samples)
        assert sorted(alone.shuffle_index) == list(range(size))
        begins = alone.sample_index[:-1] + np.array([documents, 0])
        assert np.array_equal(together.sample_index[here], begins)
        documents += len(alone.document_index)
        samples += size
    assert len(together.document_index) == documents
    assert together.sample_index.tolist()[samples:] == [[documents, 0]]
    assert len(together.shuffle_index) == samples


def test_every_epoch_has_an_order_of_its_own() -> None:
    lengths = [9] * 20  # one document a sample
    orders = [
        plan(lengths, sequence_length=10, epochs=range(epoch, epoch + 1)) for epoch in range(4)
    ]
    for name in ("document_index", "shuffle_index"):
        found = {tuple(getattr(order, name)) for order in orders}
        assert len(found) == 4
        assert {tuple(sorted(numbers)) for numbers in found} == {tuple(range(20))}


def test_documents_without_content_make_no_samples() -> None:
    ours = plan([0, 0], sequence_length=4, epochs=range(3))
    assert ours.sample_index.tolist() == [[0, 0]]
    assert len(ours.shuffle_index) == 0
    assert ours.figures.tolist() == [[0] * 5] * 3


def test_the_seed_alone_changes_the_order() -> None:
    lengths = list(range(1, 40))
    for epochs in (range(1), range(2, 4)):
        first, same, other = (
            plan(lengths, sequence_length=8, epochs=epochs, seed=seed) for seed in (1, 1, 2)
        )
        assert_equal(first, same)
        assert not np.array_equal(first.document_index, other.document_index)
        assert not np.array_equal(first.shuffle_index, other.shuffle_index)


def test_cutting_is_the_same_over_many_blocks_of_documents() -> None:
    number, sequence_length = 3 * GATHERED_AT_ONCE + 5, 64
    random = np.random.default_rng(0)
    lengths = random.integers(0, 200, number).astype(np.int32)
    order = random.permutation(number).astype(np.int32)
    ours = concatenate(
        order, lengths, sequence_length=sequence_length, slots=count_slots(order, lengths)
    ).sample_index
    # the same, slot by slot: a sample begins where the one before it is full
    expected, filled = [], sequence_length
    for position, document in enumerate(order):
        for offset in range(lengths[document] + 1 if lengths[document] else 0):
            if filled == sequence_length:
                expected.append([position, offset])
                filled = 1 if offset else 0  # the repeated anchor
            filled += 1
    assert len(expected) > 4000
    assert ours.tolist() == [*expected, [number, 0]]


def test_offsets_do_not_overflow_in_a_stream_beyond_32_bits() -> None:
    lengths = np.array([2**31 - 2] * 3, dtype=np.int32)
    order = np.arange(3, dtype=np.int32)
    slots = count_slots(order, lengths)
    assert slots == 3 * (2**31 - 1)
    ours = concatenate(order, lengths, sequence_length=2**30 - 1, slots=slots).sample_index
    assert ours.tolist() == [
        [0, 0],
        [0, 2**30 - 1],
        [0, 2**31 - 3],  # holds the anchor again, the last two tokens, and document 1 begins
        [1, 2**30 - 4],
        [1, 2**31 - 6],
        [2, 2**30 - 7],
        [2, 2**31 - 9],
        [3, 0],
    ]
