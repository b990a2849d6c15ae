"""PyTorch's scaled_dot_product_attention, run by run: works everywhere.

Whole documents are causal calls. Work is the sum of squared document lengths. Documents of up to
`SHORT` slots of like length share one padded call (8192 slots in documents of 4: 0.30 s instead of
0.90 s forward and backward; from 24 slots on a call each is the faster); causality hides the
padding behind them from every real slot. A run whose queries begin inside its document sees the
keys before them in one call and its own in another, merged (`merged`). A window's runs are cut into
chunks of queries, each with the keys of its band and a mask: O(length x window).

The calls' tensors are taken with ``torch.split``: slicing would write a full-size gradient for each
of them.

Legend: T queries, K keys, H query heads, G key/value heads, D and E head dims of keys and values, L
slots of a stretch in one call, n stretches of one call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_anchor.attention.backends.merged import merged_attention
from megatron_anchor.attention.backends.request import AttentionRequest, needs_our_communication
from megatron_anchor.attention.backends.sdpa_lse import SdpaLse
from megatron_anchor.attention.backends.widths import equal_widths
from megatron_anchor.attention.heads import repeat_heads
from megatron_anchor.attention.runs import Runs, to_device
from megatron_anchor.windows import is_visible

SHORT = 16
SMALLEST_CHUNK, LARGEST_CHUNK = 64, 512
"""Bounds of the queries of a window's call, which has about as many as the window has keys."""


def unsupported_reason(request: AttentionRequest) -> str | None:
    """Give the reason why it cannot serve, or None."""
    if request.dropout and (request.window or request.sink):
        return f"--attention-dropout {request.dropout:g} with a window or a sink: set it to 0"
    return needs_our_communication(request)


