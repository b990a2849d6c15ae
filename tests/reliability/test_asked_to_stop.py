"""SIGTERM to a whole job, as Slurm sends it: the ranks save, and nothing is done twice."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatron_anchor.compat import TRACKER
from tests.distributed.pretraining import MODEL, TRAINING
from tests.reliability.conftest import Data
from tests.reliability.jobs import TIMEOUT, run

ROOT = Path(__file__).parents[2]


def test_ranks_save_where_torchrun_alone_would_end_them(data: Data, tmp_path: Path) -> None:
    arguments = data.arguments(cache=tmp_path / "cache").replace("--train-iters 12", "")
    arguments += f"--train-iters 100000 --save {tmp_path}/run --load {tmp_path}/run "
    arguments += "--save-interval 100000 --exit-signal-handler --tensor-model-parallel-size 2 "
    arguments += "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable "
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    launcher += ["--standalone", "--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT"]
    program = ["-m", "megatron_anchor.on_cpu", "-m", "megatron_anchor.pretrain_gpt"]
    words = [*program, *(MODEL + TRAINING + arguments).split(), "--num-workers", "1"]
    log = tmp_path / "log"
    with open(log, "w") as out:
        job = subprocess.Popen(
            [sys.executable, ROOT / "examples/recipe/forward_term.py", *launcher, *words],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + TIMEOUT
        while "iteration        2/" not in log.read_text(errors="replace"):
            assert job.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(job.pid, signal.SIGTERM)
        assert job.wait(TIMEOUT) == 0, log.read_text()[-3000:]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    done = max(int(number) for number in re.findall(r"iteration +(\d+)/", log.read_text()))
    assert (tmp_path / "run" / TRACKER).read_text() == str(done)
    # One process goes on with the next iteration, at another layout.
    one = arguments.replace("--tensor-model-parallel-size 2", "")
    again = run(f"{one} --exit-interval {done + 1}", log=tmp_path / "again")
    assert again.exit_code == 0, again.log[-3000:]
    assert list(again.curve) == [done + 1]
