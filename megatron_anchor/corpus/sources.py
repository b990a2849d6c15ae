"""From the command line's inputs to a list of files, and from that to the spans of a shard."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_anchor.corpus.file_kinds import SUFFIXES, format_of, never_documents
from megatron_anchor.corpus.folders import (
    UNKNOWN,
    Contents,
    contents_of,
    described,
    is_saved_dataset,
    outside_datasets,
)
from megatron_anchor.errors import UserError

FORMATS = ("jsonl", "json", "parquet", "txt")
"""Of files; folders of saved datasets and hf:// names tell themselves."""
_DEFAULT_DOMAIN = "default"


@dataclass(frozen=True)
class Source:
    """One input file (or saved dataset, or hub dataset)."""

    path: str
    format: str
    compression: str | None
    size: int
    """Bytes on disk; 0 where unknown (hub)."""
    mtime_ns: int
    domain: str | None

    @property
    def identity(self) -> dict[str, object]:
        """What must not change between a run and its resumption."""
        return asdict(self)


@dataclass(frozen=True)
class Span:
    """The part of a source that a shard reads: bytes of a plain `jsonl`, rows of a table.

    `end` None means to the end; other formats are read whole.
    """

    source: int
    start: int = 0
    end: int | None = None


@dataclass(frozen=True)
class Inputs:
    """What is read, in order, and what lies beside it and is not read, with the reason."""

    sources: list[Source]
    passed_over: dict[str, str]


def resolve(
    inputs: Sequence[str],
    *,
    domains: Sequence[str] = (),
    input_format: str | None = None,
    hf_split: str = "train",
) -> Inputs:
    """All sources named by paths, patterns and folders, in the order given (found ones by name).

    Raises:
        UserError: for what is not there, holds no documents, or is named twice.
    """
    if len(domains) not in (0, 1, len(inputs)):
        raise UserError(
            f"--domain has {len(domains)} names for {len(inputs)} --input arguments; give one for "
            "all, or one for each"
        )
    sources: list[Source] = []
    passed_over: dict[str, str] = {}
    for number, text in enumerate(inputs):
        domain = domains[min(number, len(domains) - 1)] if domains else None
        found = _expand(text, hf_split=hf_split, input_format=input_format)
        passed_over |= found.passed_over
        sources += [
            _source(path, domain=domain, input_format=input_format) for path in found.inputs
        ]
    _refuse_doubled(sources)
    read = {source.path for source in sources}  # by another --input, perhaps
    return Inputs(sources, {path: why for path, why in passed_over.items() if path not in read})


def _refuse_doubled(sources: Sequence[Source]) -> None:
    seen: dict[str, str] = {}
    for source in sources:
        real = source.path if source.format == "hub" else os.path.realpath(source.path)
        if real in seen:
            others = f" and as {seen[real]}" if seen[real] != source.path else ""
            raise UserError(
                f"--input: {source.path} is given twice{others}, so its rows would be doubled; "
                "name every file once (a folder or a pattern may hold it already)"
            )
        seen[real] = source.path


def _expand(text: str, *, hf_split: str, input_format: str | None) -> Contents:
    path = Path(text)
    if text.startswith("hf://"):
        return Contents([text])
    if path.is_dir():
        found = contents_of(path, split=hf_split)
    elif path.exists() and not path.is_file():
        raise UserError(
            f"--input {text} is a pipe or a device, which cannot be read again where a job goes "
            "on: write its rows to a file first"
        )
    elif path.exists():
        why = never_documents(path)
        if why is not None:
            raise UserError(
                f"--input {text} {_be(why)}, so it holds no documents; leave it out, name its "
                "folder (which passes such files over), or rename it if it does hold some"
            )
        return Contents([text])
    else:
        found = _matching(text, input_format=input_format)
    if not found.inputs:
        kinds = f"{', '.join(SUFFIXES)}, also .gz and .zst"
        there = "; ".join(described(found.passed_over)) or "it is empty"
        raise UserError(
            f"--input {text}: there is no file of a known kind ({kinds}) and no folder of "
            f"Dataset.save_to_disk; {there}"
        )
    return found


