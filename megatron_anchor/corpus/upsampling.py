"""Per-source length upsampling (Fu et al. 2024, arXiv 2402.10171, section 3: UpSampledMix).

The share of tokens of every domain stays what it was (or what a mixture says); within a domain,
documents under `long_tokens` get the weight `short_weight` and others 1. The authors' code draws
every short document with that probability until the domain's budget is spent; here a document is
drawn as often as its weight says, to within one, by systematic draws along the lengths, so a
domain's tokens miss its budget by less than twice its longest document, always.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megatron_anchor.corpus.locks import locked
from megatron_anchor.errors import UserError
from megatron_anchor.indexed.checks import require_sound
from megatron_anchor.indexed.document_lists import DOCUMENT_LIST_FORMAT
from megatron_anchor.indexed.fingerprint import sha256_of
from megatron_anchor.indexed.manifest import read_domains
from megatron_anchor.indexed.pair import IndexedCorpus, idx_path
from megatron_anchor.whole_files import atomic_write, atomic_write_text

_STARTS = 16
_SMALL = 1 << 20  # documents; above it one start is good enough

_MOST_TIMES = 1000
"""How often a corpus may be repeated: more is a slip, and does not fit the memory."""


@dataclass(frozen=True)
class Share:
    """One domain before or after: `documents` counts draws, `distinct` different documents."""

    name: str
    documents: int
    distinct: int
    tokens: int
    share: float
    long_share: float
    """Share of the domain's tokens in documents of at least `long_tokens`."""
    median: int
    longest: int


@dataclass(frozen=True, kw_only=True)
class DocumentList:
    """What the JSON beside a list of document ids says."""

    corpus: str
    index_sha256: str
    documents: int
    """Length of the list."""
    tokens: int
    long_tokens: int
    short_weight: float
    seed: int
    mixture: dict[str, float]
    before: list[Share]
    after: list[Share]
    format: str = DOCUMENT_LIST_FORMAT


def upsample(
    lengths: np.ndarray,
    domains: np.ndarray,
    shares: Sequence[float],
    *,
    tokens: int,
    long_tokens: int = 4096,
    short_weight: float = 0.1,
    seed: int = 0,
) -> np.ndarray:
    """Draw document ids with repetitions, int64, in random order.

    `lengths` int64 [documents], `domains` integers [documents] into `shares`, which sum to 1.
    """
    random = np.random.default_rng(seed)
    drawn = []
    for domain, share in enumerate(shares):
        members = np.flatnonzero((domains == domain) & (lengths > 0))
        held = int(lengths[members].sum())
        if share == 0 or not held:
            continue
        # equal lengths in random order, so that systematic draws prefer none of them
        members = members[np.lexsort((random.random(len(members)), lengths[members]))]
        weights = np.where(lengths[members] >= long_tokens, 1.0, short_weight)
        expected = weights * (share * tokens / np.dot(weights, lengths[members]))
        counts = _systematic(expected, lengths[members], share * tokens, random)
        drawn.append(np.repeat(members, counts))
    ids = np.concatenate(drawn) if drawn else np.empty(0, dtype=np.int64)
    random.shuffle(ids)
    return ids.astype(np.int64)


def _systematic(
    expected: np.ndarray, lengths: np.ndarray, tokens: float, random: np.random.Generator
) -> np.ndarray:
    """Draws of every document, each within one of `expected`; of some random starts the best one.

    In a small domain one document more or less is much; so several starts are tried, and the one
    whose total comes nearest to `tokens` is kept.
    """
    ends = np.cumsum(expected)
    tries = _STARTS if len(expected) < _SMALL else 1
    found = [
        np.diff(np.floor(ends + start), prepend=0.0).astype(np.int64)
        for start in random.random(tries)
    ]
    return min(found, key=lambda counts: abs(int(counts @ lengths) - tokens))


def parse_mixture(text: str) -> dict[str, float]:
    """`CommonCrawl=0.58,C4=0.20` -> shares as given; `UserError` for anything else."""
    mixture: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.rpartition("=")
        try:
            share = float(value)
        except ValueError:
            share = -1.0
        if not name.strip() or not equals or not 0 <= share < float("inf"):
            raise UserError(f"--mixture: {part!r} is not of the form NAME=SHARE with SHARE >= 0")
        if name.strip() in mixture:
            raise UserError(f"--mixture names {name.strip()!r} twice; give each domain one share")
        mixture[name.strip()] = share
    if not sum(mixture.values()):
        raise UserError("--mixture: all shares are 0")
    return mixture


def target_shares(
    names: Sequence[str], tokens: Sequence[int], mixture: Mapping[str, float] | None
) -> list[float]:
    """The share of every domain, summing to 1: what it is, or what `mixture` says."""
    if mixture is None:
        return [count / max(sum(tokens), 1) for count in tokens]
    unknown = [name for name in mixture if name not in names]
    missing = [name for name in names if name not in mixture]
    if unknown:
        raise UserError(
            f"--mixture names {unknown[0]!r}; the corpus has the domains {', '.join(names)}"
        )
    if missing:
        raise UserError(f"--mixture says nothing of {missing[0]!r}; {missing[0]}=0 leaves it out")
    for name, count in zip(names, tokens, strict=True):
        if mixture[name] and not count:
            raise UserError(f"--mixture asks for {name!r}, of which the corpus has no token")
    total = sum(mixture.values())
    return [mixture[name] / total for name in names]


