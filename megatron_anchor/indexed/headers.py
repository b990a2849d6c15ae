"""Checks of a tokenized corpus' two files, before anything is built from them.

A corpus is what Megatron's `tools/preprocess_data.py` writes: `PREFIX.bin` holds the tokens of
all documents end to end, `PREFIX.idx` says where they stand (the format is in
megatron/core/datasets/indexed_dataset.py):

    9 bytes magic, uint64 version, uint8 type of the tokens, uint64 sequences, uint64 entries of
    the document table, int32 length of each sequence, int64 place of each sequence (bytes),
    int64 document table (the sequence that each document begins with, and the end)

The checks read a few bytes of each file, however large it is.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_anchor.errors import UserError
from megatron_anchor.indexed.fingerprint import fingerprint

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
"""code in the header to type"""
_REMEDY = "write the corpus again (was its preprocessing interrupted?) or name another one"


@dataclass(frozen=True, kw_only=True)
class CorpusFiles:
    """What the headers of a sound corpus say."""

    prefix: str
    """path of both files, without .bin and .idx"""
    dtype: np.dtype
    """type of the tokens in the .bin"""
    num_sequences: int
    num_documents: int
    num_tokens: int
    """tokens that the .idx accounts for, and the .bin holds"""

    @property
    def identity(self) -> dict[str, Any]:
        """Fingerprints of both files, which change with the contents; reads 2 MiB at most."""
        return {kind: fingerprint(f"{self.prefix}.{kind}") for kind in ("bin", "idx")}


def inspect_corpus(prefix: str) -> CorpusFiles:
    """Read the headers of `prefix`.idx and compare the sizes of both files with them.

    Raises:
        FileNotFoundError: one of the files is missing.
        UserError: the .idx is no index, damaged or truncated, the .bin is shorter or longer than
            it says, or the corpus holds no token.
    """
    idx, binary = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    _check_both_exist(prefix, idx, binary)
    idx_stat, bin_stat = idx.stat(), binary.stat()
    with idx.open("rb") as stream:
        dtype, num_sequences, num_entries = read_header(idx, stream.read(HEADER.size))
        needed = HEADER.size + 12 * num_sequences + 8 * num_entries
        if idx_stat.st_size < needed:
            raise UserError(
                f"{idx} is truncated: it has {idx_stat.st_size} bytes, but its header speaks of "
                f"{num_sequences} sequences and {num_entries} document entries, which take "
                f"{needed}; {_REMEDY}"
            )
        if num_sequences == 0 or bin_stat.st_size == 0:
            raise UserError(
                f"the corpus {prefix} holds no token ({num_sequences} sequences in the .idx, "
                f"{bin_stat.st_size} bytes in the .bin); {_REMEDY}"
            )
        last_length = _read_integer(stream, HEADER.size + 4 * (num_sequences - 1), "<i")
        pointers = HEADER.size + 4 * num_sequences
        last_pointer = _read_integer(stream, pointers + 8 * (num_sequences - 1), "<q")
        table = pointers + 8 * num_sequences
        first_entry = _read_integer(stream, table, "<q")
        last_entry = _read_integer(stream, table + 8 * (num_entries - 1), "<q")
    if (first_entry, last_entry) != (0, num_sequences):
        raise UserError(
            f"{idx} is damaged: its document table runs from sequence {first_entry} to "
            f"{last_entry}, expected 0 to {num_sequences}; {_REMEDY}"
        )
    end = last_pointer + last_length * dtype.itemsize
    if bin_stat.st_size != end:
        wrong = "short" if bin_stat.st_size < end else "long"
        raise UserError(
            f"{binary} is too {wrong}: it has {bin_stat.st_size} bytes, but {idx} accounts for "
            f"{end}. Do both files belong together? If so {_REMEDY}"
        )
    return CorpusFiles(
        prefix=prefix,
        dtype=dtype,
        num_sequences=num_sequences,
        num_documents=num_entries - 1,
        num_tokens=end // dtype.itemsize,
    )


def _check_both_exist(prefix: str, idx: Path, binary: Path) -> None:
    missing = [str(path) for path in (idx, binary) if not path.is_file()]
    if not missing:
        return
    root, suffix = os.path.splitext(prefix)
    hint = (
        f"give the prefix without {suffix}: {root}"
        if suffix in (".bin", ".idx")
        else "check the path that --data-path (or the blend file) names; it is the common "
        "beginning of both files' names, without .bin and .idx"
    )
    raise FileNotFoundError(f"no corpus at {prefix}: {' and '.join(missing)} not found; {hint}")


def read_header(idx: Path, header: bytes) -> tuple[np.dtype, int, int]:
    """(type of the tokens, number of sequences, entries of the document table) of an .idx.

    Args:
        idx: path, for messages.
        header: its first `HEADER.size` bytes, fewer where the file is shorter.

    Raises:
        UserError: it is no index, of another version, or truncated.
    """
    if header[: len(MAGIC)] != MAGIC[: len(header)]:
        raise UserError(
            f"{idx} is no index of a Megatron corpus: it begins with {header[: len(MAGIC)]!r}, "
            f"expected {MAGIC!r}; {_REMEDY}"
        )
    if len(header) < HEADER.size:
        raise UserError(
            f"{idx} is truncated: it has {len(header)} bytes, its header alone takes "
            f"{HEADER.size}; {_REMEDY}"
        )
    _, version, code, num_sequences, num_entries = HEADER.unpack(header)
    if version != 1:
        raise UserError(f"{idx} has version {version}, expected 1; {_REMEDY}")
    if code not in TOKEN_TYPES:
        known = ", ".join(f"{code} = {dtype.__name__}" for code, dtype in TOKEN_TYPES.items())
        raise UserError(f"{idx} has tokens of type {code}, expected one of {known}; {_REMEDY}")
    if num_entries < 1:
        raise UserError(f"{idx} is damaged: its document table is empty; {_REMEDY}")
    return np.dtype(TOKEN_TYPES[code]), num_sequences, num_entries


def _read_integer(stream, offset: int, form: str) -> int:
    stream.seek(offset)
    return struct.unpack(form, stream.read(struct.calcsize(form)))[0]
