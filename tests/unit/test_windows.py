"""Pairs that windows leave, by counting, and the work of samples that follows from them."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_anchor.attention.layer_window import layer_window, layer_windows
from megatron_anchor.context_parallel.split import assign_chunks, chunk_work, imbalance
from megatron_anchor.packing.statistics import attention_work_share
from megatron_anchor.windows import FULL, LayerKind, LayerWindows, Window

windows = st.none() | st.builds(Window, size=st.integers(1, 9), keeps_anchor=st.booleans())


def pairs(length, window):
    """Slot by slot."""
    seen = 0
    for query in range(length):
        for key in range(query + 1):
            near = window is None or key > query - window.size
            seen += near or (window.keeps_anchor and key == 0)
    return seen


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), windows, windows, st.integers(1, 5))
def test_pairs_are_the_mean_over_the_layers(lengths, one, other, layers):
    kinds = LayerWindows((LayerKind(one, layers), LayerKind(other, 1)))
    counted = [layers * pairs(n, one) + pairs(n, other) for n in lengths]
    assert kinds.pairs(np.array(lengths)) == pytest.approx(sum(counted) / (layers + 1))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_work_is_the_number_of_pairs_that_the_mask_lets_through(lengths):
    S = sum(lengths)
    share = attention_work_share(np.array(lengths), sequence_length=S)
    assert share == pytest.approx(sum(pairs(n, None) for n in lengths) / pairs(S, None))


def test_full_attention_over_a_million_slots_is_all_the_work():
    """Beyond 32 bits."""
    assert FULL.pairs(np.array([1 << 20], dtype=np.int32)) == 2**39 + 2**19
    assert attention_work_share(np.array([1 << 20]), sequence_length=1 << 20) == 1.0


def test_parts_are_balanced_by_the_work_that_windows_leave():
    """Of one long document and short ones, of which a window leaves the long one little work."""
    S, parts = 8192, 4
    borders = np.array([0, 4096, *range(4096 + 64, S + 1, 64)])
    window = LayerWindows((LayerKind(Window(size=64), 1),))
    for kinds in (FULL, window):
        chunks = assign_chunks(borders, sequence_length=S, parts=parts, windows=kinds)
        work = chunk_work(borders, sequence_length=S, chunks=len(chunks), windows=kinds)
        assert imbalance(work, chunks, parts=parts) <= 1.03
        other = chunk_work(
            borders,
            sequence_length=S,
            chunks=len(chunks),
            windows=window if kinds is FULL else FULL,
        )
        assert not np.allclose(work, other)


def settings(size, frequency):
    return SimpleNamespace(window_size=size, window_attn_skip_freq=frequency)


def test_windows_of_layers_are_megatrons():
    """Its size counts the keys before a query's own; every N-th layer sees everything."""
    every_second = settings((127, 0), 2)
    found = [layer_window(every_second, n, keeps_anchor=False) for n in (1, 2, 3, 4)]
    assert found == [Window(size=128), None, Window(size=128), None]
    listed = settings((7, 0), [0, 1, 1])
    kept = [layer_window(listed, n, keeps_anchor=True) for n in (1, 2, 3)]
    assert kept == [None, *[Window(size=8, keeps_anchor=True)] * 2]
    assert layer_windows(every_second, layers=3, keeps_anchor=False).kinds == (
        LayerKind(Window(size=128), 2),
        LayerKind(None, 1),
    )


@pytest.mark.parametrize("size", [None, (-1, 0), (-1, -1)])
def test_no_window_is_full_attention(size):
    assert layer_windows(settings(size, None), layers=2, keeps_anchor=False) == FULL


def test_a_window_without_keys_is_refused():
    with pytest.raises(ValueError, match="a window of 0 keys: expected 1 or more"):
        Window(size=0)
