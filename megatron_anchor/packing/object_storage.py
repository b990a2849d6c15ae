"""Corpora in object stores (s3://, msc://), read by Megatron's own readers.

The .idx is copied to a folder that all ranks see; the .bin stays in the store and is read in pieces
(megatron/core/datasets/indexed_dataset.py). Only these two files are read: weights and domains
beside a corpus are not.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch.distributed as dist
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.object_storage_utils import ObjectStorageConfig, get_index_cache_path

from megatron_anchor.errors import UserError
from megatron_anchor.indexed.fingerprint import fingerprint

PIECE = 1 << 20
"""Bytes of a request to S3. Documents are read in a shuffled order, so Megatron's 256 MiB would
fetch that much for each of them."""
PATIENCE = 600.0
"""Seconds in which rank 0 copies an .idx."""


def open_stored(prefix: str, cache_path: str | None) -> IndexedDataset:
    """Open a corpus of an object store.

    Args:
        prefix: s3://bucket/path or msc://profile/path, without .bin and .idx.
        cache_path: folder for copies of .idx files.

    Raises:
        UserError: there is no such folder in the settings, or a rank does not see rank 0's copy.
    """
    config = _config(prefix, cache_path)
    if dist.is_initialized() and dist.get_rank() != 0:
        _wait_for(get_index_cache_path(f"{prefix}.idx", config))
    return IndexedDataset(prefix, multimodal=False, mmap=False, object_storage_config=config)


def stored_identity(prefix: str, cache_path: str | None) -> dict[str, Any]:
    """What tells the corpus from others: the fingerprint of its .idx, of which there is a copy."""
    copy = get_index_cache_path(f"{prefix}.idx", _config(prefix, cache_path))
    return {"idx": fingerprint(copy)}


def _config(prefix: str, cache_path: str | None) -> ObjectStorageConfig:
    if cache_path is None:
        raise UserError(
            f"the corpus {prefix} is in an object store: set --object-storage-cache-path to a "
            "folder that all ranks see, for copies of .idx files"
        )
    return ObjectStorageConfig(path_to_idx_cache=cache_path, bin_chunk_nbytes=PIECE)


def _wait_for(path: str) -> None:
    end = time.monotonic() + PATIENCE
    while not os.path.exists(path):
        if time.monotonic() > end:
            raise UserError(
                f"rank {dist.get_rank()} does not see {path}, which rank 0 copies from the object "
                "store; put --object-storage-cache-path on a file system that all ranks share"
            )
        time.sleep(0.1)
