"""Blocks of whole lines: nothing lost, nothing doubled, whatever the cuts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_anchor.corpus.json_arrays import Flaw, array_elements
from megatron_anchor.corpus.readers import ReadOptions, read_span
from megatron_anchor.corpus.sources import Source, Span, count_lines_before, plan
from megatron_anchor.corpus.streams import DamagedError, line_blocks, pieces

DATA = st.lists(
    st.one_of(st.just(b"\n"), st.binary(max_size=9), st.just(b"xxxxxxxxxxxxxxxxxxxxxxxx")),
    max_size=30,
).map(b"".join)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """`data` in pieces of the given sizes, again and again."""
    found, at, turn = [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        found.append(data[at : at + size])
        at, turn = at + size, turn + 1
    return found


@given(DATA, st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(1, 40))
@settings(deadline=None)
def test_blocks_are_whole_lines_and_together_the_stream(data, sizes, size):
    blocks = list(line_blocks(cut(data, sizes), offset=0, end=None, size=size, longest=1000))
    assert b"".join(block.data for block in blocks) == data
    assert all(block.data.endswith(b"\n") for block in blocks[:-1])
    at = 0
    for block in blocks:
        assert block.offset == at
        at = block.end
    lines = [line for line in data.splitlines(keepends=True)] if data.isascii() else [b""]
    longest = max(map(len, lines), default=0)
    if data.isascii() and b"\r" not in data and b"\x0b" not in data and b"\x0c" not in data:
        assert all(len(block.data) <= max(size, longest) for block in blocks[:-1])


@given(DATA, st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(1, 20))
@settings(deadline=None)
def test_a_line_too_long_is_passed_over_whole_and_alone(data, sizes, longest):
    """Lines up to `longest` always come; those passed over are over it; offsets have no gap."""
    blocks = list(line_blocks(cut(data, sizes), offset=0, end=None, size=8, longest=longest))
    assert [block.offset for block in blocks] == [0, *(b.end for b in blocks)][: len(blocks)]
    assert (blocks[-1].end if blocks else 0) == len(data)
    for block in blocks:
        original = data[block.offset : block.end]
        if block.too_long:
            assert original.count(b"\n") <= 1
            assert len(original) > longest
        else:
            assert block.data == original


@given(DATA, st.integers(1, 9), st.integers(1, 30))
@settings(deadline=None)
def test_shards_partition_the_lines(tmp_path_factory, data, count, size):
    path = tmp_path_factory.getbasetemp() / "shards.jsonl"
    path.write_bytes(data)
    source = Source(str(path), "jsonl", None, len(data), 0, None)
    found, options = b"", ReadOptions(chunk_bytes=size)
    for shard in range(count):
        for span in plan([source], shard=(shard, count)):
            chunks = list(read_span([source], span, options, offset=0, row=0, domain=""))
            if chunks:
                assert data[: len(found)].count(b"\n") == count_lines_before(source, span)
            found += b"".join(chunk.payload for chunk in chunks)
    assert found == data


def test_gzip_members_and_padding_follow_one_another(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"one\n") + gzip.compress(b"two\n") + b"\x00" * 9)
    assert b"".join(pieces(str(path), compression="gz")) == b"one\ntwo\n"
    assert b"".join(pieces(str(path), compression="gz", start=5)) == b"wo\n"


@pytest.mark.parametrize("compression", ["gz", "zst"])
def test_a_stream_cut_anywhere_gives_its_whole_lines_and_says_so(tmp_path, compression):
    text = b"".join(b"line %d\n" % i for i in range(400))
    if compression == "gz":
        data = gzip.compress(text)
    else:
        data = pytest.importorskip("zstandard").ZstdCompressor().compress(text)
    path = tmp_path / f"x.{compression}"
    for keep in range(1, len(data), 7):
        path.write_bytes(data[:keep])
        stream = pieces(str(path), compression=compression)
        blocks = line_blocks(stream, offset=0, end=None, size=64, longest=999)
        found = []
        with pytest.raises(DamagedError, match="ends early"):
            found.extend(block.data for block in blocks)
        found = b"".join(found)
        assert text.startswith(found)
        assert found.endswith(b"\n") or not found


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


def elements(data: bytes, *, size: int = 1 << 20, longest: int = 1 << 20) -> list[bytes | Flaw]:
    return list(array_elements(iter(cut(data, [size])), longest=longest))


@given(st.lists(_VALUES, max_size=8), st.sampled_from([None, 1, "\t"]), st.integers(1, 40))
@settings(deadline=None, max_examples=30)
def test_array_elements_are_what_json_finds(values, indent, size):
    data = json.dumps(values, indent=indent, ensure_ascii=False).encode()
    at = data.index(b"[") + 1  # the bracket comes with the first piece, as it does in files
    pieces = [data[:at], *cut(data[at:], [size])]
    found = list(array_elements(iter(pieces), longest=1 << 20))
    assert [json.loads(element) for element in found] == values


@given(st.lists(_VALUES, max_size=6), st.integers(1, 40), st.integers(1, 30))
@settings(deadline=None, max_examples=30)
def test_an_element_too_long_is_passed_over_alone(values, longest, size):
    texts = [json.dumps(value).encode() for value in values]
    data = b"[" + b" , ".join(texts) + b"\n]"
    found = elements(data, size=size, longest=longest)
    assert len(found) == len(texts)
    for text, element in zip(texts, found, strict=True):
        if isinstance(element, Flaw):
            assert element.kind == "row too long"
            assert len(text) + 2 > longest, "white space before a comma counts"
            assert text.startswith(element.raw)
        else:
            assert element == text


@given(st.lists(_VALUES, min_size=1, max_size=5), st.data())
@settings(deadline=None, max_examples=30)
def test_an_array_cut_anywhere_gives_the_elements_before_and_one_flaw(values, data):
    texts = [json.dumps(value).encode() for value in values]
    whole = b"[" + b",".join(texts) + b"]"
    keep = data.draw(st.integers(1, len(whole) - 1))
    *before, last = elements(whole[:keep])
    assert isinstance(last, Flaw)
    assert last.kind == "file cut short"
    shown = b",".join([*before, *([last.raw] if last.raw else [])])
    left = whole[:keep].rstrip(b" ")  # of which a comma between elements is in none of them
    assert b"[" + shown in (left, left.removesuffix(b","))


@pytest.mark.parametrize("rest", [b"\n[{}]", b'{"text": "b"}', b" trailing", b"]", b","])
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_what_follows_an_array_is_one_flaw_that_shows_it(rest, size):
    data = b'[{"text": "a"}]' + rest + b"\n"
    first, flaw = elements(data, size=size)
    assert first == b'{"text": "a"}'
    assert (flaw.kind, flaw.raw) == ("data after the array", rest.strip())
    assert elements(b'[{"text": "a"}] \n\t\n', size=size) == [first]


def test_an_element_with_damage_inside_leaves_the_others_alone():
    data = b'[{"a": oops}, {"b": "x"}}, , [1, {"c": "]"}], 5,\n]'
    expected = [b'{"a": oops}', b'{"b": "x"}}', b"", b'[1, {"c": "]"}]', b"5"]
    assert elements(data) == elements(data, size=1) == expected


def test_an_array_far_larger_than_a_piece_is_read_once():
    """Each byte is looked at once: a long element is not scanned again with every piece."""
    taken = 0

    def stream():
        nonlocal taken
        yield b'[{"text": "'
        for _ in range(300):
            taken += 1
            yield b"x" * (1 << 18)
        yield b'"}, {"text": "b"}]'

    long, after = array_elements(stream(), longest=1 << 20)
    assert (long.kind, long.raw[:10], after) == ("row too long", b'{"text": "', b'{"text": "b"}')
    assert (taken, len(long.raw)) == (300, 1 << 16)


def test_spans_of_tables_and_whole_files_are_planned_once_each():
    def source(number: int, kind: str, size: int) -> Source:
        return Source(f"{number}.{kind}", kind, None, size, 0, None)

    sources = [source(0, "parquet", 1000), source(1, "txt", 10), source(2, "txt", 0)]
    sources += [source(3, "dataset", 77), source(4, "json", 5000)]
    rows = [90, None, None, 5, None]
    for count in (1, 2, 7, 100):
        spans = [s for i in range(count) for s in plan(sources, shard=(i, count), rows=rows)]
        for number, held in enumerate(rows):
            mine = [span for span in spans if span.source == number]
            if held is None or count == 1:
                assert mine == [Span(number)]
                continue
            places = [row for span in mine for row in range(span.start, span.end or 0)]
            assert places == list(range(held))


def test_paths_may_be_unusual(tmp_path: Path):
    from megatron_anchor.corpus.sources import resolve

    odd = tmp_path / "a [b] *.jsonl"
    odd.write_text("{}\n")
    assert [source.path for source in resolve([str(odd)]).sources] == [str(odd)]


def test_errors_travel_between_processes():
    import pickle

    from megatron_anchor.corpus import Rejection, RowError

    error = RowError(Rejection("f.jsonl", 3, "not a string", "x", b"\xff"))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.rejection) == (str(error), error.rejection)
