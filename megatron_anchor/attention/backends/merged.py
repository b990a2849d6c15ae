"""Attention over several sets of keys, and sinks, from kernels that return the log-sum-exp.

Each set of keys gives an output and the log-sum-exp of its logits. Together they are

    lse = logaddexp(lse_1, lse_2, ..., sink)        out = sum_i out_i exp(lse_i - lse)

where a sink is a logit without a key. The backward pass is exact: a kernel's own, handed the merged
`out` and `lse` in place of its own, computes dq, dk and dv of its keys under the merged softmax,
since all it takes from them is p = exp(logit - lse) and rowsum(dout x out). For the sink
d sink = -sum exp(sink - lse) rowsum(dout x out).

Differentiating the formula above would not do: kernels give no gradient of their log-sum-exp, and
autograd takes that for zero without a word.

Legend: L queries, K keys of a set, H heads, D and E head dims of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class LseKernel(Protocol):
    """One attention call that returns its log-sum-exp, with its backward pass.

    Tensors are [..., L, H, D] as the kernel likes them, but `lse` is always [L, H] float32 (float64
    for float64).
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Give the output and the log-sum-exp."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Give dq, dk and dv for this output and log-sum-exp."""
        ...


def merged_attention(
    q_LHD: Tensor,
    sets: Sequence[tuple[Tensor, Tensor, LseKernel]],
    *,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Attend to the keys of all sets at once.

    Args:
        q_LHD: [L, H, D] queries.
        sets: [K, G, D] keys, [K, G, E] values and the kernel of each set. Every query sees a key of
            the first one.
        sink_H: [H] logits of the heads' sinks, None for none.

    Returns:
        [L, H, E] in the dtype of ``q_LHD``.
    """
    kernels = tuple(kernel for _, _, kernel in sets)
    tensors = [tensor for k, v, _ in sets for tensor in (k, v)]
    out: Tensor = _Merged.apply(kernels, q_LHD, sink_H, *tensors)
    return out


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: tuple[LseKernel, ...],
        q: Tensor,
        sink: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        pairs = list(zip(tensors[::2], tensors[1::2], strict=True))
        outs, lses = zip(
            *(kernel.forward(q, k, v) for kernel, (k, v) in zip(kernels, pairs, strict=True)),
            strict=True,
        )
        lse = lses[0]
        for other in lses[1:]:
            lse = torch.logaddexp(lse, other)
        if sink is not None:
            lse = torch.logaddexp(lse, sink.to(lse.dtype))
        out = sum(
            part * torch.exp(own - lse)[..., None] for part, own in zip(outs, lses, strict=True)
        )
        out = out.to(q.dtype)
        ctx.save_for_backward(q, sink, out, lse, *tensors)
        ctx.kernels = kernels
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dout,) = grads
        q, sink, out, lse, *tensors = ctx.saved_tensors
        dq: Tensor | None = None
        found: list[Tensor] = []
        for kernel, k, v in zip(ctx.kernels, tensors[::2], tensors[1::2], strict=True):
            part, dk, dv = kernel.backward(dout, q, k, v, out, lse)
            dq = part if dq is None else dq + part
            found += [dk, dv]
        dsink = None
        if sink is not None:
            rows = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            dsink = -(torch.exp(sink.to(lse.dtype) - lse) * rows).sum(0).to(sink.dtype)
        return None, dq, dsink, *found
