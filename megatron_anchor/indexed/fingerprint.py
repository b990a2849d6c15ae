"""What a file holds, in a few bytes: the same on every machine that has a copy of it.

Times of change are no part of it, since copies on the disks of different nodes differ in them.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

BLOCK, BLOCKS = 1 << 16, 16
"""Bytes of a block, and the blocks that are read of a larger file, evenly spread."""


def fingerprint(path: str | Path) -> dict[str, Any]:
    """Size (bytes) and a digest of a file; of a large one, of 16 blocks (1 MiB in all).

    That is enough for the files of a corpus: every document of another length moves all places
    behind it, in the .bin as in the .idx. It is not meant against forgery.
    """
    path = Path(path)
    size = path.stat().st_size
    starts: list[int] = [0]
    length = size
    if size > BLOCK * BLOCKS:
        starts, length = np.linspace(0, size - BLOCK, BLOCKS).astype(np.int64).tolist(), BLOCK
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for start in starts:
            stream.seek(start)
            digest.update(stream.read(length))
    return {"size": size, "sha256": digest.hexdigest()[:32]}


def sha256_of(path: str | Path) -> str:
    """The digest of a whole file, in hexadecimal."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
