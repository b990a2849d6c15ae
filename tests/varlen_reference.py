"""What a variable-length attention kernel computes, document by document with plain operations.

It stands in for kernels that have no CPU version, so that the code around them runs: torch's
``varlen_attn``, flash-attn's functions, Transformer Engine's fused attention.

Legend: T query slots, U key slots, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def _documents(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, offsets: tuple[Tensor | None, Tensor | None]
) -> Iterator[tuple[slice, slice]]:
    """Slots of each document: lengths from cu_seqlens, places from the offsets where given."""
    places = [
        (cu_seqlens if offset is None else offset).tolist()
        for cu_seqlens, offset in zip((cu_seqlens_q, cu_seqlens_k), offsets, strict=True)
    ]
    lengths = (cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist())
    for a, c, queries, keys in zip(*places, *lengths, strict=False):
        if queries:
            yield slice(a, a + queries), slice(c, c + keys)


def _hidden(queries: int, keys: int, *, causal: bool, bottom_right: bool, left: int = -1) -> Tensor:
    if not causal:
        return torch.zeros(queries, keys, dtype=torch.bool)
    shift = keys - queries if bottom_right else 0
    own = torch.arange(queries)[:, None] + shift
    hidden = torch.arange(keys)[None] > own
    return hidden if left < 0 else hidden | (torch.arange(keys)[None] < own - left)


def attend_documents(
    q_THD: Tensor,
    k_UGD: Tensor,
    v_UGD: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    scale: float,
    causal: bool,
    bottom_right: bool = False,
    left: int = -1,
    offsets: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Attend inside documents, in float32 inside; slots outside of them stay 0.

    Args:
        q_THD: [T, H, D].
        k_UGD: [U, G, D].
        v_UGD: [U, G, D].
        cu_seqlens_q: cumulative lengths of the documents' queries.
        cu_seqlens_k: cumulative lengths of the documents' keys.
        scale: factor of the logits.
        causal: hide later keys.
        bottom_right: align the causal mask to the last query and key, not to the first.
        left: keys before a query's own that it sees, -1 for all of them.
        offsets: where each document's queries and keys begin, if not side by side.

    Returns:
        [T, H, D] output in the dtype of ``q_THD`` and [T, H] float32 log-sum-exp.
    """
    copies = q_THD.shape[1] // k_UGD.shape[1]
    out = q_THD.new_zeros(*q_THD.shape[:2], v_UGD.shape[-1], dtype=torch.float32)
    lse = torch.full(q_THD.shape[:2], -torch.inf)
    for a, c in _documents(cu_seqlens_q, cu_seqlens_k, offsets):
        k, v = (x[c].float().repeat_interleave(copies, 1) for x in (k_UGD, v_UGD))
        logits = torch.einsum("qhd,khd->hqk", q_THD[a].float(), k) * scale
        hidden = _hidden(*logits.shape[1:], causal=causal, bottom_right=bottom_right, left=left)
        logits = logits.masked_fill(hidden, -torch.inf)
        lse[a] = logits.logsumexp(-1).t().detach()
        out[a] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v)
    return out.to(q_THD.dtype), lse


def attend_documents_backward(
    grad_THD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    inputs: tuple,
    *,
    scale: float,
    causal: bool,
    bottom_right: bool = False,
    left: int = -1,
    offsets: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate as a flash kernel does: from the output and log-sum-exp that it is given.

    The probabilities are exp(logits - lse), so that a part of the keys with the log-sum-exp of all
    of them gives that part's share of the gradient.

    Args:
        grad_THD: gradient of the output.
        out_THD: output over all keys.
        lse_TH: log-sum-exp over all keys.
        inputs: q, k, v, cu_seqlens_q, cu_seqlens_k.
        scale: as in `attend_documents`, and so the others.
    """
    q_THD, k_UGD, v_UGD, cu_seqlens_q, cu_seqlens_k = inputs
    copies = q_THD.shape[1] // k_UGD.shape[1]
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q_THD, k_UGD, v_UGD))
    for a, c in _documents(cu_seqlens_q, cu_seqlens_k, offsets):
        q, grad, out = (x[a].float() for x in (q_THD, grad_THD, out_THD))
        k, v = (x[c].float().repeat_interleave(copies, 1) for x in (k_UGD, v_UGD))
        logits = torch.einsum("qhd,khd->hqk", q, k) * scale
        hidden = _hidden(*logits.shape[1:], causal=causal, bottom_right=bottom_right, left=left)
        weights = (logits - lse_TH[a].float().t()[..., None]).exp().masked_fill(hidden, 0.0)
        d_weights = torch.einsum("qhd,khd->hqk", grad, v)
        d_logits = weights * (d_weights - (grad * out).sum(-1).t()[..., None]) * scale
        dq[a] = torch.einsum("hqk,khd->qhd", d_logits, k)
        for total, part, other in ((dk, d_logits, q), (dv, weights, grad)):
            per_copy = torch.einsum("hqk,qhd->khd", part, other)
            total[c] = per_copy.unflatten(1, (-1, copies)).sum(2)
    return dq.to(q_THD.dtype), dk.to(k_UGD.dtype), dv.to(v_UGD.dtype)
