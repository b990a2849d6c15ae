"""The tools as users call them: output, exit codes, --json, pictures, memory."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_anchor.command_line import run
from megatron_anchor.corpus import (
    PreprocessConfig,
    TokenizerConfig,
    cli_inspect,
    cli_merge,
    cli_preprocess,
    cli_upsample,
    preprocess,
)
from megatron_anchor.errors import UserError
from tests.corpus_fixtures import corpus_files, texts, tokenizer_json, write_jsonl

TOOLS = Path(__file__).resolve().parents[2] / "tools"
BYTES = TokenizerConfig(tokenizer_type="ByteLevelTokenizer")


@pytest.fixture
def corpus(tmp_path):
    """A small finished corpus with two domains; its prefix."""
    rows = [{"text": t, "d": f"d{i % 2}"} for i, t in enumerate(texts())]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = PreprocessConfig(
        input=(str(source),),
        output_prefix=str(tmp_path / "c"),
        tokenizer=BYTES,
        domain_key="d",
        append_eod=True,
        workers=1,
        progress=False,
    )
    preprocess(config)
    return tmp_path / "c_text_document"


@pytest.mark.parametrize(
    "tool", ["preprocess_data", "merge_corpora", "inspect_corpus", "upsample_long_documents"]
)
def test_every_tool_starts_from_anywhere_and_its_help_has_an_example(tmp_path, tool):
    command = [sys.executable, str(TOOLS / f"{tool}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=180)
    assert done.returncode == 0, done.stderr
    assert f"python tools/{tool}.py" in done.stdout.split("example:")[1]


def test_starting_a_tool_does_not_load_torch(tmp_path):
    code = "import sys, megatron_anchor.corpus.cli_preprocess"
    heavy = "('torch', 'transformers', 'datasets', 'megatron.core', 'ray', 'matplotlib')"
    code += f"\nprint([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_preprocess_prints_a_summary_and_json(tmp_path, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", ["a b", "", 7])
    flags = ["--input", str(source), "--output-prefix", str(tmp_path / "o"), "--workers", "1"]
    flags += ["--tokenizer-model", str(tokenizer_json()), "--append-eod", "--on-error", "skip"]
    assert run(cli_preprocess.main, [*flags, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["documents"] == [1]
    assert summary["rejected"] == {"not a string": 1}
    assert run(cli_preprocess.main, [*flags, "--overwrite", "--no-progress"]) == 0
    out = capsys.readouterr().out
    assert "1 documents" in out
    assert "1 rows rejected (1 not a string)" in out


def test_errors_are_one_message_and_exit_code_1(tmp_path, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", [7])
    flags = ["--input", str(source), "--output-prefix", str(tmp_path / "o"), "--workers", "1"]
    assert run(cli_preprocess.main, [*flags, "--tokenizer-type", "ByteLevelTokenizer"]) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith(f"error: {source}:1: not a string")
    assert "Traceback" not in captured.err


def test_a_shard_below_0_and_shards_without_ray_are_one_message(tmp_path, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    flags = ["--input", str(source), "--output-prefix", str(tmp_path / "o")]
    flags += ["--tokenizer-type", "ByteLevelTokenizer"]
    for more, message in (
        (["--shard", "-1/5"], "--shard -1/5: expected i/n"),
        (["--shard=-1/5"], "--shard -1/5: expected i/n"),
        (["--shards", "4"], "--shards is for --executor ray"),
    ):
        assert run(cli_preprocess.main, [*flags, *more]) == 2
        assert f"error: {message}" in capsys.readouterr().err


def test_ray_names_what_a_failed_run_leaves(tmp_path):
    """Without a cluster: the message is made of the shard's error and of what lies there."""
    from megatron_anchor.corpus import Rejection, RowError
    from megatron_anchor.corpus.distributed import _readable

    shard = PreprocessConfig(input=("x",), output_prefix="x", shard="1/2")
    folder = tmp_path / "many.shards"
    failure = RuntimeError("task died")
    assert "--resume" not in str(_readable(failure, shard, folder=folder))
    folder.mkdir()
    (folder / "0_of_2_text_document.idx").touch()
    failure.cause = RowError(Rejection("in.jsonl", 7, "not a string"), kept="1_of_2.partial")
    message = str(_readable(failure, shard, folder=folder))
    assert "shard 1/2: in.jsonl:7: not a string" in message
    assert f"kept in {folder}: add --resume" in message
    assert "1_of_2.partial" not in message


