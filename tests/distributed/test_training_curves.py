"""Losses and gradient norms of every layout against one process, through Megatron's own loop.

Each layout resumes one process' checkpoint, so this is also: resuming at another layout continues
the same curve.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.distributed.pretraining import S, pretrain, write_corpus

FIRST, LAST = 20, 40
"""Iterations: where every layout takes over, and where it ends."""

RESHARDABLE = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"

LAYOUTS = {
    "TP2 SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2 interleaved": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "CP2": (2, "--context-parallel-size 2"),
    "DP2, micro-batch 2": (2, "--micro-batch-size 2"),
    "full recompute": (
        1,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "CP2, selective recompute": (2, "--context-parallel-size 2 --recompute-granularity selective"),
    "TP2 SP CP2": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2",
    ),
    "PP2 CP2, micro-batch 2": (
        4,
        "--pipeline-model-parallel-size 2 --context-parallel-size 2 --micro-batch-size 2",
    ),
    "DP2 CP2": (4, "--context-parallel-size 2"),
    "gather 2": (2, "--context-parallel-size 2 --cp-comm-type gather"),
    "gather 4, micro-batch 2": (
        4,
        "--context-parallel-size 4 --cp-comm-type gather --micro-batch-size 2 "
        "--balance-attention-work",
    ),
    "2 x 2": (4, "--context-parallel-size 4 --cp-comm-type a2a+gather"),
    "TP2 SP, gather 2, selective recompute": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 "
        "--cp-comm-type gather --recompute-granularity selective",
    ),
    "PP2 interleaved, gather 2": (
        4,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--context-parallel-size 2 --cp-comm-type gather",
    ),
    "TP2 SP PP2 CP2": (
        8,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--context-parallel-size 2",
    ),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents of odd lengths: one token, longer than samples, exactly a sample."""
    folder = tmp_path_factory.mktemp("corpus")
    lengths = [1, 5, 40, S - 2, 3, 300, 17, 9, 150, 2, 2, 66] * 30
    prefix = write_corpus(folder / "odd", lengths)
    return f"--data-path {prefix} --data-cache-path {folder / 'cache'} "


@pytest.fixture(scope="module")
def one_process(data, tmp_path_factory):
    """One process, uninterrupted; its checkpoint after FIRST iterations is everyone's start."""

    @cache
    def run(flags):
        folder = tmp_path_factory.mktemp("reference")
        common = f"{data} {RESHARDABLE} --train-iters {LAST} {flags} "
        curve = pretrain(
            1,
            f"{common} --save {folder} --save-interval {FIRST}",
            tensorboard=folder / "tensorboard",
            timeout=600,
        )
        return f"{common} --load {folder} --ckpt-step {FIRST} ", curve

    return run


CASES = [
    *((name, "--calculate-per-token-loss") for name in LAYOUTS),
    # Each micro-batch is one sample here: with two samples in one their weights would differ.
    *((name, "") for name in ("TP2 SP", "CP2", "DP2 CP2", "2 x 2", "TP2 SP PP2 CP2")),
]


@pytest.mark.parametrize(("layout", "normalisation"), CASES)
def test_every_layout_continues_the_curve_of_one_process(
    layout, normalisation, one_process, tmp_path
):
    ranks, flags = LAYOUTS[layout]
    common, expected = one_process(normalisation)
    curve = pretrain(ranks, f"{common} {flags}", tensorboard=tmp_path)
    assert sorted(curve["lm loss"]) == list(range(FIRST + 1, LAST + 1)), "20 iterations compared"
    for scalar in ("lm loss", "grad-norm"):
        worst = worst_difference(curve, expected, scalar)
        print(f"{layout}: {scalar} within {worst:.1e}")
        assert worst <= 1e-5, f"{layout}: {scalar} differs by {worst} of itself"


def worst_difference(curve, expected, scalar):
    return max(abs(v / expected[scalar][iteration] - 1) for iteration, v in curve[scalar].items())


