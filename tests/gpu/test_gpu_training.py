"""The training program on one GPU, 5 steps, as a user starts it."""

import os
import re
import subprocess
import sys

import pytest

from megatron_anchor.attention.backends import BACKENDS
from tests.distributed.pretraining import MODEL, TRAINING, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "few", [30, 5, 90, 1] * 40)


def losses(corpus, folder, arguments):
    words = f"{MODEL} {TRAINING} --data-path {corpus} --data-cache-path {folder} {arguments}"
    words = words.replace("--distributed-backend gloo ", "--train-iters 5 ").split()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    done = subprocess.run(
        [*launch, "-m", "megatron_anchor.pretrain_gpt", *words],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        timeout=300,
        check=False,
    )
    if done.returncode == 2 and "cannot serve" in done.stderr:
        pytest.skip(re.search(r".*cannot serve.*", done.stderr).group())
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(x) for x in re.findall(r"lm loss: (\S+)", done.stdout)]


@pytest.mark.parametrize("name", ["auto", *BACKENDS])
def test_five_steps_in_bfloat16_give_finite_losses_near_those_of_sdpa(name, corpus, tmp_path):
    wide = "--bf16 --kv-channels 64 --anchor-attention-backend"
    expected = losses(corpus, tmp_path, f"{wide} sdpa")
    got = losses(corpus, tmp_path, f"{wide} {name}")
    assert len(got) == len(expected) == 5
    assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) < 0.05
