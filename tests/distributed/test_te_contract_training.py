"""The training program under Transformer Engine's context parallelism, against one rank's sdpa."""

from __future__ import annotations

import pytest

from tests import te_stand_in
from tests.distributed.pretraining import S, pretrain, read_scalars, run_program, write_corpus
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.skipif(not te_stand_in.is_usable(), reason=te_stand_in.MISSING)

ALIGNMENT = 4  # 2 x context parallel, on one rank too, so that the samples are the same
COMMON = (
    f"--bf16 --calculate-per-token-loss --document-alignment {ALIGNMENT} --train-iters 4 "
    "--transformer-impl local --no-gradient-accumulation-fusion "
)


def run_on_pretended_h100(arguments: str) -> None:
    """Run the program where our own rules, too, take the CPU for an H100."""
    from megatron_anchor.attention.backends import request

    request._capability = lambda: (9, 0)
    request._cudnn_version = lambda: 92000
    request.this_hardware.cache_clear()
    run_program(arguments)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("te")
    lengths = [1, 5, 40, S - 2, 3, 300, 17, 9, 150, 2, 2, 66] * 10
    data = f"--data-path {write_corpus(folder / 'odd', lengths)} --data-cache-path {folder} "
    common = COMMON + data
    curve = pretrain(
        1, f"{common} --anchor-attention-backend sdpa", tensorboard=folder / "tensorboard"
    )
    return common, curve


@pytest.mark.parametrize("kinds", ["p2p", "p2p a2a all_gather a2a"])
def test_training_under_transformer_engine_has_the_curve_of_one_rank(kinds, one_rank, tmp_path):
    """Four layers, with one kind for all of them and with one for each."""
    common, expected = one_rank
    run_ranks(
        run_on_pretended_h100,
        2,
        f"{common} --context-parallel-size 2 --cp-comm-type {kinds} --tensorboard-dir {tmp_path}",
    )
    curve = read_scalars(tmp_path)
    for scalar in ("lm loss", "grad-norm"):
        assert sorted(curve[scalar]) == [1, 2, 3, 4]
        worst = max(abs(v / expected[scalar][i] - 1) for i, v in curve[scalar].items())
        print(f"{kinds}: {scalar} within {worst:.1e}")
        assert worst <= 5e-3, f"{scalar} differs by {worst:.1e} of itself"


def test_documents_were_filled_up_to_the_alignment(one_rank):
    assert max(one_rank[1]["padding share"].values()) > 0.01