def _be(why: str) -> str:
    return why if why.startswith(("belongs", "was")) else f"is {why}"


def _matching(pattern: str, *, input_format: str | None) -> Contents:
    paths = sorted(glob.glob(pattern, recursive=True))
    if not paths:
        raise UserError(
            f"--input {pattern}: no such file, and no file matches it as a pattern (a dataset of "
            "the Hugging Face hub is written hf://owner/name)"
        )
    found = outside_datasets(paths)
    if input_format is not None:  # it tells what the names do not
        more = [path for path, why in found.passed_over.items() if why == UNKNOWN]
        found.inputs = sorted([*found.inputs, *more])
        for path in more:
            del found.passed_over[path]
    return found


def _source(text: str, *, domain: str | None, input_format: str | None) -> Source:
    if text.startswith("hf://"):
        return Source(text, "hub", None, 0, 0, domain)
    path = Path(text)
    if is_saved_dataset(path):
        files = [p.stat() for p in path.rglob("*")]
        newest = max((stat.st_mtime_ns for stat in files), default=0)
        return Source(text, "dataset", None, sum(s.st_size for s in files), newest, domain)
    found, compression = format_of(path) or (None, None)
    chosen = input_format or found
    if chosen is None:
        raise UserError(
            f"--input {text}: unknown kind of file; rename it to one of {', '.join(SUFFIXES)} "
            "(also .gz, .zst), or name the kind with --input-format"
        )
    if chosen not in FORMATS:
        raise UserError(f"--input-format {chosen}: expected one of {', '.join(FORMATS)}")
    if compression and chosen in ("parquet", "txt"):
        raise UserError(f"--input {text}: compressed .{chosen} is not supported; decompress it")
    stat = path.stat()
    return Source(text, chosen, compression, stat.st_size, stat.st_mtime_ns, domain)


def parse_shard(text: str | None) -> tuple[int, int]:
    """`i/n` (i from 0 to n - 1) -> (i, n)."""
    if text is None:
        return 0, 1
    left, _, right = text.partition("/")
    if left.isdigit() and right.isdigit() and int(left) < int(right):
        return int(left), int(right)
    raise UserError(f"--shard {text}: expected i/n with i from 0 to n - 1, as in 0/8")


def plan(
    sources: Sequence[Source], *, shard: tuple[int, int] = (0, 1), rows: Sequence[int | None] = ()
) -> list[Span]:
    """The spans of shard i of n: equal shares of the bytes, in order, none twice, none left out.

    Plain `jsonl` is cut at line ends, tables at rows (`rows` holds their row counts); any other
    file goes whole to the shard in which it begins.
    """
    index, count = shard
    if count > 1 and any(source.format == "hub" for source in sources):
        raise UserError("--shard cannot cut a hub stream; download the dataset first")
    total = sum(max(source.size, 1) for source in sources)
    low, high = total * index // count, total * (index + 1) // count
    spans, base = [], 0
    for number, source in enumerate(sources):
        size = max(source.size, 1)
        first, last = max(low - base, 0), min(high - base, size)
        if count == 1:
            spans.append(Span(number))
        elif source.format == "jsonl" and source.compression is None and source.size:
            if first < last:
                spans.append(Span(number, first, last))
        elif rows and (held := rows[number]) is not None:
            begin, end = held * first // size, held * last // size
            if first < last and begin < end:
                spans.append(Span(number, begin, end))
        elif low <= base < high:
            spans.append(Span(number))
        base += size
    return spans


def domain_of(source: Source) -> str:
    """The domain of rows that name none themselves."""
    return source.domain or _DEFAULT_DOMAIN


def count_lines_before(source: Source, span: Span) -> int:
    """Lines of a plain `jsonl` before the span, for messages; 0 for other formats."""
    if source.format != "jsonl" or source.compression or not span.start:
        return 0
    lines, left = 0, span.start - 1
    with open(source.path, "rb") as stream:
        while left and (block := stream.read(min(left, 1 << 22))):
            lines += block.count(b"\n")
            left -= len(block)
    return lines + 1  # the line that holds the last byte before the span is not of the span
