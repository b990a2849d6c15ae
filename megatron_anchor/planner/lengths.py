"""Document lengths: of a corpus, or of a table that imitates a well-known one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_anchor.errors import UserError

SLIMPAJAMA_MEAN = 23_918_118_724 / 5_489_000 / 4
"""Tokens of a document: bytes over documents of SlimPajama-6B's training split (dataset card of
DKYoon/SlimPajama-6B on Hugging Face), at 4 bytes a token. 1089."""

SLIMPAJAMA_SIGMA = 1.2
"""Spread of the log-normal law that we lay through that mean: our assumption, no published figure.
One document in a hundred is then longer than 8 500 tokens."""

LONG_SHARE = 0.5
"""Share of tokens from documents of 32 K and more in the `long` table. Up-sampled mixtures for
context extension are of this kind (arXiv 2402.10171, 2411.13476); the share is our assumption."""

TABLES = ("slimpajama-like", "long-upsampled")


@dataclass(frozen=True)
class Lengths:
    """A source of document lengths."""

    name: str
    lengths: np.ndarray
    """int64 tokens of each document, the end-of-document token included, the anchor not."""
    prefix: str | None = None
    """Of the corpus that they were read from."""


def slimpajama_like(count: int = 100_000) -> Lengths:
    """Lengths with SlimPajama's mean."""
    mu = np.log(SLIMPAJAMA_MEAN) - SLIMPAJAMA_SIGMA**2 / 2
    drawn = np.random.default_rng(1).lognormal(mu, SLIMPAJAMA_SIGMA, count)
    return Lengths("slimpajama-like", np.maximum(drawn.astype(np.int64), 1))


def long_documents(count: int = 100_000) -> Lengths:
    """The same with documents of 32 K to 128 K tokens mixed in."""
    short = slimpajama_like(count).lengths
    long = np.random.default_rng(2).integers(32_768, 131_072, count)
    share = LONG_SHARE * short.mean() / (LONG_SHARE * short.mean() + (1 - LONG_SHARE) * long.mean())
    is_long = np.random.default_rng(3).random(count) < share
    return Lengths("long-upsampled", np.where(is_long, long, short))


def of_corpus(prefix: str | Path) -> Lengths:
    """Read the lengths of all documents of a `.bin/.idx` corpus (the index alone is read).

    Raises:
        UserError: a file is missing or malformed.
        UserError: the corpus has no token.
    """
    from megatron_anchor.indexed.pair import IndexedCorpus

    prefix = str(prefix).removesuffix(".idx").removesuffix(".bin")
    lengths = IndexedCorpus.open(prefix).document_lengths()
    if not (lengths > 0).any():
        raise UserError(f"--corpus {prefix}: it holds no token; preprocess it again")
    return Lengths(Path(prefix).name, lengths[lengths > 0], prefix)


def find_lengths(*, corpus: str | None, table: str) -> Lengths:
    """Take the corpus if one is given, else a built-in table.

    Raises:
        UserError: for an unknown table.
    """
    if corpus:
        return of_corpus(corpus)
    if table not in TABLES:
        raise UserError(
            f"--length-table {table}: known are {', '.join(TABLES)}; or give --corpus PREFIX"
        )
    return slimpajama_like() if table == TABLES[0] else long_documents()
