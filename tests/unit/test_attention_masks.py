"""The mask predicate and the identity that lets copies of the anchor replace the shared one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.masks import dense_mask, document_of_slot
from tests.oracle import dense_attention

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def test_three_documents_are_drawn_as_in_the_docstring():
    drawn = ["x......", "xx.....", "xxx....", "...x...", "...xx..", ".....x.", ".....xx"]
    expected = np.array([[cell == "x" for cell in row] for row in drawn])
    assert (dense_mask(np.array([0, 3, 5, 7])) == expected).all()


def test_shared_form_is_drawn_as_in_the_docstring():
    drawn = ["x....", "xx...", "xxx..", "x..x.", "x...x"]
    expected = np.array([[cell == "x" for cell in row] for row in drawn])
    assert (dense_mask(np.array([0, 3, 4, 5]), anchor_index=0) == expected).all()


def test_repeated_entries_of_cu_seqlens_are_documents_without_slots():
    assert document_of_slot(np.array([0, 2, 2, 3, 3])).tolist() == [0, 0, 2]


@settings(deadline=None, max_examples=50)
@given(lengths)
def test_a_token_sees_exactly_its_document_so_far(document_lengths):
    mask = dense_mask(np.cumsum([0, *document_lengths]))
    row = 0
    for length in document_lengths:
        for place in range(length):
            assert mask[row].sum() == place + 1
            assert mask[row, row - place : row + 1].all()
            row += 1


@settings(deadline=None, max_examples=30)
@given(lengths, st.integers(0, 2**31))
def test_copies_of_the_anchor_equal_one_shared_anchor(document_lengths, seed):
    """One attention step in float64: document tokens get the same output in both forms."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(document_lengths)
    shared = [
        torch.randn(tokens + 1, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3)
    ]
    shared_cu = np.cumsum([0, document_lengths[0] + 1, *document_lengths[1:]])
    shared_mask = torch.from_numpy(dense_mask(shared_cu, anchor_index=0))
    expected = dense_attention(*shared, mask_TT=shared_mask, scale=0.5)

    slots, start = [], 1
    for length in document_lengths:
        slots += [0, *range(start, start + length)]
        start += length
    copies = [x[slots] for x in shared]
    copies_mask = torch.from_numpy(dense_mask(np.cumsum([0, *(n + 1 for n in document_lengths)])))
    got = dense_attention(*copies, mask_TT=copies_mask, scale=0.5)
    assert torch.allclose(got, expected[slots], rtol=0, atol=1e-13)


@pytest.mark.parametrize("anchor", [0, -1])
def test_anchor_makes_a_difference_only_where_there_are_several_documents(anchor):
    one, two = np.array([0, 4]), np.array([0, 2, 4])
    assert (dense_mask(one, anchor_index=anchor) == dense_mask(one)).all()
    assert (dense_mask(two, anchor_index=anchor) == dense_mask(two)).all() == (anchor < 0)
