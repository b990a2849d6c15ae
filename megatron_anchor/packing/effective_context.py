"""Weights by effective context (EXACT, arXiv 2605.10544): long contexts count more in the loss.

The effective context of a target is the number of tokens that predict it: those of its own document
(with `full`, of the sample) before it, without anchors, tags and padding. Targets are counted in
buckets of contexts 0 to 7, 8 to 15, 16 to 31, ... Those from a length on are the tail. With c_b the
targets of bucket b in an epoch, and sums over the tail,

    q_b = c_b / sum c        r_b = q_b ^ -gamma        w_b = 1 + alpha r_b / (sum q r)

so rare contexts weigh most, and the tail's weights exceed 1 by alpha on average. Other targets
weigh 1. The paper leaves open what the counts are of and what the loss is divided by: here of the
sample index, and by the sum of weights.

Legend: S slots of a sample, b buckets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_anchor.packing.index import Slices

FIRST_EDGE = 8


def bucket_edges(longest: int) -> np.ndarray:
    """int64 [b + 1]: 0, 8, 16, 32, ..., the last one above `longest`."""
    edges = [0, FIRST_EDGE]
    while edges[-1] <= longest:
        edges.append(2 * edges[-1])
    return np.array(edges, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class ContextWeights:
    """A weight for every bucket of contexts."""

    edges: np.ndarray
    """int64 [b + 1]."""
    counts: np.ndarray
    """float64 [b], targets (of a blend: their shares)."""
    weights: np.ndarray
    """float32 [b]."""

    def of(self, contexts: np.ndarray) -> np.ndarray:
        """float32, of contexts of any shape."""
        return self.weights[np.searchsorted(self.edges, contexts, side="right") - 1]

    def table(self) -> list[str]:
        """Lines that say what the weights do: bucket, share of targets, weight, share of loss."""
        targets = self.counts / max(self.counts.sum(), 1e-300)
        loss = targets * self.weights / max((targets * self.weights).sum(), 1e-300)
        lines = [f"{'context':>17}  {'targets':>8}  {'weight':>7}  {'of the loss':>11}"]
        rows = zip(self.edges[:-1], self.edges[1:], targets, self.weights, loss, strict=True)
        for first, end, share, weight, part in rows:
            span = f"{first} to {end - 1}"
            lines.append(f"{span:>17}  {share:>8.2%}  {weight:>7.3f}  {part:>11.2%}")
        return lines


def exact_weights(
    counts: np.ndarray, edges: np.ndarray, *, alpha: float, gamma: float, tail: int
) -> ContextWeights:
    """The weights of every bucket, by the formula above.

    Args:
        counts: [b] targets of each bucket; buckets without any weigh 1.
        edges: [b + 1].
        alpha: by how much the tail's mean weight exceeds 1.
        gamma: how much more rare contexts weigh.
        tail: context from which on a bucket is part of the tail.
    """
    counts = np.asarray(counts, dtype=np.float64)
    in_tail = (edges[:-1] >= tail) & (counts > 0)
    weights = np.ones(len(counts))
    if in_tail.any():
        q = counts[in_tail] / counts[in_tail].sum()
        r = q**-gamma
        weights[in_tail] = 1 + alpha * r / (q * r).sum()
    return ContextWeights(edges=edges, counts=counts, weights=weights.astype(np.float32))


def weigh_by_context(dataset: Any) -> ContextWeights:
    """Weigh the targets of a `PackedDataset`, or of a blend of such, as its settings say.

    The corpora of a blend have the same weights, which come from the counts of all.

    Returns:
        The weights, which all the corpora now have.
    """
    corpora = getattr(dataset, "datasets", [dataset])
    shares = getattr(dataset, "weights", [1.0])
    config = corpora[0].config
    edges = bucket_edges(config.sequence_length - 1)
    counts = [corpus.context_counts(edges) / corpus.figures.samples for corpus in corpora]
    tail = config.effective_context_tail or config.sequence_length // 4
    weights = exact_weights(
        np.average(counts, axis=0, weights=shares),
        edges,
        alpha=config.effective_context_alpha,
        gamma=config.effective_context_gamma,
        tail=tail,
    )
    for corpus in corpora:
        corpus.context_weights = weights
    return weights


def count_contexts(dataset: Any, edges: np.ndarray) -> np.ndarray:
    """int64 [b], targets of each bucket in an epoch of a `PackedDataset`.

    Reads the index and no token; about 30 us a sample, with a progress bar when it takes long.
    """
    longest = dataset.config.sequence_length
    changes = np.zeros(longest + 2, dtype=np.int64)
    samples = range(dataset.figures.samples)
    for sample in tqdm(samples, desc="contexts", unit="sample", delay=5, disable=None):
        slices = dataset.slices(sample)
        first, end = _spans(
            slices,
            first_token_loss=dataset.config.anchor_first_token_loss,
            apart=dataset.config.pattern.masks_documents,
        )
        np.add.at(changes, first, 1)
        np.add.at(changes, end, -1)
    targets = np.cumsum(changes)[:-1]
    totals = np.concatenate(([0], np.cumsum(targets)))
    return np.diff(totals[np.minimum(edges, len(targets))])


def _spans(slices: Slices, *, first_token_loss: bool, apart: bool) -> tuple[np.ndarray, np.ndarray]:
    """The contexts of the targets of every slice, from the first to before the end."""
    before = np.zeros(len(slices.length), dtype=np.int64)
    if not apart:
        before = np.cumsum(slices.length) - slices.length
    head = slices.anchor_has_target & first_token_loss
    last = slices.last_has_target & (first_token_loss | (slices.length > 0))
    # Context c is predicted by the slot of the slice's c-th token; c = 0 by its head.
    first = before + np.where(head | (slices.length == 0), 0, 1)
    end = before + slices.length + last
    return first, np.maximum(end, first)


def content_slots(slices: Slices, sequence_length: int) -> np.ndarray:
    """bool [S], slots that hold a document's token: no anchor, tag, filling or padding."""
    counts = np.stack((slices.prefix, slices.length, slices.filling), axis=1).ravel()
    is_content = np.tile([False, True, False], len(slices.length))
    content = np.repeat(is_content, counts)
    return np.concatenate((content, np.zeros(sequence_length - len(content), dtype=np.bool_)))


def slot_contexts(content_S: np.ndarray, borders: Iterable[int]) -> np.ndarray:
    """int64 [S], the effective context of the target that each slot predicts.

    Args:
        content_S: bool, see `content_slots`.
        borders: of the segments, from 0 to S, ascending.
    """
    held = np.concatenate(([0], np.cumsum(content_S)))
    borders = np.asarray(borders, dtype=np.int64)
    before = np.repeat(held[borders[:-1]], np.diff(borders))
    return held[1:] - before
