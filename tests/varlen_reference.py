"""What a variable-length attention kernel computes, document by document with plain operations.

It stands in for kernels that have no CPU version, so that the code around them runs: torch's
``varlen_attn``, flash-attn's functions, Transformer Engine's fused attention.

Legend: T query slots, U key slots, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend_documents(
    q_THD: Tensor,
    k_UGD: Tensor,
    v_UGD: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Attend inside documents, in float32 inside; slots past the last document stay 0.

    A causal mask is aligned to the top left corner.

    Returns:
        [T, H, D] output in the dtype of ``q_THD`` and [T, H] float32 log-sum-exp.
    """
    copies = q_THD.shape[1] // k_UGD.shape[1]
    out = torch.zeros_like(q_THD, dtype=torch.float32)
    lse = torch.full(q_THD.shape[:2], -torch.inf)
    q_borders, k_borders = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for a, b, c, d in zip(q_borders, q_borders[1:], k_borders, k_borders[1:], strict=False):
        if a == b:
            continue
        k = k_UGD[c:d].float().repeat_interleave(copies, 1)
        v = v_UGD[c:d].float().repeat_interleave(copies, 1)
        logits = torch.einsum("qhd,khd->hqk", q_THD[a:b].float(), k) * scale
        if causal:
            hidden = torch.arange(d - c)[None] > torch.arange(b - a)[:, None]
            logits = logits.masked_fill(hidden, -torch.inf)
        lse[a:b] = logits.logsumexp(-1).t().detach()
        out[a:b] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v)
    return out.to(q_THD.dtype), lse


def attend_documents_backward(
    grad_THD: Tensor, out_THD: Tensor, lse_TH: Tensor, inputs: tuple, **settings: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate as a flash kernel does: from the output and log-sum-exp that it is given.

    The probabilities are exp(logits - lse), so that a part of the keys with the log-sum-exp of all
    of them gives that part's share of the gradient.

    Args:
        grad_THD: gradient of the output.
        out_THD: output over all keys.
        lse_TH: log-sum-exp over all keys.
        inputs: q, k, v, cu_seqlens_q, cu_seqlens_k.
        settings: ``scale`` and ``causal``.
    """
    q_THD, k_UGD, v_UGD, cu_seqlens_q, cu_seqlens_k = inputs
    scale, causal = settings["scale"], settings["causal"]
    copies = q_THD.shape[1] // k_UGD.shape[1]
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q_THD, k_UGD, v_UGD))
    q_borders, k_borders = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for a, b, c, d in zip(q_borders, q_borders[1:], k_borders, k_borders[1:], strict=False):
        if a == b:
            continue
        q, grad, out = (x[a:b].float() for x in (q_THD, grad_THD, out_THD))
        k = k_UGD[c:d].float().repeat_interleave(copies, 1)
        v = v_UGD[c:d].float().repeat_interleave(copies, 1)
        logits = torch.einsum("qhd,khd->hqk", q, k) * scale
        weights = (logits - lse_TH[a:b].float().t()[..., None]).exp()
        if causal:
            hidden = torch.arange(d - c)[None] > torch.arange(b - a)[:, None]
            weights = weights.masked_fill(hidden, 0.0)
        d_weights = torch.einsum("qhd,khd->hqk", grad, v)
        d_logits = weights * (d_weights - (grad * out).sum(-1).t()[..., None])
        dq[a:b] = torch.einsum("hqk,khd->qhd", d_logits, k) * scale
        dk[c:d] = (
            (torch.einsum("hqk,qhd->khd", d_logits, q) * scale).unflatten(1, (-1, copies)).sum(2)
        )
        dv[c:d] = torch.einsum("hqk,qhd->khd", weights, grad).unflatten(1, (-1, copies)).sum(2)
    return dq.to(q_THD.dtype), dk.to(k_UGD.dtype), dv.to(v_UGD.dtype)
