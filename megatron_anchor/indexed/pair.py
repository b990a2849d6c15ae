"""Megatron's `.bin/.idx` pair: reading, and writing an index from streams.

Nothing here holds more than a few megabytes: arrays are mapped, and the index is written in blocks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron_anchor.errors import UserError
from megatron_anchor.indexed.headers import HEADER, MAGIC, TOKEN_TYPES, read_header

_CODES = {np.dtype(kind): code for code, kind in TOKEN_TYPES.items()}
_BLOCK = 1 << 20  # elements moved at once


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype Megatron takes for a vocabulary (`DType.optimal_dtype`): uint16 below 65500."""
    return np.dtype(np.uint16) if vocab_size < 65500 else np.dtype(np.int32)


def bin_path(prefix: str | Path) -> Path:
    """The token file of a corpus."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """The index file of a corpus."""
    return Path(f"{prefix}.idx")


@dataclass(frozen=True)
class IndexedCorpus:
    """A mapped `.bin/.idx` pair.

    `lengths` int32 [sequences], `pointers` int64 [sequences] (bytes), `document_indices` int64
    [documents + 1], `tokens` [all tokens] of the index's dtype.
    """

    prefix: Path
    lengths: np.ndarray
    pointers: np.ndarray
    document_indices: np.ndarray
    tokens: np.ndarray

    @classmethod
    def open(cls, prefix: str | Path) -> IndexedCorpus:
        """Map the pair at `prefix`; `UserError` where a file is missing or malformed."""
        for path in (bin_path(prefix), idx_path(prefix)):
            if not path.is_file():
                raise UserError(f"{path} does not exist; give the prefix without .bin or .idx")
        path = idx_path(prefix)
        with open(path, "rb") as stream:
            dtype, sequences, indices = read_header(path, stream.read(HEADER.size))
        start = HEADER.size
        expected = start + 12 * sequences + 8 * indices
        size = path.stat().st_size
        if size < expected:
            raise UserError(
                f"{path} holds {size} bytes, but {sequences} sequences and {indices} document "
                f"indices need {expected}: it was cut short, build it again"
            )
        raw = np.memmap(path, mode="r", dtype=np.uint8)
        pointers_at, documents_at = start + 4 * sequences, start + 12 * sequences
        return cls(
            prefix=Path(prefix),
            lengths=raw[start:pointers_at].view(np.int32),
            pointers=raw[pointers_at:documents_at].view(np.int64),
            document_indices=raw[documents_at:expected].view(np.int64),
            tokens=_map_tokens(bin_path(prefix), dtype),
        )

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the tokens."""
        return self.tokens.dtype

    def __len__(self) -> int:
        """The number of documents."""
        return max(0, len(self.document_indices) - 1)

    def document(self, index: int) -> np.ndarray:
        """The tokens of document `index`, 1-D; all its sequences together."""
        if not 0 <= index < len(self):
            raise UserError(
                f"document {index} asked of {self.prefix}, which holds 0 to {len(self) - 1}"
            )
        first, last = map(int, self.document_indices[index : index + 2])
        if first == last:
            return self.tokens[:0]
        if not 0 <= first < last <= len(self.lengths):
            raise self._damaged(index, f"its sequences would be {first} to {last - 1}")
        start = int(self.pointers[first]) // self.dtype.itemsize
        end = start + int(self.lengths[first:last].sum(dtype=np.int64))
        if not 0 <= start <= end <= len(self.tokens):
            raise self._damaged(index, f"its tokens would be {start} to {end - 1}")
        return self.tokens[start:end]

    def _damaged(self, index: int, why: str) -> UserError:
        return UserError(
            f"{idx_path(self.prefix)} is damaged at document {index}: {why}, of "
            f"{len(self.lengths)} sequences and {len(self.tokens)} tokens; make the corpus again"
        )

    def document_lengths(self) -> np.ndarray:
        """Tokens of every document, int64 [documents]."""
        ends = np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))
        return np.diff(ends[self.document_indices])


def _map_tokens(path: Path, dtype: np.dtype) -> np.ndarray:
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise UserError(f"{path} holds {size} bytes, which is no whole number of {dtype} tokens")
    if size == 0:
        return np.empty(0, dtype=dtype)  # an empty file cannot be mapped
    return np.memmap(path, mode="r", dtype=dtype)


def write_index(
    path: Path, *, dtype: np.dtype, lengths_file: Path, document_ends_file: Path
) -> None:
    """Write an `.idx` from a file of int32 lengths and one of int64 document ends.

    The ends are counts of sequences from the start of the corpus, without the leading 0.
    """
    sequences = lengths_file.stat().st_size // 4
    documents = document_ends_file.stat().st_size // 8
    with open(path, "wb") as out:
        out.write(HEADER.pack(MAGIC, 1, _CODES[dtype], sequences, documents + 1))
        for block in _blocks(lengths_file, np.int32):
            out.write(block.data)
        _write_pointers(out, lengths_file, dtype.itemsize)
        out.write(np.zeros(1, dtype=np.int64).data)
        for block in _blocks(document_ends_file, np.int64):
            out.write(block.data)
        out.flush()
        os.fsync(out.fileno())


def _write_pointers(out: BinaryIO, lengths_file: Path, itemsize: int) -> None:
    at = 0
    for block in _blocks(lengths_file, np.int32):
        ends = at + np.cumsum(block, dtype=np.int64) * itemsize
        out.write(np.concatenate(([at], ends[:-1])).astype(np.int64).data)
        at = int(ends[-1])


def _blocks(path: Path, dtype: type) -> Iterator[np.ndarray]:
    with open(path, "rb") as stream:
        while True:
            block: np.ndarray = np.fromfile(stream, dtype=dtype, count=_BLOCK)
            if not block.size:
                return
            yield block
