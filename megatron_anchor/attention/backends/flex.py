"""FlexAttention with a block mask built from document lengths.

The one kernel here that also does the paper's own layout, a single anchor which all documents of a
sample see (``AnchorPackedSeqParams.shared_anchor``). Compiled on CUDA devices; on the CPU it runs
uncompiled and forward only, for tests, with S x S scores.

Legend: T slots of the micro-batch, H query heads, G key/value heads, D head dim.
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
    needs_ulysses,
)

if TYPE_CHECKING:
    from megatron_anchor.attention.packed import AnchorPackedSeqParams

SMALLEST_HEAD_DIM, LARGEST_HEAD_DIM = 16, 256

SHAPES = 128
"""Kinds of call (lengths, heads, dtype) that a process may compile."""


def why_not(request: AttentionRequest) -> str | None:
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
    return needs_ulysses(request) or needs_no_dropout(request)


def attend(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    *,
    packed: AnchorPackedSeqParams,
    scale: float,
    dropout: float,
) -> Tensor:
    """Attend causally inside every document, and to the sample's anchor where it is shared.

    Args:
        q_THD: [T, H, D] rotated queries.
        k_TGD: [T, G, D] rotated keys; G divides H.
        v_TGD: [T, G, D] values.
        packed: documents of the micro-batch; their lengths add up to T.
        scale: factor of the logits.
        dropout: must be 0.

    Returns:
        [T, H, D] in the dtype of ``q_THD``.
    """
    assert not dropout
    q_1HTD, k_1GTD, v_1GTD = (x.transpose(0, 1)[None] for x in (q_THD, k_TGD, v_TGD))
    out_1HTD = _flex_attention(q_THD.device.type)(
        q_1HTD,
        k_1GTD,
        v_1GTD,
        block_mask=packed.once("block mask", lambda: _block_mask(packed)),
        scale=scale,
        enable_gqa=q_THD.shape[1] != k_TGD.shape[1],
    )
    return out_1HTD[0].transpose(0, 1)


def _block_mask(packed: AnchorPackedSeqParams) -> Any:
    # Here, since importing torch's FlexAttention takes a second that other kernels need not spend.
    from megatron_anchor.attention.block_mask import documents_block_mask

    return documents_block_mask(
        packed.cu_seqlens_q,
        slots=sum(packed.document_lengths),
        shared_anchor_every=packed.tokens_per_sample if packed.shared_anchor else None,
    )


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
