"""The program as users start it: torchrun, `on_cpu -m`, real exit codes and messages."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from megatron_anchor.packing.patterns import attention_pattern
from megatron_anchor.pretrain_gpt import _ending_for_users
from tests.distributed.pretraining import MODEL, TRAINING, write_corpus


def launch(arguments, *, ranks=1):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "megatron_anchor.on_cpu"]
    command += ["-m", "megatron_anchor.pretrain_gpt", *(MODEL + TRAINING + arguments).split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "few", [30, 5, 90, 1] * 20)


def test_torchrun_trains_and_logs_what_packing_did(corpus, tmp_path):
    done = launch(
        f"--data-path {corpus} --data-cache-path {tmp_path} --train-iters 2 "
        "--tensor-model-parallel-size 2 --hidden-dropout 0.1",
        ranks=2,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("> warning: --hidden-dropout 0.1: it differs between the copies") == 1
    for part in ("iteration        2/       2", "documents per sample:", "attention work:"):
        assert part in done.stdout
    for part in ("> attention pattern anchor, RoPE base", "> attention kernel: sdpa"):
        assert part in done.stdout
    for frightening in ("DEPRECATED", "Apex", "No CUDA runtime"):
        assert frightening not in done.stdout + done.stderr


def test_bad_arguments_end_with_the_reason_and_no_traceback(corpus):
    done = launch(f"--data-path {corpus} --train-iters 2 --attention-pattern anchr")
    assert done.returncode != 0
    assert "error: megatron_anchor cannot run with these arguments" in done.stderr
    assert "unknown attention pattern 'anchr': did you mean 'anchor'?" in done.stderr
    assert "pretrain_gpt.py" not in done.stderr, "a traceback from our code"


def test_missing_corpus_ends_with_its_name_and_no_traceback(tmp_path):
    done = launch(f"--data-path {tmp_path}/nowhere --train-iters 2")
    assert done.returncode != 0
    assert re.search(f"^error: .* missing; .*:\n  - {tmp_path}/nowhere.bin", done.stderr, re.M)
    assert "pretrain_gpt.py" not in done.stderr, "a traceback from our code"


def test_only_errors_of_this_package_end_without_traceback(capsys):
    def ours():
        attention_pattern("anchr")

    def foreign():
        int("x")

    with pytest.raises(SystemExit, match="2"):
        _ending_for_users(ours)()
    assert "error: unknown attention pattern 'anchr'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="invalid literal"):
        _ending_for_users(foreign)()
