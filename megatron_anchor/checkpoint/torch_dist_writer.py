"""Writing a ``torch_dist`` checkpoint chunk by chunk, in one process and without a model.

Nothing is gathered in memory: the bytes between a chunk's archive frame go to the file as they
come. The result is what Megatron's own ``dist_checkpointing.save`` writes, so it loads at any
layout.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from megatron_anchor.checkpoint.archives import archive_frame

FILE_BYTES = 4 * 2**30
"""A new file is begun after so many bytes, so that many ranks can read side by side."""


class TorchDistWriter:
    """The folder of one iteration in the making."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._entries: dict[str, Any] = {}
        self._places: dict[Any, Any] = {}
        self._number = -1
        self._file: BinaryIO | None = None

    def __enter__(self) -> TorchDistWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add_object(self, key: str, value: object, *, offset: str = "0", shape: str = "1") -> None:
        """Store a plain object as Megatron stores its sharded objects.

        Args:
            key: name.
            value: what torch's weights-only unpickler reads.
            offset: which part of it, as ``1`` or ``1.0``.
            shape: of how many.
        """
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

        buffer = io.BytesIO()
        torch.save([value], buffer)
        name = f"{key}/shard_{offset}_{shape}"
        file, start = self._open()
        file.write(buffer.getvalue())
        self._entries[name] = BytesStorageMetadata()
        self._record(MetadataIndex(name), start)

    def add_chunk(
        self,
        key: str,
        blocks: Iterable[np.ndarray],
        *,
        index: Sequence[int],
        stack: Sequence[int],
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        """Store one layer's (and expert's) part of a stacked tensor.

        Args:
            key: name of the stacked tensor.
            blocks: its bytes in order.
            index: place along the axes in front.
            stack: sizes of these axes.
            shape: of this part.
            dtype: of this part; all parts must agree.
        """
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
            TensorStorageMetadata,
        )

        entry = self._entries.setdefault(
            key,
            TensorStorageMetadata(
                TensorProperties(dtype=dtype), torch.Size([*stack, *shape]), chunks=[]
            ),
        )
        assert entry.properties.dtype == dtype, (key, dtype)
        sizes = torch.Size([*(1 for _ in stack), *shape])
        offsets = torch.Size([*index, *(0 for _ in shape)])
        before, after = archive_frame(tuple(sizes), dtype)
        file, start = self._open()
        file.write(before)
        written = 0
        for block in blocks:
            written += file.write(memoryview(block).cast("B"))
        assert written == math.prod(shape) * dtype.itemsize, (key, written, shape)
        file.write(after)
        entry.chunks.append(ChunkStorageMetadata(offsets, sizes))
        self._record(MetadataIndex(key, offsets), start)

    def finish(self) -> None:
        """Write the metadata, without which the folder is no checkpoint."""
        from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

        assert self._file is not None
        self._file.close()
        metadata = Metadata(
            state_dict_metadata=self._entries,
            storage_data=self._places,
            storage_meta=StorageMeta(),
            version="1.0.0",  # of torch.distributed.checkpoint's files
        )
        (self.folder / ".metadata").write_bytes(pickle.dumps(metadata))
        config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (self.folder / "metadata.json").write_text(json.dumps(config))

    def _open(self) -> tuple[BinaryIO, int]:
        """Give the file and where the next entry starts."""
        if self._file is None or self._file.tell() >= FILE_BYTES:
            if self._file is not None:
                self._file.close()
            self._number += 1
            self._file = open(self.folder / f"__0_{self._number}.distcp", "wb")  # noqa: SIM115
        return self._file, self._file.tell()

    def _record(self, index: Any, start: int) -> None:
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        assert self._file is not None
        length = self._file.tell() - start
        self._places[index] = _StorageInfo(f"__0_{self._number}.distcp", start, length)
