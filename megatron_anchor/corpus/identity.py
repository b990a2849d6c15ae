"""What decides the bytes of a corpus, and what of it changed between a run and its resumption.

Every option of `tools/preprocess_data.py` is in one of the tables below, and a test holds that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_anchor.corpus.sources import Source
from megatron_anchor.errors import UserError
from megatron_anchor.indexed.manifest import KeyManifest
from megatron_anchor.tokenizers import TokenizerConfig

if TYPE_CHECKING:
    from megatron_anchor.corpus.preprocess import PreprocessConfig

_BY_FINGERPRINT = "in the tokenizer's fingerprint"
_BY_SOURCES = "in the identity of every source"

TEXT_OPTIONS = ("append_eod", "pretokenized", "split_sentences", "chat")
"""What a text becomes hangs on them: also corpora that are merged must agree in them."""

ROW_OPTIONS = (
    *("json_keys", "domain_key", "hf_split", "hf_config", "max_row_mb", "shard", "domain"),
    *("input_format", "tools_key", "max_conversation_tokens", "long_conversations"),
    *("weight_key", "weight_dtype"),
)
"""Which rows there are, and what they are called, hangs on them; corpora of many inputs differ."""

ELSEWHERE = {
    "input": _BY_SOURCES,
    **{f.name: _BY_FINGERPRINT for f in fields(TokenizerConfig) if f.name != "engine"},
    **dict.fromkeys(("chat_template", "chat_template_kwargs"), "in `conversations`, by digests"),
    **dict.fromkeys(("keep_newlines", "lang", "punkt_path"), "in `sentences`, where there are any"),
}
"""Options that are in an identity by what they lead to, and not by their values."""

WITHOUT_EFFECT = {
    "output_prefix": "a name",
    "engine": "every engine gives the ids of the tokenizer's own library",
    "workers": "results are put in order",
    "chunk_kb": "where chunks end is not seen in the corpus",
    "checkpoint_seconds": "how often the state is written",
    "on_error": "`stop` finishes only where `skip` would leave out nothing",
    "resume": "a resumed run gives the bytes of one that was not stopped",
    "overwrite": "what was there before does not enter",
    "executor": "shards are merged to the bytes of one run",
    "shards": "shards are merged to the bytes of one run",
    "json": "how the summary is printed",
    "progress": "what is shown meanwhile",
    "no_progress": "what is shown meanwhile",
}
"""Options that cannot change a byte of a corpus, and why."""

_SENTENCES = "sentences"
_CONVERSATIONS = "conversations"
_ABSENT = object()
_SHOWN = 4  # differences named in a message


def run_identity(
    config: PreprocessConfig,
    sources: Sequence[Source],
    fingerprint: str,
    *,
    punkt: str | None = None,
    template: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """All that a resumed run must agree in, as JSON values.

    `fingerprint` is that of the tokenizer, `punkt` the digest of the sentence splitter's model,
    `template` the digests of the chat template and its variables.
    """
    identity = {
        **{name: getattr(config, name) for name in (*TEXT_OPTIONS, *ROW_OPTIONS)},
        "tokenizer": fingerprint,
        _SENTENCES: None
        if punkt is None
        else {"keep_newlines": config.keep_newlines, "lang": config.lang, "model": punkt},
        _CONVERSATIONS: template,
        "sources": {source.path: source.identity for source in sources},
    }
    return json.loads(json.dumps(identity))


def text_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a manifest's settings in which corpora that are merged must agree."""
    names = (*TEXT_OPTIONS, _SENTENCES, _CONVERSATIONS)
    return {name: settings[name] for name in names if name in settings}


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
    raise UserError(
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
