"""Bad rows and bad runs: named at once, never lost, never half-written, never a hang."""

from __future__ import annotations

import base64
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_anchor.corpus import (
    IndexedCorpus,
    PreprocessConfig,
    RowError,
    TokenizerConfig,
    preprocess,
)
from megatron_anchor.errors import UserError
from tests.corpus_fixtures import corpus_files, texts, tokenizer_json, write_jsonl

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "preprocess_data.py"
BYTES = TokenizerConfig(tokenizer_type="ByteLevelTokenizer")

BAD_LINES = {
    "malformed JSON": b'{"text": "a"',
    "missing key": b'{"txt": "a"}',
    "not a string": b'{"text": 7}',
    "lone surrogate": b'{"text": "a\\ud800b"}',
    "invalid UTF-8": b'{"text": "a\xff"}',
    "not an object": b'["text"]',
    "malformed JSON, raw NUL": b'{"text": "a\x00"}',
    "malformed JSON, nested too deeply": b'{"text": ' + b"[" * 100_000,
    "not a string, null": b'{"text": null}',
    "not a string, list of numbers": b'{"text": ["a", 1]}',
    "malformed JSON, huge number": b'{"text": "a", "n": ' + b"9" * 5000 + b"}",
    "duplicate key": b'{"text": "first", "text": "second"}',
    "duplicate key, escaped": b'{"text": "first", "te\\u0078t": "second"}',
    "malformed JSON, NUL instead of a line": b"\x00",
}


def run(prefix: Path, *inputs: Path, **config):
    config = {"tokenizer": BYTES, "workers": 1, "progress": False, **config}
    return preprocess(
        PreprocessConfig(input=tuple(map(str, inputs)), output_prefix=str(prefix), **config)
    )


def no_result(prefix: Path) -> bool:
    """Whether nothing carries a final name."""
    return not [name for name in corpus_files(prefix) if name]


@pytest.mark.parametrize("workers", [1, 2])
def test_stop_names_file_line_and_reason_and_leaves_nothing_finished(tmp_path, workers):
    source = tmp_path / "in.jsonl"
    for name, line in BAD_LINES.items() if workers == 1 else list(BAD_LINES.items())[:1]:
        source.write_bytes(b'{"text": "good"}\n\n' * 40 + line + b'\n{"text": "after"}\n')
        began = time.monotonic()
        with pytest.raises(RowError) as caught:
            run(tmp_path / "out", source, workers=workers, chunk_kb=1, overwrite=True)
        assert time.monotonic() - began < 30
        message = str(caught.value)
        assert f"{source}:81: {name.split(',')[0]}" in message
        assert "--on-error skip" in message
        assert no_result(tmp_path / "out")


@pytest.mark.parametrize("workers", [1, 2])
def test_skip_writes_all_other_rows_and_lists_the_bad_ones(tmp_path, workers):
    source = tmp_path / "in.jsonl"
    lines = [b'{"text": "first"}']
    for i, line in enumerate(BAD_LINES.values()):
        lines += [line, b'{"text": "good %d"}' % i]
    source.write_bytes(b"\n".join(lines))
    summary = run(tmp_path / "out", source, on_error="skip", workers=workers, chunk_kb=1)
    count = len(BAD_LINES)
    assert sum(summary.rejected.values()) == count
    assert summary.rows_read == 2 * count + 1
    assert summary.documents == [count + 1]
    listed = [json.loads(row) for row in Path(summary.rejected_file).read_text().splitlines()]
    assert [row["row"] for row in listed] == list(range(2, 2 * count + 1, 2))
    for row, (name, line) in zip(listed, BAD_LINES.items(), strict=True):
        assert row["reason"].startswith(name.split(",")[0])
        raw = row["raw"].encode() if "raw" in row else base64.b64decode(row["raw_base64"])
        assert raw == line
    corpus = IndexedCorpus.open(tmp_path / "out_text_document")
    assert bytes(corpus.document(count).tolist()) == b"good %d" % (count - 1)


