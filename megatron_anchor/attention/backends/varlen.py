"""PyTorch's own variable-length flash attention: ``torch.nn.attention.varlen``, no extra package.

One kernel for all documents, work proportional to the sum of squared lengths. torch has it for
CUDA devices from sm80 on, in bfloat16 and float16.

Legend: T slots of the micro-batch, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_anchor.attention.backends.request import (
    AttentionRequest,
    needs_device,
    needs_half_precision,
    needs_head_dim,
    needs_no_dropout,
    needs_ulysses,
)
from megatron_anchor.attention.heads import repeat_heads

if TYPE_CHECKING:
    from megatron_anchor.attention.packed import AnchorPackedSeqParams


def why_not(request: AttentionRequest) -> str | None:
    """Give the reason why torch's variable-length kernel cannot serve, or None."""
    if not request.hardware.torch_varlen:
        return "this torch has no torch.nn.attention.varlen; pip install 'torch>=2.10'"
    if request.deterministic:
        return (
            "torch does not say that its backward pass is deterministic; leave out "
            "--deterministic-mode, or use --anchor-attention-backend sdpa"
        )
    return (
        needs_device(request, capability=(8, 0))
        or needs_ulysses(request)
        or needs_half_precision(request)
        or needs_head_dim(request, largest=256, multiple=8)
        or needs_no_dropout(request)
    )


def attend(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    *,
    packed: AnchorPackedSeqParams,
    scale: float,
    dropout: float,
) -> Tensor:
    """Attend causally inside every document.

    Args:
        q_THD: [T, H, D] rotated queries, bfloat16 or float16, on a CUDA device.
        k_TGD: [T, G, D] rotated keys; G divides H.
        v_TGD: [T, G, D] values.
        packed: documents of the micro-batch; their lengths add up to T.
        scale: factor of the logits.
        dropout: must be 0.

    Returns:
        [T, H, D] in the dtype of ``q_THD``.
    """
    from torch.nn.attention.varlen import varlen_attn

    assert not dropout
    keywords = _causal_keywords()
    copies = q_THD.shape[1] // k_TGD.shape[1]
    if "enable_gqa" in keywords:
        keywords["enable_gqa"] = copies > 1
    else:
        k_TGD, v_TGD = repeat_heads(k_TGD, copies=copies), repeat_heads(v_TGD, copies=copies)
    cu_seqlens, longest = packed.cu_seqlens_q, packed.max_seqlen_q
    q, k, v = (x.contiguous() for x in (q_THD, k_TGD, v_TGD))
    out: Any = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=scale, **keywords
    )
    return out


@cache
def _spelling() -> tuple[tuple[str, Any], ...]:
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    # torch 2.10 says is_causal; later releases say it with the window, and know GQA.
    causal: tuple[str, Any] = (
        ("window_size", (-1, 0)) if "window_size" in known else ("is_causal", True)
    )
    return (causal, ("enable_gqa", False)) if "enable_gqa" in known else (causal,)


def _causal_keywords() -> dict[str, Any]:
    return dict(_spelling())
