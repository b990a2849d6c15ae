"""Repeat key/value heads so that the order of their gradient sums does not depend on the layout.

Context parallelism splits the query heads of one key/value group over ranks. If each layout summed
the group's gradients in its own order, CP=2 and CP=1 would differ in the last bit. Here the sum
over copies always walks the same binary tree, so any power-of-two split of a group over ranks gives
the same bits.

Legend: T tokens (any leading shape), G key/value heads, N = G x copies heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _RepeatHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TGD: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        return x_TGD.repeat_interleave(copies, dim=-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad_TND,) = grads
        grad_TGCD = grad_TND.unflatten(-2, (-1, ctx.copies))
        return _tree_sum(grad_TGCD), None


def _tree_sum(x_TGCD: Tensor) -> Tensor:
    """Sum the copies: first odd factors of neighbours, then pairs of neighbours up to one."""
    copies = x_TGCD.shape[-2]
    odd = copies // (copies & -copies)
    if odd > 1:
        x_TGCD = x_TGCD.unflatten(-2, (-1, odd)).sum(dim=-2)
    while x_TGCD.shape[-2] > 1:
        x_TGCD = x_TGCD[..., 0::2, :] + x_TGCD[..., 1::2, :]
    return x_TGCD.squeeze(-2)


def repeat_heads(x_TGD: Tensor, *, copies: int) -> Tensor:
    """Repeat every head ``copies`` times, neighbours side by side.

    Args:
        x_TGD: [..., G, D] keys or values.
        copies: how often each head is repeated; 1 returns the tensor itself.

    Returns:
        [..., G * copies, D]. The gradient of a head is the tree sum over its copies.
    """
    return x_TGD if copies == 1 else _RepeatHeads.apply(x_TGD, copies)
