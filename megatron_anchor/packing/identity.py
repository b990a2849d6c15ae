"""What a dataset's samples depend on, as JSON values: keys of caches, compared over ranks."""

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_anchor.indexed.fingerprint import fingerprint

_PATHS = ("path", "dataset_path")


def describe_documents(indices: np.ndarray) -> list[int] | str:
    """[first, last + 1] of a range of documents, else a digest of the list."""
    if len(indices) == 0:
        return [0, 0]
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 == len(indices) and (indices[1:] > indices[:-1]).all():
        return [first, last + 1]
    return hashlib.sha256(indices.tobytes()).hexdigest()


def describe_file(path: str | None) -> dict[str, Any] | None:
    """Path and fingerprint: other contents give another description.

    Raises:
        FileNotFoundError: there is no such document list.
    """
    if path is None:
        return None
    if not os.path.isfile(path):
        raise FileNotFoundError(f"--document-list {path} not found")
    return {"path": path, **fingerprint(path)}


def without_paths(description: Mapping[str, Any]) -> dict[str, Any]:
    """The description of the contents alone, the same for copies of the files elsewhere."""
    return {
        name: without_paths(value) if isinstance(value, Mapping) else value
        for name, value in description.items()
        if name not in _PATHS
    }
