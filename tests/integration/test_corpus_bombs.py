"""Small files that unpack to a great deal: rows come out one by one, or are refused, never held."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_anchor.corpus.readers import ReadOptions, read_span
from megatron_anchor.corpus.sources import Span, resolve
from megatron_anchor.corpus.streams import pieces
from megatron_anchor.corpus.table_parts import GrowsTooFarError, parts, require_text, row_sizes
from megatron_anchor.corpus.tables import open_table, records

ROOT = Path(__file__).resolve().parents[2]
MB = 1 << 20
BEFORE, AFTER = b'{"text": "before"}\n', b'{"text": "after"}\n'
_MEASURE = """\
import sys
from megatron_anchor.command_line import run
from megatron_anchor.corpus.cli_preprocess import main
code = run(main)
print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0], file=sys.stderr)
sys.exit(code)
"""


def measured(tmp_path: Path, source: Path) -> tuple[dict, int]:
    """The summary of a run over one input, and its peak of memory in MB."""
    command = [sys.executable, "-c", _MEASURE, "--input", str(source), "--output-prefix"]
    command += [str(tmp_path / "out"), "--tokenizer-type", "ByteLevelTokenizer"]
    command += ["--workers", "1", "--on-error", "skip", "--json", "--max-row-mb", "16"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), int(done.stderr.split()[-1]) >> 10


def zstd(path: Path, content: list[bytes]) -> Path:
    zstandard = pytest.importorskip("zstandard")
    with open(path, "wb") as stream, zstandard.ZstdCompressor().stream_writer(stream) as out:
        for part in content:
            out.write(part)
    return path


def gzipped(path: Path, content: list[bytes]) -> Path:
    with gzip.open(path, "wb") as out:
        for part in content:
            out.write(part)
    return path


@pytest.mark.parametrize(("make", "name"), [(zstd, "a.jsonl.zst"), (gzipped, "a.jsonl.gz")])
@pytest.mark.parametrize("kind", ["a line", "blank lines", "spaces"])
def test_a_compressed_file_is_read_in_pieces(tmp_path, make, name, kind):
    filling = {"a line": b"x", "blank lines": b"\n", "spaces": b" "}[kind] * MB
    source = make(tmp_path / name, [BEFORE, *[filling] * 400, b"\n", AFTER])
    assert source.stat().st_size < MB
    summary, peak = measured(tmp_path, source)
    assert summary["documents"] == [2]
    assert summary["rejected"] == ({} if kind == "blank lines" else {"row too long": 1})
    assert peak < 300, "400 MB were held"


@pytest.mark.parametrize(("make", "compression"), [(zstd, "zst"), (gzipped, "gz")])
@pytest.mark.parametrize("damaged", [False, True])
def test_no_piece_is_larger_than_a_few_megabytes(tmp_path, make, compression, damaged):
    source = make(tmp_path / "a", [bytes(MB)] * 300)
    if damaged:
        with open(source, "r+b") as stream:
            stream.seek(source.stat().st_size * 2 // 3)
            stream.write(os.urandom(64))
    sizes, failure = [], None
    try:
        sizes += map(len, pieces(str(source), compression=compression))
    except Exception as error:
        failure = error
    assert bool(failure) == damaged
    assert max(sizes, default=0) <= 32 * MB


def test_a_window_that_needs_too_much_memory_is_refused_by_name(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    from megatron_anchor.errors import UserError

    parameters = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
    path = tmp_path / "a.zst"
    with open(path, "wb") as stream:
        compressor = zstandard.ZstdCompressor(compression_params=parameters)
        with compressor.stream_writer(stream) as out:
            out.write(AFTER)
    with pytest.raises(UserError, match=r"window of 1024 MB \(zstd --long\)"):
        list(pieces(str(path), compression="zst"))


def dictionary(path: Path, values: list[str], indices: list[int]) -> Path:
    """A parquet file in which rows are numbers of a dictionary's values."""
    column = pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), pa.array(values))
    table = pa.table({"text": column})
    more = {"compression": "zstd", "store_schema": False, "dictionary_pagesize_limit": 1 << 30}
    pq.write_table(table, path, **more)
    return path


def test_a_long_value_behind_many_rows_is_not_spelled_out_at_once(tmp_path):
    long, just = "x" * (40 * MB), "y" * (8 * MB)
    source = dictionary(tmp_path / "a.parquet", ["a", long, just], [0, *[1] * 500, *[2] * 12, 0])
    assert source.stat().st_size < MB
    summary, peak = measured(tmp_path, source)
    assert summary["documents"] == [14]
    assert summary["rejected"] == {"row too long": 500}
    assert summary["tokens"] == [2 + 12 * len(just)]
    assert peak < 600, "500 rows of 40 MB, 12 of 8 MB"


def test_a_page_that_no_text_fills_is_refused_and_the_rows_before_it_are_read(tmp_path):
    path = tmp_path / "a.parquet"
    schema = pa.schema({"text": pa.string()})
    more = {"compression": "zstd", "use_dictionary": False, "write_statistics": False}
    with pq.ParquetWriter(path, schema, **more) as out:
        for text in ("before", "x" * (260 * MB), "after"):
            out.write_table(pa.table({"text": [text]}, schema=schema))
    summary, peak = measured(tmp_path, path)
    assert summary["documents"] == [1]
    assert summary["rejected"] == {"file grows too far": 1}
    assert peak < 300
    file = pq.ParquetFile(path)
    require_text(file, 0, ["text"])
    require_text(file, 1, ["other"])
    with pytest.raises(GrowsTooFarError, match="row group 1: column 'text' grows from"):
        require_text(file, 1, ["text"])


