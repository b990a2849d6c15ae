"""Megatron-FSDP: weights in pieces train like the distributed optimizer's whole ones.

Sums of gradients are taken in another order, in bf16; so the losses differ by that.
"""

from __future__ import annotations

import pytest

from tests.distributed.pretraining import S, pretrain, write_corpus

STEPS = 20
BF16 = (
    f"--bf16 --use-distributed-optimizer --no-gradient-accumulation-fusion --train-iters {STEPS} "
)
SHARDED = (
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor "
    "--data-parallel-sharding-strategy optim_grads_params "
)


@pytest.mark.parametrize("layout", ["", "--calculate-per-token-loss --micro-batch-size 2 "])
def test_sharded_weights_train_like_whole_ones(layout, tmp_path):
    prefix = write_corpus(tmp_path / "few", [1, 5, 40, S - 2, 3, 300, 17, 9, 150, 2, 2, 66] * 30)
    data = f"--data-path {prefix} --data-cache-path {tmp_path / 'cache'} " + BF16 + layout
    whole = pretrain(2, data, tensorboard=tmp_path / "whole")
    sharded = pretrain(2, data + SHARDED, tensorboard=tmp_path / "sharded")
    assert sharded["lm loss"][1] == whole["lm loss"][1]
    assert sharded["attention work"] == whole["attention work"]
    for step, loss in whole["lm loss"].items():
        assert sharded["lm loss"][step] == pytest.approx(loss, abs=0.01), step
        norm = whole["grad-norm"][step]
        assert sharded["grad-norm"][step] == pytest.approx(norm, rel=0.01), step
    assert len(whole["lm loss"]) == STEPS
    assert whole["lm loss"][STEPS] < whole["lm loss"][1] - 0.5