def test_empty_and_white_space_documents_and_escaped_nul_are_no_errors(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": ""}\n{"text": " \\n\\t"}\n{"text": "a\\u0000b"}\n{"text": []}\n')
    summary = run(tmp_path / "out", source, append_eod=True)
    assert (summary.rows_read, summary.documents, summary.empty_documents) == (4, [2], [2])
    corpus = IndexedCorpus.open(tmp_path / "out_text_document")
    assert [corpus.document(i).tolist() for i in range(2)] == [[32, 10, 9, 256], [97, 0, 98, 256]]


def test_an_empty_first_document_does_not_shift_the_others(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", ["", "a", "", "bc"])
    run(tmp_path / "out", source)
    corpus = IndexedCorpus.open(tmp_path / "out_text_document")
    assert [bytes(corpus.document(i).tolist()) for i in range(2)] == [b"a", b"bc"]


def test_a_line_of_200_mb_is_rejected_without_holding_it(tmp_path):
    source = tmp_path / "in.jsonl"
    with open(source, "wb") as stream:
        stream.write(b'{"text": "before"}\n{"text": "')
        for _ in range(200):
            stream.write(b"x" * (1 << 20))
        stream.write(b'"}\n{"text": "after"}\n')
    code = (
        "import sys\n"
        "from megatron_anchor.command_line import run\n"
        "from megatron_anchor.corpus.cli_preprocess import main\n"
        "code = run(main)\n"
        "peak = open('/proc/self/status').read().split('VmHWM:')[1].split()[0]\n"
        "print(peak, file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    command = [sys.executable, "-c", code, "--input", str(source), "--output-prefix"]
    command += [str(tmp_path / "out"), "--tokenizer-type", "ByteLevelTokenizer"]
    command += ["--workers", "1", "--on-error", "skip", "--json", "--max-row-mb", "16"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["documents"] == [2]
    assert summary["rejected"] == {"row too long": 1}
    assert int(done.stderr.split()[-1]) < 250_000, "peak memory in KB"


def test_the_row_limit_can_be_raised(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", ["y" * (3 << 20), "z"])
    with pytest.raises(RowError, match=r"in.jsonl:1: row too long.*--max-row-mb 2"):
        run(tmp_path / "out", source, max_row_mb=2)
    summary = run(tmp_path / "out", source, max_row_mb=4, overwrite=True)
    assert summary.tokens == [(3 << 20) + 1]


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_gzip_gives_its_good_rows_and_one_rejection(tmp_path, damage):
    rows = [{"text": f"row {i} " + os.urandom(30).hex()} for i in range(9000)]
    data = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    middle = len(data) // 2
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(
        data[:middle] if damage == "cut" else data[:middle] + b"\xff" * 64 + data[middle + 64 :]
    )
    with pytest.raises(RowError, match=r"in.jsonl.gz:\d+"):
        run(tmp_path / "out", source)
    summary = run(tmp_path / "out", source, on_error="skip", overwrite=True)
    corpus = IndexedCorpus.open(tmp_path / "out_text_document")
    found = [bytes(corpus.document(i).tolist()).decode() for i in range(len(corpus))]
    assert summary.rejected["file cut short" if damage == "cut" else "file damaged"] == 1
    if damage == "cut":
        assert found == [row["text"] for row in rows[: len(found)]]
    assert 1000 < len(found) < 9000
    assert summary.rows_read == len(found) + sum(summary.rejected.values())


ARRAYS = {
    '[{"text": "a"}, 5, {"text": oops}, {"text": "c"}]': ("ac", ["5", '{"text": oops}']),
    '[{"text": "a"}]\n[{"text": "b"}]\n': ("a", ['[{"text": "b"}]']),
    '[{"text": "a"}]{"text": "b"}': ("a", ['{"text": "b"}']),
    '[{"text": "a"}, {"text": "b': ("a", ['{"text": "b']),
    '[{"text": "a"}, {"text": "%s"}, {"text": "b"}]' % ("x" * (2 << 20)): ("ab", [None]),
    '[{"text": "a"} {"text": "b"}, {"text": "c"}]': ("c", ['{"text": "a"} {"text": "b"}']),
}


@pytest.mark.parametrize("content", ARRAYS, ids=range(len(ARRAYS)))
def test_every_part_of_a_json_array_is_a_document_or_a_listed_row(tmp_path, content):
    source, (good, bad) = tmp_path / "in.json", ARRAYS[content]
    source.write_text(content)
    summary = run(tmp_path / "out", source, on_error="skip", max_row_mb=1)
    corpus = IndexedCorpus.open(tmp_path / "out_text_document")
    assert bytes(corpus.tokens.tolist()).decode() == good
    listed = [json.loads(row) for row in Path(summary.rejected_file).read_text().splitlines()]
    for row, raw in zip(listed, bad, strict=True):
        assert (
            content.startswith(row["raw"], content.index('{"text": "x'))
            if raw is None
            else (row["raw"] == raw)
        )
        with pytest.raises(RowError):
            run(tmp_path / "again", source, max_row_mb=1, overwrite=True)


def test_json_values_one_after_another_are_told_to_be_json_lines(tmp_path):
    source = tmp_path / "in.json"
    source.write_text('{\n "text": "a"\n}\n{\n "text": "b"\n}\n')
    with pytest.raises(RowError, match=r"give each a line in a .jsonl file"):
        run(tmp_path / "out", source)


@pytest.mark.parametrize("compression", ["gz", "zst"])
@pytest.mark.parametrize("place", [0.6, -6])
def test_all_rows_that_were_whole_before_damage_are_kept(tmp_path, compression, place):
    """Also those in the block in which the damage lies; a damaged checksum loses no row at all."""
    texts = [f"row {i} " + os.urandom(30).hex() for i in range(6000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if compression == "gz":
        data = bytearray(gzip.compress(lines))
    else:
        zstandard = pytest.importorskip("zstandard")
        data = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(lines))
        place = -2 if place == -6 else place
    at = int(place * len(data)) if place > 0 else place
    data[at] ^= 0xFF
    source = tmp_path / f"in.jsonl.{compression}"
    source.write_bytes(data)
    # in the middle, gzip reads on for a while and gives wrong bytes before it notices
    remedy = "file damaged.*Put a whole copy in its place" if place < 0 else "in.jsonl"
    with pytest.raises(RowError, match=remedy):
        run(tmp_path / "out", source)
    summary = run(tmp_path / "out", source, on_error="skip", overwrite=True)
    whole = 1 if place < 0 else 0.55 if compression == "gz" else 0.4
    assert summary.rejected["file damaged"] == 1
    assert summary.documents[0] >= whole * 6000 - 1


def _table_of_bytes(column: str, kind, values: list[bytes]):
    """A column of strings that nobody checked."""
    import pyarrow as pa

    raw = pa.array(values, pa.binary())
    strings = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
    arrays = {
        "string": strings,
        "large_string": raw.cast(pa.large_binary()).view(pa.large_string()),
        "list": pa.ListArray.from_arrays(range(len(raw) + 1), strings),
        "struct": pa.StructArray.from_arrays([strings], ["text"]),
        "binary": raw,
    }
    return pa.table({column: arrays[kind]})


@pytest.mark.parametrize("kind", ["string", "large_string", "list", "struct", "binary"])
def test_invalid_utf8_in_a_table_is_one_bad_row_a_value_and_listed_as_it_is(tmp_path, kind):
    import pyarrow.parquet as pq

    values = [b"a", b"b\xffc", b"d", b"\xc3", "é".encode()]
    source = tmp_path / "in.parquet"
    pq.write_table(_table_of_bytes("text", kind, values), source)
    keys = ("text.text",) if kind == "struct" else ("text",)
    with pytest.raises(RowError, match=r"in.parquet:2: invalid UTF-8: byte 0xff at 1"):
        run(tmp_path / "out", source, json_keys=keys)
    summary = run(tmp_path / "out", source, json_keys=keys, on_error="skip", overwrite=True)
    assert (summary.rows_read, summary.rejected) == (5, {"invalid UTF-8": 2})
    corpus = IndexedCorpus.open(summary.prefixes[0])
    assert bytes(corpus.tokens.tolist()).decode() == "adé"
    listed = [json.loads(row) for row in Path(summary.rejected_file).read_text().splitlines()]
    for row, number in zip(listed, (1, 3), strict=True):
        assert row["row"] == number + 1
        assert b'"' + values[number] + b'"' in base64.b64decode(row["raw_base64"])


def test_a_table_without_the_domain_column_takes_the_given_name(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["b"], "d": ["web"]}), tmp_path / "b.parquet")
    sources = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    assert run(tmp_path / "out", *sources, domain_key="d", domain=("rest",)).domains == [
        "rest",
        "web",
    ]
    with pytest.raises(UserError, match="not 'd'"):
        run(tmp_path / "other", *sources, domain_key="d")


def test_a_pretokenized_table_needs_no_spans(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"input_ids": [[1, 2], [3]]}), tmp_path / "in.parquet")
    config = {"pretokenized": True, "json_keys": ("input_ids",)}
    assert run(tmp_path / "out", tmp_path / "in.parquet", **config).documents == [2]


def test_empty_files_are_no_error_among_others_and_an_error_alone(tmp_path):
    empty, full = tmp_path / "empty.jsonl", write_jsonl(tmp_path / "full.jsonl", ["a"])
    empty.touch()
    assert run(tmp_path / "out", empty, full).documents == [1]
    with pytest.raises(UserError, match="no document was written for 'text': 0 rows read"):
        run(tmp_path / "alone", empty)
    assert no_result(tmp_path / "alone")


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl.gz", "x.txt"])
def test_files_of_other_kinds_under_a_known_name_are_told(tmp_path, name):
    source = tmp_path / name
    source.write_bytes(b"\xff\xfe not what the name says\n")
    with pytest.raises(UserError, match=name):
        run(tmp_path / "out", source)
    assert no_result(tmp_path / "out")


def test_a_missing_column_names_the_present_ones(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"body": ["a"], "n": [1]}), tmp_path / "in.parquet")
    with pytest.raises(UserError, match=r"columns body, n, not 'text'.*--json-keys"):
        run(tmp_path / "out", tmp_path / "in.parquet")


