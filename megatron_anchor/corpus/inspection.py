"""Looking into a corpus: counts, lengths by domain, and whether its files agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_anchor.errors import UserError
from megatron_anchor.indexed.checks import index_problems, named
from megatron_anchor.indexed.manifest import KeyManifest, read_domains, read_manifest
from megatron_anchor.indexed.pair import IndexedCorpus
from megatron_anchor.indexed.weights import WEIGHTS_BLOCK, TargetWeights

ALL = "all"
PERCENTILES = (50, 90, 99, 100)
_BLOCK = 1 << 24  # tokens checked at once


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
class LearnedTokens:
    """What a corpus' weights say."""

    dtype: str
    weighted_tokens: int
    share: float
    """Of all tokens, those that weigh more than nothing."""
    weight_sum: float
    largest: float
    documents: int
    """Documents with such a token."""
    conversations: dict[str, int]
    """Counts of `--chat`; empty for other weights."""


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
    learned: LearnedTokens | None = None
    """None where the corpus has no weights: then all tokens are learned alike."""


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
    empty = 0 if manifest is None else manifest.empty_kept
    problems = verify(corpus, vocab_size=vocab_size, eod_id=eod_id, empty=empty)
    if manifest is not None:
        for what, stated, held in (
            ("documents", manifest.documents, len(corpus)),
            ("tokens", manifest.tokens, len(corpus.tokens)),
        ):
            if stated != held:
                problems.append(f"the manifest states {stated} {what}, the corpus holds {held}")
    lengths = _safe_lengths(corpus)
    learned, found_wrong = _learned(corpus, lengths)
    problems += found_wrong
    edges = length_edges(int(lengths.max(initial=1)))
    domains = [_domain_lengths(ALL, lengths, edges)]
    try:
        recorded = read_domains(prefix)
    except UserError as error:
        problems.append(str(error))
        recorded = None
    if recorded is not None and manifest is not None and len(recorded[1]) == len(lengths):
        names, ids = recorded
        found = [_domain_lengths(name, lengths[ids == i], edges) for i, name in enumerate(names)]
        problems += _count_problems(found, manifest)
        domains += sorted(found, key=lambda domain: -domain.tokens)
    return Report(
        prefix=str(prefix),
        dtype=corpus.dtype.name,
        sequences=len(corpus.lengths),
        edges=tuple(edges.tolist()),
        domains=tuple(domains),
        problems=tuple(problems),
        learned=learned,
    )


def _learned(corpus: IndexedCorpus, lengths: np.ndarray) -> tuple[LearnedTokens | None, list[str]]:
    """What the weights say, counted anew, and where they disagree with their JSON."""
    try:
        weights = TargetWeights.open(corpus.prefix)
    except UserError as error:
        return None, [str(error)]
    if weights is None:
        return None, []
    stated = weights.manifest
    if stated.tokens != len(corpus.tokens):
        return None, [f"there are {stated.tokens} weights for {len(corpus.tokens)} tokens"]
    total, largest, flags = 0.0, 0.0, np.zeros(stated.tokens, dtype=bool)
    for at in range(0, stated.tokens, WEIGHTS_BLOCK):
        block = weights.at(at, WEIGHTS_BLOCK)
        total += float(block.sum(dtype=np.float64))
        largest = max(largest, float(block.max(initial=0.0)))
        flags[at : at + len(block)] = block > 0
    ends = np.concatenate(([0], np.cumsum(flags, dtype=np.int64)))
    starts = np.concatenate(([0], np.cumsum(lengths)))
    documents = 0
    if starts[-1] == stated.tokens:  # documents lie one after another, as all tools write them
        documents = int(np.count_nonzero(np.diff(ends[starts])))
    count = int(ends[-1])
    held = LearnedTokens(
        dtype=stated.dtype,
        weighted_tokens=count,
        share=count / max(stated.tokens, 1),
        weight_sum=total,
        largest=largest,
        documents=documents,
        conversations=dict(stated.made_from.get("counts", {})),
    )
    if (stated.weighted_tokens, stated.weight_sum, stated.largest) == (count, total, largest):
        return held, []
    return held, [
        f"the weights' JSON states {stated.weighted_tokens} learned tokens and a sum of "
        f"{stated.weight_sum:g}, the file holds {count} and {total:g}"
    ]


def weights_of_document(corpus: IndexedCorpus, index: int) -> np.ndarray | None:
    """float32 [tokens]: the weights of a document; None where the corpus has none."""
    weights = TargetWeights.open(corpus.prefix)
    if weights is None:
        return None
    first = int(corpus.document_indices[index])
    count = len(corpus.document(index))
    start = int(corpus.pointers[first]) // corpus.dtype.itemsize if count else 0
    return weights.at(start, count)


def _count_problems(found: Sequence[DomainLengths], manifest: KeyManifest) -> list[str]:
    return [
        f"the manifest states {stated.documents} documents and {stated.tokens} tokens of the "
        f"domain {stated.name!r}, the corpus holds {held.documents} and {held.tokens}"
        for stated, held in zip(manifest.domains, found, strict=True)
        if (stated.documents, stated.tokens) != (held.documents, held.tokens)
    ]


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
    lengths = corpus.document_lengths()
    return lengths if not len(lengths) or lengths.min() >= 0 else np.empty(0, dtype=np.int64)


def verify(
    corpus: IndexedCorpus,
    *,
    vocab_size: int | None = None,
    eod_id: int | None = None,
    empty: int = 0,
) -> list[str]:
    """Every way in which `.bin` and `.idx` disagree or tokens are not what they should be.

    `empty` is the number of documents that may have no tokens.
    """
    problems = index_problems(corpus)
    if problems:
        return problems  # offsets cannot be trusted: what follows would read at wrong places
    if vocab_size is not None:
        problems += _vocabulary_problems(corpus, vocab_size)
    if eod_id is not None:
        problems += _eod_problems(corpus, eod_id, may_be_empty=empty)
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


def _eod_problems(corpus: IndexedCorpus, eod_id: int, *, may_be_empty: int) -> list[str]:
    first, last = corpus.document_indices[:-1], corpus.document_indices[1:] - 1
    empty = last < first
    sequences = last[~empty]
    ends = corpus.pointers[sequences] // corpus.dtype.itemsize + corpus.lengths[sequences] - 1
    wrong = np.zeros(len(last), dtype=bool)
    if len(ends):
        wrong[~empty] = corpus.tokens[ends] != eod_id
    problems = named(f"documents that do not end with eod {eod_id}", [wrong])
    if empty.sum() != may_be_empty:
        stated = f" (the manifest states {may_be_empty})" if may_be_empty else ""
        problems += named(f"documents without tokens{stated}", [empty]) or [
            f"no document is without tokens{stated}"
        ]
    return problems
