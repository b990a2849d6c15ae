"""The pieces of a sample that ranks hold under Transformer Engine's context parallelism.

*Every* document is cut into 2 P chunks of equal size, and rank r holds chunks r and 2 P - 1 - r of
each, so that all ranks do the same share of causal work. For P = 2, documents of 8 and 4 slots::

    slot      0 1 2 3 4 5 6 7 | 8 9 10 11
    rank      0 0 1 1 1 1 0 0 | 0 1  1  0

Transformer Engine calls it dual chunk swap (``thd_get_partitioned_indices``). It checks only that
the total is a multiple of 2 P, and is silently wrong where a document is not, so `rank_of_slots`
checks every document.

Legend: P context-parallel ranks, S slots of a sample, s = S / P.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def check_alignment(lengths: np.ndarray, *, cp_size: int) -> None:
    """Refuse documents that cannot be cut into 2 P equal chunks.

    Args:
        lengths: slots of each document.
        cp_size: P.

    Raises:
        ValueError: naming the first such document and its length.
    """
    ragged = np.flatnonzero(np.asarray(lengths) % (2 * cp_size))
    if len(ragged):
        number = int(ragged[0])
        raise ValueError(
            f"document {number} of the sample has {int(lengths[number])} slots, not a multiple of "
            f"{2 * cp_size} (2 x --context-parallel-size): Transformer Engine's context "
            f"parallelism would be silently wrong; set --document-alignment {2 * cp_size}"
        )


def rank_of_slots(cu_seqlens: np.ndarray, *, cp_size: int) -> np.ndarray:
    """Say which rank holds each slot of a sample.

    Args:
        cu_seqlens: [any] cumulative document lengths from 0 to S; repeated entries are empty.
        cp_size: P.

    Returns:
        [S] int64 rank of each slot.

    Raises:
        ValueError: if a document is not a multiple of 2 P slots.
    """
    cu_seqlens = np.asarray(cu_seqlens, dtype=np.int64)
    lengths = np.diff(cu_seqlens)
    check_alignment(lengths, cp_size=cp_size)
    slot_in_document = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths)
    chunk = slot_in_document // np.repeat(lengths // (2 * cp_size), lengths)
    return np.minimum(chunk, 2 * cp_size - 1 - chunk)


def slots_of_rank(cu_seqlens_Bn: Tensor, *, cp_size: int, rank: int) -> Tensor:
    """Give the slots that a rank holds, in their order.

    Args:
        cu_seqlens_Bn: [B, any] integer cumulative document lengths of each sample.
        cp_size: P.
        rank: context-parallel rank.

    Returns:
        [B, s] int64 indices into the S slots of each sample, on the device of ``cu_seqlens_Bn``.

    Raises:
        ValueError: if a document is not a multiple of 2 P slots.
    """
    rows = [
        np.flatnonzero(rank_of_slots(row, cp_size=cp_size) == rank)
        for row in cu_seqlens_Bn.cpu().numpy()
    ]
    return torch.from_numpy(np.stack(rows)).to(cu_seqlens_Bn.device)


def take_slots(field_BS: Tensor, slots: slice | Tensor) -> Tensor:
    """Take what a rank holds out of whole samples.

    Args:
        field_BS: [B, S] any dtype.
        slots: a slice of the sequence, or [B, s] int64 as of `slots_of_rank`.
    """
    return field_BS[:, slots] if isinstance(slots, slice) else field_BS.gather(1, slots)
