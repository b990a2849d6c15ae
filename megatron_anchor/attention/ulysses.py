"""Ulysses context parallelism (arXiv 2309.14509) around one attention call.

Every rank of the context-parallel group holds a contiguous piece of the sample. One all-to-all
turns pieces of the sequence into shares of the heads, the kernel sees whole documents, one more
all-to-all turns its output back. No document needs padding and every kernel serves. Each rank's
attention is exactly that of the same heads without context parallelism, so outputs keep their bits.

Cost a layer and rank, in elements sent: (2 x query heads + 2 x key/value heads) x D x s x (P-1)/P,
forward and again backward.

Legend: P ranks, s slots of this rank's piece, S = P x s, B micro-batch, H query heads, G key/value
heads, D and E head dims, X = heads x head dim of a share.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_anchor.attention.heads import repeat_heads


def unsupported_reason(*, query_heads: int, kv_heads: int, cp_size: int) -> str | None:
    """Say why the heads of one tensor-parallel rank cannot be shared out, or None if they can.

    Args:
        query_heads: query heads of a tensor-parallel rank.
        kv_heads: key/value heads of a tensor-parallel rank.
        cp_size: context-parallel size P.
    """
    if query_heads % cp_size:
        return (
            f"{query_heads} query heads per tensor-parallel rank cannot be shared by "
            f"{cp_size} context-parallel ranks; (--num-attention-heads / "
            "--tensor-model-parallel-size) must be a multiple of --context-parallel-size; use "
            "--cp-comm-type auto or gather, which heads do not bound"
        )
    if kv_heads % cp_size and cp_size % kv_heads:
        return (
            f"{kv_heads} key/value heads per tensor-parallel rank and {cp_size} context-parallel "
            "ranks: one must be a multiple of the other; change --context-parallel-size or "
            "--tensor-model-parallel-size (heads come from --num-query-groups)"
        )
    return None


class _AllToAll(torch.autograd.Function):
    """Exchange equal blocks along dimension 0: its own inverse, so backward is it again."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(blocks, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchange(grads[0], ctx.group), None


def _exchange(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(blocks, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, blocks.contiguous(), group=group)
    return received


def gather_sequence(
    q_sBHD: Tensor, k_sBGD: Tensor, v_sBGE: Tensor, *, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange pieces of the sequence for shares of the heads, q, k and v in one all-to-all.

    Args:
        q_sBHD: [s, B, H, D] queries of this rank's slots.
        k_sBGD: [s, B, G, D] keys; with G < P every head is first repeated P / G times.
        v_sBGE: [s, B, G, E] values; their width may differ from that of the keys.
        group: context-parallel group; rank r holds slots r x s ... (r + 1) x s - 1.

    Returns:
        [S, B, H/P, D], [S, B, max(G/P, 1), D] and [S, B, max(G/P, 1), E].
    """
    P = group.size()
    copies = max(1, P // k_sBGD.shape[2])
    tensors = (q_sBHD, repeat_heads(k_sBGD, copies=copies), repeat_heads(v_sBGE, copies=copies))
    shares_sBPX = [x.unflatten(2, (P, -1)).flatten(3) for x in tensors]
    blocks_PsBX = torch.cat(shares_sBPX, dim=3).permute(2, 0, 1, 3)
    together_SBX = _AllToAll.apply(blocks_PsBX, group).flatten(0, 1)
    split = together_SBX.split([x.shape[3] for x in shares_sBPX], dim=2)
    q, k, v = (
        x.unflatten(2, (-1, whole.shape[3])) for x, whole in zip(split, tensors, strict=True)
    )
    return q, k, v


def scatter_sequence(out_SBHD: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Exchange shares of the heads for pieces of the sequence: undo `gather_sequence`.

    Args:
        out_SBHD: [S, B, H/P, D] attention output of this rank's heads.
        group: context-parallel group.

    Returns:
        [s, B, H, D] output of all heads for this rank's slots.
    """
    blocks_PsBHD = out_SBHD.unflatten(0, (group.size(), -1))
    heads_PsBHD = _AllToAll.apply(blocks_PsBHD, group)
    return heads_PsBHD.permute(1, 2, 0, 3, 4).flatten(2, 3)
