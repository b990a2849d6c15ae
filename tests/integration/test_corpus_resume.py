"""A killed run leaves nothing that looks finished, and its resumption is the same bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_anchor.corpus import PreprocessConfig, TokenizerConfig, preprocess
from megatron_anchor.corpus.output import CorpusOutput
from megatron_anchor.errors import UserError
from tests.corpus_fixtures import corpus_files, texts, write_jsonl

TOOL = Path(__file__).resolve().parents[2] / "tools" / "preprocess_data.py"
BYTES = TokenizerConfig(tokenizer_type="ByteLevelTokenizer")


def inputs(tmp_path: Path) -> list[Path]:
    """Every kind of place to go on from: bytes, rows of a table, elements, compressed bytes."""
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"text": t * 4, "d": f"d{i % 4}"} for i, t in enumerate(texts())]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    bad = '{"text": 7}\n' + lines + "not json\n"
    plain, packed, array = (tmp_path / n for n in ("a.jsonl", "b.jsonl.gz", "c.json"))
    plain.write_text(bad)
    packed.write_bytes(gzip.compress(bad.encode()))
    array.write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet", row_group_size=20)
    (tmp_path / "e.txt").write_text(texts()[0])
    return [plain, packed, array, tmp_path / "d.parquet", tmp_path / "e.txt"]


def command(tmp_path: Path, sources: list[Path], *more: str) -> list[str]:
    flags = ["--output-prefix", str(tmp_path / "out"), "--domain-key", "d", "--domain", "rest"]
    flags += ["--tokenizer-type", "ByteLevelTokenizer", "--append-eod", "--on-error", "skip"]
    flags += ["--chunk-kb", "16", "--checkpoint-seconds", "0", "--no-progress", "--workers", "1"]
    return [sys.executable, str(TOOL), "--input", *map(str, sources), *flags, *more]


def whole(tmp_path: Path, sources: list[Path]) -> dict[str, bytes]:
    preprocess(
        PreprocessConfig(
            input=tuple(map(str, sources)),
            output_prefix=str(tmp_path / "whole"),
            tokenizer=BYTES,
            domain_key="d",
            domain=("rest",),
            append_eod=True,
            on_error="skip",
            workers=1,
            progress=False,
        )
    )
    return corpus_files(tmp_path / "whole")


def test_kill_9_at_random_moments_then_resume_gives_the_same_bytes(tmp_path):
    sources = inputs(tmp_path)
    expected = whole(tmp_path, sources)
    chance, kills, resumed = random.Random(5), 0, 0
    process = None
    for attempt in range(40):
        more = ["--resume"] if (tmp_path / "out.partial").exists() else []
        process = subprocess.Popen(command(tmp_path, sources, *more), stderr=subprocess.PIPE)
        state = tmp_path / "out.partial" / "state.json"
        before = state.stat().st_mtime_ns if state.exists() else 0
        deadline = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline:
            if state.exists() and state.stat().st_mtime_ns != before:
                break  # it writes now: the kill will hit work, not imports
            time.sleep(0.002)
        resumed += bool(more) and process.poll() is None
        time.sleep(chance.random() * 0.15)
        if attempt < 8:
            process.send_signal(signal.SIGKILL)
        process.communicate(timeout=180)
        if process.returncode == 0:
            break
        kills += 1
        found = corpus_files(tmp_path / "out")
        if any(name.endswith(".idx") for name in found):  # killed behind the last rename
            assert found == expected, "an index makes a corpus look finished"
    assert process is not None
    assert process.returncode == 0
    assert kills >= 3, "the run was never killed at work, so this test proved nothing"
    assert resumed >= 2
    assert corpus_files(tmp_path / "out") == expected
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("every", [1, 2, 5])
def test_resuming_after_any_chunk_gives_the_same_bytes(tmp_path, monkeypatch, every):
    """Stopped again and again, each time after a few more chunks."""
    sources = inputs(tmp_path)[:4] if every > 1 else inputs(tmp_path)[1:4:2]
    expected = whole(tmp_path, sources)
    append, count = CorpusOutput.append, 0

    def stop_soon(self, *arguments, **keywords):
        nonlocal count
        count += 1
        if count % (every + 1) == 0:
            raise KeyboardInterrupt
        append(self, *arguments, **keywords)

    config = PreprocessConfig(
        input=tuple(map(str, sources)),
        output_prefix=str(tmp_path / "out"),
        tokenizer=BYTES,
        domain_key="d",
        domain=("rest",),
        append_eod=True,
        on_error="skip",
        workers=1,
        progress=False,
        chunk_kb=64,
        checkpoint_seconds=0,
        resume=True,
    )
    monkeypatch.setattr(CorpusOutput, "append", stop_soon)
    for _ in range(500):
        try:
            preprocess(config)
            break
        except KeyboardInterrupt:
            continue
    assert count > 5
    assert corpus_files(tmp_path / "out") == expected


@pytest.mark.parametrize("renamed", range(7))
def test_a_run_killed_among_its_last_renames_finishes_when_resumed(tmp_path, monkeypatch, renamed):
    source = write_jsonl(tmp_path / "in.jsonl", texts())
    (tmp_path / "in.jsonl").write_text(source.read_text() + "bad\n")
    config = {
        "input": (str(source),),
        "tokenizer": BYTES,
        "on_error": "skip",
        "workers": 1,
        "progress": False,
    }
    preprocess(PreprocessConfig(output_prefix=str(tmp_path / "whole"), **config))
    replace, done = os.replace, 0

    def dies(source, target):
        nonlocal done
        if not str(target).startswith(str(tmp_path / "out.partial")):
            if done == renamed:
                raise KeyboardInterrupt
            done += 1
        replace(source, target)

    monkeypatch.setattr(os, "replace", dies)
    if renamed < 5:
        with pytest.raises(KeyboardInterrupt):
            preprocess(PreprocessConfig(output_prefix=str(tmp_path / "out"), **config))
        monkeypatch.setattr(os, "replace", replace)
        assert not (tmp_path / "out_text_document.idx").exists()
    preprocess(PreprocessConfig(output_prefix=str(tmp_path / "out"), resume=True, **config))
    assert corpus_files(tmp_path / "out") == corpus_files(tmp_path / "whole")


def _unfinished(tmp_path: Path, **config) -> dict:
    source = write_jsonl(tmp_path / "in.jsonl", [*texts(), 7])
    config = {
        "input": (str(source),),
        "output_prefix": str(tmp_path / "out"),
        "tokenizer": BYTES,
        "workers": 1,
        "progress": False,
        "chunk_kb": 8,
        **config,
    }
    with pytest.raises(UserError, match="not a string"):
        preprocess(PreprocessConfig(**config))
    return config


def test_a_stop_at_a_bad_row_goes_on_with_skip(tmp_path):
    config = _unfinished(tmp_path)
    assert (tmp_path / "out.partial" / "0.bin").stat().st_size > 0
    with pytest.raises(UserError, match=r"--resume to go on from there, or --overwrite"):
        preprocess(PreprocessConfig(**config))
    preprocess(PreprocessConfig(**{**config, "resume": True, "on_error": "skip"}))
    other = {**config, "output_prefix": str(tmp_path / "whole"), "on_error": "skip"}
    preprocess(PreprocessConfig(**other))
    assert corpus_files(tmp_path / "out") == corpus_files(tmp_path / "whole")


def _finished(tmp_path: Path) -> dict:
    source = write_jsonl(tmp_path / "in.jsonl", texts()[:4])
    config = {"input": (str(source),), "output_prefix": str(tmp_path / "out"), "tokenizer": BYTES}
    config |= {"workers": 1, "progress": False}
    preprocess(PreprocessConfig(**config))
    return config


def _grown(path: Path) -> None:
    with open(path, "a") as stream:
        stream.write('{"text": "more"}\n')


def _same_size(path: Path) -> None:
    path.write_text(path.read_text().replace("e", "a"))
    os.utime(path, ns=(later := time.time_ns() + 5_000_000, later))


CHANGES = [
    ({"append_eod": True}, None, "append_eod false -> true"),
    ({"tokenizer": TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9)}, None, "tokeni"),
    ({"domain": ("web",)}, None, "domain"),
    ({"max_row_mb": 7}, None, "max_row_mb 100 -> 7"),
    ({"shard": "0/1"}, None, 'shard null -> "0/1"'),
    ({}, _grown, r"in.jsonl:? size"),
    ({}, _same_size, r"in.jsonl(: written after| mtime_ns)"),
]


@pytest.mark.parametrize("state", [_unfinished, _finished])
@pytest.mark.parametrize(("settings", "edit", "named"), CHANGES, ids=range(len(CHANGES)))
def test_resume_refuses_what_changed_and_shows_only_that(tmp_path, state, settings, edit, named):
    config = state(tmp_path)
    before = corpus_files(tmp_path / "out")
    if edit:
        edit(tmp_path / "in.jsonl")
    with pytest.raises(UserError, match=f"made otherwise.*{named}") as caught:
        preprocess(PreprocessConfig(**{**config, "resume": True, **settings}))
    assert str(caught.value).count("->") <= 3, "what is the same is not listed"
    assert corpus_files(tmp_path / "out") == before


@pytest.mark.parametrize("state", [_unfinished, _finished])
def test_resume_refuses_other_inputs(tmp_path, state):
    config = state(tmp_path)
    more = write_jsonl(tmp_path / "more.jsonl", ["a"])
    for inputs, named in (
        ((*config["input"], str(more)), r"more.jsonl.*(new|after)"),
        ((str(more),), r"(in.jsonl|more.jsonl)"),
    ):
        with pytest.raises(UserError, match=f"made otherwise.*{named}"):
            preprocess(PreprocessConfig(**{**config, "resume": True, "input": inputs}))


def test_resume_refuses_other_keys_of_an_unfinished_run(tmp_path):
    config = _unfinished(tmp_path)
    with pytest.raises(UserError, match=r"json_keys \[\"text\"\] -> \[\"body\"\]"):
        preprocess(PreprocessConfig(**{**config, "resume": True, "json_keys": ("body",)}))


def test_resuming_a_finished_corpus_does_nothing_and_claims_no_speed(tmp_path, capsys):
    from megatron_anchor.corpus.cli_preprocess import print_summary

    config = _finished(tmp_path)
    before = corpus_files(tmp_path / "out")
    again = preprocess(PreprocessConfig(**{**config, "resume": True, "on_error": "skip"}))
    assert (again.processed_bytes, again.documents) == (0, [4])
    assert "nothing was done" in again.notes[0]
    print_summary(again)
    assert "MB/s" not in capsys.readouterr().out
    assert corpus_files(tmp_path / "out") == before


@pytest.mark.parametrize("ending", ["idx", "bin", "domains.npy", "manifest.json"])
def test_a_corpus_that_lost_a_file_is_not_taken_for_a_finished_one(tmp_path, ending):
    config = _finished(tmp_path)
    (tmp_path / f"out_text_document.{ending}").unlink()
    with pytest.raises(UserError, match=f"{ending} is missing.*--overwrite"):
        preprocess(PreprocessConfig(**{**config, "resume": True}))


@pytest.mark.parametrize("name", ["state.json", "run.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"{}", b'{"span": "x"}', None]
)
def test_a_damaged_checkpoint_is_told_and_not_used(tmp_path, name, content):
    config = _unfinished(tmp_path)
    path = tmp_path / "out.partial" / name
    if content is None:  # whole, but of a run with two keys
        value = json.loads(path.read_text()) if name == "state.json" else []
        if isinstance(value, dict):
            value["tokens"] = [1, 2]
        path.write_text(json.dumps(value))
    else:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"(state|run).json.*--overwrite|made otherwise"):
        preprocess(PreprocessConfig(**{**config, "resume": True}))
    with pytest.raises(UserError, match="not a string"):
        preprocess(PreprocessConfig(**{**config, "overwrite": True}))


def test_a_resumed_run_states_what_it_did_itself(tmp_path):
    config = _unfinished(tmp_path)
    done = preprocess(PreprocessConfig(**{**config, "resume": True, "on_error": "skip"}))
    assert 0 < done.processed_bytes < done.text_bytes


def test_a_stop_at_a_bad_row_says_how_to_go_on_from_what_is_kept(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [*texts(), 7])
    config = {"input": (str(source),), "tokenizer": BYTES, "workers": 1, "progress": False}
    with pytest.raises(UserError, match=r"--on-error skip --resume from .*out.partial"):
        preprocess(PreprocessConfig(**config, output_prefix=str(tmp_path / "out"), chunk_kb=8))
    source = write_jsonl(tmp_path / "first.jsonl", [7])
    config["input"] = (str(source),)
    with pytest.raises(UserError, match="run again with --on-error skip") as caught:
        preprocess(PreprocessConfig(**config, output_prefix=str(tmp_path / "none")))
    assert "--resume" not in str(caught.value)


def test_resume_refuses_streams_that_lost_data(tmp_path):
    config = _unfinished(tmp_path)
    os.truncate(tmp_path / "out.partial" / "0.bin", 10)
    with pytest.raises(UserError, match="the disk lost data"):
        preprocess(PreprocessConfig(**{**config, "resume": True}))
    shutil.rmtree(tmp_path / "out.partial")
    with pytest.raises(UserError, match="not a string"):
        preprocess(PreprocessConfig(**{**config, "resume": True}))