def test_null_values_of_a_table_are_bad_rows(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a", None, "b"]}), tmp_path / "in.parquet")
    with pytest.raises(RowError, match=r"in.parquet:2: not a string"):
        run(tmp_path / "out", tmp_path / "in.parquet")
    summary = run(tmp_path / "out", tmp_path / "in.parquet", on_error="skip", overwrite=True)
    assert (summary.documents, summary.rows_read) == ([2], 3)


BAD_PACKED = [
    ({"input_ids": "abc"}, "no list"),
    ({"input_ids": [1, 2.5]}, "no list"),
    ({"input_ids": [1, True]}, "no list"),
    ({"input_ids": [1, 900]}, "vocabulary has 257"),
    ({"input_ids": [-1]}, "vocabulary has 257"),
    ({"input_ids": [1 << 70]}, "over 64 bits"),
    ({"input_ids": [1, 2], "source": 5}, "no list"),
    ({"input_ids": [1, 2], "source": [{"start": 0}]}, "without an 'end'"),
    ({"input_ids": [1, 2], "source": [{"start": 1, "end": 2}]}, "should follow"),
    ({"input_ids": [1, 2], "source": [{"start": 0, "end": 3}]}, "should follow"),
    ({"input_ids": [1, 2], "source": [{"start": 0, "end": 1}]}, "spans end at 1"),
    ({"ids": [1]}, "missing key"),
]


@pytest.mark.parametrize(("row", "message"), BAD_PACKED)
def test_pretokenized_rows_that_would_lose_tokens_are_rejected(tmp_path, row, message):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(row) + "\n")
    with pytest.raises(RowError, match=message):
        run(tmp_path / "out", source, pretokenized=True, json_keys=("input_ids",))


