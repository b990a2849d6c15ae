"""Runs, windows and sinks through every kernel that runs on a CPU, against dense float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_anchor.attention.backends import flex, sdpa
from megatron_anchor.attention.runs import Runs, document_runs
from megatron_anchor.windows import Window
from tests.oracle import dense_attention, gradients

H, D, E = 4, 16, 16
CPU = torch.device("cpu")


def visible(runs):
    """[T, K] bool, slot by slot from the definition of a run."""
    rows = np.zeros((runs.num_queries, runs.num_keys), dtype=bool)
    query = key = 0
    for lq, lk, begin, anchor in zip(
        runs.q_lengths, runs.k_lengths, runs.q_begins, runs.first_key_is_anchor, strict=True
    ):
        for i in range(lq):
            for j in range(lk):
                place = 0 if anchor and j == 0 else begin + lq - lk + j
                seen = place <= begin + i
                if runs.window is not None:
                    near = place > begin + i - runs.window.size
                    seen &= near or (runs.window.keeps_anchor and place == 0)
                rows[query + i, key + j] = seen
        query, key = query + lq, key + lk
    return torch.from_numpy(rows)


def tensors(runs, *, kv_heads=2, dtype=torch.float64, value_width=E, seed=0):
    generator = torch.Generator().manual_seed(seed)
    T, K = runs.num_queries, runs.num_keys
    shapes = [(T, H, D), (K, kv_heads, D), (K, kv_heads, value_width), (T, H, value_width)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def dense(q, k, v, sink, *, mask, scale):
    """Dense attention with a sink as one more logit without a value."""
    if sink is None:
        return dense_attention(q, k, v, mask_TT=mask, scale=scale)
    copies = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
    logits = torch.einsum("qnd,knd->nqk", q, k) * scale
    logits = logits.masked_fill(~mask, -torch.inf)
    logits = torch.cat((logits, sink[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("nqk,knd->qnd", logits.softmax(-1)[..., :-1], v)


@st.composite
def any_runs(draw):
    """Runs with prefixes, trimmed to the window as the gathered form trims them."""
    size = draw(st.none() | st.sampled_from([1, 2, 3, 7, 40]))
    window = None if size is None else Window(size=size, keeps_anchor=draw(st.booleans()))
    q_lengths, k_lengths, begins = [], [], []
    for _ in range(draw(st.integers(1, 5))):
        begin = draw(st.sampled_from([0, 0, 1, 2, 5, 30, 100]))
        length = draw(st.sampled_from([1, 1, 2, 3, 8, 17, 70]))
        keys = begin + length
        if window is not None and draw(st.booleans()):
            keys = min(keys, length + window.size - 1 + window.keeps_anchor)
        q_lengths.append(length)
        k_lengths.append(keys)
        begins.append(begin)
    arrays = (np.array(x, dtype=np.int64) for x in (q_lengths, k_lengths, begins))
    names = ("q_lengths", "k_lengths", "q_begins")
    return Runs(**dict(zip(names, arrays, strict=True)), device=CPU, window=window)


@given(runs=any_runs(), has_sink=st.booleans(), width=st.sampled_from([8, 16, 24]))
@settings(max_examples=80)
def test_sdpa_equals_dense_attention_forward_and_backward(runs, has_sink, width):
    *inputs, upstream = tensors(runs, value_width=width)
    if has_sink:
        inputs.append(torch.randn(H, dtype=torch.float64))

    def ours(q, k, v, sink=None):
        return sdpa.attend(q, k, v, runs=runs, scale=0.3, dropout=0.0, sink_H=sink)

    def theirs(q, k, v, sink=None):
        return dense(q, k, v, sink, mask=visible(runs), scale=0.3)

    out, grads = gradients(ours, inputs, upstream)
    want, want_grads = gradients(theirs, inputs, upstream)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    for got, expected in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


@given(runs=any_runs(), has_sink=st.booleans())
@settings(max_examples=40)
def test_flex_sees_what_runs_say(runs, has_sink):
    """The block mask too: FlexAttention on the CPU evaluates mask and blocks."""
    q, k, v, _ = tensors(runs, dtype=torch.float32)
    sink = torch.randn(H) if has_sink else None
    out = flex.attend(q, k, v, runs=runs, scale=0.3, dropout=0.0, sink_H=sink)
    want = dense(
        *(x.double() for x in (q, k, v)),
        None if sink is None else sink.double(),
        mask=visible(runs),
        scale=0.3,
    )
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)


@given(runs=any_runs())
@settings(max_examples=60)
def test_blocks_of_flex_cover_every_visible_pair_and_no_hidden_one(runs):
    from megatron_anchor.attention.block_mask import BLOCK, _blocks

    partial, full = (table.numpy() for table in _blocks(runs))
    mask = visible(runs).numpy()
    for row in range(partial.shape[0]):
        for column in range(partial.shape[1]):
            block = mask[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            if full[row, column]:
                assert block.all()
                assert not partial[row, column]
            elif not partial[row, column]:
                assert not block.any()


def test_places_of_queries_and_keys_are_those_of_the_drawing():
    """Queries 3 to 5 of a document of six: no window, a window of 2, and that with the anchor."""
    for window, keys in (
        (None, [0, 1, 2, 3, 4, 5]),
        (Window(size=2), [2, 3, 4, 5]),
        (Window(size=2, keeps_anchor=True), [0, 2, 3, 4, 5]),
    ):
        arrays = [np.array([x], dtype=np.int64) for x in (3, len(keys), 3)]
        names = ("q_lengths", "k_lengths", "q_begins")
        runs = Runs(**dict(zip(names, arrays, strict=True)), device=CPU, window=window)
        assert runs.q_places().tolist() == [3, 4, 5]
        assert runs.k_places().tolist() == keys


def test_a_window_that_no_document_reaches_is_none():
    assert document_runs(np.array([3, 8]), device=CPU, window=Window(size=8)).window is None
    assert document_runs(np.array([3, 9]), device=CPU, window=Window(size=8)).window is not None


def test_cumulative_lengths_are_padded_to_a_constant_shape():
    runs = document_runs(np.array([3, 4]), device=CPU, padded_to=5)
    assert runs.cu_q.tolist() == [0, 3, 7, 7, 7, 7]
    with pytest.raises(ValueError, match=r"3 documents.*--pad-documents-to"):
        document_runs(np.array([1, 1, 1]), device=CPU, padded_to=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_within_the_error_floor(dtype):
    """Not farther from float64 than dense attention in the same precision, by the usual factors."""
    runs = document_runs(np.array([3, 90, 1, 200]), device=CPU, window=Window(size=33))
    *inputs, upstream = tensors(runs, dtype=dtype)
    inputs.append(torch.randn(H).to(dtype))
    wide = [x.double() for x in inputs]
    mask = visible(runs)

    def ours(q, k, v, sink):
        return sdpa.attend(q, k, v, runs=runs, scale=0.25, dropout=0.0, sink_H=sink)

    def theirs(q, k, v, sink):
        return dense(q, k, v, sink, mask=mask, scale=0.25)

    truth = gradients(theirs, wide, upstream.double())
    found = gradients(ours, inputs, upstream)
    floor = gradients(theirs, inputs, upstream)
    for got, low, want, factor in zip(
        (found[0], *found[1]),
        (floor[0], *floor[1]),
        (truth[0], *truth[1]),
        (2, 3, 3, 3, 3),
        strict=True,
    ):
        error, least = ((x.double() - want).abs().max() for x in (got, low))
        assert error <= factor * least + torch.finfo(dtype).eps * want.abs().max() * 0.1
