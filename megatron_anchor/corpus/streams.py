"""Bytes from plain and compressed files, and whole lines out of them, in bounded memory."""

from __future__ import annotations

import contextlib
import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_anchor.errors import UserError

_PIECE = 1 << 18  # compressed bytes read at once
_MOST = 1 << 24  # bytes that one call may decompress
_ZSTD_PIECE = 512  # compressed bytes, for the same: a block is 4 bytes or more, and gives 128 KB
_MOST_WINDOW = 128 << 20  # bytes; the default of the library


class DamagedError(Exception):
    """A compressed stream ends early or is damaged; what came before it is good.

    `kind` groups such files in summaries; `left` is the beginning of a line that has no end.
    """

    def __init__(self, kind: str, detail: str, left: bytes = b"") -> None:
        super().__init__(detail)
        self.kind = kind
        self.left = left


def pieces(
    path: str, *, compression: str | None, start: int = 0, size: int = 1 << 20
) -> Iterator[bytes]:
    """The (decompressed) bytes of a file from byte `start` on, in pieces (of `size` if plain).

    Raises `DamagedError` after the last good byte of a damaged compressed file.
    """
    if compression is None:
        yield from _plain(path, start, size)
        return
    left = start
    for piece in {"gz": _gunzip, "zst": _unzstd}[compression](path):
        if left >= len(piece):
            left -= len(piece)
        else:
            yield piece[left:]
            left = 0


def _plain(path: str, start: int, size: int) -> Iterator[bytes]:
    with open(path, "rb") as stream:
        stream.seek(start)
        while piece := stream.read(size):
            yield piece


def _gunzip(path: str) -> Iterator[bytes]:
    with open(path, "rb") as stream:
        inflate, data = zlib.decompressobj(wbits=31), b""
        while data or (data := stream.read(_PIECE)):
            before = inflate.copy()
            try:
                piece = inflate.decompress(data, _MOST)
            except zlib.error as error:
                yield from _until_damage(before.decompress, data, zlib.error)
                raise _damaged("gzip", error) from error
            if piece:
                yield piece
            data = inflate.unconsumed_tail
            if inflate.eof:  # the end of one member: another may follow, or zero padding
                data = inflate.unused_data.lstrip(b"\x00")
                inflate = zlib.decompressobj(wbits=31)
                fresh = True
            else:
                fresh = False
        if Path(path).stat().st_size and not fresh:
            raise DamagedError("file cut short", "gzip data ends early")


def _unzstd(path: str) -> Iterator[bytes]:
    """Frames one after another.

    A block of at most 128 KB may take 4 bytes in the file, so little is given to the decompressor
    at once, and what comes out is gathered.
    """
    zstandard = _zstandard(path)
    with open(path, "rb") as stream:
        frame, begins, data, fresh = zstandard.ZstdDecompressor().decompressobj(), 0, b"", True
        gathered = io.BytesIO()
        while data or (data := stream.read(_ZSTD_PIECE)):
            try:
                gathered.write(frame.decompress(data))
            except zstandard.ZstdError as error:
                yield gathered.getvalue()
                again = zstandard.ZstdDecompressor().decompressobj()  # a state cannot be copied
                left = stream.tell() - len(data) - begins
                stream.seek(begins)
                while left:
                    left -= len(taken := stream.read(min(left, _ZSTD_PIECE)))
                    again.decompress(taken)
                yield from _until_damage(again.decompress, data, zstandard.ZstdError)
                raise _damaged("zstd", error) from error
            if gathered.tell() >= _PIECE:
                yield gathered.getvalue()
                gathered = io.BytesIO()
            fresh, data = frame.eof, frame.unused_data if frame.eof else b""
            if fresh:
                frame = zstandard.ZstdDecompressor().decompressobj()
                begins = stream.tell() - len(data)
        yield gathered.getvalue()
        if not fresh:
            raise DamagedError("file cut short", "zstd data ends early")