def make_document_list(
    prefix: str | Path,
    output: str | Path,
    *,
    tokens: int | None = None,
    long_tokens: int = 4096,
    short_weight: float = 0.1,
    mixture: Mapping[str, float] | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> DocumentList:
    """Write `output` (.npy of int64 ids) and the `.json` beside it for the corpus at `prefix`.

    `tokens` is the size of the drawn corpus, by default that of the whole corpus.
    """
    path = Path(output)
    if path.suffix != ".npy":
        raise UserError(f"--output {path}: the list is a .npy file; name it {path}.npy")
    if not 0 < short_weight <= 1:
        raise UserError(f"--short-weight {short_weight}: expected above 0 and at most 1")
    with locked(Path(f"{path}.lock"), output=path):
        for existing in (path, path.with_suffix(".json")):
            if existing.exists() and not overwrite:
                raise UserError(f"{existing} exists; choose another --output or --overwrite")
        ids, described = _drawn(
            prefix,
            tokens=tokens,
            long_tokens=long_tokens,
            short_weight=short_weight,
            mixture=mixture,
            seed=seed,
        )
        _write(path, ids, described)
    return described


def _drawn(
    prefix: str | Path,
    *,
    tokens: int | None,
    long_tokens: int,
    short_weight: float,
    mixture: Mapping[str, float] | None,
    seed: int,
) -> tuple[np.ndarray, DocumentList]:
    """The ids, and what is said of them."""
    corpus = IndexedCorpus.open(prefix)
    require_sound(corpus)
    lengths = corpus.document_lengths()
    names, domains = _domains(prefix, len(lengths))
    held = np.bincount(domains, weights=lengths, minlength=len(names)).astype(np.int64)
    wanted = int(lengths.sum()) if tokens is None else tokens
    if wanted < 1:
        raise UserError(f"--tokens {wanted}: expected at least 1, from a corpus with tokens")
    most = max(int(lengths.sum()), 1) * _MOST_TIMES
    if wanted > most:
        raise UserError(
            f"--tokens {wanted}: expected at most {most}, {_MOST_TIMES} times the corpus, which "
            "would be repeated as often"
        )
    if seed < 0:
        raise UserError(f"--seed {seed}: expected 0 or more")
    ids = upsample(
        lengths,
        domains,
        target_shares(names, held.tolist(), mixture),
        tokens=wanted,
        long_tokens=long_tokens,
        short_weight=short_weight,
        seed=seed,
    )
    if not len(ids):
        raise UserError(
            f"--tokens {wanted} is too little to draw a single document; ask for more (the corpus "
            f"has {lengths.sum()} tokens in {len(lengths)} documents)"
        )
    everything = np.arange(len(lengths))
    described = DocumentList(
        corpus=str(prefix),
        index_sha256=sha256_of(idx_path(prefix)),
        documents=len(ids),
        tokens=int(lengths[ids].sum()),
        long_tokens=long_tokens,
        short_weight=short_weight,
        seed=seed,
        mixture=dict(mixture or {}),
        before=_shares(everything, lengths, domains, names, long_tokens),
        after=_shares(ids, lengths, domains, names, long_tokens),
    )
    return ids, described


def _domains(prefix: str | Path, documents: int) -> tuple[list[str], np.ndarray]:
    found = read_domains(prefix)
    if found is None:
        return ["all"], np.zeros(documents, dtype=np.int32)
    return found[0], np.asarray(found[1])


def _shares(
    ids: np.ndarray, lengths: np.ndarray, domains: np.ndarray, names: Sequence[str], long: int
) -> list[Share]:
    total = max(int(lengths[ids].sum()), 1)
    rows = []
    for code, name in enumerate(names):
        chosen = ids[domains[ids] == code]
        sizes = lengths[chosen]
        tokens = int(sizes.sum())
        rows.append(
            Share(
                name=name,
                documents=len(chosen),
                distinct=len(np.unique(chosen)),
                tokens=tokens,
                share=tokens / total,
                long_share=int(sizes[sizes >= long].sum()) / max(tokens, 1),
                median=int(np.median(sizes)) if len(sizes) else 0,
                longest=int(sizes.max(initial=0)),
            )
        )
    return rows


def _write(path: Path, ids: np.ndarray, described: DocumentList) -> None:
    header = np.lib.format.header_data_from_array_1_0(ids)
    try:
        with atomic_write(path) as stream, atomic_write_text(path.with_suffix(".json")) as beside:
            beside.write(json.dumps(asdict(described), indent=1))
            np.lib.format.write_array_header_1_0(stream, header)
            stream.write(ids.data)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