def test_a_text_that_the_tokenizer_cannot_take_is_a_bad_row(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", ["1 2", "seven", "3"])
    numbers = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10)
    with pytest.raises(RowError, match=r"in.jsonl:2: tokenizer failed.*seven"):
        run(tmp_path / "out", source, tokenizer=numbers)
    summary = run(tmp_path / "out", source, tokenizer=numbers, on_error="skip", overwrite=True)
    assert (summary.documents, summary.tokens) == ([2], [3])


def test_append_eod_without_an_eod_token_fails_before_anything_is_written(tmp_path):
    config = json.loads(tokenizer_json().read_text())
    config["added_tokens"] = [t for t in config["added_tokens"] if t["content"] != "</s>"]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(config))
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    tokenizer = TokenizerConfig(tokenizer_model=str(path))
    with pytest.raises(UserError, match=r"--append-eod.*--eod-token"):
        run(tmp_path / "out", source, tokenizer=tokenizer, append_eod=True)
    run(tmp_path / "out", source, tokenizer=replace(tokenizer, eod_id=5), append_eod=True)
    assert IndexedCorpus.open(tmp_path / "out_text_document").tokens[-1] == 5


def test_a_run_that_wrote_nothing_leaves_nothing_behind(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("bad\n")
    for config in ({}, {"json_keys": ("body",)}):
        with pytest.raises(RowError):
            run(tmp_path / "out", source, **config)
        assert not (tmp_path / "out.partial").exists()
    with pytest.raises(UserError, match=r"no document was written.*1 rejected, listed in"):
        run(tmp_path / "out", source, on_error="skip")
    assert list(corpus_files(tmp_path / "out")) == [".rejected.jsonl"]


def test_overwriting_keeps_the_old_corpus_until_the_new_one_is_finished(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    run(tmp_path / "out", source)
    before = corpus_files(tmp_path / "out")
    broken = write_jsonl(tmp_path / "broken.jsonl", [*texts(), 7])
    with pytest.raises(RowError):
        run(tmp_path / "out", broken, overwrite=True, chunk_kb=1)
    assert corpus_files(tmp_path / "out") == before
    run(tmp_path / "out", broken, overwrite=True, on_error="skip")
    assert len(IndexedCorpus.open(tmp_path / "out_text_document")) == len(texts())
    assert (tmp_path / "out.rejected.jsonl").exists()
    run(tmp_path / "out", source, overwrite=True)
    assert corpus_files(tmp_path / "out") == before


def test_output_that_exists_is_not_touched(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    run(tmp_path / "out", source)
    before = corpus_files(tmp_path / "out")
    with pytest.raises(UserError, match=r"exists.*--overwrite"):
        run(tmp_path / "out", write_jsonl(tmp_path / "other.jsonl", ["b"]))
    assert corpus_files(tmp_path / "out") == before
    assert "nothing was done" in run(tmp_path / "out", source, resume=True).notes[0]
    assert corpus_files(tmp_path / "out") == before


def test_a_full_disk_ends_the_run_and_resume_goes_on(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", texts() * 3)
    limited = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))\n"
        "from megatron_anchor.command_line import run\n"
        "from megatron_anchor.corpus.cli_preprocess import main\n"
        "sys.exit(run(main))\n"
    )
    arguments = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), "--workers"]
    arguments += ["1", "--tokenizer-type", "ByteLevelTokenizer", "--chunk-kb", "16"]
    command = [sys.executable, "-c", limited, *arguments, "--checkpoint-seconds", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=180)
    assert done.returncode == 2
    assert "cannot be written: File too large. Make room" in done.stderr
    assert no_result(tmp_path / "out")
    run(tmp_path / "out", source, resume=True)
    run(tmp_path / "whole", source)
    assert corpus_files(tmp_path / "out") == corpus_files(tmp_path / "whole")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_really_full_disk_is_told_as_such(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        source = write_jsonl(tmp_path / "in.jsonl", texts() * 3)
        with pytest.raises(UserError, match="No space left on device"):
            run(disk / "out", source)
        assert no_result(disk / "out")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_worker_that_dies_ends_the_run_with_its_cause(tmp_path, how):
    """Killed from outside while it works, as an out-of-memory killer does."""
    source = write_jsonl(tmp_path / "in.jsonl", texts() * 20)
    command = [sys.executable, str(TOOL), "--input", str(source), "--workers", "2"]
    command += ["--output-prefix", str(tmp_path / "out"), "--chunk-kb", "4", "--no-progress"]
    command += ["--tokenizer-model", str(tokenizer_json()), "--engine", "native"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    state = tmp_path / "out.partial" / "0.bin"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (state.exists() and state.stat().st_size):
        time.sleep(0.01)
    victims = [
        int(pid)
        for pid in children.read_text().split()
        if "resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    os.kill(victims[-1], how)
    killed = time.monotonic()
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 2
    assert f"signal {how.name}" in stderr
    assert "--resume" in stderr
    assert time.monotonic() - killed < 20
    assert no_result(tmp_path / "out")


def test_outputs_that_cannot_be_are_refused(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    config = PreprocessConfig(
        input=(str(source),), output_prefix=f"{tmp_path}/folder/", tokenizer=BYTES
    )
    with pytest.raises(UserError, match="is a folder"):
        preprocess(config)
    with pytest.raises(UserError, match="cannot be made"):
        run(source / "below", source)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"on_error": "ignore"}, "expected stop or skip"),
        ({"shard": "4/4"}, "--shard 4/4"),
        ({"shard": "x"}, "--shard x"),
        ({"json_keys": ("a/b",)}, "--json-keys"),
        ({"json_keys": ("a", "a")}, "--json-keys"),
        ({"json_keys": ("a", "b"), "pretokenized": True}, "single --json-keys"),
        ({"max_row_mb": 0}, "--max-row-mb 0"),
        ({"workers": -1}, "--workers -1"),
        ({"chunk_kb": -1}, "--chunk-kb -1"),
        ({"checkpoint_seconds": -1.0}, "--checkpoint-seconds -1"),
        ({"checkpoint_seconds": float("nan")}, "--checkpoint-seconds nan"),
        ({"shard": "-1/5"}, "--shard -1/5"),
        ({"pretokenized": True, "split_sentences": True}, "--split-sentences needs text"),
    ],
)
def test_wrong_settings_are_refused_at_the_start(tmp_path, config, message):
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    with pytest.raises(UserError, match=message):
        run(tmp_path / "out", source, **config)


