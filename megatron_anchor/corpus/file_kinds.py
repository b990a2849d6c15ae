"""What a file is by its name and its first and last bytes: documents, or never any."""

from __future__ import annotations

import json
import re
from pathlib import Path

SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".txt": "txt",
}
"""Suffix to the format that it tells."""

COMPRESSED = {".gz": "gz", ".zst": "zst"}

SAVED_DATASET = "belongs to a dataset of Dataset.save_to_disk, which is read as a folder"
OUTPUT = "was written by this package"
MODEL = "belongs to a model or its tokenizer"
ARROW = "a table of Arrow, read only within the folder of Dataset.save_to_disk"
BINARY = "a corpus, weights or arrays"
HIDDEN = "hidden"

_BINARY = (
    *(".bin", ".idx", ".npy", ".npz", ".safetensors", ".pt", ".pth", ".ckpt", ".distcp"),
    *(".gguf", ".lock", ".tmp"),
)
_NAMES = {
    **dict.fromkeys(
        ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"),
        SAVED_DATASET,
    ),
    **dict.fromkeys(
        (
            *("config.json", "generation_config.json", "adapter_config.json", "metadata.json"),
            *("preprocessor_config.json", "processor_config.json", "quantize_config.json"),
            *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tekken.json"),
            *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.json"),
            *("megatron_args.txt", "latest_checkpointed_iteration.txt"),
        ),
        MODEL,
    ),
}
_ENDINGS = {
    ".safetensors.index.json": MODEL,
    ".bin.index.json": MODEL,
    "-description.json": OUTPUT,  # of an index of packed samples, as Megatron has them too
    "-description.txt": OUTPUT,
}
_WRITTEN_LAST = re.compile(rb'"format":\s*"megatron_anchor [^"]*"\s*}\s*$')
_WRITTEN_FIRST = re.compile(rb'\s*\{\s*"(settings|like)":\s*[{"n]|\s*\{\s*"groups":\s*\{\s*"')
_REJECTED = {"file", "row", "reason"}
_LOOKED_AT = 4096


def format_of(path: Path) -> tuple[str, str | None] | None:
    """Format and compression by the name; None where it tells nothing."""
    compression = COMPRESSED.get(path.suffix.lower())
    stem = path.with_suffix("") if compression else path
    kind = SUFFIXES.get(stem.suffix.lower())
    if kind is None:
        return None
    return ("jsonl" if compression and kind == "json" else kind), compression


def never_documents(path: Path) -> str | None:
    """Why a file holds no documents whatever it is called; None where it may hold some.

    That is so for metadata of datasets and models, for weights, and for what this package writes:
    corpora, manifests, lists of rejected rows and of documents, results, dumps of bad batches.
    """
    if path.suffix.lower() == ".arrow":
        return ARROW
    if path.suffix.lower() in _BINARY:
        return BINARY
    if path.name in _NAMES:
        return _NAMES[path.name]
    for ending, why in _ENDINGS.items():
        if path.name.endswith(ending):
            return why
    if path.suffix == ".json":
        return OUTPUT if _describes_arrays(path) or _is_own_json(path) else None
    if path.suffix == ".jsonl":
        return OUTPUT if _is_own_json_lines(path) else None
    return None


def _describes_arrays(path: Path) -> bool:
    return any(path.with_suffix(ending).is_file() for ending in (".npy", ".npz"))


def _is_own_json(path: Path) -> bool:
    with open(path, "rb") as stream:
        head = stream.read(_LOOKED_AT)
        stream.seek(max(0, path.stat().st_size - _LOOKED_AT))
        tail = stream.read()
    own_name = path.name.endswith((".source.json", "results.json"))
    return bool(_WRITTEN_LAST.search(tail)) or (own_name and bool(_WRITTEN_FIRST.match(head)))


def _is_own_json_lines(path: Path) -> bool:
    """A list of rejected rows, or the samples of an evaluation."""
    with open(path, "rb") as stream:
        first = stream.readline(1 << 20)
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        return False
    if not isinstance(row, dict):
        return False
    is_rejected = set(row) >= _REJECTED and set(row) <= {*_REJECTED, "raw", "raw_base64"}
    return is_rejected or (set(row) == {"settings"} and isinstance(row["settings"], dict))
