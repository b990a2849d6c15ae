"""From a chunk to texts: parsing rows, checking values, finding domains.

A row either gives its texts or a `Rejection`; there is no third way, so that rows read = rows with
texts + rejected rows.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_anchor.corpus.conversations import ConversationError, conversations_of
from megatron_anchor.corpus.duplicate_keys import (
    DuplicateKeyError,
    may_have_duplicates,
    strict_loads,
)
from megatron_anchor.corpus.pretokenized import SpanError, split_spans
from megatron_anchor.corpus.readers import BOM, Chunk
from megatron_anchor.corpus.rejections import Rejection
from megatron_anchor.corpus.row_weights import WeightError, checked_weights, require_length

_quick: Any = None
with contextlib.suppress(ImportError):
    _quick = importlib.import_module("orjson")

_MISSING = object()


@dataclass(frozen=True)
class RowOptions:
    """What to take of a row."""

    keys: tuple[str, ...] = ("text",)
    domain_key: str | None = None
    domain_fallback: bool = False
    """Whether rows without the domain key get the input's domain; else they are rejected."""
    max_row_bytes: int = 100 << 20
    pretokenized: bool = False
    vocab_size: int = 0
    """Ids of a pre-tokenized row must lie below it."""
    chat: bool = False
    """Whether the key holds conversations."""
    tools_key: str = "tools"
    """Where rows with conversations may have tools."""
    weight_key: str | None = None
    weight_dtype: str = "float32"

    @property
    def read_keys(self) -> tuple[str, ...]:
        """Keys of a row, and of the objects in it, that enter the corpus."""
        keys = (*self.keys, *filter(None, [self.domain_key, self.weight_key]))
        if self.pretokenized:
            keys += ("source", "start", "end")
        if self.chat:
            keys += (self.tools_key, "role", "content", "from", "value", "tool_calls")
        return keys

    @property
    def exact_numbers(self) -> bool:
        """Whether numbers of a row enter the corpus."""
        return self.pretokenized or self.chat or self.weight_key is not None


@dataclass
class Document:
    """A document: `values` holds, for each key, its sequences: texts, id arrays, conversations."""

    row: int
    values: list[list[Any]]
    domain: str
    text_bytes: int = 0
    raw: bytes | None = None
    """The row as it was read, for the side file."""
    weights: np.ndarray | None = None
    """Of its tokens: 0-d where all weigh the same, else 1-D."""


@dataclass
class ParsedChunk:
    """What came out of a chunk: rows read = good rows + rejections."""

    documents: list[Document] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    good_rows: int = 0
    blank_lines: int = 0
    text_bytes: int = 0
    """UTF-8 bytes of the texts of good rows."""


class _RowError(Exception):
    """A row is no document: kind and detail."""


def parse_chunk(chunk: Chunk, options: RowOptions) -> ParsedChunk:
    """Take a chunk apart."""
    parsed = ParsedChunk(rejections=list(chunk.rejections))
    for number, raw, value in _values(chunk, parsed):
        try:
            if raw is not None and len(raw) > options.max_row_bytes:
                limit = options.max_row_bytes >> 20
                raise _RowError("row too long", f"{len(raw)} bytes, over --max-row-mb {limit}")
            if chunk.kind == "texts":
                assert raw is not None
                value = dict.fromkeys(options.keys, _text_file(raw))
            elif raw is not None:
                value = _load(raw, options)
            from_table = chunk.kind in ("table", "objects")  # in both, nulls fill gaps
            documents = _documents(value, number, chunk.domain, options, from_table=from_table)
        except _RowError as bad:
            kind, detail = bad.args
            shown = raw if raw is not None else _shown(value)
            parsed.rejections.append(Rejection(chunk.path, number, kind, detail, shown))
            continue
        for document in documents:
            document.raw = raw
            parsed.text_bytes += document.text_bytes
        parsed.documents += documents
        parsed.good_rows += 1
    return parsed