@pytest.mark.parametrize("name", ["no/such/file.jsonl", "nothing*.jsonl", "in.docx", "."])
def test_inputs_that_are_not_there_are_named(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.docx").touch()
    with pytest.raises(UserError, match="--input"):
        run(tmp_path / "out", Path(name))


@pytest.mark.parametrize("how", ["twice", "dots", "link", "folder", "pattern"])
def test_a_file_given_twice_is_refused_however_it_is_written(tmp_path, how):
    folder = tmp_path / "data"
    folder.mkdir()
    source = write_jsonl(folder / "a.jsonl", ["a"])
    (tmp_path / "link.jsonl").symlink_to(source)
    again = {
        "twice": source,
        "dots": folder / ".." / "data" / "a.jsonl",
        "link": tmp_path / "link.jsonl",
        "folder": folder,
        "pattern": folder / "*.jsonl",
    }[how]
    for inputs in ((source, again), (again, source)):
        with pytest.raises(UserError, match=r"a.jsonl|link.jsonl.* given twice.*doubled"):
            run(tmp_path / "out", *inputs)
    assert run(tmp_path / "out", folder).documents == [1]


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        ({"keep_newlines": True}, "--keep-newlines"),
        ({"lang": "german"}, "--lang"),
        ({"punkt_path": "x"}, "--punkt-path"),
    ],
)
def test_flags_without_effect_are_told(tmp_path, config, flag):
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    notes = run(tmp_path / "out", source, **config).notes
    assert f"{flag} has no effect without --split-sentences" in notes
    assert not [n for n in run(tmp_path / "other", source).notes if "no effect" in n]


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_stopped_says_what_is_kept(tmp_path, how, code):
    source = write_jsonl(tmp_path / "in.jsonl", texts() * 400)
    command = [sys.executable, str(TOOL), "--input", str(source), "--workers", "1"]
    command += ["--output-prefix", str(tmp_path / "out"), "--chunk-kb", "4", "--no-progress"]
    command += ["--tokenizer-type", "ByteLevelTokenizer", "--checkpoint-seconds", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    state = tmp_path / "out.partial" / "state.json"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if state.exists() and json.loads(state.read_text())["rows_read"]:
            break
        time.sleep(0.005)
    process.send_signal(how)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert f"kept in {tmp_path / 'out.partial'}: go on with --resume" in stderr
    assert "Traceback" not in stderr
    assert no_result(tmp_path / "out")


_PIECES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [
            b"\n",
            b"\r\n",
            b"\x00",
            b"{",
            b'"}\n',
            b'{"text": "',
            b"\\ud800",
            b"[",
            b"]",
            b",",
            b"\xff",
        ]
    ),
    st.text(max_size=20).map(lambda text: json.dumps({"text": text}).encode() + b"\n"),
)


