"""Looking into a corpus: counts, lengths by domain, and whether its files agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_anchor.corpus.indexed import IndexedCorpus, bin_path
from megatron_anchor.corpus.manifest import read_domains, read_manifest

ALL = "all"
PERCENTILES = (50, 90, 99, 100)
_BLOCK = 1 << 24  # tokens checked at once
_SHOWN = 5  # offenders named in a message


@dataclass(frozen=True)
class DomainLengths:
    """Lengths of one domain's documents, in tokens."""

    name: str
    documents: int
    tokens: int
    percentiles: tuple[int, ...]
    """At `PERCENTILES`."""
    counts: tuple[int, ...]
    """Documents in each bin of the report."""
    bin_tokens: tuple[int, ...]
    """Tokens in each bin."""


@dataclass(frozen=True)
class Report:
    """What `inspect_corpus` found; `edges` are the lower ends of the length bins."""

    prefix: str
    dtype: str
    sequences: int
    edges: tuple[int, ...]
    domains: tuple[DomainLengths, ...]
    """All documents first (named `all`), then every domain, largest first."""
    problems: tuple[str, ...]


def inspect_corpus(
    prefix: str | Path, *, vocab_size: int | None = None, eod_id: int | None = None
) -> Report:
    """Count, measure and verify the corpus at `prefix`.

    `vocab_size` and `eod_id` come from the manifest where they are None; without either, ids and
    document ends are not checked.
    """
    corpus = IndexedCorpus.open(prefix)
    manifest = read_manifest(prefix)
    if manifest is not None:
        vocab_size = manifest.vocab_size if vocab_size is None else vocab_size
        eod_id = manifest.eod_id if eod_id is None else eod_id
    problems = verify(corpus, vocab_size=vocab_size, eod_id=eod_id)
    if manifest is not None:
        for what, stated, held in (
            ("documents", manifest.documents, len(corpus)),
            ("tokens", manifest.tokens, len(corpus.tokens)),
        ):
            if stated != held:
                problems.append(f"the manifest states {stated} {what}, the corpus holds {held}")
    lengths = _safe_lengths(corpus)
    edges = length_edges(int(lengths.max(initial=1)))
    named = read_domains(prefix)
    domains = [_domain_lengths(ALL, lengths, edges)]
    if named is not None and len(named[1]) == len(lengths):
        names, ids = named
        found = [_domain_lengths(name, lengths[ids == i], edges) for i, name in enumerate(names)]
        domains += sorted(found, key=lambda domain: -domain.tokens)
    return Report(
        prefix=str(prefix),
        dtype=corpus.dtype.name,
        sequences=len(corpus.lengths),
        edges=tuple(edges.tolist()),
        domains=tuple(domains),
        problems=tuple(problems),
    )


def length_edges(longest: int) -> np.ndarray:
    """Lower ends of length bins: 0 and the powers of two up to `longest`, int64."""
    top = max(1, int(longest).bit_length())
    return np.concatenate(([0], 2 ** np.arange(top, dtype=np.int64)))


def _domain_lengths(name: str, lengths: np.ndarray, edges: np.ndarray) -> DomainLengths:
    bins = np.searchsorted(edges, lengths, side="right") - 1
    counts = np.bincount(bins, minlength=len(edges))
    # exact integer sums: float weights lose tokens above 2^53
    order = np.argsort(bins, kind="stable")
    ends = np.concatenate(([0], np.cumsum(lengths[order], dtype=np.int64)))
    tokens = np.diff(ends[np.concatenate(([0], np.cumsum(counts)))])
    found = np.percentile(lengths, PERCENTILES, method="higher") if len(lengths) else [0] * 4
    return DomainLengths(
        name=name,
        documents=len(lengths),
        tokens=int(lengths.sum(dtype=np.int64)),
        percentiles=tuple(int(value) for value in found),
        counts=tuple(counts.tolist()),
        bin_tokens=tuple(tokens.tolist()),
    )


def _safe_lengths(corpus: IndexedCorpus) -> np.ndarray:
    """Document lengths, or none where the index is too damaged to tell."""
    indices = corpus.document_indices
    if not len(indices) or indices.min() < 0 or indices.max() > len(corpus.lengths):
        return np.empty(0, dtype=np.int64)
    return corpus.document_lengths()


def verify(
    corpus: IndexedCorpus, *, vocab_size: int | None = None, eod_id: int | None = None
) -> list[str]:
    """Every way in which `.bin` and `.idx` disagree or tokens are not what they should be."""
    problems = _index_problems(corpus)
    if problems:
        return problems  # offsets cannot be trusted: what follows would read at wrong places
    if vocab_size is not None:
        problems += _vocabulary_problems(corpus, vocab_size)
    if eod_id is not None:
        problems += _eod_problems(corpus, eod_id)
    return problems


def _index_problems(corpus: IndexedCorpus) -> list[str]:
    problems = []
    lengths, indices = corpus.lengths, corpus.document_indices
    if not len(indices) or indices[0] != 0:
        problems.append("the first document index is not 0")
    elif indices[-1] != len(lengths):
        problems.append(
            f"the last document index is {indices[-1]}, but there are {len(lengths)} sequences"
        )
    if len(indices) > 1:
        problems += _named("document indices fall", np.flatnonzero(np.diff(indices) < 0))
    problems += _named("sequences with a negative length", np.flatnonzero(lengths < 0))
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = np.concatenate(([0], ends[:-1])) if len(ends) else ends
    itemsize = corpus.dtype.itemsize
    problems += _named(
        "sequences whose offset is not the sum of the lengths before",
        np.flatnonzero(corpus.pointers != starts * itemsize),
    )
    held, stated = len(corpus.tokens), int(ends[-1]) if len(ends) else 0
    if held != stated:
        problems.append(f"{bin_path(corpus.prefix)} holds {held} tokens, the index states {stated}")
    return problems


def _vocabulary_problems(corpus: IndexedCorpus, vocab_size: int) -> list[str]:
    for at in range(0, len(corpus.tokens), _BLOCK):
        block = corpus.tokens[at : at + _BLOCK]
        if block.min() < 0 or block.max() >= vocab_size:
            place = at + int(np.flatnonzero((block < 0) | (block >= vocab_size))[0])
            document = _document_of(corpus, place)
            return [
                f"token {place} (document {document}) is {corpus.tokens[place]}, outside the "
                f"vocabulary of {vocab_size}"
            ]
    return []


def _document_of(corpus: IndexedCorpus, token: int) -> int:
    starts = np.asarray(corpus.pointers) // corpus.dtype.itemsize
    sequence = int(np.searchsorted(starts, token, side="right")) - 1
    return int(np.searchsorted(corpus.document_indices, sequence, side="right")) - 1


def _eod_problems(corpus: IndexedCorpus, eod_id: int) -> list[str]:
    first, last = corpus.document_indices[:-1], corpus.document_indices[1:] - 1
    filled = np.flatnonzero(last >= first)
    sequences = last[filled]
    ends = corpus.pointers[sequences] // corpus.dtype.itemsize + corpus.lengths[sequences] - 1
    wrong = filled[corpus.tokens[ends] != eod_id] if len(ends) else filled
    empty = np.flatnonzero(last < first)
    return _named(f"documents that do not end with eod {eod_id}", wrong) + _named(
        "documents without tokens", empty
    )


def _named(what: str, places: Sequence[int] | np.ndarray) -> list[str]:
    if not len(places):
        return []
    shown = ", ".join(str(int(place)) for place in places[:_SHOWN])
    return [f"{len(places)} {what}, at {shown}{', ...' if len(places) > _SHOWN else ''}"]
