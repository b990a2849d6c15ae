"""Communication of experts overlapped with computation: the same digits as without it."""

from __future__ import annotations

import pytest

from tests.distributed.pretraining import S, pretrain, write_corpus

STEPS = 20
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1 "
    "--bf16 --no-gradient-accumulation-fusion --global-batch-size 8 --micro-batch-size 2 "
)
OVERLAP = "--overlap-moe-expert-parallel-comm "
LAYOUTS = {
    "EP2, each kind of loss": (2, "--moe-router-load-balancing-type aux_loss "),
    "EP2, expert bias, a dense layer": (
        2,
        "--moe-layer-freq [0,1,1,1] --moe-router-load-balancing-type seq_aux_loss "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--calculate-per-token-loss ",
    ),
    "EP2, CP2": (2, "--context-parallel-size 2 "),
    "PP2 interleaved, EP2": (
        4,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 ",
    ),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    prefix = write_corpus(folder / "few", [1, 5, 40, S - 2, 3, 300, 17, 9, 150, 2, 2, 66] * 30)
    return f"--data-path {prefix} --data-cache-path {folder / 'cache'} --train-iters {STEPS} "


@pytest.mark.parametrize("layout", LAYOUTS)
def test_overlapped_experts_train_like_others(layout, data, tmp_path):
    ranks, flags = LAYOUTS[layout]
    plain, overlapped = (
        pretrain(ranks, data + EXPERTS + flags + more, tensorboard=tmp_path / str(len(more)))
        for more in ("", OVERLAP)
    )
    for name in ("lm loss", "grad-norm", "z_loss", "load_balancing_loss", "attention work"):
        assert len(plain[name]) == STEPS
        assert overlapped[name] == plain[name], name
    assert plain["lm loss"][STEPS] < plain["lm loss"][1] - 0.5