@given(st.lists(_PIECES, max_size=12).map(b"".join), st.sampled_from(["jsonl", "json", "txt"]))
@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_random_bytes_never_hang_and_never_become_documents_that_were_not_there(
    tmp_path, data, ending
):
    """Written + rejected + empty = read, and what is written is what a slow oracle finds."""
    source = tmp_path / f"in.{ending}"
    source.write_bytes(data)
    expected = _oracle(data, ending)
    config = {"on_error": "skip", "overwrite": True, "chunk_kb": 1}
    if not expected:
        with pytest.raises(UserError, match="no document was written"):
            run(tmp_path / "out", source, **config)
        return
    summary = run(tmp_path / "out", source, **config)
    corpus = IndexedCorpus.open(tmp_path / "out_text_document")
    written = [bytes(corpus.document(i).tolist()).decode() for i in range(len(corpus))]
    assert written == expected
    rejected, empty = sum(summary.rejected.values()), summary.empty_documents[0]
    assert len(written) + rejected + empty == summary.rows_read


def _oracle(data: bytes, ending: str) -> list[str]:
    """The documents in `data`, by the plainest code."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    if ending == "txt":
        rows = [{"text": _or_none(data.decode)}]
    elif ending == "json" and data.lstrip().startswith(b"["):
        rows = _array_rows(data)
    elif ending == "json" and data.lstrip().split(b"\n")[0].rstrip().endswith((b"{", b"[", b",")):
        rows = [_or_none(lambda: json.loads(data.decode()))]
    else:
        lines = [line for line in data.split(b"\n") if line.strip()]
        rows = [_or_none(lambda line=line: json.loads(line.decode())) for line in lines]
    found = [row.get("text") for row in rows if isinstance(row, dict)]
    texts = ["".join(t) if _is_strings(t) else t for t in found]
    return [t for t in texts if isinstance(t, str) and t and _or_none(t.encode) is not None]


def _is_strings(value) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _array_rows(data: bytes) -> list:
    """The elements of an array, character after character."""
    parts, depth, in_string, escaped = [b""], 0, False, False
    for byte in data.lstrip()[1:]:
        char = bytes([byte])
        if in_string:
            escaped, in_string = char == b"\\" and not escaped, escaped or char != b'"'
        elif char == b'"':
            in_string = True
        elif char in (b"{", b"["):
            depth += 1
        elif char == b"]" and not depth:
            break
        elif char in (b"}", b"]"):
            depth = max(0, depth - 1)
        elif char == b"," and not depth:
            parts.append(b"")
            continue
        parts[-1] += char
    return [_or_none(lambda part=part: json.loads(part.decode())) for part in parts]


def _or_none(function):
    try:
        return function()
    except (ValueError, RecursionError):
        return None


@pytest.mark.parametrize("how", ["quick", "slow"])
@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"text": "a"}, "text"),
        ({"meta": {"name": "b"}, "text": "a"}, "name"),
        ({"meta": {"name": "b"}, "text": "a"}, "meta"),
    ],
)
def test_a_key_given_twice_is_a_bad_row_wherever_it_stands(tmp_path, monkeypatch, how, row, key):
    if how == "slow":
        monkeypatch.setattr("megatron_anchor.corpus.rows._quick", None)
    good = json.dumps(row)
    doubled = good.replace(f'"{key}":', f'"{key}": "lost", "{key}":')
    path = tmp_path / "a.jsonl"
    path.write_text(f"{good}\n{doubled}\n")
    with pytest.raises(RowError, match=f"duplicate key.*{key!r} twice"):
        run(tmp_path / "out", path, domain_key="meta.name" if "meta" in row else None)


def test_what_only_looks_like_a_key_given_twice_is_kept(tmp_path):
    rows = [{"text": 'say "text": now', "n": {"id": 1}}, {"text": "<", "other": "text"}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(r).replace("<", "\\u003c") + "\n" for r in rows))
    run(tmp_path / "out", path)
    assert len(IndexedCorpus.open(f"{tmp_path}/out_text_document")) == 2


def test_a_table_with_a_column_twice_is_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table([pa.array(["first"]), pa.array(["second"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="has 2 columns 'text', of which one would be lost"):
        run(tmp_path / "out", tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("raw", "hint"),
    [
        ('{"text": "ä"}\n'.encode("utf-16"), "looks like UTF-16"),
        ('{"text": "a"}\n'.encode("utf-16-le"), "looks like UTF-16"),
        (gzip.compress(b'{"text": "a"}\n'), "name end with .gz"),
        (b'{"text": "a", "n": ' + b"9" * 5000 + b', "text": "b"}\n', "more than 4300 digits"),
    ],
)
def test_another_encoding_is_told(tmp_path, raw, hint):
    (tmp_path / "a.jsonl").write_bytes(raw)
    with pytest.raises(RowError, match=hint):
        run(tmp_path / "out", tmp_path / "a.jsonl")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match="is a pipe or a device"):
        run(tmp_path / "out", tmp_path / "a.jsonl")


def test_an_arrow_file_is_called_one(tmp_path):
    (tmp_path / "a.arrow").write_bytes(b"ARROW1")
    with pytest.raises(UserError, match="is a table of Arrow, read only within the folder"):
        run(tmp_path / "out", tmp_path / "a.arrow")