def test_rows_of_a_saved_dataset_are_cut_by_their_size(tmp_path):
    from datasets import Dataset

    texts = ["a", "b" * 3 * MB, "c" * 20 * MB, "d"] * 8
    Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved")
    [source] = resolve([str(tmp_path / "saved")]).sources
    options = ReadOptions(chunk_bytes=1 << 18, max_row_bytes=16 * MB)
    chunks = list(read_span([source], Span(0), options, offset=0, row=0, domain="d"))
    rows = [record["text"] for c in chunks if c.kind == "table" for record in records(c.payload)]
    assert rows == [text for text in texts if len(text) <= 16 * MB]
    rejected = [rejection.row for chunk in chunks for rejection in chunk.rejections]
    assert rejected == [n for n, text in enumerate(texts, 1) if len(text) > 16 * MB]
    for chunk in chunks:
        if chunk.payload is not None:
            assert chunk.payload.nbytes < 4 * MB
    assert [chunk.first_row for chunk in chunks] == [0, *(chunk.next_row for chunk in chunks[:-1])]


def test_rows_of_a_stream_from_the_hub_are_held_to_the_limit(tmp_path):
    (tmp_path / "hub").mkdir()
    texts = ["a", "b" * 3 * MB, "c", "d" * MB, "e"]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "hub" / "train.jsonl").write_text(lines)
    [source] = resolve([f"hf://{tmp_path / 'hub'}"]).sources
    options = ReadOptions(chunk_bytes=1 << 18, max_row_bytes=2 * MB)
    chunks = list(read_span([source], Span(0), options, offset=0, row=0, domain="d"))
    rows = [row["text"] for chunk in chunks if chunk.payload for row in chunk.payload]
    assert rows == ["a", "c", "d" * MB, "e"]
    assert [r.row for chunk in chunks for r in chunk.rejections] == [2]
    assert [chunk.first_row for chunk in chunks] == [0, *(chunk.next_row for chunk in chunks[:-1])]
    rest = list(read_span([source], Span(0), options, offset=2, row=2, domain="d"))
    assert [row["text"] for chunk in rest for row in chunk.payload] == rows[1:]


TYPES = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int32(), pa.string()),
    pa.list_(pa.string()),
    pa.large_list(pa.string()),
    pa.struct({"a": pa.string(), "b": pa.list_(pa.string())}),
    pa.map_(pa.string(), pa.string()),
    pa.int64(),
]


def _value(kind: pa.DataType, size: int):
    if pa.types.is_struct(kind):
        return {"a": "é" * size, "b": ["x" * size, None]}
    if pa.types.is_map(kind):
        return [("k" * size, "v"), ("", "w" * size)]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return ["x"] * size
    return size if kind == pa.int64() else "é" * size


def _bytes(value) -> int:
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    return 0 if value is None else 8


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("start", [0, 3])
def test_the_size_of_a_row_is_that_of_its_strings(kind, start):
    values = [_value(kind, n % 7) if n % 5 else None for n in range(20)]
    array = pa.array(values, kind) if kind != TYPES[3] else pa.array(values).dictionary_encode()
    table = pa.table({"a": pa.chunked_array([array, array])}).slice(start)
    expected = [_bytes(value) for value in [*values, *values][start:]]
    if kind == pa.int64():
        assert (row_sizes(table) > 0).all()
    else:
        np.testing.assert_array_equal(row_sizes(table), expected)


@given(
    st.lists(st.lists(st.integers(0, 30), max_size=8), max_size=6),
    st.integers(1, 40),
    st.integers(1, 30),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_parts_are_the_rows_in_order_and_bounded(sizes, most, longest, fails):
    def batches():
        for batch in sizes:
            yield pa.table({"t": pa.array(["x" * size for size in batch], pa.string())})
        if fails:
            raise OSError("damaged")

    found, failed = [], False
    rest = parts(batches(), most=most, longest=longest)
    try:
        for part in rest:
            found.append(part)
    except OSError:
        failed = True
    assert failed == fails
    rows = [size for batch in sizes for size in batch]
    assert [
        size
        for part in found
        for size in ([part.too_long] if part.table is None else row_sizes(part.table).tolist())
    ] == rows
    for part in found:
        if part.table is None:
            assert part.too_long > longest
        else:
            held = row_sizes(part.table)
            assert part.rows == len(held) > 0
            assert held.max() <= longest
            assert held.sum() <= most or len(held) == 1


def test_batches_are_small_where_a_dictionary_has_long_values(tmp_path):
    source = dictionary(tmp_path / "a.parquet", ["a", "x" * (8 * MB)], [0, 1] * 100)
    [found] = resolve([str(source)]).sources
    table = open_table(found, ReadOptions())
    batches = list(table.batches(0, table.rows, 1000))
    assert max(batch.num_rows for batch in batches) <= 8
    assert sum(batch.num_rows for batch in batches) == 200
    small = dictionary(tmp_path / "b.parquet", ["a", "b"], [0, 1] * 100)
    [found] = resolve([str(small)]).sources
    assert len(list(open_table(found, ReadOptions()).batches(0, 200, 1000))) == 1
