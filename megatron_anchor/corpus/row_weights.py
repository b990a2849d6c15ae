"""Weights that a row brings itself (`--weight-key`): one number for a document, or one a token."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_anchor.indexed.weights import LARGEST_WEIGHT


class WeightError(Exception):
    """A row's weights are none; the argument completes `KEY ...`."""


def checked_weights(value: Any, *, dtype: str) -> np.ndarray:
    """The weights of a row in the dtype of the corpus: 0-d for a number, 1-D for a list.

    Raises:
        WeightError: not a number or a list of numbers, one is negative, not finite or too large, or
            the dtype cannot hold it.
    """
    items = value if isinstance(value, list) else [value]
    for place, item in enumerate(items):
        if isinstance(item, bool) or not isinstance(item, (int, float)):
            raise WeightError(f"holds {item!r:.60} at place {place}, which is no number")
        if not 0 <= item <= LARGEST_WEIGHT:
            raise WeightError(
                f"holds {item!r:.60} at place {place}, expected 0 to {LARGEST_WEIGHT:g}; only "
                "ratios matter, so divide all of them"
            )
    exact = np.array(value, dtype=np.float64)
    held = exact.astype(dtype)
    whole = dtype == "uint8"
    wrong = held.astype(np.float64) != exact if whole else (held == 0) != (exact == 0)
    if whole:
        wrong |= exact > 255
    if wrong.any():
        first = exact.reshape(-1)[int(np.flatnonzero(wrong)[0])]
        remedy = "float16 or float32" if whole else "float32, or larger weights"
        raise WeightError(
            f"holds {first:g}, which {dtype} cannot hold; use --weight-dtype {remedy}"
        )
    return held


def require_length(weights: np.ndarray | None, lengths: list[int]) -> None:
    """Refuse a list that does not fit the ids of its document's sequences.

    Args:
        weights: as `checked_weights` gives them, or None.
        lengths: tokens of every sequence, without what is added around them.

    Raises:
        WeightError: another number of weights than of tokens, or several sequences.
    """
    if weights is None or weights.ndim == 0:
        return
    if len(lengths) > 1:
        raise WeightError(
            f"is a list, and the document has {len(lengths)} sequences; give a number"
        )
    if len(weights) != sum(lengths):
        raise WeightError(
            f"has {len(weights)} weights, and the document {sum(lengths)} tokens (without those "
            "that the tokenizer or --append-eod adds)"
        )


def spread(weights: np.ndarray, *, before: int, tokens: int, after: int) -> np.ndarray:
    """1-D [before + tokens + after]: tokens added around a document weigh as their neighbours."""
    if weights.ndim == 0:
        return np.full(before + tokens + after, weights, dtype=weights.dtype)
    return np.pad(weights, (before, after), mode="edge")
