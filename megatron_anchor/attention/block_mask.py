"""FlexAttention's block mask straight from the lengths of runs.

torch's ``create_block_mask`` evaluates the mask for every pair of slots, S x S of them, before it
looks for empty blocks. Which blocks a run touches follows from its borders alone: the rows of keys
that a query sees begin and end later the later the query is, so a block of queries touches the
blocks from the first key of its first query to the last key of its last. Cost: a few (S / 128)^2
tables, 60 MB at 131072 slots, where one S x S mask of bytes is 17 GB.

Legend: T queries, K keys, N = T / 128 and M = K / 128 blocks of them, R runs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from megatron_anchor.attention.runs import Runs, to_device
from megatron_anchor.windows import is_visible

BLOCK = 128
"""Slots of a block, FlexAttention's own default."""


def runs_block_mask(runs: Runs) -> BlockMask:
    """Build the block mask of runs.

    Returns:
        Mask of [1, 1, T, K] with blocks of 128 x 128, causal inside runs, within their window.
    """
    q_places, k_places = runs.q_places(), runs.k_places()
    run_T, run_K = _run_of_row(runs.q_lengths, runs), _run_of_row(runs.k_lengths, runs)
    partial_NM, full_NM = _blocks(runs)
    window = runs.window

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen: Tensor = is_visible(q_places[query], k_places[key], window)
        return (run_T[query] == run_K[key]) & seen

    return BlockMask.from_kv_blocks(
        *_ordered(partial_NM),
        *_ordered(full_NM),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask,
        seq_lengths=(runs.num_queries, runs.num_keys),
    )


def _run_of_row(lengths: np.ndarray, runs: Runs) -> Tensor:
    return torch.repeat_interleave(
        torch.arange(len(lengths), dtype=torch.int32, device=runs.device),
        to_device(lengths, runs.device),
        output_size=int(lengths.sum()),
    )


def _blocks(runs: Runs) -> tuple[Tensor, Tensor]:
    """Say for every pair of blocks whether some (``partial``) or all (``full``) pairs are seen."""
    T, K = runs.num_queries, runs.num_keys
    first_N = np.arange(0, T, BLOCK)
    last_N = np.minimum(first_N + BLOCK, T) - 1
    q_ends, k_ends = np.cumsum(runs.q_lengths), np.cumsum(runs.k_lengths)
    k_begins = k_ends - runs.k_lengths
    run_of_first_N, run_of_last_N = (
        np.searchsorted(q_ends, rows, side="right") for rows in (first_N, last_N)
    )
    own_key_of_first_N, own_key_of_last_N = (
        k_ends[run] - (q_ends[run] - row)
        for run, row in ((run_of_first_N, first_N), (run_of_last_N, last_N))
    )
    size = K if runs.window is None else runs.window.size
    start_N = k_begins[run_of_first_N]
    low_of_first_N = np.maximum(start_N, own_key_of_first_N - size + 1)
    low_of_last_N = np.maximum(k_begins[run_of_last_N], own_key_of_last_N - size + 1)
    one_run_N = run_of_first_N == run_of_last_N
    number_M = torch.arange(-(-K // BLOCK), device=runs.device)[None]

    def column(rows: np.ndarray) -> Tensor:
        return to_device(rows, runs.device)[:, None]

    touched_NM = (number_M >= column(low_of_first_N // BLOCK)) & (
        number_M <= column(own_key_of_last_N // BLOCK)
    )
    full_NM = (
        column(one_run_N)
        & (number_M * BLOCK >= column(low_of_last_N))
        & (number_M * BLOCK + BLOCK - 1 <= column(own_key_of_first_N))
    )
    if runs.window is not None and runs.window.keeps_anchor:
        touched_NM |= number_M == column(start_N // BLOCK)
    return touched_NM & ~full_NM, full_NM


def _ordered(blocks_NM: Tensor) -> tuple[Tensor, Tensor]:
    """Turn a table into FlexAttention's counts and indices, the set ones first."""
    count_N = blocks_NM.sum(-1, dtype=torch.int32)
    order_NM = blocks_NM.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return count_N[None, None], order_NM.to(torch.int32)[None, None].contiguous()
