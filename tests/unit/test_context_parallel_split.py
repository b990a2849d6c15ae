"""Which rank holds which slot: every slot once, equal counts, and work that is nearly equal."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_anchor.context_parallel.split import (
    CHUNKS,
    CONTEXT_IMBALANCE,
    CONTIGUOUS,
    MOST_CHUNKS,
    ZIGZAG,
    SlotSplit,
    assign_chunks,
    chunk_work,
    imbalance,
    slots_in_chunks,
    split_sample,
    work_before,
)
from megatron_anchor.planner.lengths import long_documents, slimpajama_like

S = 131072


def draw(distribution, *, seed, sequence_length=S):
    """Borders of documents drawn until they fill a sample; the last one is cut."""
    random, left, borders = np.random.default_rng(seed), sequence_length, [0]
    while left:
        length = min(int(random.choice(distribution.lengths)) + 1, left)
        left -= length
        borders.append(borders[-1] + length)
    return np.array(borders)


@st.composite
def samples(draw):
    parts = draw(st.sampled_from([1, 2, 3, 4, 8]))
    S = parts * draw(st.sampled_from([1, 2, 6, 7, 12, 32]))
    cuts = draw(st.sets(st.integers(1, S - 1), max_size=8)) if S > 1 else set()
    return parts, np.array([0, *sorted(cuts), S])


@given(samples())
def test_every_slot_is_held_once_and_all_parts_hold_as_many(sample):
    parts, borders = sample
    S = int(borders[-1])
    chunks = assign_chunks(borders, sequence_length=S, parts=parts)
    held = slots_in_chunks(chunks, sequence_length=S)
    assert held.shape == (parts, S // parts)
    assert sorted(held.ravel()) == list(range(S))
    assert (np.diff(held, axis=1) > 0).all()


@given(samples())
def test_work_is_the_number_of_pairs(sample):
    """Against counting them."""
    parts, borders = sample
    S = int(borders[-1])
    document = np.searchsorted(borders, np.arange(S), side="right") - 1
    pairs = np.arange(S) - borders[document] + 1
    assert work_before(np.arange(S + 1), borders).tolist() == [0, *np.cumsum(pairs)]
    chunks = assign_chunks(borders, sequence_length=S, parts=parts)
    work = chunk_work(borders, sequence_length=S, chunks=len(chunks))
    load = [pairs[slots].sum() for slots in slots_in_chunks(chunks, sequence_length=S)]
    assert imbalance(work, chunks, parts=parts) == pytest.approx(max(load) / np.mean(load))


@given(samples(), st.integers(0, 3))
def test_the_assignment_is_a_function_of_the_borders_alone(sample, repeats):
    """Empty segments behind the last one change nothing, nor does calling again."""
    parts, borders = sample
    S = int(borders[-1])
    padded = np.concatenate((borders, np.full(repeats, S)))
    first = assign_chunks(borders, sequence_length=S, parts=parts)
    assert np.array_equal(first, assign_chunks(padded, sequence_length=S, parts=parts))


@pytest.mark.parametrize("parts", [8, 16, 32])
@pytest.mark.parametrize("distribution", [slimpajama_like, long_documents])
def test_parts_of_131072_slots_have_equal_work_within_three_percent(distribution, parts):
    found = []
    for seed in range(12):
        borders = draw(distribution(), seed=seed)
        sample = split_sample(borders, sequence_length=S, parts=parts)
        found.append(int(sample[CONTEXT_IMBALANCE]) / 1e6)
        assert sample["part_of_chunk"].shape == (parts * MOST_CHUNKS,)
    assert np.mean(found) <= 1.03
    assert max(found) <= 1.05


def test_a_single_document_is_cut_as_zigzag():
    """Two chunks per part, a light and a heavy one: no more are needed."""
    chunks = assign_chunks(np.array([0, S]), sequence_length=S, parts=8)
    work = chunk_work(np.array([0, S]), sequence_length=S, chunks=16)
    assert len(chunks) == 16
    assert imbalance(work, chunks, parts=8) == pytest.approx(1)


@given(samples(), st.sampled_from([1, 2]))
def test_ranks_of_a_group_hold_contiguous_pieces_of_its_part(sample, inner):
    parts, borders = sample
    S = int(borders[-1])
    if S // parts % inner:
        return
    split = SlotSplit(cp_size=parts * inner, kind=CHUNKS, parts=parts)
    chunks = split_sample(borders, sequence_length=S, parts=parts)["part_of_chunk"]
    held = [split.slots(borders, chunks, rank=rank) for rank in range(split.cp_size)]
    whole = slots_in_chunks(chunks[chunks >= 0], sequence_length=S)
    assert np.array_equal(np.concatenate(held), whole.ravel())


@pytest.mark.parametrize("kind", [CONTIGUOUS, ZIGZAG])
def test_other_kinds_hold_every_slot_once(kind):
    split = SlotSplit(cp_size=2, kind=kind)
    held = [split.slots(np.array([0, 8, 12]), None, rank=rank) for rank in range(2)]
    assert sorted(np.concatenate(held)) == list(range(12))
    assert split.gathers is False
