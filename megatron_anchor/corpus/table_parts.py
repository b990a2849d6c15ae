"""Tables in parts of bounded size, so that no batch of rows is larger than its chunk.

A table says how many rows it has, and not how long they are: one long string may stand behind a
thousand rows of a dictionary, and pages are compressed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_BATCH_BYTES = 64 << 20  # that a batch may have by a dictionary's longest value in every row
_HEADER_BYTES = 64
_MOST_GROWN = 200  # times its compressed size that a column of text may have
_SMALL = 256 << 20  # a column chunk that may grow to this size from any


class GrowsTooFarError(Exception):
    """A part of a file is far larger than any text would be that compresses so well."""


@dataclass(frozen=True)
class Part:
    """Rows that follow one another, or one row that is too long to be kept."""

    rows: int
    table: pa.Table | None
    too_long: int = 0
    """Bytes of the row that is left out."""


def parts(batches: Iterable[pa.Table], *, most: int, longest: int) -> Iterator[Part]:
    """All rows, in parts of at most `most` bytes (or one row); those over `longest` stand alone.

    What `batches` raises comes after the rows before it.
    """
    held: list[pa.Table] = []
    room, rest, failure = most, iter(batches), None
    while True:
        try:
            batch = next(rest)
        except StopIteration:
            break
        except Exception as error:
            failure = error
            break
        start = 0
        for row, size in enumerate(row_sizes(batch).tolist()):
            if size > min(room, longest) and (held or row > start):
                yield _joined([*held, _cut(batch, start, row)])
                held, start, room = [], row, most
            if size > longest:
                yield Part(1, None, size)
                start, room = row + 1, most
            else:
                room -= size
        if start < batch.num_rows:
            held.append(_cut(batch, start, batch.num_rows))
    if held:
        yield _joined(held)
    if failure is not None:
        raise failure


def _cut(table: pa.Table, start: int, stop: int) -> pa.Table:
    """Rows as a table of their own: a slice would drag all others along to a worker."""
    return table.take(pa.array(range(start, stop), pa.int64()))


def _joined(tables: list[pa.Table]) -> Part:
    whole = pa.concat_tables([table for table in tables if table.num_rows])
    return Part(whole.num_rows, whole)


def row_sizes(table: pa.Table) -> np.ndarray:
    """Bytes of the values of every row, int64 [rows]."""
    sizes = np.zeros(table.num_rows, dtype=np.int64)
    for column in table.columns:
        at = 0
        for chunk in column.chunks:
            sizes[at : at + len(chunk)] += _sizes(chunk)
            at += len(chunk)
    return sizes


def _sizes(array: pa.Array) -> np.ndarray:
    """Bytes of every element, int64; strings count, and what holds them."""
    types, kind = pa.types, array.type
    if types.is_dictionary(kind):
        values = np.append(_sizes(array.dictionary), 0)
        return values[array.indices.fill_null(len(array.dictionary)).to_numpy(zero_copy_only=False)]
    if types.is_struct(kind):
        return sum(map(_sizes, array.flatten()), np.zeros(len(array), dtype=np.int64))
    if types.is_map(kind):
        return _in_lists(_sizes(array.keys) + _sizes(array.items), array.offsets)
    if types.is_list(kind) or types.is_large_list(kind):
        return _in_lists(_sizes(array.values), array.offsets)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        array = array.cast(pa.large_string() if types.is_string_view(kind) else pa.large_binary())
    elif not any(is_kind(kind) for is_kind in _OF_BYTES):
        return np.full(len(array), array.nbytes // max(len(array), 1), dtype=np.int64)
    lengths = pc.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int64)


_OF_BYTES = (
    pa.types.is_string,
    pa.types.is_binary,
    pa.types.is_large_string,
    pa.types.is_large_binary,
)


def _in_lists(sizes: np.ndarray, offsets: pa.Array) -> np.ndarray:
    return np.diff(np.concatenate(([0], np.cumsum(sizes)))[offsets.to_numpy()])


def rows_at_once(file: pq.ParquetFile, path: str, columns: Sequence[str], *, wanted: int) -> int:
    """How many rows of a parquet file a batch may have; few where a dictionary has long values."""
    longest = 1
    with open(path, "rb") as stream:
        for number in range(file.metadata.num_row_groups):
            for chunk in _chunks(file, number, columns):
                if chunk.has_dictionary_page:
                    stream.seek(chunk.dictionary_page_offset)
                    size = _page_bytes(stream.read(_HEADER_BYTES))
                    longest = max(longest, chunk.total_uncompressed_size if size is None else size)
    return max(1, min(wanted, _BATCH_BYTES // longest))


def require_text(file: pq.ParquetFile, group: int, columns: Sequence[str]) -> None:
    """Refuse a row group that is small on the disk and huge in memory.

    Raises:
        GrowsTooFarError: it is.
    """
    for chunk in _chunks(file, group, columns):
        large, small = chunk.total_uncompressed_size, chunk.total_compressed_size
        if large > _SMALL and large > _MOST_GROWN * small:
            raise GrowsTooFarError(
                f"row group {group}: column {chunk.path_in_schema!r} grows from {small} to {large} "
                "bytes, which no text does"
            )


def _chunks(
    file: pq.ParquetFile, group: int, columns: Sequence[str]
) -> Iterator[pq.ColumnChunkMetaData]:
    row_group = file.metadata.row_group(group)
    for number in range(row_group.num_columns):
        chunk = row_group.column(number)
        if chunk.path_in_schema.split(".")[0] in columns:
            yield chunk


def _page_bytes(header: bytes) -> int | None:
    """The uncompressed size that a page's header states; None where it cannot be read.

    The header (parquet.thrift, PageHeader) is in Thrift's compact form: field 1 is the page's type
    and field 2 this size, both as 0x15 (next field, i32) and a zigzag varint.
    """
    at, value = 0, 0
    for _ in range(2):
        if header[at : at + 1] != b"\x15":
            return None
        value, shift, at = 0, 0, at + 1
        while at < len(header):
            value |= (header[at] & 0x7F) << shift
            shift, at = shift + 7, at + 1
            if header[at - 1] < 0x80:
                break
    return (value >> 1) ^ -(value & 1)
