"""The elements of a JSON array, told apart without parsing them: one pass, one element in memory.

Only strings and brackets are followed, so an element with damage inside is still one element, and
those after it are found; whoever parses an element judges it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_MARKS = re.compile(rb'["\[\]{},]')
_SPACE = b" \t\r\n"
_SHOWN = 1 << 16  # bytes kept of what cannot be an element


@dataclass(frozen=True)
class Flaw:
    """A piece of the array that is no element: what is wrong, and how it begins."""

    kind: str
    detail: str
    raw: bytes


class _Ends:
    """Where elements end, piece after piece of the stream."""

    depth = 0
    in_string = False
    _escaped = False  # the piece before ended with an odd number of backslashes in a string

    def find(self, piece: bytes, at: int) -> int:
        """The next ',' or ']' of the array itself at or after `at`; -1 if the piece has none."""
        while at < len(piece):
            if self.in_string:
                at = self._after_string(piece, at)
                continue
            found = _MARKS.search(piece, at)
            if found is None:
                return -1
            mark, at = found[0], found.end()
            if mark == b'"':
                self.in_string = True
            elif mark in b"[{":
                self.depth += 1
            elif self.depth:
                self.depth -= mark != b","
            elif mark != b"}":
                return at - 1
        return -1

    def _after_string(self, piece: bytes, at: int) -> int:
        while (quote := piece.find(b'"', at)) >= 0:
            if not self._ends_escaped(piece[at:quote]):
                self.in_string = self._escaped = False
                return quote + 1
            at, self._escaped = quote + 1, False
        self._escaped = self._ends_escaped(piece[at:])
        return len(piece)

    def _ends_escaped(self, part: bytes) -> bool:
        escapes = len(part) - len(part.rstrip(b"\\"))
        return bool((escapes + (self._escaped and escapes == len(part))) % 2)


class _Open:
    """The element that is being read; no more than `longest` bytes are held."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._held = bytearray()
        self._size = 0

    def add(self, part: bytes) -> None:
        part = part if self._size else part.lstrip(_SPACE)
        self._size += len(part)
        self._held += part
        if self._size > self._longest:
            del self._held[_SHOWN:]

    def take(self) -> bytes | Flaw:
        """The element, and begin the next one."""
        size, data = self._size, bytes(self._held).rstrip(_SPACE)
        self._held.clear()
        self._size = 0
        if size <= self._longest:
            return data
        detail = f"{size} bytes, over --max-row-mb {self._longest >> 20}"
        return Flaw("row too long", detail, data[:_SHOWN])


def array_elements(stream: Iterator[bytes], *, longest: int) -> Iterator[bytes | Flaw]:
    """The bytes of every element of a JSON array, and what is wrong with the array in its place.

    A comma before the closing bracket is passed over. `stream` begins before the opening bracket.
    """
    ends, element = _Ends(), _Open(longest)
    piece = next(stream, b"")
    at = piece.index(b"[") + 1
    while piece:
        while (end := ends.find(piece, at)) >= 0:
            element.add(piece[at:end])
            found, last = element.take(), piece[end : end + 1] == b"]"
            if found != b"" or not last:
                yield found
            if last:
                yield from _after_array(piece[end + 1 :], stream)
                return
            at = end + 1
        element.add(piece[at:])
        piece, at = next(stream, b""), 0
    yield from _cut_short(element.take(), inside=bool(ends.depth or ends.in_string))


def _after_array(rest: bytes, stream: Iterator[bytes]) -> Iterator[Flaw]:
    shown, size = bytearray(), 0
    while rest or (rest := next(stream, b"")):
        rest = rest if size else rest.lstrip(_SPACE)
        size += len(rest)
        shown += rest[: _SHOWN - len(shown)]
        rest = b""
    if size:
        detail = f"{size} bytes follow the closing ']', and a .json file holds one array"
        yield Flaw("data after the array", detail, bytes(shown).rstrip(_SPACE))


def _cut_short(left: bytes | Flaw, *, inside: bool) -> Iterator[bytes | Flaw]:
    raw = left.raw if isinstance(left, Flaw) else left
    if not inside and left:
        yield left
        raw = b""
    where = "within an element" if inside else "without a closing ']'"
    yield Flaw("file cut short", f"the array ends {where}; later rows are lost", raw)
