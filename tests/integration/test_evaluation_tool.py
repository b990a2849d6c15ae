"""The evaluation as a user runs it: files, averages, resumption, exports, messages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_anchor.checkpoint.to_megatron import convert_to_megatron
from megatron_anchor.command_line import run as run_command
from megatron_anchor.evaluation.cli import main
from tests.evaluation_models import tiny_model

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "evaluate_long_context.py"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two tiny models, and a Megatron checkpoint of the second."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab"):
        tiny_model(folder / name, seed=seed, layers=1)
    convert_to_megatron(folder / "b", folder / "run", progress=False)
    return folder


def run(capsys, *words, expect=0):
    """Run in this process; give what was printed."""
    code = run_command(main, [*map(str, words), "--no-progress", "--device", "cpu"])
    said = capsys.readouterr()
    assert code == expect, said.out + said.err
    return said.out if expect == 0 else said.err


def scores(folder):
    """The records of every checkpoint, in order of their keys."""
    found = {}
    for path in sorted((folder / "samples").glob("*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()[1:]]
        found[path.stem] = sorted(records, key=lambda r: json.dumps(r))
    return found


SMALL = ("--tasks", "vt,niah_single_1", "--seq-lengths", "1100", "1300", "--num-samples", "2")


@pytest.fixture(scope="module")
def done(models, tmp_path_factory):
    """One evaluation of two groups, one of them of two checkpoints, one from Megatron."""
    out = tmp_path_factory.mktemp("out")
    (out / "text.txt").write_text("It was a dark and stormy night. " * 90)
    words = ["--checkpoints", f"full={models}/a", f"anchor={models}/run", f"anchor={models}/b"]
    words += [*SMALL, "--output-dir", f"{out}/both", "--batch-size", "2", "--depths", "0", "100"]
    words += ["--perplexity", "--text", f"{out}/*.txt", "--no-progress"]
    assert main(words) == 0
    return out


def test_tables_json_and_pictures_are_written(done):
    out = done / "both"
    names = {path.name for path in out.iterdir()}
    assert names >= {"results.json", "results.md", "heatmap.png", "curves.png", "depths.png"}
    assert "perplexity.png" in names
    groups = json.loads((out / "results.json").read_text())["groups"]
    assert list(groups) == ["full", "anchor"]
    assert [len(group["checkpoints"]) for group in groups.values()] == [1, 2]
    told = (out / "results.md").read_text()
    for words in (
        "### full against anchor",
        "anchor - full",
        "depth of the needle",
        "1024 to 2047",
    ):
        assert words in told
    assert not list(out.rglob("*partial*"))
    assert not list(out.rglob("*.tmp"))


def test_an_exported_megatron_checkpoint_scores_as_the_model_it_was_made_from(done):
    found = scores(done / "both")
    assert len(found) == 3
    [exported] = [name for name in found if "run" in name]
    assert found[exported] == found["b"] != found["a"]
    group = json.loads((done / "both/results.json").read_text())["groups"]["anchor"]
    for row in group["scores"].values():
        assert all(cell["std"] == 0 for cell in row.values())
    assert all(row["loss"]["std"] == 0 for row in group["perplexity"])


def test_batch_size_and_other_tasks_change_nothing(done, models, tmp_path, capsys):
    told = run(
        capsys,
        *("--checkpoints", models / "a", "--tasks", "vt", "--seq-lengths", 1100),
        *("--num-samples", 2, "--output-dir", tmp_path, "--json"),
    )
    assert list(json.loads(told)["groups"]) == ["a"]
    wanted = [r for r in scores(done / "both")["a"] if r.get("task") == "vt"]
    assert scores(tmp_path)["a"] == [r for r in wanted if r["length"] == 1100]


def test_saved_results_are_drawn_side_by_side(done, models, tmp_path, capsys):
    words = ("--tasks", "vt", "--seq-lengths", 1100, "--num-samples", 1)
    run(capsys, "--checkpoints", models / "a", *words, "--output-dir", tmp_path / "a")
    given = [f"first={tmp_path}/a", f"second={done}/both"]
    told = run(capsys, "--plot", *given, "--output-dir", tmp_path / "plot")
    assert "### first against second full against second anchor" in told
    assert (tmp_path / "plot/curves.png").is_file()
    (tmp_path / "a/results.json").write_text("{")
    said = run(capsys, "--plot", *given, "--output-dir", tmp_path / "plot", expect=2)
    assert "results.json is damaged" in said


def test_a_killed_evaluation_goes_on_where_it_was(models, tmp_path, capsys):
    words = ["--checkpoints", models / "a", "--tasks", "vt", "--seq-lengths", "1100"]
    words += ["--num-samples", "8"]
    process = subprocess.Popen(
        [sys.executable, TOOL, *map(str, words), "--output-dir", tmp_path / "killed"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    path = tmp_path / "killed/samples/a.jsonl"
    until = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < 2:
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = path.read_bytes().splitlines(keepends=True)[:2]
    path.write_bytes(b"".join(kept) + b'{"kind": "sam')  # torn, wherever it was killed
    run(capsys, *words, "--output-dir", tmp_path / "killed")
    assert path.read_bytes().splitlines(keepends=True)[:2] == kept
    run(capsys, *words, "--output-dir", tmp_path / "whole", "--batch-size", 3)
    assert scores(tmp_path / "killed") == scores(tmp_path / "whole")
    said = run(capsys, *words, "--output-dir", tmp_path / "whole", "--seed", 1, expect=2)
    assert "seed 42 -> 1" in said


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--checkpoints", "{}/none"], "there is no such folder"),
        (["--checkpoints", "{}/a", "--batch-size", "0"], "--batch-size 0: expected 1 or more"),
        (["--checkpoints", "{}/a", "--tasks", "niah_single_9"], "did you mean niah_single_"),
        (["--checkpoints", "{}/a", "--tasks", "qa"], "--qa-file"),
        (["--checkpoints", "{}/a", "--tasks", "vt", "--seq-lengths", "200"], "needs at least"),
        (["--checkpoints", "{}/a", "--seq-lengths", "4096"], "--allow-longer"),
        (["--checkpoints", "{}/a", "--depths", "101"], "0 to 100"),
        (["--checkpoints", "{}/a", "--perplexity"], "needs --text"),
        (["--checkpoints", "{}/a", "--haystack", "{}/a/config.json"], "words; expected"),
        (["--checkpoints", "{}/a", "--tokenizer", "{}"], "has no tokenizer"),
        (["--checkpoints", "{}/a", "--first-token", "bso"], "expected auto, none, bos, eos"),
        (["--checkpoints", "{}/bare"], "has no tokenizer"),
        (["--checkpoints", "{}/damaged", "--seq-lengths", "1500", "--tasks", "vt"], "damaged"),
        ([], "give --checkpoints"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(models, tmp_path, capsys, words, what):
    for name in ("bare", "damaged"):
        (models / name).mkdir(exist_ok=True)
        for file in (models / "a").iterdir():
            if name == "damaged" or not file.name.startswith("tokenizer"):
                (models / name / file.name).write_bytes(file.read_bytes())
    (models / "damaged/model.safetensors").write_bytes(b"\x08" * 100)
    given = [word.format(models) for word in words]
    said = run(capsys, *given, "--output-dir", tmp_path, "--num-samples", 1, expect=2)
    assert said.startswith("error: ")
    assert what in said


def test_first_tokens_are_compared_in_one_table(models, tmp_path, capsys):
    words = ["--checkpoints", f"m={models}/a", "--first-token", "auto", "none", "--tasks", "vt"]
    words += ["--seq-lengths", "1100", "--num-samples", "1", "--output-dir", tmp_path]
    said = run(capsys, *words)
    assert "m first-token auto against m first-token none" in said
    assert "not asked the same: first_token is [256] and []" in said
    assert sorted(scores(tmp_path)) == ["a.first-token-auto", "a.first-token-none"]


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "--checkpoints full=" in capsys.readouterr().out
