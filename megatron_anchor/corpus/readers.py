"""Reading a source in chunks: blocks of rows that a worker can take apart on its own.

The reader does only what must be done in order (decompression, finding line ends); parsing is the
worker's. Every chunk says where the next one begins, which is all that a resumed run needs.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_anchor.corpus.json_arrays import Flaw, array_elements
from megatron_anchor.corpus.rejections import Rejection
from megatron_anchor.corpus.sources import Source, Span
from megatron_anchor.corpus.streams import DamagedError, line_blocks, pieces
from megatron_anchor.errors import UserError

BOM = codecs.BOM_UTF8


@dataclass(frozen=True)
class ReadOptions:
    """How to read; `columns` are the top-level names that a table must have.

    `optional` are those that are taken as well where they are there.
    """

    chunk_bytes: int = 1 << 19
    max_row_bytes: int = 100 << 20
    columns: tuple[str, ...] = ("text",)
    optional: tuple[str, ...] = ()
    hf_split: str = "train"
    hf_config: str | None = None


@dataclass
class Chunk:
    """Some rows of one source.

    `kind` says what `payload` is: `lines` (bytes of whole JSON lines), `rows` (list of bytes, one
    JSON value each), `table` (an Arrow table), `texts` (list of bytes, one document each),
    `objects` (list of dicts), `none` (nothing but `rejections`).
    """

    source: int
    path: str
    domain: str
    first_row: int
    kind: str
    payload: Any
    next_offset: int
    next_row: int
    bytes_read: int
    """For the progress bar: bytes of the source as it lies on disk."""
    rejections: list[Rejection] = field(default_factory=list)


@dataclass
class _Place:
    """Where reading begins: `offset` as the format counts it, `row` rows before it."""

    offset: int = 0
    row: int = 0


def read_span(
    sources: list[Source], span: Span, options: ReadOptions, *, offset: int, row: int, domain: str
) -> Iterator[Chunk]:
    """The chunks of one span from a place on (`offset` 0 and `row` 0 for its beginning)."""
    source = sources[span.source]
    read = _READERS[source.format]
    if source.format == "json":
        read = _json_reader(source)
    make = _ChunkMaker(span.source, source.path, domain)
    try:
        yield from read(source, span, options, _Place(offset, row), make)
    except OSError as error:
        raise UserError(f"{source.path} cannot be read: {error}") from error


@dataclass
class _ChunkMaker:
    source: int
    path: str
    domain: str

    def __call__(
        self,
        kind: str,
        payload: Any,
        *,
        row: int,
        next_row: int,
        next_offset: int,
        bytes_read: int,
        rejected: tuple[str, str, bytes | None] | None = None,
    ) -> Chunk:
        rejections = []
        if rejected:
            why, detail, raw = rejected
            rejections = [Rejection(self.path, next_row, why, detail, raw)]
        return Chunk(
            self.source,
            self.path,
            self.domain,
            row,
            kind,
            payload,
            next_offset,
            next_row,
            bytes_read,
            rejections,
        )


def _read_jsonl(
    source: Source, span: Span, options: ReadOptions, place: _Place, make: _ChunkMaker
) -> Iterator[Chunk]:
    offset = place.offset or _first_line_start(source, span.start)
    if span.end is not None and offset >= span.end:
        return  # no line begins in this span (or all of it was read before)
    ratio = _disk_ratio(source)
    stream = pieces(
        source.path, compression=source.compression, start=offset, size=options.chunk_bytes
    )
    row = place.row
    try:
        for block in line_blocks(
            stream,
            offset=offset,
            end=span.end,
            size=options.chunk_bytes,
            longest=options.max_row_bytes,
        ):
            lines = 1 if block.too_long else block.data.count(b"\n")
            lines += not block.too_long and not block.data.endswith(b"\n")
            detail = f"{block.too_long} bytes, over --max-row-mb {options.max_row_bytes >> 20}"
            yield make(
                "none" if block.too_long else "lines",
                None if block.too_long else block.data,
                row=row,
                next_row=row + lines,
                next_offset=block.end,
                bytes_read=int((block.end - block.offset) * ratio),
                rejected=("row too long", detail, block.data) if block.too_long else None,
            )
            row, offset = row + lines, block.end
    except DamagedError as error:
        yield make(
            "none",
            None,
            row=row,
            next_row=row + 1,
            next_offset=offset + len(error.left),
            bytes_read=0,
            rejected=(error.kind, f"{error} here; later rows are lost", error.left),
        )


def _first_line_start(source: Source, start: int) -> int:
    """The first byte at or after `start` that begins a line."""
    if start == 0:
        return 0
    at = start - 1
    for piece in pieces(source.path, compression=None, start=at):
        newline = piece.find(b"\n")
        if newline >= 0:
            return at + newline + 1
        at += len(piece)
    return at


def _disk_ratio(source: Source) -> float:
    """Bytes on disk for one byte of text; 4 to 1 is guessed for compressed files."""
    return 1.0 if source.compression is None else 0.25


def _json_reader(source: Source) -> Callable[..., Iterator[Chunk]]:
    """A `.json` file is one array, one object, or (as Megatron's users have it) JSON lines."""
    head = next(pieces(source.path, compression=None), b"").removeprefix(BOM).lstrip()
    first = head.split(b"\n", 1)[0].rstrip()
    if head.startswith(b"["):
        return _read_json_array
    if first.endswith((b"{", b"[", b",")):
        return _read_json_object
    return _read_jsonl


def _read_json_object(
    source: Source, span: Span, options: ReadOptions, place: _Place, make: _ChunkMaker
) -> Iterator[Chunk]:
    del span
    if place.row == 0:
        yield _whole_file(source, options, make, kind="rows", row=0)


def _whole_file(
    source: Source, options: ReadOptions, make: _ChunkMaker, *, kind: str, row: int
) -> Chunk:
    too_long = source.size > options.max_row_bytes
    detail = f"{source.size} bytes, over --max-row-mb {options.max_row_bytes >> 20}"
    return make(
        "none" if too_long else kind,
        None if too_long else [b"".join(pieces(source.path, compression=None))],
        row=row,
        next_row=row + 1,
        next_offset=source.size,
        bytes_read=source.size,
        rejected=("row too long", detail, None) if too_long else None,
    )


def _read_text(
    source: Source, span: Span, options: ReadOptions, place: _Place, make: _ChunkMaker
) -> Iterator[Chunk]:
    del span
    if place.row == 0:
        yield _whole_file(source, options, make, kind="texts", row=0)


def _read_json_array(
    source: Source, span: Span, options: ReadOptions, place: _Place, make: _ChunkMaker
) -> Iterator[Chunk]:
    """One array of objects. `place.offset` is not used: a resumed run scans the array again."""
    del span
    stream = pieces(source.path, compression=None)
    elements = array_elements(stream, longest=options.max_row_bytes)
    row = place.row
    for part in _grouped(itertools.islice(elements, row, None), options.chunk_bytes):
        flaw = part if isinstance(part, Flaw) else None
        rows = [] if isinstance(part, Flaw) else part
        end = row + (len(rows) or 1)
        yield make(
            "none" if flaw else "rows",
            None if flaw else rows,
            row=row,
            next_row=end,
            next_offset=1,
            bytes_read=sum(map(len, rows)),
            rejected=(flaw.kind, flaw.detail, flaw.raw) if flaw else None,
        )
        row = end


def _grouped(elements: Iterator[bytes | Flaw], size: int) -> Iterator[list[bytes] | Flaw]:
    """Elements in lists of about `size` bytes; flaws alone, in their places."""
    held: list[bytes] = []
    left = size
    for element in elements:
        if isinstance(element, bytes):
            held.append(element)
            left -= len(element)
        if held and (left <= 0 or isinstance(element, Flaw)):
            yield held
            held, left = [], size
        if isinstance(element, Flaw):
            yield element
    if held:
        yield held


def _read_table(
    source: Source, span: Span, options: ReadOptions, place: _Place, make: _ChunkMaker
) -> Iterator[Chunk]:
    """Parquet files and saved datasets; offsets are rows."""
    from megatron_anchor.corpus import table_parts, tables

    table = tables.open_table(source, options)
    row = place.row or span.start
    stop = table.rows if span.end is None else span.end
    bytes_a_row = source.size / max(table.rows, 1)
    most, longest = options.chunk_bytes, options.max_row_bytes
    step = max(1, int(most / max(table.bytes_a_row, 1)))
    flaw: tuple[str, str, bytes | None] | None = None
    try:
        for part in table_parts.parts(table.batches(row, stop, step), most=most, longest=longest):
            detail = f"{part.too_long} bytes, over --max-row-mb {longest >> 20}"
            yield make(
                "none" if part.table is None else "table",
                part.table,
                row=row,
                next_row=row + part.rows,
                next_offset=row + part.rows,
                bytes_read=int(part.rows * bytes_a_row),
                rejected=("row too long", detail, None) if part.table is None else None,
            )
            row += part.rows
    except table_parts.GrowsTooFarError as error:
        flaw = ("file grows too far", f"{error}; its later rows are left out", None)
    except tables.DAMAGE as error:
        flaw = ("file damaged", f"{error}; later rows are lost", None)
    if flaw:
        end = row + 1
        yield make(
            "none", None, row=row, next_row=end, next_offset=end, bytes_read=0, rejected=flaw
        )


def _read_hub(
    source: Source, span: Span, options: ReadOptions, place: _Place, make: _ChunkMaker
) -> Iterator[Chunk]:
    del span
    from megatron_anchor.corpus import tables

    row, longest = place.row, options.max_row_bytes
    objects: list[dict[str, Any]] = []
    size = 0

    def rest() -> Iterator[Chunk]:
        if objects:
            end = row + len(objects)
            yield make("objects", objects, row=row, next_row=end, next_offset=end, bytes_read=size)

    for item in tables.stream_hub(source.path, options, skip=place.row):
        length = sum(len(value) for value in item.values() if isinstance(value, str))
        if objects and size + length > options.chunk_bytes:
            yield from rest()
            row, objects, size = row + len(objects), [], 0
        if length > longest:
            detail = f"{length} characters, over --max-row-mb {longest >> 20}"
            flaw = ("row too long", detail, None)
            end = row + 1
            yield make(
                "none", None, row=row, next_row=end, next_offset=end, bytes_read=0, rejected=flaw
            )
            row = end
        else:
            objects.append(item)
            size += length
    yield from rest()


_READERS: dict[str, Callable[..., Iterator[Chunk]]] = {
    "jsonl": _read_jsonl,
    "json": _read_jsonl,
    "txt": _read_text,
    "parquet": _read_table,
    "dataset": _read_table,
    "hub": _read_hub,
}