def test_flags_that_megatron_users_know_are_all_there():
    known = "--input --json-keys --output-prefix --append-eod --workers --split-sentences "
    known += "--keep-newlines --lang --tokenizer-type --tokenizer-model --vocab-file --merge-file "
    known += "--vocab-size --tiktoken-pattern --tiktoken-num-special-tokens "
    known += "--tokenizer-special-tokens --tokenizer-hf-no-include-special-tokens "
    known += "--trust-remote-code --null-tokenizer-eod-id"
    flags = cli_preprocess.parser()._option_string_actions
    assert set(known.split()) <= set(flags)
    assert all(action.help for flag, action in flags.items() if flag in ("--input", "--engine"))


def test_inspect_reports_verifies_and_draws(corpus, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "x.png"
    assert run(cli_inspect.main, [str(corpus), "--png", str(picture)]) == 0
    out = capsys.readouterr().out
    assert f"{len(texts())} documents" in out
    assert "the files agree" in out
    assert {"all", "d0", "d1"} <= {line.split(" ")[0] for line in out.splitlines()}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run(cli_inspect.main, [f"{corpus}.idx", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []


def test_inspect_fails_where_files_do_not_agree(corpus, capsys):
    os.truncate(f"{corpus}.bin", Path(f"{corpus}.bin").stat().st_size - 2)
    assert run(cli_inspect.main, [str(corpus)]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM" in out
    assert "the manifest states" in out


def test_inspect_shows_a_document_as_text(corpus, capsys):
    tokenizer = ["--tokenizer-type", "ByteLevelTokenizer"]
    assert run(cli_inspect.main, [str(corpus), "--document", "3", *tokenizer]) == 0
    assert texts()[3][:200] in capsys.readouterr().out
    assert run(cli_inspect.main, [str(corpus), "--document", "3"]) == 2
    assert "give --tokenizer-type ByteLevelTokenizer" in capsys.readouterr().err
    assert run(cli_inspect.main, [str(corpus), "--document", "9999", *tokenizer]) == 2
    assert "which holds 0 to" in capsys.readouterr().err
    other = ["--tokenizer-model", str(tokenizer_json())]
    run(cli_inspect.main, [str(corpus), "--document", "3", "--max-tokens", "2", *other])
    assert "made with another tokenizer" in capsys.readouterr().err


def test_upsample_prints_before_and_after_and_draws(corpus, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    flags = [str(corpus), "--output", str(tmp_path / "l.npy"), "--long-tokens", "2000"]
    assert run(cli_upsample.main, [*flags, "--png", str(tmp_path / "l.png")]) == 0
    out = capsys.readouterr().out
    assert out.index("before:") < out.index("after:")
    assert (tmp_path / "l.png").read_bytes().startswith(b"\x89PNG")
    assert run(cli_upsample.main, flags) == 2
    assert "exists" in capsys.readouterr().err
    flags += ["--overwrite", "--json", "--mixture", "d0=0.9,d1=0.1"]
    assert run(cli_upsample.main, flags) == 0
    after = json.loads(capsys.readouterr().out)["after"]
    assert after[0]["share"] == pytest.approx(0.9, abs=0.05)


def test_merge_takes_patterns(corpus, tmp_path, capsys):
    flags = ["--input", str(tmp_path / "*_text_document"), "--output-prefix", str(tmp_path / "m")]
    assert run(cli_merge.main, [*flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == len(texts())


def test_places_that_cannot_be_written_are_one_message_of_every_tool(corpus, tmp_path, capsys):
    """Below a file there can be no folder, whoever asks."""
    pytest.importorskip("matplotlib")
    below = str(tmp_path / "in.jsonl" / "x")
    tokenizer = ["--tokenizer-type", "ByteLevelTokenizer"]
    listed = ["--output", str(tmp_path / "l.npy")]
    source = str(tmp_path / "in.jsonl")
    before = sorted(tmp_path.iterdir())
    for main, flags in (
        (cli_preprocess.main, ["--input", source, "--output-prefix", below, *tokenizer]),
        (cli_merge.main, ["--input", str(corpus), "--output-prefix", below, "--no-progress"]),
        (cli_inspect.main, [str(corpus), "--png", f"{below}.png"]),
        (cli_upsample.main, [str(corpus), "--output", f"{below}.npy"]),
    ):
        assert run(main, flags) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ")
        assert below in error
        assert "None" not in error
        assert sorted(tmp_path.iterdir()) == before
    assert run(cli_upsample.main, [str(corpus), *listed, "--png", f"{below}.png"]) == 2
    assert f"{below}.png" in capsys.readouterr().err


@pytest.mark.parametrize("tool", [cli_merge, cli_upsample])
def test_a_full_disk_is_named_and_nothing_is_left_behind(corpus, tmp_path, capsys, tool):
    import resource

    flags = ["--input", str(corpus), "--output-prefix", str(tmp_path / "x"), "--no-progress"]
    if tool is cli_upsample:
        flags = [str(corpus), "--output", str(tmp_path / "x.npy"), "--tokens", "9000000"]
    before = sorted(tmp_path.iterdir())
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, limit[1]))
    try:
        code = run(tool.main, flags)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert code == 2
    assert "cannot be written: File too large" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_mixtures_and_sizes_that_say_nothing_are_refused(corpus, tmp_path, capsys):
    flags = [str(corpus), "--output", str(tmp_path / "l.npy")]
    for more, message in (
        (["--mixture", "d0=1,d0=2"], "names 'd0' twice"),
        (["--mixture", "d0=1, d0 =2,d1=1"], "names 'd0' twice"),
        (["--tokens", "1"], "too little to draw a single document"),
        (["--tokens", "0"], "expected at least 1"),
    ):
        assert run(cli_upsample.main, [*flags, *more]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "l.npy").exists()


def test_memory_stays_flat_whatever_the_corpus(tmp_path):
    """Four times the corpus needs the same memory, within a few megabytes."""

    def peak(repeats: int) -> int:
        source = tmp_path / "in.jsonl"
        row = json.dumps({"text": "lorem ipsum " * 400}) + "\n"
        with open(source, "w") as stream:
            for _ in range(repeats):
                stream.write(row * 100)
        code = (
            "import sys\n"
            "from megatron_anchor.corpus.cli_preprocess import main\n"
            "main(sys.argv[1:])\n"
            "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        )
        flags = ["--input", str(source), "--output-prefix", str(tmp_path / "o"), "--no-progress"]
        flags += ["--tokenizer-type", "ByteLevelTokenizer", "--workers", "1", "--overwrite"]
        done = subprocess.run(
            [sys.executable, "-c", code, *flags], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split()[-1])

    small, large = peak(40), peak(160)  # 19 MB and 77 MB of text
    assert large < small + 12_000, f"peak {small} KB, then {large} KB"


def _patiently(call):
    """Ray gives its own start 30 seconds, which a busy machine may exceed: then once more."""
    for _ in range(3):
        try:
            return call()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    pytest.skip("Ray does not start on this machine")


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_ray_gives_the_bytes_of_one_run(tmp_path, request):
    from megatron_anchor.corpus.distributed import preprocess_on_ray

    ray = pytest.importorskip("ray")
    source = write_jsonl(tmp_path / "in.jsonl", [*texts(), 7])
    config = {"tokenizer": BYTES, "append_eod": True, "workers": 1, "progress": False}
    many = PreprocessConfig(input=(str(source),), output_prefix=str(tmp_path / "many"), **config)
    bad_row = rf"shard 2/3: .*in.jsonl:{len(texts()) + 1}: not a str"
    with pytest.raises(UserError, match=bad_row):
        # starts and ends a local Ray by itself
        _patiently(lambda: preprocess_on_ray(many, shards=3))
    assert not ray.is_initialized()
    _patiently(lambda: ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False))
    request.addfinalizer(ray.shutdown)
    done = preprocess_on_ray(replace(many, resume=True, on_error="skip"), shards=3)
    assert json.loads(Path(done.rejected_file).read_text())["row"] == len(texts()) + 1
    assert not (tmp_path / "many.shards").exists()
    preprocess(replace(many, output_prefix=str(tmp_path / "one"), on_error="skip"))
    assert corpus_files(tmp_path / "many") == corpus_files(tmp_path / "one")


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_ray_is_asked_for_by_name_where_it_is_missing(tmp_path, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    flags = ["--input", str(source), "--output-prefix", str(tmp_path / "o"), "--executor", "ray"]
    assert run(cli_preprocess.main, [*flags, "--tokenizer-type", "ByteLevelTokenizer"]) == 2
    assert "pip install ray" in capsys.readouterr().err
