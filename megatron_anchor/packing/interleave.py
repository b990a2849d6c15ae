"""Interleaved chunks: the documents of a sample in random pieces (arXiv 2411.13476, 3.3.2).

Every document slice is split at random places into chunks, and the chunks of all documents are
shuffled, those of one document kept in order. Attention does not care where in memory a token
lies, so for masked patterns only position ids follow the new order; "full" moves the tokens.

Legend: P pieces (document slices), S slots, C chunks.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Interleaving:
    """How finely documents are split."""

    max_chunks: int = 8
    """chunks of a document slice: a random number from 1 to this"""
    min_chunk_length: int = 16
    """slots that every chunk has at least; a shorter slice stays whole"""

    def __post_init__(self) -> None:
        """Check both bounds.

        Raises:
            ValueError: one is not positive.
        """
        if self.max_chunks < 1:
            raise ValueError(
                f"got --interleave-max-chunks {self.max_chunks}, expected 1 or more (1 shuffles "
                "whole documents)"
            )
        if self.min_chunk_length < 1:
            raise ValueError(
                f"got --interleave-min-chunk-length {self.min_chunk_length}, expected 1 or more"
            )


def interleave(
    slots_P: np.ndarray, *, interleaving: Interleaving, random: np.random.Generator
) -> np.ndarray:
    """int64 [sum of slots], the slots of all slices in their new order.

    Args:
        slots_P: slots of each slice (its head included), which lie side by side.
        interleaving: bounds of the splitting.
        random: source of the random numbers.
    """
    borders, owner = [], []
    begin_P = np.cumsum(slots_P) - slots_P
    for piece, (begin, slots) in enumerate(zip(begin_P, slots_P, strict=True)):
        most = max(1, min(interleaving.max_chunks, int(slots) // interleaving.min_chunk_length))
        number = int(random.integers(1, most + 1))
        # Places with all minimal lengths taken out, drawn with repetition and put back in.
        free = int(slots) - number * min(interleaving.min_chunk_length, int(slots) // number)
        least = (int(slots) - free) // number
        cuts = np.sort(random.integers(0, free + 1, number - 1))
        borders.append(begin + np.concatenate(([0], cuts + least * np.arange(1, number))))
        owner.append(np.full(number, piece))
    begin_C = np.concatenate(borders) if borders else np.zeros(0, np.int64)
    owner_C = np.concatenate(owner) if owner else np.zeros(0, np.int64)
    length_C = np.diff(begin_C, append=slots_P.sum())
    # A shuffled list of owners; the k-th turn of an owner plays its k-th chunk.
    turns = random.permutation(owner_C)
    chunk_of_turn = np.empty(len(turns), dtype=np.int64)
    chunk_of_turn[np.argsort(turns, kind="stable")] = np.arange(len(turns))
    begin, length = begin_C[chunk_of_turn], length_C[chunk_of_turn]
    new_begin = np.cumsum(length) - length
    return np.arange(int(length.sum())) + np.repeat(begin - new_begin, length)
