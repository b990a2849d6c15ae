"""Attention over several sets of keys, and sinks, from kernels that return the log-sum-exp.

Each set of keys gives an output and the log-sum-exp of its logits. Together they are

    lse = logaddexp(lse_1, lse_2, ..., sink)        out = sum_i out_i exp(lse_i - lse)

where a sink is a logit without a key. The backward pass is exact: a kernel's own, handed the merged
`out` and `lse` in place of its own, computes dq, dk and dv of its keys under the merged softmax,
since all it takes from them is p = exp(logit - lse) and rowsum(dout x out). For the sink
d sink = -sum exp(sink - lse) rowsum(dout x out).

Differentiating the formula above would not do: kernels give no gradient of their log-sum-exp, and
autograd takes that for zero without a word.

Legend: L queries, K keys of a set, T queries and K keys of all runs, R runs, H query heads, G key/
value heads, D and E head dims of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_anchor.attention.runs import Runs, to_device


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


def attend_with_lse(
    q_THD: Tensor,
    k_KGD: Tensor,
    v_KGE: Tensor,
    runs: Runs,
    kernel: LseKernel,
    *,
    scale: float,
    sink_H: Tensor | None,
) -> Tensor:
    """Attend as `backends.Attend` says, by a kernel of all runs that knows their window alone.

    Where the anchor stays in the window, a run's first key is a set of its own, for the queries
    that the window has left it behind of.
    """
    sets: list[tuple[Tensor, Tensor, LseKernel]]
    sets = [(k_KGD.contiguous(), v_KGE.contiguous(), kernel)]
    if runs.window is not None and runs.window.keeps_anchor:
        first_R = runs.cached("first keys", lambda: runs.cu_k[: len(runs.k_lengths)].long())
        k_RGD, v_RGE = (x.index_select(0, first_R) for x in (k_KGD, v_KGE))
        sets.append((k_RGD, v_RGE, AnchorKey(runs, scale)))
    return merged_attention(q_THD.contiguous(), sets, sink_H=sink_H)


@dataclass(frozen=True)
class AnchorKey:
    """One key per run, seen by the queries that are further than the window from it."""

    runs: Runs
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Give the values [T, H, E] of the anchors and their logits [T, H]; k, v are [R, G, D]."""
        k_THD, v_THE = self._spread(k, q), self._spread(v, q)
        return v_THE, self._logits(q, k_THD)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Give dq [T, H, D], dk and dv [R, G, D] for this output and log-sum-exp."""
        k_THD, v_THE = self._spread(k, q), self._spread(v, q)
        weight_TH = torch.exp(self._logits(q, k_THD) - lse)
        wide = dout.to(lse.dtype)
        gain_TH = (wide * (v_THE - out).to(lse.dtype)).sum(-1)
        dlogit_TH1 = (weight_TH * gain_TH * self.scale)[..., None]
        dk = self._gather(dlogit_TH1 * q, k)
        dv = self._gather(weight_TH[..., None] * wide, v)
        return (dlogit_TH1 * k_THD).to(q.dtype), dk, dv

    def _logits(self, q: Tensor, k_THD: Tensor) -> Tensor:
        assert self.runs.window is not None
        wide = torch.promote_types(q.dtype, torch.float32)
        logit_TH = (q.to(wide) * k_THD).sum(-1) * self.scale
        inside_T = self.runs.q_places() < self.runs.window.size
        return logit_TH.masked_fill(inside_T[:, None], -torch.inf)

    def _run_of_query(self) -> Tensor:
        runs = self.runs
        lengths = to_device(runs.q_lengths, runs.device)
        return runs.cached(
            "run of query", lambda: torch.repeat_interleave(lengths, output_size=runs.num_queries)
        )

    def _spread(self, x_RGD: Tensor, q_THD: Tensor) -> Tensor:
        copies = q_THD.shape[1] // x_RGD.shape[1]
        return x_RGD.repeat_interleave(copies, dim=1).index_select(0, self._run_of_query())

    def _gather(self, grad_THD: Tensor, like_RGD: Tensor) -> Tensor:
        total = grad_THD.new_zeros(len(like_RGD), *grad_THD.shape[1:])
        total.index_add_(0, self._run_of_query(), grad_THD)
        copies = grad_THD.shape[1] // like_RGD.shape[1]
        return total.unflatten(1, (-1, copies)).sum(2).to(like_RGD.dtype)


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
