"""flash-attn's and torch's forward and backward passes by themselves, with the log-sum-exp.

Legend: T queries, K keys, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_anchor.attention.runs import Runs

FLASH_2_FIRST = "2.7.3"
"""First FlashAttention 2 whose passes take their arguments as `FlashLse` gives them."""


@dataclass(frozen=True)
class FlashLse:
    """A generation's varlen kernel (`merged.LseKernel`): q [T, H, D], k and v [K, G, D]."""

    generation: int
    """2 or 3."""
    module: Any
    """Its ``flash_attn_interface``."""
    runs: Runs
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Give the output [T, H, D] and the log-sum-exp [T, H]."""
        if self.generation == 2:
            settings = {"dropout_p": 0.0, **self._settings("causal")}
            found = self.module._wrapped_flash_attn_varlen_forward(q, k, v, **settings)
        else:
            found = self.module._flash_attn_forward(q, k, v, **self._settings("causal"))
        out, lse_HT = found[:2]
        return out, lse_HT.t()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Give dq, dk and dv for this output and log-sum-exp."""
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        tensors = (dout.contiguous(), q, k, v, out, lse.t().contiguous())
        settings = {
            **{"dq": dq, "dk": dk, "dv": dv, "softcap": 0.0},
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if self.generation == 2:
            settings |= {"dropout_p": 0.0, "alibi_slopes": None, **self._settings("causal")}
            self.module._wrapped_flash_attn_varlen_backward(*tensors, **settings)
        else:
            settings |= self._settings("is_causal")
            self.module._flash_attn_backward(*tensors, **settings)
        return dq, dk, dv

    def _settings(self, causal: str) -> dict[str, Any]:
        runs = self.runs
        left = -1 if runs.window is None else runs.window.size - 1
        return {
            "cu_seqlens_q": runs.cu_q,
            "cu_seqlens_k": runs.cu_k,
            "max_seqlen_q": runs.max_q,
            "max_seqlen_k": runs.max_k,
            "softmax_scale": self.scale,
            causal: True,
            "window_size_left": left,
            "window_size_right": 0,
        }


@dataclass(frozen=True)
class TorchLse:
    """The operators below torch's ``varlen_attn`` (`merged.LseKernel`); tensors as `FlashLse`."""

    runs: Runs
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Give the output [T, H, D] and the log-sum-exp [T, H]."""
        found = torch.ops.aten._flash_attention_forward(
            *(q, k, v, *self._lengths(), 0.0, True, False), **self._window()
        )
        out, lse_HT = found[:2]
        return out, lse_HT.t()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Give dq, dk and dv for this output and log-sum-exp."""
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            *(dout.contiguous(), q, k, v, out, lse.t().contiguous()),
            *(*self._lengths(), 0.0, True, unused, unused),
            **self._window(),
        )
        return grads

    def _lengths(self) -> tuple[Any, ...]:
        return self.runs.cu_q, self.runs.cu_k, self.runs.max_q, self.runs.max_k

    def _window(self) -> dict[str, Any]:
        window = self.runs.window
        return {
            "scale": self.scale,
            "window_size_left": -1 if window is None else window.size - 1,
            "window_size_right": 0,
        }
