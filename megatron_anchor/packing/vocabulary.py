"""Token ids that the model's embedding has no row for."""

import numpy as np

from megatron_anchor.packing.compiled import compiled
from megatron_anchor.packing.index import Slices

_NO_LIMIT = np.iinfo(np.int64).max


def ids_are_inside(tokens_S: np.ndarray, labels_S: np.ndarray, vocab_size: int | None) -> bool:
    """Whether all ids of int64 [S] arrays are in [0, vocab_size); None = only not negative."""
    smallest, largest = _extremes(tokens_S, labels_S)
    return smallest >= 0 and largest < (vocab_size or _NO_LIMIT)


def find_token_outside(
    text: np.ndarray, slices: Slices, *, vocab_size: int | None
) -> tuple[int, int]:
    """(slice, offset from its start) of the first token outside the vocabulary.

    Args:
        text: integers, what `slices.start` points into.
        slices: slices of which one holds such a token.
        vocab_size: ids in [0, vocab_size) are inside; None = all that are not negative.
    """
    for p, (start, count) in enumerate(zip(slices.start, slices.tokens_read, strict=True)):
        tokens = text[start : start + count].astype(np.int64)
        outside = np.flatnonzero((tokens < 0) | (tokens >= (vocab_size or _NO_LIMIT)))
        if outside.size:
            return p, int(outside[0])
    raise AssertionError("no token is outside the vocabulary")


@compiled
def _extremes(tokens_S: np.ndarray, labels_S: np.ndarray) -> tuple[int, int]:
    """Smallest and largest value of two arrays of one length."""
    smallest, largest = tokens_S[0], tokens_S[0]
    for slot in range(len(tokens_S)):
        smallest = min(smallest, tokens_S[slot], labels_S[slot])
        largest = max(largest, tokens_S[slot], labels_S[slot])
    return smallest, largest
