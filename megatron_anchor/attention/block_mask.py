"""FlexAttention's block mask straight from cumulative document lengths.

torch's ``create_block_mask`` evaluates the mask for every pair of slots, S x S of them, before it
looks for empty blocks. Which blocks documents touch follows from their borders alone: a block of
queries sees the blocks from the start of its first row's document up to its own. Cost: a few
(S / 128)^2 tables, 60 MB at 131072 slots, where one S x S mask of bytes is 17 GB.

Two layouts (``megatron_anchor.attention.masks`` draws both): every document headed by its copy of
the anchor, or the paper's single anchor at the head of each sample, which every document sees.

Legend: T slots of the micro-batch, S slots of a sample, N = T / 128 blocks, n documents.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Slots of a block, FlexAttention's own default."""


def documents_block_mask(
    cu_seqlens: Tensor, *, slots: int, shared_anchor_every: int | None = None
) -> BlockMask:
    """Build the block mask of packed documents.

    Args:
        cu_seqlens: [n + 1] integer cumulative lengths from 0 to ``slots``, on the device where
            attention runs.
        slots: T, so that nothing waits for the device.
        shared_anchor_every: None where documents carry copies of the anchor; else S: slot 0 of
            every S slots is an anchor that the sample's other documents see.

    Returns:
        Mask of [1, 1, T, T] with blocks of 128 x 128, causal inside documents.
    """
    document_T = _document_of_slot(cu_seqlens, slots)
    partial_NN, full_NN = _blocks(cu_seqlens, document_T, shared_anchor_every)
    every = shared_anchor_every

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = document_T[query] == document_T[key]
        if every is not None:
            seen = seen | (key == query // every * every)
        return seen & (key <= query)

    return BlockMask.from_kv_blocks(
        *_ordered(partial_NN),
        *_ordered(full_NN),
        BLOCK_SIZE=BLOCK,
        mask_mod=is_visible,
        seq_lengths=(slots, slots),
    )


def _document_of_slot(cu_seqlens: Tensor, slots: int) -> Tensor:
    slot_T = torch.arange(slots, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, slot_T, right=True, out_int32=True) - 1


def _blocks(
    cu_seqlens: Tensor, document_T: Tensor, shared_anchor_every: int | None
) -> tuple[Tensor, Tensor]:
    """Say for every pair of blocks whether some (``partial``) or all (``full``) pairs are seen."""
    T = len(document_T)
    first_N = torch.arange(0, T, BLOCK, device=document_T.device)
    last_N = (first_N + BLOCK - 1).clamp(max=T - 1)
    start_N = cu_seqlens[document_T[first_N]]
    number_N = torch.arange(len(first_N), device=document_T.device)
    query_N1, key_1N = number_N[:, None], number_N[None]
    touched_NN = (key_1N >= (start_N // BLOCK)[:, None]) & (key_1N <= query_N1)
    one_document_N = document_T[first_N] == document_T[last_N]
    inside_NN = key_1N >= ((start_N + BLOCK - 1) // BLOCK)[:, None]
    full_NN = inside_NN & (key_1N < query_N1) & one_document_N[:, None]
    if shared_anchor_every is not None:
        anchor_N = first_N // shared_anchor_every * shared_anchor_every
        touched_NN |= key_1N == (anchor_N // BLOCK)[:, None]
    return touched_NN & ~full_NN, full_NN


def _ordered(blocks_NN: Tensor) -> tuple[Tensor, Tensor]:
    """Turn a table into FlexAttention's counts and indices, the set ones first."""
    count_N = blocks_NN.sum(-1, dtype=torch.int32)
    order_NN = blocks_NN.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return count_N[None, None], order_NN.to(torch.int32)[None, None].contiguous()
