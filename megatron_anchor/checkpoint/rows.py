"""Reading a few rows of a tensor at a time, wherever and in however many pieces it lies."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_anchor.checkpoint.archives import Extent
from megatron_anchor.errors import UserError

BLOCK_BYTES = 512 * 1024  # fits a core's cache: as fast as the disk's own copy


class Rows(Protocol):
    """Something that has rows: a vector's entries, or a matrix' rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, first: int, out: np.ndarray) -> None:
        """Fill ``out`` [rows, row bytes] (uint8) with the rows from ``first`` on."""
        ...


def row_bytes(rows: Rows) -> int:
    """Bytes of one row."""
    return int(np.prod(rows.shape[1:], dtype=np.int64)) * rows.dtype.itemsize


class Files:
    """Open files by path, for positioned reads."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(self, path: Path, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``offset`` on.

        Raises:
            UserError: if the file ends before, or cannot be read.
        """
        while out:
            try:
                if path not in self._open:
                    self._open[path] = os.open(path, os.O_RDONLY)
                count = os.preadv(self._open[path], [out], offset)
            except OSError as error:
                raise UserError(f"{path} cannot be read: {error.strerror}") from error
            if not count:
                raise UserError(f"{path} ends at byte {offset}: truncated; fetch it again")
            out, offset = out[count:], offset + count


@dataclass(frozen=True)
class Piece:
    """A block of a tensor: where it stands in the tensor and in a file."""

    extent: Extent
    row: int = 0
    column_byte: int = 0


class FileRows:
    """Rows of a tensor that lies in one or more pieces in files."""

    def __init__(
        self,
        files: Files,
        pieces: Sequence[Piece],
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self._files, self._pieces = files, sorted(pieces, key=lambda p: (p.row, p.column_byte))

    def read(self, first: int, out: np.ndarray) -> None:
        """Fill ``out`` [rows, row bytes] (uint8) with the rows from ``first`` on."""
        last = first + len(out)
        for piece in self._pieces:
            width, height = piece.extent.row_bytes, piece.extent.shape[0]
            begin, end = max(first, piece.row), min(last, piece.row + height)
            if begin >= end:
                continue
            offset = piece.extent.offset + (begin - piece.row) * width
            target = out[begin - first : end - first]
            if width == out.shape[1]:
                self._files.read(piece.extent.path, offset, memoryview(target).cast("B"))
            else:
                block = np.empty((end - begin, width), np.uint8)
                self._files.read(piece.extent.path, offset, memoryview(block).cast("B"))
                target[:, piece.column_byte : piece.column_byte + width] = block


class AverageRows:
    """The mean of several tensors, summed in float64."""

    def __init__(self, sources: Sequence[Rows]) -> None:
        self.shape, self.dtype = sources[0].shape, sources[0].dtype
        self._sources = sources

    def read(self, first: int, out: np.ndarray) -> None:
        """Fill ``out`` [rows, row bytes] (uint8) with the mean of the rows from ``first`` on."""
        total = torch.zeros(out.size // self.dtype.itemsize, dtype=torch.float64)
        for source in self._sources:
            source.read(first, out)
            total += torch.from_numpy(out.reshape(-1)).view(self.dtype)
        out.reshape(-1)[:] = as_bytes((total / len(self._sources)).to(self.dtype))


class CastRows:
    """A tensor in another floating dtype."""

    def __init__(self, source: Rows, dtype: torch.dtype) -> None:
        self.shape, self.dtype = source.shape, dtype
        self._source = source

    def read(self, first: int, out: np.ndarray) -> None:
        """Fill ``out`` [rows, row bytes] (uint8) with the converted rows from ``first`` on."""
        block = np.empty((len(out), row_bytes(self._source)), np.uint8)
        self._source.read(first, block)
        values = torch.from_numpy(block.reshape(-1)).view(self._source.dtype)
        out.reshape(-1)[:] = as_bytes(values.to(self.dtype))


def as_bytes(values: Tensor) -> np.ndarray:
    """View a contiguous tensor as bytes."""
    return values.contiguous().view(-1).view(torch.uint8).numpy()


class Blocks:
    """Reads rows through one buffer that is used over and over."""

    def __init__(self) -> None:
        self._buffer = np.empty(BLOCK_BYTES, np.uint8)

    def of(self, rows: Rows, first: int, count: int) -> Iterator[np.ndarray]:
        """Yield ``count`` rows from ``first`` on as [rows, row bytes] blocks (uint8)."""
        width = row_bytes(rows)
        if width > self._buffer.size:
            self._buffer = np.empty(width, np.uint8)
        step = self._buffer.size // width
        for start in range(first, first + count, step):
            height = min(step, first + count - start)
            block = self._buffer[: height * width].reshape(height, width)
            rows.read(start, block)
            yield block


def read_tensor(rows: Rows) -> Tensor:
    """Read a whole tensor (small ones, and the verifier's)."""
    out = torch.empty(rows.shape, dtype=rows.dtype)
    if out.numel():
        rows.read(0, out.view(-1).view(torch.uint8).numpy().reshape(rows.shape[0], -1))
    return out
