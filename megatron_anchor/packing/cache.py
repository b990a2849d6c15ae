"""Named arrays on disk: built once, written whole or not at all, memory-mapped by every process.

An entry is one .npy file an array and a description, written last, that repeats what the entry
depends on and every array's shape, type and checksum, which every process compares. Several
processes may build one entry at once: each writes to names of its own and renames at the end, and
all write the same. What a killed process leaves is no part of an entry; the next one that builds
removes it after a day.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron_anchor.errors import UserError
from megatron_anchor.terminal import logger_of
from megatron_anchor.whole_files import atomic_write, remove_abandoned

logger = logger_of(__name__)


class StoredArrays:
    """Arrays of one cache entry, opened at first use; pickles as paths, not as contents."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = dict(paths)
        self._open: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._open:
            mapped = np.load(self._paths[name], mmap_mode="r", allow_pickle=False)
            self._open[name] = np.asarray(mapped)  # plain arrays index faster than np.memmap
        return self._open[name]

    def __getstate__(self) -> dict[str, Any]:
        return {"_paths": self._paths, "_open": {}}


def digest(description: Mapping[str, Any]) -> str:
    """32 characters that are others for another description of JSON values."""
    text = json.dumps(description, sort_keys=True)
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def load_or_build(
    directory: str | os.PathLike[str],
    stem: str,
    *,
    names: tuple[str, ...],
    description: Mapping[str, Any],
    build: Callable[[], Mapping[str, np.ndarray]],
) -> StoredArrays:
    """The entry `stem` of `directory`; built and written when it is missing or damaged.

    Args:
        directory: made when missing.
        stem: beginning of the entry's file names; holds a digest of `description`.
        names: the arrays of the entry.
        description: all that the arrays depend on, as JSON values.
        build: returns the arrays.

    Raises:
        UserError: the directory cannot be written.
    """
    paths = {name: Path(directory, f"{stem}-{name}.npy") for name in names}
    described = Path(directory, f"{stem}-description.json")
    if described.exists():
        damage = _find_damage(described, paths, description)
        if damage is None:
            return StoredArrays(paths)
        logger.warning("the cached %s is damaged (%s): building it again", described, damage)
    arrays = build()
    remove_abandoned(directory)
    record = {
        "description": description,
        "arrays": {name: _form(array) for name, array in arrays.items()},
    }
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        for name, path in paths.items():
            with atomic_write(path) as stream:
                _save(stream, arrays[name])
        with atomic_write(described) as stream:
            stream.write(json.dumps(record, indent=4).encode())
    except OSError as error:
        raise UserError(
            f"cannot write the packing index to {directory}: {error}; give a directory that can "
            "be written and has space with --data-cache-path (path_to_cache)"
        ) from error
    return StoredArrays(paths)


def _save(stream: IO[bytes], array: np.ndarray) -> None:
    """As np.save, whose own way of writing to a file reports a full disk without saying so."""
    array = np.ascontiguousarray(array)
    header = np.lib.format.header_data_from_array_1_0(array)
    np.lib.format.write_array_header_1_0(stream, header)
    stream.write(array.view(np.uint8).reshape(-1).data)


def _form(array: np.ndarray) -> dict[str, Any]:
    contents = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    return {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "crc32": zlib.crc32(contents) if len(contents) else 0,
    }


def _find_damage(
    described: Path, paths: Mapping[str, Path], description: Mapping[str, Any]
) -> str | None:
    """What is wrong with an entry, or None."""
    try:
        record = json.loads(described.read_bytes())
        if record["description"] != description:
            return "it describes something else"
        for name, path in paths.items():
            form = _form(np.load(path, mmap_mode="r", allow_pickle=False))
            if form != record["arrays"][name]:
                return f"{path.name} holds {form}, expected {record['arrays'][name]}"
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None