def _values(chunk: Chunk, parsed: ParsedChunk) -> Iterator[tuple[int, bytes | None, Any]]:
    """Row number (from 1), raw bytes or None, and the value where it is parsed already."""
    number = chunk.first_row
    if chunk.kind == "lines":
        data: bytes = chunk.payload
        if number == 0 and data.startswith(BOM):
            data = data[len(BOM) :]
        if data.isspace():  # many blank lines are counted at once
            parsed.blank_lines += data.count(b"\n") + (not data.endswith(b"\n"))
            return
        lines = data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        for line in lines:
            number += 1
            if line and not line.isspace():
                yield number, line, _MISSING
            else:
                parsed.blank_lines += 1
    elif chunk.kind in ("rows", "texts"):
        for raw in chunk.payload:
            number += 1
            yield number, raw, _MISSING
    elif chunk.kind in ("table", "objects"):
        found = chunk.payload
        if chunk.kind == "table":
            from megatron_anchor.corpus.tables import records

            found = records(chunk.payload)
        for record in found:
            number += 1
            yield number, None, record


def _load(raw: bytes, options: RowOptions) -> Any:
    """A row's value. `orjson` may read good rows (it is twice as fast); `json` judges the others.

    Numbers over 64 bits differ between the two, so `json` reads rows with `exact_numbers`.
    """
    keys = options.read_keys
    doubled = may_have_duplicates(raw, keys)
    if _quick is not None and not doubled and not options.exact_numbers:
        try:
            return _quick.loads(raw)
        except ValueError:
            pass
    text = _decoded(raw)
    try:
        return strict_loads(text, keys) if doubled else json.loads(text)
    except DuplicateKeyError as error:
        [key] = error.args
        raise _RowError(
            "duplicate key", f"an object has {key!r} twice, and one value would be lost"
        ) from None
    except RecursionError:
        raise _RowError("malformed JSON", "nested too deeply") from None
    except ValueError as error:
        if str(error).startswith("Exceeds the limit"):
            raise _RowError("malformed JSON", "a number has more than 4300 digits") from None
        hint = _other_encoding(raw)
        if str(error).startswith("Extra data"):
            hint = "; it looks like several JSON values: give each a line in a .jsonl file"
        raise _RowError("malformed JSON", f"{error}{hint}") from None


def _text_file(raw: bytes) -> str:
    return _decoded(raw.removeprefix(BOM))


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        place = f"byte {raw[error.start]:#04x} at {error.start}{_other_encoding(raw)}"
        raise _RowError("invalid UTF-8", place) from None


def _other_encoding(raw: bytes) -> str:
    """A hint where the bytes are text of another encoding, or compressed."""
    if raw.startswith(b"\x1f\x8b"):
        return "; it looks like gzip: let the file's name end with .gz"
    if raw.startswith(b"\x28\xb5\x2f\xfd"):
        return "; it looks like zstd: let the file's name end with .zst"
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\x00" in raw[:200]:
        return "; it looks like UTF-16 or UTF-32: convert it (iconv -f UTF-16 -t UTF-8)"
    return ""


def _documents(
    record: Any, number: int, domain: str, options: RowOptions, *, from_table: bool
) -> list[Document]:
    if not isinstance(record, Mapping):
        raise _RowError("not an object", f"the row is a JSON {_name(record)}")
    if options.domain_key is not None:
        domain = _domain(record, domain, options)
    if options.chat:
        return _chats(record, number, domain, options, from_table=from_table)
    weights = _weights(record, options)
    if options.pretokenized:
        return _pretokenized(record, number, domain, options, weights)
    values, size = [], 0
    for key in options.keys:
        texts, text_bytes = _texts(record, key)
        values.append(texts)
        size += text_bytes
    return [Document(number, values, domain, size, weights=weights)]


