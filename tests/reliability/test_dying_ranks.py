"""A rank that dies ends the job, with its number and the reason, as users start it: by torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.distributed.pretraining import MODEL, TRAINING
from tests.reliability.conftest import Data
from tests.reliability.poisoned import Poisoned

ROOT = Path(__file__).parents[2]

TO_START, TO_END = 110, 60
"""Seconds: only a hang takes so long. The second is what is promised."""


@contextmanager
def torchrun(
    program: str, arguments: str, *, ranks: int, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a module on several ranks, and leave nothing of it behind."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "megatron_anchor.on_cpu", "-m", program]
    command += (MODEL + TRAINING + arguments).split()
    with log.open("wb") as stream:
        job = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    family = psutil.Process(job.pid)
    try:
        yield job
    finally:
        for process in [*family.children(recursive=True), family] if family.is_running() else []:
            process.kill()
        job.wait()


def wait_for(text: str, log: Path, job: subprocess.Popen[bytes]) -> None:
    """Until the job has said it."""
    deadline = time.monotonic() + TO_START
    while text not in log.read_text(errors="replace"):
        assert job.poll() is None, log.read_text(errors="replace")[-3000:]
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
        time.sleep(0.1)


def process_of(rank: int, job: subprocess.Popen[bytes]) -> psutil.Process:
    children = psutil.Process(job.pid).children(recursive=True)
    [found] = [child for child in children if child.environ().get("RANK") == str(rank)]
    return found


def root_cause(log: str) -> str:
    """What torchrun says at the end."""
    return log.split("Root Cause (first observed failure):")[1]


def test_a_rank_that_is_killed_ends_the_job_with_its_number_and_the_signal(
    data: Data, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    arguments = data.arguments(cache=tmp_path / "cache") + "--train-iters 100000 "
    layout = "--pipeline-model-parallel-size 2"
    program = "megatron_anchor.pretrain_gpt"
    with torchrun(program, arguments + layout, ranks=2, log=log) as job:
        wait_for("iteration        3/", log, job)
        victim = process_of(1, job)
        survivor = process_of(0, job)
        victim.kill()
        assert job.wait(TO_END) != 0
        assert not survivor.is_running()
    said = root_cause(log.read_text(errors="replace"))
    assert re.search(rf"rank +: 1 .*\n.*exitcode +: -9 \(pid: {victim.pid}\)", said), said
    assert f"Signal {signal.SIGKILL.value} (SIGKILL) received by PID {victim.pid}" in said


def test_a_rank_that_fails_ends_the_job_with_its_number_and_the_reason(
    poisoned: Poisoned, tmp_path: Path
) -> None:
    """Only the rank that reads the sample computes NaN; the other one waits for its gradient."""
    log = tmp_path / "log"
    arguments = f"{poisoned.arguments(tmp_path)} --rerun-mode disabled "
    with torchrun("tests.reliability.poison", arguments, ranks=2, log=log) as job:
        assert job.wait(TO_START + TO_END) != 0
    text = log.read_text(errors="replace")
    rank = poisoned.sample % 2
    assert re.search(
        rf"^error: rank {rank}, iteration {poisoned.iteration}: found NaN .*\n"
        rf"  sample {poisoned.sample} of the train split of {poisoned.prefix}: .*"
        rf"in documents {poisoned.document}$",
        text,
        re.MULTILINE,
    ), text[-4000:]
    said = root_cause(text)
    assert re.search(rf"rank +: {rank} .*\n.*exitcode +: 1 ", said), said
    assert "RuntimeError: Rank" in said, "with the reason"
    assert "found NaN in local forward loss calculation" in said
