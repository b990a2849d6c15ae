"""Two jobs on one output: the second is told that the first is alive, and changes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_anchor.command_line import run as run_command
from megatron_anchor.corpus import (
    PreprocessConfig,
    TokenizerConfig,
    cli_merge,
    cli_preprocess,
    cli_upsample,
    locks,
    preprocess,
)
from megatron_anchor.corpus.locks import Lock, locked, working_folder
from megatron_anchor.errors import UserError
from tests.corpus_fixtures import corpus_files, texts, write_jsonl

TOOL = Path(__file__).resolve().parents[2] / "tools" / "preprocess_data.py"
BYTES = TokenizerConfig(tokenizer_type="ByteLevelTokenizer")


@pytest.fixture(autouse=True)
def short_wait(monkeypatch):
    monkeypatch.setattr(locks, "_WAIT_SECONDS", 0.3)


@pytest.fixture
def source(tmp_path) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", texts()[:20])


def finished(source: Path, prefix: Path) -> Path:
    config = {"input": (str(source),), "output_prefix": str(prefix), "tokenizer": BYTES}
    preprocess(PreprocessConfig(**config, workers=1, progress=False))
    return Path(f"{prefix}_text_document")


def preprocess_flags(source: Path, prefix: Path) -> list[str]:
    flags = ["--input", str(source), "--output-prefix", str(prefix), "--workers", "1"]
    return [*flags, "--tokenizer-type", "ByteLevelTokenizer", "--no-progress"]


@pytest.mark.parametrize("there", [False, True], ids=["new output", "finished output"])
@pytest.mark.parametrize("more", [(), ("--resume",), ("--overwrite",)], ids=str)
@pytest.mark.parametrize("tool", ["preprocess", "merge", "upsample"])
def test_every_tool_that_writes_tells_of_the_other_job_first(
    source, tmp_path, capsys, tool, more, there
):
    if more == ("--resume",) and tool != "preprocess":
        pytest.skip("only preprocess_data.py resumes")
    part = finished(source, tmp_path / "part")
    out = tmp_path / "out"
    command, flags, lock = {
        "preprocess": (
            cli_preprocess.main,
            preprocess_flags(source, out),
            tmp_path / "out.partial" / "lock",
        ),
        "merge": (
            cli_merge.main,
            ["--input", str(part), "--output-prefix", str(out), "--no-progress"],
            tmp_path / "out.merging" / "lock",
        ),
        "upsample": (
            cli_upsample.main,
            [str(part), "--output", f"{out}.npy"],
            tmp_path / "out.npy.lock",
        ),
    }[tool]
    if there:
        assert run_command(command, flags) == 0
    before = corpus_files(out)
    other = Lock(lock, output=out)
    work = lock.with_name("unfinished work")
    work.write_text("of the other job")
    try:
        assert run_command(command, [*flags, *more]) == 2
        told = capsys.readouterr().err
        assert f"another run is writing {out}" in told
        assert f"(process {os.getpid()} on " in told
        assert "--resume" not in told
        assert "--overwrite" not in told
        assert work.read_text() == "of the other job"
        assert {n: c for n, c in corpus_files(out).items() if not n.endswith(".lock")} == before
    finally:
        other.release()
    work.unlink()
    again = more if there or not more else ()
    expected = 2 if there and not more else 0
    assert run_command(command, [*flags, *again]) == expected
    assert [
        p.name
        for p in tmp_path.iterdir()
        if "lock" in p.name or p.suffix in (".partial", ".merging")
    ] == []


@pytest.mark.parametrize("more", [(), ("--resume",), ("--overwrite",)], ids=str)
def test_a_run_that_stands_still_is_alive(source, tmp_path, capsys, more):
    write_jsonl(source, texts() * 40)
    command = [sys.executable, str(TOOL), *preprocess_flags(source, tmp_path / "out")]
    command += ["--chunk-kb", "4", "--checkpoint-seconds", "0"]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        state, deadline = tmp_path / "out.partial" / "state.json", time.monotonic() + 120
        while not state.exists() and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        first.send_signal(signal.SIGSTOP)
        assert state.exists(), "the first run ended before it could be stopped"
        flags = [*preprocess_flags(source, tmp_path / "out"), *more]
        assert run_command(cli_preprocess.main, flags) == 2
        told = capsys.readouterr().err
        assert f"(process {first.pid} on " in told
        assert "--overwrite" not in told
    finally:
        first.send_signal(signal.SIGCONT)
        _, errors = first.communicate(timeout=180)
    assert first.returncode == 0, errors
    finished(source, tmp_path / "whole")
    ours = corpus_files(tmp_path / "out")
    assert ours["_text_document.bin"] == corpus_files(tmp_path / "whole")["_text_document.bin"]
    assert not (tmp_path / "out.partial").exists()


def test_a_killed_run_leaves_no_lock_behind(source, tmp_path):
    folder = tmp_path / "out.partial"
    folder.mkdir()
    (folder / "lock").write_text("process 7 on elsewhere")
    finished(source, tmp_path / "out")
    assert not folder.exists()


@pytest.mark.parametrize("removes", ["file", "folder"])
def test_one_at_a_time_holds_a_lock_that_is_removed_each_time(tmp_path, monkeypatch, removes):
    monkeypatch.setattr(locks, "_WAIT_SECONDS", 120.0)
    inside, most, failures = 0, 0, []

    def work():
        nonlocal inside, most
        try:
            for _ in range(8):
                if removes == "file":
                    held = locked(tmp_path / "a.lock", output="a")
                else:
                    held = working_folder(tmp_path / "a.merging", output="a")
                with held:
                    inside += 1
                    most = max(most, inside)
                    time.sleep(0.001)
                    inside -= 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert most == 1
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_told_as_such(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be made: Not a directory"):
        Lock(tmp_path / "file" / "x.partial" / "lock", output="x")
