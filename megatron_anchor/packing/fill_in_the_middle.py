"""Fill-in-the-middle: documents rearranged before they are packed (arXiv 2207.14255).

A chosen document with the parts a, b and c becomes, with the tokens P, S and M around the parts,

    P a S c M b        prefix, suffix, middle
    P S c M a b        suffix, prefix, middle (the paper's variant 2)

so it grows by three tokens, whatever it is. Lengths are known without reading the corpus, and the
packer packs the documents as they will be read. Whether and where a document is cut follows from
the seed and its number alone: the same in every epoch, on every rank and in a resumed run.

Megatron rearranges after packing (megatron/training/datasets/fim_dataset.py): it cuts the text of a
sample between characters, tokenizes the parts again, and cuts off or pads what no longer fits. Here
parts end between tokens and nothing is lost.

Legend: P documents asked for, n tokens of a document behind its anchor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ADDED = 3
"""Tokens by which a rearranged document grows."""
_FEWEST = 2
"""Shorter documents hold nothing, or an end-of-document token alone."""


@dataclass(frozen=True, kw_only=True)
class FillInTheMiddle:
    """How documents are rearranged."""

    rate: float
    """Share of the documents that are rearranged, in [0, 1]."""
    suffix_first_rate: float
    """Share of these in which the suffix comes first, in [0, 1]."""
    prefix: int
    """Token P."""
    suffix: int
    """Token S."""
    middle: int
    """Token M."""
    end: int
    """End-of-document token, which stays at the document's end."""
    seed: int
    """Of all choices."""

    def lengths(self, documents: np.ndarray, content: np.ndarray) -> np.ndarray:
        """Tokens of documents when they are rearranged, of the dtype of `content`.

        Args:
            documents: integers [P], numbers in the corpus.
            content: integers [P], tokens of each document behind its anchor.
        """
        return content + ADDED * self.is_chosen(documents, content).astype(content.dtype)

    def is_chosen(self, documents: np.ndarray, content: np.ndarray) -> np.ndarray:
        """bool [P], which documents are rearranged.

        Args:
            documents: as in `lengths`.
            content: as in `lengths`, before rearranging.
        """
        return (_fractions(documents, self.seed) < self.rate) & (content >= _FEWEST)

    def rearranged(self, document: int, tokens: np.ndarray) -> np.ndarray:
        """A chosen document's tokens, int64 [n + 3].

        Args:
            document: its number.
            tokens: integers [n], behind its anchor.
        """
        ended = int(tokens[-1] == self.end)
        text = tokens[: len(tokens) - ended].astype(np.int64)
        random = np.random.default_rng([self.seed, document])
        first, last = np.sort(random.integers(0, len(text) + 1, size=2))
        a, b, c = text[:first], text[first:last], text[last:]
        P, S, M = [self.prefix], [self.suffix], [self.middle]
        suffix_first = random.random() < self.suffix_first_rate
        parts = (P, S, c, M, a, b) if suffix_first else (P, a, S, c, M, b)
        return np.concatenate([*parts, tokens[len(text) :]]).astype(np.int64)


def _fractions(numbers: np.ndarray, seed: int) -> np.ndarray:
    """float64 in [0, 1), one for each number, by SplitMix64 (Steele et al., OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        x = numbers.astype(np.uint64) + np.uint64(1)
        x = x * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed) * np.uint64(0xD1342543DE82EF95)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
