"""Order and number of epochs, against Megatron's own functions and against counting."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index

from megatron_anchor.packing.epochs import (
    SamplePlan,
    order_documents,
    order_samples,
    plan_samples,
)
from megatron_anchor.packing.index import GATHERED_AT_ONCE, concatenate, count_slots


def plan(
    lengths: list[int], *, sequence_length: int, num_samples: int | None, seed: int = 7
) -> SamplePlan:
    """A plan over documents with `lengths` tokens behind their anchors."""
    return plan_samples(
        np.arange(len(lengths), dtype=np.int32),
        np.array(lengths, dtype=np.int32),
        sequence_length=sequence_length,
        num_samples=num_samples,
        random_seed=seed,
    )


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("num_epochs", [1, 2, 5])
def test_documents_are_ordered_as_megatron_orders_them(num_epochs: int, separate: bool) -> None:
    documents = np.arange(3, 40, dtype=np.int32)
    ours_state, theirs_state = np.random.RandomState(9), np.random.RandomState(9)
    ours = order_documents(documents, num_epochs, separate, ours_state)
    theirs = _build_document_index(documents, num_epochs, theirs_state, separate)
    assert ours.dtype == theirs.dtype
    assert np.array_equal(ours, theirs)
    assert ours_state.randint(1 << 30) == theirs_state.randint(1 << 30)


@pytest.mark.parametrize(("first", "total"), [(10, 10), (7, 10), (0, 4), (1, 1)])
def test_samples_are_ordered_as_megatron_orders_them(first: int, total: int) -> None:
    ours = order_samples(first, total, np.random.RandomState(3))
    theirs = _build_shuffle_index(first, total, np.random.RandomState(3))
    assert ours.dtype == theirs.dtype
    assert np.array_equal(ours, theirs)


lengths_strategy = st.lists(st.integers(0, 30), min_size=1, max_size=10).filter(any)


@settings(deadline=None, max_examples=300)
@given(lengths_strategy, st.integers(2, 12), st.integers(0, 200), st.integers(0, 3))
@example([3], 12, 10, 0)
@example([1] * 10, 2, 200, 0)
def test_enough_epochs_and_not_more_than_full_samples_would_need(
    lengths: list[int], sequence_length: int, num_samples: int, seed: int
) -> None:
    ours = plan(lengths, sequence_length=sequence_length, num_samples=num_samples, seed=seed)
    num_epochs, rest = divmod(len(ours.document_index), len(lengths))
    slots = sum(length + 1 for length in lengths if length)
    assert rest == 0
    assert num_epochs >= 1
    assert len(ours.shuffle_index) == len(ours.sample_index) - 1 >= num_samples
    assert num_epochs <= max(1, -(-num_samples * sequence_length // slots))
    assert sorted(ours.shuffle_index) == list(range(len(ours.shuffle_index)))
    documents, counts = np.unique(ours.document_index, return_counts=True)
    assert documents.tolist() == list(range(len(lengths)))
    assert set(counts) == {num_epochs}


def test_the_samples_of_one_epoch_are_served_by_one_epoch() -> None:
    lengths = [9, 30, 4, 1, 17]
    one_epoch = plan(lengths, sequence_length=5, num_samples=None)
    number = len(one_epoch.shuffle_index)
    slots = sum(length + 1 for length in lengths)
    assert number > -(-slots // 5)  # repeated anchors make more samples than the bare slots fill
    again = plan(lengths, sequence_length=5, num_samples=number)
    for field, other in zip(one_epoch, again, strict=True):
        assert np.array_equal(field, other)
    assert len(plan(lengths, sequence_length=5, num_samples=number + 1).document_index) == 10


def test_a_small_last_epoch_is_kept_apart() -> None:
    lengths, sequence_length = [9] * 20, 10  # one document a sample: 20 samples an epoch
    ours = plan(lengths, sequence_length=sequence_length, num_samples=45)
    assert len(ours.document_index) == 60
    assert sorted(ours.document_index[40:]) == list(range(20))
    assert sorted(ours.shuffle_index[:40]) == list(range(40))
    assert (ours.document_index[:20] != ours.document_index[20:40]).any()


def test_a_large_last_epoch_is_mixed_with_the_others() -> None:
    ours = plan([9] * 20, sequence_length=10, num_samples=57)
    assert len(ours.document_index) == 60
    assert sorted(ours.document_index[40:]) != list(range(20))
    assert sorted(ours.shuffle_index[:40]) != list(range(40))


def test_documents_without_content_make_no_samples() -> None:
    ours = plan([0, 0], sequence_length=4, num_samples=5)
    assert ours.sample_index.tolist() == [[0, 0]]
    assert len(ours.shuffle_index) == 0


def test_the_seed_alone_changes_the_order() -> None:
    lengths = list(range(1, 40))
    first, same, other = (
        plan(lengths, sequence_length=8, num_samples=None, seed=seed) for seed in (1, 1, 2)
    )
    assert all(np.array_equal(a, b) for a, b in zip(first, same, strict=True))
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
