"""How much every target counts in the loss: by its corpus, its document, or its context.

A target's weight is the product of what the corpus says (`PREFIX.weights.bin`, 1 where there is no
such file) and of --loss-weighting:

    uniform            1
    document-mean      1 / N, so that every document counts alike (LongAlign, arXiv 2401.18058)
    document-sqrt      1 / sqrt(N), between the two
    effective-context  by the tokens that the target sees, see `effective_context`

N is the sum of the corpus' weights over the targets of the whole document, wherever it is cut. The
loss is divided by the sum of all weights, so only their ratios matter.

Legend: P document slices of a sample.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np

from megatron_anchor.indexed.weights import TargetWeights
from megatron_anchor.packing.documents import Documents
from megatron_anchor.packing.index import Slices

LossWeighting = Literal["uniform", "document-mean", "document-sqrt", "effective-context"]
LOSS_WEIGHTINGS: tuple[str, ...] = get_args(LossWeighting)

POWERS = {"document-mean": -1.0, "document-sqrt": -0.5}
"""Power of N that weighs a document's targets."""


class SliceWeights(NamedTuple):
    """Weights of the targets of a sample's slices."""

    factor_P: np.ndarray
    """float32, of all targets of a slice."""
    tokens: np.ndarray
    """float32, of single tokens as targets; empty = they are all 1."""
    start_P: np.ndarray
    """int64, where those of a slice begin in `tokens`."""


def uniform_weights(slices: Slices) -> SliceWeights:
    """Weights of 1."""
    ones_P = np.ones(len(slices.start), dtype=np.float32)
    return SliceWeights(ones_P, np.zeros(0, dtype=np.float32), slices.start)


def slice_weights(
    slices: Slices,
    *,
    weighting: str,
    corpus: TargetWeights | None,
    documents: Documents,
    own_anchor_D: np.ndarray,
    first_token_loss: bool,
) -> SliceWeights | None:
    """The weights of a sample's slices; None where every target weighs 1.

    Args:
        slices: the slices.
        weighting: --loss-weighting; what depends on the context is applied later.
        corpus: weights of the corpus' tokens, if there are some.
        documents: the corpus' document table.
        own_anchor_D: bool, which documents begin with the anchor token, which is no target.
        first_token_loss: whether a document's first token is a target.
    """
    power = POWERS.get(weighting)
    if power is None and corpus is None:
        return None
    factor_P, tokens, start_P = uniform_weights(slices)
    if corpus is not None:
        counts = slices.tokens_read
        read = [corpus.at(*place) for place in zip(slices.start, counts, strict=True)]
        tokens, start_P = np.concatenate(read), np.cumsum(counts) - counts
    if power is not None:
        skipped = own_anchor_D[slices.document] + (not first_token_loss)
        begin = documents.boundaries(slices.document) + skipped
        count = np.maximum(documents.boundaries(slices.document + 1) - begin, 0)
        total_P = count if corpus is None else _sums(corpus, begin, count)
        # A document without targets has nothing that the factor could weigh.
        factor_P = np.where(total_P > 0, total_P, 1.0) ** power
    return SliceWeights(factor_P.astype(np.float32), tokens, start_P)


def _sums(corpus: TargetWeights, begin: np.ndarray, count: np.ndarray) -> np.ndarray:
    places = zip(begin, count, strict=True)
    return np.array([corpus.at(*place).sum(dtype=np.float64) for place in places])
