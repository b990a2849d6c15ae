"""Merging corpora: any number of `.bin/.idx` pairs, one after another, in bounded memory.

dtype, key, level, eod, tokenizer fingerprint, and all settings that decide what a text becomes must
agree, and all parts have weights of one dtype or none has any; domain names are united in the order
in which they are met, so merged shards equal the corpus of one run byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from megatron_anchor.corpus.identity import text_settings
from megatron_anchor.corpus.locks import working_folder
from megatron_anchor.corpus.shards import is_one_run, shard_order
from megatron_anchor.corpus.weight_options import joined_origins
from megatron_anchor.errors import UserError
from megatron_anchor.indexed.checks import require_sound
from megatron_anchor.indexed.manifest import (
    DomainCount,
    KeyManifest,
    domains_path,
    manifest_path,
    read_domains,
    read_manifest,
    write_domains,
)
from megatron_anchor.indexed.pair import IndexedCorpus, bin_path, idx_path, write_index
from megatron_anchor.indexed.weights import (
    TargetWeights,
    describe_weights,
    weights_manifest_path,
    weights_path,
)
from megatron_anchor.whole_files import move_finished

_BLOCK = 1 << 20  # elements moved at once
_NAMES = ("bin", "weights.bin", "weights.json", "domains.npy", "manifest.json", "idx")


@dataclass(frozen=True)
class _Part:
    prefix: Path
    corpus: IndexedCorpus
    manifest: KeyManifest | None
    domains: tuple[list[str], np.ndarray] | None
    weights: TargetWeights | None


def merge_corpora(
    prefixes: Sequence[str | Path],
    output_prefix: str | Path,
    *,
    overwrite: bool = False,
    allow_missing_shards: bool = False,
    progress: bool = True,
) -> KeyManifest | None:
    """Merge corpora into one at `output_prefix`: in the order given, shards in their own order.

    Returns the merged manifest, None where no part has one. Raises `UserError` where parts do not
    fit together or the output exists. Nothing carries a final name before all is written.
    """
    if not prefixes:
        raise UserError("nothing to merge: give at least one prefix")
    out = Path(output_prefix)
    if any(Path(prefix).resolve() == out.resolve() for prefix in prefixes):
        raise UserError(f"{out} is both an input and the output; choose another output prefix")
    parts = [_open(prefix) for prefix in prefixes]
    _check_fit(parts)
    order = shard_order(
        [(part.prefix, part.manifest) for part in parts], allow_missing=allow_missing_shards
    )
    _refuse_doubled(prefixes)
    parts = [parts[place] for place in order]
    with working_folder(Path(f"{out}.merging"), output=out) as folder:
        finals = [bin_path(out), weights_path(out), weights_manifest_path(out)]
        finals += [domains_path(out), manifest_path(out), idx_path(out)]
        existing = [path for path in finals if path.exists()]
        if existing and not overwrite:
            raise UserError(f"{existing[0]} exists; choose another output prefix or --overwrite")
        try:
            manifest = _write(parts, folder, progress=progress)
            for path in reversed(existing):  # the index first: then it is no corpus any more
                path.unlink()
            for name, final in zip(_NAMES, finals, strict=True):
                if (folder / f"all.{name}").exists():
                    move_finished(folder / f"all.{name}", final)
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror}") from error
    return manifest


def _refuse_doubled(prefixes: Sequence[str | Path]) -> None:
    seen: dict[Path, str | Path] = {}
    for prefix in prefixes:
        if (real := idx_path(prefix).resolve()) in seen:
            also = f" (also as {seen[real]})" if str(seen[real]) != str(prefix) else ""
            raise UserError(
                f"--input: {prefix} is given twice{also}, so its documents would be doubled; name "
                "every corpus once (tools/upsample_long_documents.py repeats documents)"
            )
        seen[real] = prefix


def _write(parts: Sequence[_Part], folder: Path, *, progress: bool) -> KeyManifest | None:
    """All files of the merged corpus, in the folder."""
    names = _domain_names(parts)
    _write_streams(parts, folder, names, progress=progress)
    manifest = _merged_manifest(parts, names)
    prefix = folder / "all"
    write_index(
        idx_path(prefix),
        dtype=parts[0].corpus.dtype,
        lengths_file=folder / "lengths",
        document_ends_file=folder / "ends",
    )
    if manifest is not None:
        write_domains(domains_path(prefix), folder / "domains")
        manifest.write(manifest_path(prefix))
    weights = [part.weights.manifest for part in parts if part.weights is not None]
    if weights:
        describe_weights(
            prefix,
            dtype=weights[0].dtype,
            made_from=joined_origins([one.made_from for one in weights]),
        )
    return manifest


def _open(prefix: str | Path) -> _Part:
    corpus = IndexedCorpus.open(prefix)
    require_sound(corpus)
    manifest, domains = read_manifest(prefix), read_domains(prefix)
    return _Part(Path(prefix), corpus, manifest, domains, TargetWeights.open(prefix))


def _check_fit(parts: Sequence[_Part]) -> None:
    """Refuse to mix dtypes, keys, levels, eod settings or tokenizers."""
    first = parts[0]
    for part in parts[1:]:
        pairs: list[tuple[str, Any, Any]] = [("dtype", first.corpus.dtype, part.corpus.dtype)]
        a, b = first.manifest, part.manifest
        if (a is None) != (b is None):
            without = first if a is None else part
            raise UserError(
                f"{manifest_path(without.prefix)} is missing while other parts have a manifest, so "
                "it cannot be checked that the tokenizers agree; make that part again, or move all "
                "manifests away"
            )
        pairs += _weight_pairs(first, part)
        if a is not None and b is not None:
            pairs += _manifest_pairs(a, b)
        for what, left, right in pairs:
            if left != right:
                raise UserError(
                    f"{first.prefix} has {what} {left}, {part.prefix} has {right}: corpora can be "
                    "merged only where it agrees"
                )


def _weight_pairs(a: _Part, b: _Part) -> list[tuple[str, Any, Any]]:
    """The dtypes of weights, which all parts have or none."""
    if (a.weights is None) != (b.weights is None):
        without, other = (a, b) if a.weights is None else (b, a)
        raise UserError(
            f"{weights_path(without.prefix)} does not exist, and {other.prefix} has weights: all "
            "parts have them or none has; make that part again with --weight-key or --chat, or "
            f"move {weights_path(other.prefix)} and its .json away to train on all tokens"
        )
    if a.weights is None or b.weights is None:
        return []
    return [("weights of the dtype", a.weights.manifest.dtype, b.weights.manifest.dtype)]


def _manifest_pairs(a: KeyManifest, b: KeyManifest) -> list[tuple[str, Any, Any]]:
    """What must agree, with both values."""
    names = ("key", "level", "vocab_size", "eod_id", "bos_id")
    pairs = [(name, getattr(a, name), getattr(b, name)) for name in names]
    left, right = a.tokenizer.get("fingerprint"), b.tokenizer.get("fingerprint")
    pairs.append(("tokenizer fingerprint", left, right))
    ours, theirs = text_settings(a.settings), text_settings(b.settings)
    return pairs + [(name, ours[name], theirs[name]) for name in ours if name in theirs]


def _domain_names(parts: Sequence[_Part]) -> list[str]:
    names: dict[str, None] = {}
    for part in parts:
        if part.manifest is not None:
            names.update(dict.fromkeys(domain.name for domain in part.manifest.domains))
    return list(names)


def _write_streams(
    parts: Sequence[_Part], folder: Path, names: Sequence[str], *, progress: bool
) -> None:
    total = sum(bin_path(part.prefix).stat().st_size for part in parts)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="merge", disable=not progress)
    sequences = 0
    codes = {name: code for code, name in enumerate(names)}
    with (
        open(bin_path(folder / "all"), "wb") as tokens,
        open(folder / "lengths", "wb") as lengths,
        open(folder / "ends", "wb") as ends,
        open(folder / "domains", "wb") as domains,
        bar,
    ):
        for part in parts:
            corpus = part.corpus
            for size in _append(bin_path(part.prefix), tokens):
                bar.update(size)
            _copy(corpus.lengths, lengths)
            _copy(corpus.document_indices[1:], ends, plus=sequences)
            sequences += len(corpus.lengths)
            if part.domains is not None:
                own, ids = part.domains
                _copy(ids, domains, table=np.array([codes[name] for name in own], dtype=np.int32))
    if parts[0].weights is not None:
        with open(weights_path(folder / "all"), "wb") as weights:
            for part in parts:
                for _ in _append(weights_path(part.prefix), weights):
                    pass


def _append(path: Path, out: BinaryIO) -> Iterator[int]:
    """Copy a file to the end of another; yields the bytes of every piece."""
    with open(path, "rb") as stream:
        while block := stream.read(1 << 24):
            out.write(block)
            yield len(block)


def _copy(
    array: np.ndarray, out: BinaryIO, *, plus: int = 0, table: np.ndarray | None = None
) -> None:
    for at in range(0, len(array), _BLOCK):
        block = np.asarray(array[at : at + _BLOCK])
        block = table[block] if table is not None else block + block.dtype.type(plus)
        out.write(np.ascontiguousarray(block).data)


def _merged_manifest(parts: Sequence[_Part], names: Sequence[str]) -> KeyManifest | None:
    found = [part.manifest for part in parts if part.manifest is not None]
    if not found:
        return None
    counts = {name: DomainCount(name, 0, 0) for name in names}
    rejected: dict[str, int] = {}
    passed_over: dict[str, int] = {}
    sources: dict[tuple[str, int], dict] = {}
    for manifest in found:
        for domain in manifest.domains:
            counts[domain.name].documents += domain.documents
            counts[domain.name].tokens += domain.tokens
        for kind, number in manifest.rejected.items():
            rejected[kind] = rejected.get(kind, 0) + number
        for why, number in manifest.passed_over.items():
            passed_over[why] = passed_over.get(why, 0) + number
        for source in manifest.sources:
            held = sources.setdefault((source["path"], source["bytes"]), {**source, "rows": 0})
            held["rows"] += source["rows"]

    whole = is_one_run([(part.prefix, part.manifest) for part in parts])
    engines = {name for manifest in found for name in manifest.tokenizer.get("engines", ())}

    def total(name: str) -> int:
        return sum(getattr(manifest, name) for manifest in found)

    return replace(
        found[0],
        documents=total("documents"),
        sequences=total("sequences"),
        tokens=total("tokens"),
        rows_read=total("rows_read"),
        empty_documents=total("empty_documents"),
        empty_kept=total("empty_kept"),
        blank_lines=total("blank_lines"),
        text_bytes=total("text_bytes"),
        rejected=dict(sorted(rejected.items())),
        domains=list(counts.values()),
        sources=list(sources.values()),
        passed_over=found[0].passed_over if whole else dict(sorted(passed_over.items())),
        shard=None,
        settings=found[0].settings if whole else text_settings(found[0].settings),
        tokenizer={**found[0].tokenizer, "engines": sorted(engines)},
    )