def _chats(
    record: Mapping, number: int, domain: str, options: RowOptions, *, from_table: bool
) -> list[Document]:
    [key] = options.keys
    messages, tools = lookup(record, key), lookup(record, options.tools_key)
    if messages is _MISSING:
        raise _missing(record, key)
    try:
        found = conversations_of(
            messages, None if tools is _MISSING else tools, from_table=from_table
        )
    except ConversationError as bad:
        raise _RowError(bad.kind, f"{key!r}: {bad.detail}") from None
    return [Document(number, [[chat]], domain, chat.text_bytes) for chat in found]


def _weights(record: Mapping, options: RowOptions) -> np.ndarray | None:
    if options.weight_key is None:
        return None
    value = lookup(record, options.weight_key)
    if value is _MISSING:
        raise _missing(record, options.weight_key)
    try:
        return checked_weights(value, dtype=options.weight_dtype)
    except WeightError as bad:
        raise _RowError("not a weight", f"{options.weight_key!r} {bad}") from None


def _texts(record: Mapping, key: str) -> tuple[list[str], int]:
    """The texts of a key, and their bytes in UTF-8."""
    value = lookup(record, key)
    if value is _MISSING:
        raise _missing(record, key)
    texts, size = list(value) if isinstance(value, list) else [value], 0
    for number, text in enumerate(texts):
        if isinstance(text, bytes):  # a binary column of a table
            text = texts[number] = _text_file(text)
        if not isinstance(text, str):
            raise _RowError("not a string", f"{key!r} is a JSON {_name(text)}: {str(text)[:60]}")
        size += len(text) if text.isascii() else _encoded_size(text, key)
    return texts, size


def _encoded_size(text: str, key: str) -> int:
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise _RowError(
            "lone surrogate",
            f"{key!r} has {text[error.start]!r} at character {error.start}, no Unicode text",
        ) from None


def _domain(record: Mapping, default: str, options: RowOptions) -> str:
    assert options.domain_key is not None
    value = lookup(record, options.domain_key)
    if isinstance(value, bytes):  # a binary column of a table
        value = _text_file(value)
    if isinstance(value, str) and value:
        _encoded_size(value, options.domain_key)  # a lone surrogate is no name
        return value
    if options.domain_fallback:
        return default
    what = "is missing" if value is _MISSING else f"is {value!r}, no name"
    raise _RowError("no domain", f"{options.domain_key!r} {what}; --domain NAME gives a fallback")


def lookup(record: Mapping, key: str) -> Any:
    """The value of a key, or of a dotted path through nested objects."""
    if key in record:
        return record[key]
    value: Any = record
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _pretokenized(
    record: Mapping, number: int, domain: str, options: RowOptions, weights: np.ndarray | None
) -> list[Document]:
    [key] = options.keys
    value = lookup(record, key)
    if value is _MISSING:
        raise _missing(record, key)
    try:
        parts = split_spans(value, record.get("source"), vocab_size=options.vocab_size)
    except SpanError as bad:
        raise _RowError("not token ids", f"{key!r} {bad}") from None
    documents = [Document(number, [[ids]], name or domain) for ids, name in parts]
    if weights is not None:
        try:
            require_length(weights, [sum(len(ids) for ids, _ in parts)])
        except WeightError as bad:
            raise _RowError("not a weight", f"{options.weight_key!r} {bad}") from None
        at = 0
        for document, (ids, _) in zip(documents, parts, strict=True):
            document.weights = weights if weights.ndim == 0 else weights[at : at + len(ids)]
            at += len(ids)
    return documents


def _missing(record: Mapping, key: str) -> _RowError:
    present = ", ".join(map(repr, record)) or "no keys"
    return _RowError("missing key", f"no {key!r} among {present[:200]}")


def _shown(value: Any) -> bytes | None:
    """A row of a table as the side file shows it: JSON, in which bytes are what they are."""
    if value is _MISSING:
        return None
    text = json.dumps(value, default=_plain, ensure_ascii=False)
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(value, default=_plain).encode()


def _plain(value: Any) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def _name(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
