"""FlexAttention with a block mask built from the lengths of runs.

Compiled on CUDA devices; on the CPU it runs uncompiled and forward only, for tests, with S x S
scores.

Legend: T queries, K keys, H query heads, G key/value heads, D and E head dims of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_anchor.attention.backends.request import (
    HALF,
    AttentionRequest,
    needs_device,
    needs_no_dropout,
    needs_our_communication,
)

if TYPE_CHECKING:
    from megatron_anchor.attention.runs import Runs

SMALLEST_HEAD_DIM, LARGEST_HEAD_DIM = 16, 256

SHAPES = 128
"""Kinds of call (lengths, heads, dtype) that a process may compile."""


def unsupported_reason(request: AttentionRequest) -> str | None:
    """Give the reason why FlexAttention cannot serve, or None."""
    if request.hardware.capability is None:
        return "FlexAttention has no backward pass on the CPU; use --anchor-attention-backend sdpa"
    if too_old := needs_device(request, capability=(8, 0)):
        return too_old
    if request.dtype not in (*HALF, torch.float32):
        return f"FlexAttention does not compute in {request.dtype}"
    if not SMALLEST_HEAD_DIM <= request.head_dim <= LARGEST_HEAD_DIM:
        return (
            f"FlexAttention is for head dimensions from {SMALLEST_HEAD_DIM} to {LARGEST_HEAD_DIM}, "
            f"got {request.head_dim} (--kv-channels); use --anchor-attention-backend sdpa"
        )
    return needs_our_communication(request) or needs_no_dropout(request)


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
    """Attend as `Attend` says; `dropout` must be 0."""
    assert not dropout
    q_1HTD, k_1GKD, v_1GKE = (x.transpose(0, 1)[None] for x in (q_THD, k_KGD, v_KGE))
    function = _flex_attention(q_THD.device.type)
    options: dict[str, Any] = {
        "block_mask": runs.cached("block mask", lambda: _block_mask(runs)),
        "scale": scale,
        "enable_gqa": q_THD.shape[1] != k_KGD.shape[1],
    }
    if sink_H is None:
        return function(q_1HTD, k_1GKD, v_1GKE, **options)[0].transpose(0, 1)
    # FlexAttention gives the gradient of its log-sum-exp, so the sink is plain arithmetic here.
    out_1HTE, lse_1HT = function(q_1HTD, k_1GKD, v_1GKE, return_lse=True, **options)
    kept_1HT = torch.sigmoid(lse_1HT - sink_H.to(lse_1HT.dtype)[:, None])
    return (out_1HTE * kept_1HT[..., None]).to(q_THD.dtype)[0].transpose(0, 1)


def _block_mask(runs: Runs) -> Any:
    # Here, since importing torch's FlexAttention takes a second that other kernels need not spend.
    from megatron_anchor.attention.block_mask import runs_block_mask

    return runs_block_mask(runs)


@cache
def _flex_attention(device_type: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    function: Any = flex_attention
    if device_type != "cuda":
        return function
    # Beyond its limit of shapes torch runs a function uncompiled, here with S x S scores and
    # without a word. A run has few shapes (documents only change the mask's contents), so the
    # limit is above any real need, and with fullgraph reaching it is an error.
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, SHAPES)
    return torch.compile(function, fullgraph=True)