def _zstandard(path: str) -> Any:
    """The library, if it can read the file: a frame says how much memory it needs.

    Raises:
        UserError: it is not installed, or the frame asks for too much.
    """
    try:
        import zstandard
    except ImportError as error:
        raise UserError(f"{path}: reading .zst needs `pip install zstandard`") from error
    with open(path, "rb") as stream:
        head = stream.read(64)
    with contextlib.suppress(zstandard.ZstdError):  # damage is told where it is read
        window = zstandard.get_frame_parameters(head).window_size
        if window > _MOST_WINDOW:
            raise UserError(
                f"{path} was compressed with a window of {window >> 20} MB (zstd --long), of which "
                f"{_MOST_WINDOW >> 20} MB are read; write it again with zstd --long=27 or without"
            )
    return zstandard


def _until_damage(
    decompress: Callable[[bytes], bytes], data: bytes, damage: type[Exception]
) -> Iterator[bytes]:
    """What `data` gives before the byte that the decompressor cannot take."""
    found = bytearray()
    with contextlib.suppress(damage):
        for at in range(len(data)):
            found += decompress(data[at : at + 1])
            if len(found) >= _MOST:
                yield bytes(found)
                found.clear()
    if found:
        yield bytes(found)


def _damaged(name: str, error: Exception) -> DamagedError:
    return DamagedError("file damaged", f"{name} data is damaged ({error}), maybe before this too")


@dataclass
class LineBlock:
    """Whole lines `data` that begin at byte `offset`, or one line too long to be held."""

    data: bytes
    offset: int
    too_long: int = 0
    """Bytes of a line that was passed over; then `data` is its beginning."""

    @property
    def end(self) -> int:
        """The offset after the block."""
        return self.offset + (self.too_long or len(self.data))


def line_blocks(
    source: Iterable[bytes], *, offset: int, end: int | None, size: int, longest: int
) -> Iterator[LineBlock]:
    """Cut a stream into blocks of whole lines of about `size` bytes.

    Lines that begin before `end` belong (all, where it is None); the last one need not end with a
    newline. A line over `longest` bytes is passed over without holding it. On `DamagedError` the
    complete lines come first, and the exception passes on with the incomplete one as `left`.
    """
    held, at, skipped = bytearray(), offset, 0  # held: the beginning of a line
    try:
        for piece in source:
            newline = piece.rfind(b"\n") + 1
            if skipped:
                first = piece.find(b"\n") + 1
                skipped += first or len(piece)
                if not first:
                    continue
                yield LineBlock(bytes(held), at, too_long=skipped)
                at, skipped, newline = at + skipped, 0, newline - first
                held, piece = bytearray(), piece[first:]
                if end is not None and at >= end:
                    return
            if newline:
                lines = bytes(held) + piece[:newline] if held else piece[:newline]
                if end is not None and at + len(lines) >= end:
                    cut = lines.index(b"\n", max(end - 1 - at, 0)) + 1
                    yield from _split(lines[:cut], at, size)
                    return
                yield from _split(lines, at, size)
                at, held = at + len(lines), bytearray(piece[newline:])
            else:
                held += piece
            if len(held) > longest:
                skipped = len(held)
                del held[1 << 16 :]
    except DamagedError as error:
        error.left = bytes(held)
        raise
    if skipped:
        yield LineBlock(bytes(held), at, too_long=skipped)
    elif held:
        yield LineBlock(bytes(held), at)


def _split(lines: bytes, at: int, size: int) -> Iterator[LineBlock]:
    """Whole lines in blocks of at most `size` bytes (or one line)."""
    start = 0
    while len(lines) - start > size:
        cut = lines.rfind(b"\n", start, start + size) + 1 or lines.index(b"\n", start + size) + 1
        yield LineBlock(lines[start:cut], at + start)
        start = cut
    if start < len(lines):
        yield LineBlock(lines[start:] if start else lines, at + start)
