"""A DeepSeek-shaped run (MLA, yarn, experts, multi-token prediction) at every layout.

Through the real program: each layout resumes one process' checkpoint and continues its curves.
"""

from __future__ import annotations

import pytest

from tests.distributed.pretraining import S, pretrain, write_corpus
from tests.distributed.test_training_curves import RESHARDABLE, worst_difference

FIRST, LAST = 4, 24
"""Iterations: where every layout takes over, and where it ends."""

GROUPED = "--group-query-attention --num-query-groups 2 "
"""What the common flags of test runs have, and multi-latent attention has not."""

LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 12 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 6 --qk-layernorm --rotary-scaling-factor 40 "
    "--mscale 1.0 --mscale-all-dim 0.8 "
)
EXPERTS = (
    # As many as there are: with fewer, last bits would sooner or later decide where a token goes.
    "--num-experts 4 --moe-router-topk 4 --moe-ffn-hidden-size 24 --moe-layer-freq [0,1,1,1] "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 "
    "--moe-shared-expert-intermediate-size 24 --moe-token-dispatcher-type alltoall "
)
DEPTHS = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.3 "
PER_TOKEN = "--calculate-per-token-loss "
MODELS = {
    "V3": LATENT + EXPERTS + DEPTHS + PER_TOKEN,
    # Grouped attention, and a mean of micro-batches.
    "Llama with a repeated layer": DEPTHS + "--mtp-use-repeated-layer ",
}

TP, PP = (
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--pipeline-model-parallel-size 2",
)
FRESH = "--finetune --no-load-optim --no-load-rng"
"""Megatron keeps an optimizer per set of experts, and cannot load it for other sets."""

LAYOUTS = {
    "TP2 SP": ("Llama with a repeated layer", 2, TP),
    "PP2 interleaved": ("V3", 2, f"{PP} --num-layers-per-virtual-pipeline-stage 1"),
    "CP2": ("V3", 2, "--context-parallel-size 2 --cp-comm-type a2a"),
    "gather 2": (
        "Llama with a repeated layer",
        2,
        "--context-parallel-size 2 --cp-comm-type gather",
    ),
    "TP2 SP PP2": ("V3", 4, f"{TP} {PP}"),
    "EP2, gather 2": (
        "V3",
        4,
        "--expert-model-parallel-size 2 --context-parallel-size 2 --cp-comm-type gather",
    ),
}
SCALARS = ("lm loss", "mtp_1 loss", "mtp_2 loss", "grad-norm")


def without(model):
    return GROUPED if "latent" in MODELS[model] else ""


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """One process, uninterrupted, of each model; its checkpoint is everyone's start."""
    folder = tmp_path_factory.mktemp("latent")
    lengths = [1, 5, 40, S - 2, 3, 300, 17, 9, 150, 2, 2, 66] * 20
    prefix = write_corpus(folder / "odd", lengths)
    data = f"--data-path {prefix} --data-cache-path {folder / 'cache'} {RESHARDABLE} "
    found = {}
    for number, (name, flags) in enumerate(MODELS.items()):
        common = f"{data} --train-iters {LAST} {flags} "
        saved = folder / str(number)
        curve = pretrain(
            1,
            f"{common} --save {saved} --save-interval {FIRST}",
            tensorboard=folder / f"tensorboard{number}",
            without=without(name),
        )
        found[name] = f"{common} --load {saved} --ckpt-step {FIRST} ", curve
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_continues_the_curves_of_one_process(layout, references, tmp_path):
    model, ranks, flags = LAYOUTS[layout]
    common, expected = references[model]
    first = FIRST + 1
    if "--expert-model" in flags:
        common, first = f"{common} {FRESH}", 1
        expected = pretrain(1, common, tensorboard=tmp_path / "one", without=without(model))
    curve = pretrain(
        ranks, f"{common} {flags}", tensorboard=tmp_path / "many", without=without(model)
    )
    assert sorted(curve["lm loss"]) == list(range(first, LAST + 1)), "20 iterations or more"
    for scalar in SCALARS:
        worst = worst_difference(curve, expected, scalar)
        print(f"{layout}: {scalar} within {worst:.1e}")
        assert worst <= 1e-5, f"{layout}: {scalar} differs by {worst} of itself"


def test_the_depths_learn_and_differ(references):
    """Anti-vacuity: the further a token is, the harder it is, and all losses fall."""
    for _, curve in references.values():
        for scalar in SCALARS[:3]:
            losses = list(curve[scalar].values())
            assert losses[-1] < losses[0] - 0.1
        last = [curve[scalar][LAST] for scalar in SCALARS[:3]]
        assert len({round(value, 3) for value in last}) == 3
        assert 0 <= curve["mtp_1_acceptance_rate"][LAST] <= 100