def attend(
    q_THD: Tensor,
    k_KGD: Tensor,
    v_KGE: Tensor,
    *,
    runs: Runs,
    scale: float,
    dropout: float,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Attend as `Attend` says.

    Args:
        q_THD: [T, H, D] rotated queries.
        k_KGD: [K, G, D] rotated keys; G divides H.
        v_KGE: [K, G, E] values.
        runs: which queries see which keys.
        scale: factor of the logits.
        dropout: probability of dropping an attention weight; 0 but for whole documents without
            window and sink.
        sink_H: [H] logits of the heads' sinks, None for none.

    Returns:
        [T, H, E] in the dtype of ``q_THD``.
    """
    width = v_KGE.shape[-1]
    q_THD, k_KGD, v_KGE = equal_widths(q_THD, k_KGD, v_KGE)
    copies = q_THD.shape[1] // k_KGD.shape[1]
    k_KHD, v_KHD = repeat_heads(k_KGD, copies=copies), repeat_heads(v_KGE, copies=copies)
    plan: _Plan = runs.cached("sdpa", lambda: _plan(runs))
    q_rows = _rows(q_THD, plan.q_index).split([call.queries for call in plan.calls])
    k_rows, v_rows = (
        _rows(x, plan.k_index, repeats=plan.keys_repeat).split([call.keys for call in plan.calls])
        for x in (k_KHD, v_KHD)
    )
    outputs = [
        _attend(call, q, k, v, scale=scale, dropout=dropout, sink_H=sink_H)
        for call, q, k, v in zip(plan.calls, q_rows, k_rows, v_rows, strict=True)
    ]
    return _rows(torch.cat(outputs), plan.back)[..., :width]


class _Call(NamedTuple):
    """One kernel call over the next `queries` and `keys` rows."""

    queries: int
    keys: int
    stretches: int = 1
    """Equal stretches, each attending to itself; 1 where the call is not of whole documents."""
    bias_LK: Tensor | None = None
    """Mask of a window's chunk."""


@dataclass(frozen=True)
class _Plan:
    """The calls, and where their rows come from and go to; None: rows stay where they are."""

    calls: list[_Call]
    q_index: Tensor | None
    k_index: Tensor | None
    keys_repeat: bool
    back: Tensor | None


def _attend(
    call: _Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    dropout: float,
    sink_H: Tensor | None,
) -> Tensor:
    same = call.queries == call.keys and call.bias_LK is None
    if sink_H is None and same:
        return _sdpa(
            q, k, v, stretches=call.stretches, dropout_p=dropout, is_causal=True, scale=scale
        )
    assert not dropout
    if sink_H is None and call.bias_LK is not None:
        return _sdpa(q, k, v, attn_mask=call.bias_LK.to(q.dtype), scale=scale)
    if same or call.bias_LK is not None:
        kernel = SdpaLse(scale, is_causal=same, bias_LK=call.bias_LK, stretches=call.stretches)
        return merged_attention(q, [(k, v, kernel)], sink_H=sink_H)
    before = call.keys - call.queries
    (k_before, k_own), (v_before, v_own) = (x.split([before, call.queries]) for x in (k, v))
    sets = [(k_own, v_own, SdpaLse(scale, is_causal=True)), (k_before, v_before, SdpaLse(scale))]
    return merged_attention(q, sets, sink_H=sink_H)


def _sdpa(q_tHD: Tensor, k_tHD: Tensor, v_tHD: Tensor, *, stretches: int = 1, **how: Any) -> Tensor:
    q_nHLD, k_nHLD, v_nHLD = (
        x.unflatten(0, (stretches, -1)).transpose(1, 2) for x in (q_tHD, k_tHD, v_tHD)
    )
    out_nHLD = F.scaled_dot_product_attention(q_nHLD, k_nHLD, v_nHLD, **how)
    return out_nHLD.transpose(1, 2).flatten(0, 1)


def _rows(x: Tensor, index: Tensor | None, *, repeats: bool = False) -> Tensor:
    if index is None:
        return x
    if repeats:
        return _RepeatedRows.apply(x, index)
    # index_select's backward is index_add; that of advanced indexing is several times slower.
    return x.index_select(0, index)


class _RepeatedRows(torch.autograd.Function):
    """Rows of which some are taken more than once; their gradients are summed in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        (index,) = ctx.saved_tensors
        dtype = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(ctx.rows, *grad.shape[1:], dtype=dtype, device=grad.device)
        return total.index_add_(0, index, grad.to(dtype)).to(grad.dtype), None


def _plan(runs: Runs) -> _Plan:
    """Decide the calls of all runs, once a micro-batch."""
    q_first = np.cumsum(runs.q_lengths) - runs.q_lengths
    k_first = np.cumsum(runs.k_lengths) - runs.k_lengths
    window = runs.window
    most = np.inf if window is None else window.size
    whole = (runs.q_lengths == runs.k_lengths) & (runs.q_lengths <= most)
    short = whole & (runs.q_lengths <= SHORT)
    if short.sum() < 2:
        short[:] = False
    calls: list[_Call] = []
    q_rows: list[np.ndarray] = []
    k_rows: list[np.ndarray] = []
    for number in np.flatnonzero(~short).tolist():
        queries = q_first[number] + np.arange(runs.q_lengths[number])
        if window is None or whole[number]:
            keys = k_first[number] + np.arange(runs.k_lengths[number])
            calls.append(_Call(len(queries), len(keys)))
            q_rows.append(queries)
            k_rows.append(keys)
            continue
        for call, own_queries, own_keys in _chunks(runs, number):
            calls.append(call)
            q_rows.append(queries[own_queries])
            k_rows.append(k_first[number] + own_keys)
    back = np.empty(runs.num_queries, dtype=np.int64)
    done = 0
    for rows in q_rows:
        back[rows] = np.arange(done, done + len(rows))
        done += len(rows)
    _batch_short(runs, short, q_first, k_first, calls, q_rows, k_rows, back, done)
    q_index, k_index = np.concatenate(q_rows), np.concatenate(k_rows)
    return _Plan(
        calls=calls,
        q_index=_unless_in_order(q_index, runs.num_queries, runs.device),
        k_index=_unless_in_order(k_index, runs.num_keys, runs.device),
        keys_repeat=window is not None,
        back=_unless_in_order(back, len(q_index), runs.device),
    )


def _unless_in_order(index: np.ndarray, rows: int, device: torch.device) -> Tensor | None:
    if len(index) == rows and (index == np.arange(rows)).all():
        return None
    return to_device(index, device)


def _batch_short(
    runs: Runs,
    short: np.ndarray,
    q_first: np.ndarray,
    k_first: np.ndarray,
    calls: list[_Call],
    q_rows: list[np.ndarray],
    k_rows: list[np.ndarray],
    back: np.ndarray,
    done: int,
) -> None:
    """Add one padded call for all short documents of like length."""
    classes: dict[int, list[int]] = defaultdict(list)
    for number in np.flatnonzero(short).tolist():
        classes[1 << (int(runs.q_lengths[number]) - 1).bit_length()].append(number)
    for L, numbers in classes.items():
        last_n1 = runs.q_lengths[numbers][:, None] - 1
        slot_nL = np.broadcast_to(np.arange(L), (len(numbers), L))
        real_nL = slot_nL <= last_n1
        # Padding repeats the document's last slot; its output is dropped.
        offset_nL = np.minimum(slot_nL, last_n1)
        queries_nL = q_first[numbers][:, None] + offset_nL
        back[queries_nL[real_nL]] = done + np.flatnonzero(real_nL)
        q_rows.append(queries_nL.ravel())
        k_rows.append((k_first[numbers][:, None] + offset_nL).ravel())
        calls.append(_Call(queries_nL.size, queries_nL.size, stretches=len(numbers)))
        done += queries_nL.size


def _chunks(runs: Runs, number: int) -> Iterator[tuple[_Call, slice, np.ndarray]]:
    """Cut a window's run into chunks of queries, each with the keys of its band (and the anchor).

    Yields:
        The call, its queries and its keys, as numbers in the run.
    """
    assert runs.window is not None
    size, keeps_anchor = runs.window.size, runs.window.keeps_anchor
    length, begin = int(runs.q_lengths[number]), int(runs.q_begins[number])
    anchor_rows = int(runs.first_key_is_anchor[number])
    first_place = begin + length - (int(runs.k_lengths[number]) - anchor_rows)
    chunk = min(max(size, SMALLEST_CHUNK), LARGEST_CHUNK)
    for start in range(0, length, chunk):
        stop = min(length, start + chunk)
        places = begin + np.arange(start, stop)
        key_places = np.arange(max(first_place, places[0] - size + 1), places[-1] + 1)
        keys = key_places - first_place + anchor_rows
        if keeps_anchor and key_places[0] > 0:
            key_places, keys = np.append(0, key_places), np.append(0, keys)
        # All bands of one shape look alike: their last key is their last query's own.
        bias = runs.cached(
            ("bias", len(places), len(keys)), partial(_bias, places, key_places, runs)
        )
        yield _Call(len(places), len(keys), bias_LK=bias), slice(start, stop), keys


def _bias(places: np.ndarray, key_places: np.ndarray, runs: Runs) -> Tensor:
    """float32 [L, K]: 0 where a query sees a key, else -inf."""
    seen = is_visible(places[:, None], key_places, runs.window)
    return to_device(np.where(seen, np.float32(0), np.float32(-np.inf)), runs.device)
