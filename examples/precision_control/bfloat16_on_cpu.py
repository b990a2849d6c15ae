"""Products of bfloat16 numbers on a CPU without bfloat16 units, at the speed of float32.

A tensor core multiplies bfloat16 numbers exactly, adds the products up in float32 and rounds the
sum to bfloat16 at the end. torch does the same on such a CPU, element by element, at a quarter to a
tenth of float32's speed. Here the factors are widened to float32 (exact), multiplied by the float32
kernel, and the result is rounded: the same numbers up to the order of the sums.

The attention kernel keeps what flash kernels do in bfloat16: weights are rounded before they meet
the values, and so are their gradients before they meet queries and keys.

Legend: ... batch and heads, L queries and keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def widened(matmul: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A matrix product whose bfloat16 operands go through float32."""

    def multiply(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
        if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16:
            return matmul(a, b) if out is None else matmul(a, b, out=out)
        product = matmul(a.float(), b.float()).bfloat16()
        return product if out is None else out.copy_(product)

    return multiply


class CausalAttention(torch.autograd.Function):
    """softmax(scale q k^T) v under the causal mask, with the roundings of a flash kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attend: [..., L, D] bfloat16 each."""
        weights = _weights(q, k, scale)
        out = weights.bfloat16().float() @ v.float()
        ctx.save_for_backward(q, k, v, weights, out)
        ctx.scale = scale
        return out.bfloat16()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Gradients of q, k and v."""
        q, k, v, weights, out = ctx.saved_tensors
        grad = grad.float()
        of_weights = grad @ v.float().mT
        of_logits = weights * (of_weights - (grad * out).sum(-1, keepdim=True))
        of_logits = of_logits.bfloat16().float()
        return (
            (of_logits @ k.float() * ctx.scale).bfloat16(),
            (of_logits.mT @ q.float() * ctx.scale).bfloat16(),
            (weights.bfloat16().float().mT @ grad).bfloat16(),
            None,
        )


def _weights(q: Tensor, k: Tensor, scale: float) -> Tensor:
    L = q.shape[-2]
    later = torch.ones(L, L, dtype=torch.bool).triu(1)
    return (q.float() @ k.float().mT * scale).masked_fill_(later, -torch.inf).softmax(-1)


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute bfloat16 products in this way as long as the context lasts."""
    function, method, attention = torch.matmul, Tensor.matmul, F.scaled_dot_product_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if q.dtype != torch.bfloat16:
            return attention(q, k, v, **options)
        assert options["is_causal"]
        assert not options["dropout_p"]
        return CausalAttention.apply(q, k, v, options["scale"])

    torch.matmul, Tensor.matmul = widened(function), widened(method)
    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        torch.matmul, Tensor.matmul = function, method
        F.scaled_dot_product_attention = attention
