"""PyTorch's own variable-length flash attention: ``torch.nn.attention.varlen``, no extra package.

One kernel for all documents, work proportional to the sum of squared lengths. torch has it for
CUDA devices from sm80 on, in bfloat16 and float16.

Legend: T queries, K keys, H query heads, G key/value heads, D and E head
dims of keys and values.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_anchor.attention.backends.flash_lse import TorchLse
from megatron_anchor.attention.backends.merged import attend_with_lse
from megatron_anchor.attention.backends.request import (
    AttentionRequest,
    needs_device,
    needs_half_precision,
    needs_head_dim,
    needs_no_dropout,
    needs_our_communication,
)
from megatron_anchor.attention.backends.widths import equal_widths
from megatron_anchor.attention.heads import repeat_heads

if TYPE_CHECKING:
    from megatron_anchor.attention.runs import Runs


def unsupported_reason(request: AttentionRequest) -> str | None:
    """Give the reason why torch's variable-length kernel cannot serve, or None."""
    if not request.hardware.torch_varlen:
        return "this torch has no torch.nn.attention.varlen; pip install 'torch>=2.10'"
    if request.deterministic:
        return (
            "torch does not say that its backward pass is deterministic; leave out "
            "--deterministic-mode, or use --anchor-attention-backend sdpa"
        )
    if request.window and not request.hardware.torch_varlen_windows:
        return "this torch's varlen_attn has no sliding windows; upgrade torch (2.13 has them)"
    return (
        needs_device(request, capability=(8, 0))
        or needs_our_communication(request)
        or needs_half_precision(request)
        or needs_head_dim(request, largest=256, multiple=8)
        or needs_no_dropout(request)
    )


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
    from torch.nn.attention.varlen import varlen_attn

    assert not dropout
    width = v_KGE.shape[-1]
    q, k, v = equal_widths(q_THD, k_KGD, v_KGE)
    if sink_H is not None or (runs.window is not None and runs.window.keeps_anchor):
        kernel = TorchLse(runs, scale)
        out = attend_with_lse(q, k, v, runs, kernel, scale=scale, sink_H=sink_H)
        return out[..., :width]
    keywords = _keywords(None if runs.window is None else runs.window.size)
    copies = q.shape[1] // k.shape[1]
    if "enable_gqa" in keywords:
        keywords["enable_gqa"] = copies > 1
    else:
        k, v = repeat_heads(k, copies=copies), repeat_heads(v, copies=copies)
    q, k, v = (x.contiguous() for x in (q, k, v))
    found: Any = varlen_attn(
        q, k, v, runs.cu_q, runs.cu_k, runs.max_q, runs.max_k, scale=scale, **keywords
    )
    return found[..., :width]


@cache
def known_parameters() -> frozenset[str]:
    """Names of the parameters of this torch's ``varlen_attn``."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def _keywords(window: int | None) -> dict[str, Any]:
    # torch 2.10 says is_causal; later releases say it with the window, and know GQA.
    known = known_parameters()
    if "window_size" not in known:
        assert window is None
        return {"is_causal": True}
    keywords: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    return keywords | ({"enable_gqa": False} if "enable_gqa" in known else {})
