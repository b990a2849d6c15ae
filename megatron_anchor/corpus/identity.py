"""What decides the bytes of a corpus, and what of it changed between a run and its resumption."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_anchor.corpus.errors import CorpusError
from megatron_anchor.corpus.manifest import KeyManifest
from megatron_anchor.corpus.sources import Source

if TYPE_CHECKING:
    from megatron_anchor.corpus.preprocess import PreprocessConfig

_FREE = {"input", "tokenizer", "workers", "on_error", "resume", "overwrite", "progress"}
_FREE |= {"chunk_kb", "checkpoint_seconds", "output_prefix", "punkt_path"}
_ABSENT = object()
_SHOWN = 4  # differences named in a message


def run_identity(
    config: PreprocessConfig, sources: Sequence[Source], fingerprint: str
) -> dict[str, Any]:
    """Settings and inputs that a resumed run must agree in, as JSON values."""
    settings = {key: value for key, value in asdict(config).items() if key not in _FREE}
    identity = {
        **settings,
        "tokenizer": fingerprint,
        "affixes": not config.tokenizer.tokenizer_hf_no_include_special_tokens,
        "sources": {source.path: source.identity for source in sources},
    }
    return json.loads(json.dumps(identity))


def lasting_identity(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an identity that the manifest keeps: no times, and inputs as a digest.

    Shards of one job array have the same one.
    """
    kept = {key: value for key, value in identity.items() if key not in ("sources", "shard")}
    inputs = [
        {key: value for key, value in source.items() if key != "mtime_ns"}
        for source in identity["sources"].values()
    ]
    return {**kept, "inputs": hashlib.sha256(json.dumps(inputs).encode()).hexdigest()}


def require_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with an unfinished run; the message has only what differs."""
    found = list(_differences(before, now))
    if not found and list(before["sources"]) != list(now["sources"]):
        found = ["the inputs come in another order"]
    _refuse(found, "the unfinished run")


def require_finished_same(manifest: KeyManifest, now: Mapping[str, Any], *, finished: Path) -> None:
    """Refuse to take a finished corpus for the one that was asked for.

    `finished` is its index: inputs that are newer changed after it was made.
    """
    lasting = lasting_identity(now)
    before = {**manifest.settings, "shard": manifest.shard}
    found = list(_differences(before, {**lasting, "shard": now["shard"]}))
    sizes = {source["path"]: source["bytes"] for source in manifest.sources}
    changed = []
    for path, source in now["sources"].items():
        if path in sizes and sizes[path] != source["size"]:
            changed.append(f"{path}: size {sizes[path]} -> {source['size']}")
        elif source["mtime_ns"] > finished.stat().st_mtime_ns:
            changed.append(f"{path}: written after the corpus was finished")
    changed += [f"{path}: no longer an input" for path in sizes if path not in now["sources"]]
    if changed:
        found = [text for text in found if not text.startswith("inputs ")] + changed
    _refuse(found, "the finished corpus")


def _refuse(found: Sequence[str], what: str) -> None:
    if not found:
        return
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise CorpusError(
        f"--resume: {what} was made otherwise (before -> now): {'; '.join(found[:_SHOWN])}{more}. "
        "Use --overwrite to make it anew"
    )


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            inner = f"{name} {key}".removeprefix("sources ") if name else str(key)
            yield from _differences(before.get(key, _ABSENT), now.get(key, _ABSENT), inner)
    elif before is _ABSENT:
        yield f"{name}: new"
    elif now is _ABSENT:
        yield f"{name}: no longer there"
    elif before != now:
        yield f"{name} {json.dumps(before)} -> {json.dumps(now)}"
