"""What kernels are judged by: dense attention in float64, and the error floor.

Truth is dense attention in float64; the floor is the same maths without a kernel in the kernel's
dtype. A kernel stays within twice the floor forward and three times in its gradients. Used by
`tests/gpu` and by `make gpu-report`, so it needs torch and megatron-core only.

Legend: T slots, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_anchor.attention.backends import (
    AttentionRequest,
    Layer,
    bind_backend,
    load_backend,
    this_hardware,
)
from megatron_anchor.attention.packed import AnchorPackedSeqParams, pack_micro_batch
from tests.oracle import gradients

LENGTHS = {
    "odd": [37, 5, 90, 1, 123, 64, 200],
    "one document": [1024],
    "one token each": [1] * 300,
    "2000 documents": [1 + (7 * number) % 5 for number in range(2000)],
    "empty tail": [500, 140],
}
"""`empty tail`: cu_seqlens is padded at its end by repetition, as it comes from the dataset."""

FORWARD, BACKWARD = 2, 3
"""Multiples of the floor that a kernel may err by."""


class UnavailableError(Exception):
    """A backend cannot serve here; the message is its own reason."""


def packed_documents(
    lengths: Sequence[int], *, device: str, tail: int = 0
) -> AnchorPackedSeqParams:
    """One sample of these documents, with `tail` repeated borders at its end."""
    cu_seqlens = torch.tensor([[0, *lengths]]).cumsum(1).to(torch.int32)
    cu_seqlens = torch.cat((cu_seqlens, cu_seqlens[:, -1:].expand(-1, tail)), 1)
    T = sum(lengths)
    return pack_micro_batch(torch.arange(T, device=device)[None], cu_seqlens, seq_length=T)


def dense_by_document(lengths: Sequence[int], scale: float) -> Callable[..., Tensor]:
    """The oracle's maths, document by document: 2000 of them would need a huge mask."""

    def attend(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        copies = q_THD.shape[1] // k_TGD.shape[1]
        outputs = []
        for qd, kd, vd in zip(
            *(x.split(list(lengths)) for x in (q_THD, k_TGD, v_TGD)), strict=True
        ):
            kd, vd = kd.repeat_interleave(copies, 1), vd.repeat_interleave(copies, 1)
            logits = torch.einsum("qhd,khd->hqk", qd, kd) * scale
            later = torch.ones(logits.shape[1:], dtype=torch.bool, device=qd.device).triu(1)
            weights = logits.masked_fill(later, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, vd))
        return torch.cat(outputs)

    return attend


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of a kernel."""

    documents: str
    """A name of `LENGTHS`."""
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The case in a few words."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.documents}, heads {self.heads}/{self.kv_heads} of {self.head_dim}, {dtype}"


def bind_kernel(
    name: str, *, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, scale: float
) -> Callable[..., Tensor]:
    """Bind a backend.

    Raises:
        UnavailableError: it cannot serve this request on this machine.
    """
    request = AttentionRequest(
        head_dim=head_dim,
        dtype=dtype,
        query_heads=heads,
        kv_heads=kv_heads,
        hardware=this_hardware(),
    )
    reason = load_backend(name).unsupported_reason(request)
    if reason:
        raise UnavailableError(reason)
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        num_query_groups=kv_heads,
        kv_channels=head_dim,
        attention_dropout=0.0,
        params_dtype=dtype,
    )
    groups: Any = SimpleNamespace(tp=None, cp=None)
    return bind_backend(
        name, Layer(config=config, layer_number=1, scale=scale, pg_collection=groups)
    )


@dataclass(frozen=True)
class Share:
    """How much of what is allowed one tensor's error takes; above 1 it is too large."""

    which: str
    """``output``, ``dq``, ``dk`` or ``dv``."""
    error: float
    allowed: float

    @property
    def of_allowed(self) -> float:
        """Error over allowed error; infinite for values that are not finite."""
        return self.error / self.allowed if self.error == self.error else float("inf")


def error_shares(name: str, case: Case, *, device: str) -> list[Share]:
    """Run a kernel forward and backward and judge the output and the three gradients.

    Raises:
        UnavailableError: the backend cannot serve the case on this machine.
    """
    lengths, scale = LENGTHS[case.documents], case.head_dim**-0.5
    attend = bind_kernel(
        name,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        scale=scale,
    )
    tail = 5 if case.documents == "empty tail" else 0
    packed = packed_documents(lengths, device=device, tail=tail)
    inputs, upstream, floor, truth = _references(case, device)
    ours = gradients(
        lambda *x: attend(*x, runs=packed.runs(), scale=scale, dropout=0.0), inputs, upstream
    )
    return list(_judge(ours, floor, truth, case.dtype))


@lru_cache(maxsize=1)  # every kernel is asked about a case before the next one
def _references(case: Case, device: str) -> tuple[list[Tensor], Tensor, Any, Any]:
    """Queries, keys and values; the gradient of the output; floor and truth."""
    lengths = LENGTHS[case.documents]
    generator = torch.Generator().manual_seed(0)
    *inputs, upstream = (
        torch.randn(sum(lengths), n, case.head_dim, generator=generator).to(case.dtype).to(device)
        for n in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    )
    dense = dense_by_document(lengths, case.head_dim**-0.5)
    truth = gradients(dense, [x.double() for x in inputs], upstream.double())
    return inputs, upstream, gradients(dense, inputs, upstream), truth


def _judge(ours: Any, floor: Any, truth: Any, dtype: torch.dtype) -> Any:
    ulp = 2 * torch.finfo(dtype).eps * max(x.abs().max() for x in (truth[0], *truth[1]))
    names = ((FORWARD, "output"), (BACKWARD, "dq"), (BACKWARD, "dk"), (BACKWARD, "dv"))
    tensors = ((found[0], *found[1]) for found in (ours, floor, truth))
    for (factor, which), got, base, true in zip(names, *tensors, strict=True):
        error, allowed = (got - true).abs().max(), factor * (base - true).abs().max() + ulp
        yield Share(which, float(error), float(allowed))
