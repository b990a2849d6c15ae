"""Interleaved chunks: the documents of a sample in random slices (arXiv 2411.13476, 3.3.2).

Every document slice is split at random places into chunks, and the chunks of all documents are
shuffled, those of one document kept in order. Attention does not care where in memory a token
lies, so for masked patterns only position ids follow the new order; "full" moves the tokens.

Legend: P document slices, S slots, C chunks.
"""

from dataclasses import dataclass

import numpy as np

from megatron_anchor.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Interleaving:
    """How finely documents are split."""

    max_chunks: int = 8
    """chunks of a document slice: a random number from 1 to this"""
    min_chunk_length: int = 16
    """slots that every chunk has at least; a shorter slice stays whole"""
    max_chunk_length: int | None = None
    """slots that a chunk has at most; a longer slice gets the chunks that this takes, be they more
    than `max_chunks`; None = any number"""

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            UserError: one is not positive, or both lengths cannot be kept at once.
        """
        if self.max_chunks < 1:
            raise UserError(
                f"got --interleave-max-chunks {self.max_chunks}, expected 1 or more (1 shuffles "
                "whole documents)"
            )
        if self.min_chunk_length < 1:
            raise UserError(
                f"got --interleave-min-chunk-length {self.min_chunk_length}, expected 1 or more"
            )
        # Then every slice of at least the minimum can be split into chunks within both bounds.
        least = 2 * self.min_chunk_length - 1
        if self.max_chunk_length is not None and self.max_chunk_length < least:
            raise UserError(
                f"got --interleave-max-chunk-length {self.max_chunk_length}, expected at least "
                f"{least} (--interleave-min-chunk-length {self.min_chunk_length}, doubled, less "
                "one), so that documents of all lengths can be split"
            )


def interleave(
    slots_P: np.ndarray, *, interleaving: Interleaving, random: np.random.Generator
) -> np.ndarray:
    """int64 [sum of slots], the slots of all slices in their new order.

    Args:
        slots_P: int64 slots of each slice (its prefix included), which lie side by side.
        interleaving: bounds of the splitting.
        random: source of the random numbers.
    """
    if len(slots_P) == 0:
        return np.zeros(0, np.int64)
    owner_C, length_C = _split(slots_P, interleaving, random)
    begin_C = np.cumsum(length_C) - length_C
    # A shuffled list of owners; the k-th turn of an owner plays its k-th chunk.
    turns = random.permutation(owner_C)
    chunk_of_turn = np.empty(len(turns), dtype=np.int64)
    chunk_of_turn[np.argsort(turns, kind="stable")] = np.arange(len(turns))
    begin, length = begin_C[chunk_of_turn], length_C[chunk_of_turn]
    new_begin = np.cumsum(length) - length
    return np.arange(int(length.sum())) + np.repeat(begin - new_begin, length)


def _split(
    slots_P: np.ndarray, bounds: Interleaving, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """int64 [C] slice that each chunk belongs to, and int64 [C] its slots."""
    least_P = np.minimum(bounds.min_chunk_length, slots_P)
    most_P = slots_P if bounds.max_chunk_length is None else bounds.max_chunk_length
    fewest_P = -(-slots_P // most_P)
    number_P = random.integers(
        fewest_P, np.maximum(fewest_P, np.minimum(bounds.max_chunks, slots_P // least_P)) + 1
    )
    owner_C = np.repeat(np.arange(len(slots_P)), number_P)
    last_P = np.cumsum(number_P) - 1
    # Cuts at random among the slots that the minimal lengths leave free.
    free_P = slots_P - number_P * least_P
    cut_C = random.integers(0, free_P[owner_C] + 1)
    cut_C[last_P] = free_P
    extra_C = _differences(cut_C[np.lexsort((cut_C, owner_C))], last_P)
    # What is beyond the maximal length goes to the slice's other chunks, in proportion to the room.
    room_C = np.broadcast_to(most_P - least_P, slots_P.shape)[owner_C] - extra_C
    surplus_P = np.add.reduceat(np.maximum(-room_C, 0), last_P - number_P + 1)
    extra_C += np.minimum(room_C, 0)
    upto_C = np.cumsum(np.maximum(room_C, 0))
    upto_C -= np.concatenate(([0], upto_C[last_P[:-1]]))[owner_C]
    dealt_C = upto_C * surplus_P[owner_C] // np.maximum(upto_C[last_P], 1)[owner_C]
    return owner_C, least_P[owner_C] + extra_C + _differences(dealt_C, last_P)


def _differences(upto_C: np.ndarray, last_P: np.ndarray) -> np.ndarray:
    """int64 [C], each chunk's part of a sum that grows from 0 within each slice."""
    parts_C = np.diff(upto_C, prepend=0)
    parts_C[last_P[:-1] + 1] = upto_C[last_P[:-1] + 1]
    return parts_C