@pytest.mark.parametrize(
    ("kind", "topk", "steps"),
    # With fewer experts than all, the last bits sooner or later decide where a token goes, and
    # curves part; the first steps are from the same weights.
    [("a2a", 4, LAST), ("gather", 4, LAST), ("gather", 2, 2)],
)
def test_experts_and_qk_norm_continue_the_curve_too(one_process, tmp_path, kind, topk, steps):
    flags = (
        f"--calculate-per-token-loss --qk-layernorm --num-experts 4 --moe-router-topk {topk} "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 "
        "--moe-z-loss-coeff 0.01 --packing best-fit"
    )
    # From the same weights and a fresh optimizer: Megatron keeps one optimizer a set of experts,
    # and refuses to load them for another number of expert-parallel ranks.
    common = one_process(flags)[0] + " --finetune --no-load-optim --no-load-rng"
    layout = f"--expert-model-parallel-size 2 --context-parallel-size 2 --cp-comm-type {kind}"
    expected = pretrain(1, common, tensorboard=tmp_path / "one")
    curve = pretrain(4, f"{common} {layout}", tensorboard=tmp_path / "four")
    assert len(curve["lm loss"]) == LAST
    assert max(curve["padding share"].values()) > 0
    for scalar in ("lm loss", "grad-norm", "seq_load_balancing_loss", "z_loss"):
        first = {step: curve[scalar][step] for step in range(1, steps + 1)}
        assert worst_difference({scalar: first}, expected, scalar) <= 1e-5, scalar


WINDOWS = "--calculate-per-token-loss --window-size 5,0 --window-attn-skip-freq 3 "


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (4, "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"),
        (4, f"{LAYOUTS['PP2 interleaved'][1]} --context-parallel-size 2 --cp-comm-type gather"),
        (
            4,
            "--context-parallel-size 4 --cp-comm-type a2a+gather --recompute-granularity selective",
        ),
        (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    ],
)
def test_windows_and_sinks_continue_the_curve_too(one_process, tmp_path, ranks, layout):
    """Learnable sinks in a checkpoint, resumed at another layout; the anchor out of the window."""
    common, expected = one_process(f"{WINDOWS} --softmax-type learnable")
    curve = pretrain(ranks, f"{common} {layout}", tensorboard=tmp_path)
    assert len(curve["lm loss"]) == LAST - FIRST
    for scalar in ("lm loss", "grad-norm", "attention work"):
        assert worst_difference(curve, expected, scalar) <= 1e-5


def test_an_anchor_in_the_window_changes_the_curve_and_no_layout_does(one_process, tmp_path):
    common, expected = one_process(f"{WINDOWS} --softmax-type off-by-one --anchor-in-window")
    layout = "--context-parallel-size 2 --cp-comm-type gather"
    curve = pretrain(2, f"{common} {layout}", tensorboard=tmp_path / "gather")
    for scalar in ("lm loss", "grad-norm"):
        assert worst_difference(curve, expected, scalar) <= 1e-5
    strict = common.replace("--anchor-in-window", "")
    other = pretrain(1, strict, tensorboard=tmp_path / "strict")
    assert worst_difference(other, expected, "lm loss") > 1e-3


def test_bfloat16_begins_with_the_same_loss_and_stays_near(one_process, tmp_path):
    """The forward pass has the same bits; only the order of gradient sums differs."""
    common, expected = one_process("--calculate-per-token-loss --bf16")
    curve = pretrain(2, f"{common} --context-parallel-size 2", tensorboard=tmp_path)
    assert abs(curve["lm loss"][FIRST + 1] / expected["lm loss"][FIRST + 1] - 1) <= 1e-6
    assert worst_difference(curve, expected, "lm loss") <= 1e-2


@pytest.fixture
def curve(one_process):
    return one_process("--calculate-per-token-loss")[1]


def test_the_curve_depends_on_what_it_should(curve):
    """Anti-vacuity: the loss falls, and gradient norms are neither zero nor constant."""
    losses, norms = list(curve["lm loss"].values()), list(curve["grad-norm"].values())
    assert losses[-1] < losses[0] - 0.1
    assert min(norms) > 1e-3
    assert max(norms) / min(norms) > 1.05


def test_the_imbalance_of_gathered_parts_is_in_tensorboard(one_process, tmp_path):
    common, _ = one_process("--calculate-per-token-loss")
    flags = "--context-parallel-size 2 --cp-comm-type gather --kv-gather-memory-mib 1"
    curve = pretrain(2, f"{common} {flags}", tensorboard=tmp_path)
    values = list(curve["context work imbalance"].values())
    assert all(1 <= value <= 2 for value in values)
    assert len(set(values)) > 1


def test_packing_figures_are_in_tensorboard(curve):
    assert 1 < curve["documents per sample"][1] < S
    assert 0 <= curve["padding share"][1] < 1
    assert 0 < curve["attention work"][1] < 1
