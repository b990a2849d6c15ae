"""PyTorch's scaled_dot_product_attention with its log-sum-exp, forward and backward.

The public function does not return the log-sum-exp; the operators behind it do. On the CPU that is
the flash kernel, on CUDA devices the memory-efficient one, which also computes in float32.

Legend: n stretches, L queries and K keys of each, H heads, D head dim of queries, keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LSE_ALIGNMENT = 32
"""The memory-efficient kernel pads its log-sum-exp to a multiple of this, with infinity."""


@dataclass(frozen=True)
class SdpaLse:
    """One SDPA call (`merged.LseKernel`) over n stretches, each attending to itself.

    Queries are [n x L, H, D], keys and values [n x K, H, D].
    """

    scale: float
    is_causal: bool = False
    """Causal, for L == K."""
    bias_LK: Tensor | None = None
    """Added to the logits: 0, or -inf where a key is hidden."""
    stretches: int = 1
    """n."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Give the output [n x L, H, D] and the log-sum-exp [n x L, H]."""
        q, k, v = (self._in(x) for x in (q, k, v))
        if q.device.type == "cuda":
            out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, v, self._bias(q), True, 0.0, self.is_causal, scale=self.scale
            )
            lse = lse[..., : q.shape[2]]
        else:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, self.is_causal, attn_mask=self._bias(q), scale=self.scale
            )
        return self._out(out), self._out(lse)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Give dq, dk and dv for this output and log-sum-exp."""
        dout, q, k, v, out, lse = (self._in(x) for x in (dout, q, k, v, out, lse))
        bias = self._bias(q)
        if q.device.type == "cuda":
            padding = (0, -lse.shape[2] % LSE_ALIGNMENT)
            lse = F.pad(lse.contiguous(), padding, value=torch.inf)
            seed = torch.zeros((), dtype=torch.int64, device=q.device)
            grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
                *(dout, q, k, v, bias, out, lse, seed, seed, 0.0),
                [True, True, True, False],
                self.is_causal,
                scale=self.scale,
            )[:3]
        else:
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(dout, q, k, v, out, lse.contiguous(), 0.0, self.is_causal),
                attn_mask=bias,
                scale=self.scale,
            )
        dq, dk, dv = (self._out(x) for x in grads)
        return dq, dk, dv

    def _bias(self, q: Tensor) -> Tensor | None:
        return None if self.bias_LK is None else self.bias_LK.to(q.dtype)[None, None]

    def _in(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.stretches, -1)).transpose(1, 2)

    def _out(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1)
