"""Training with weighted targets: the same loss and gradient at every layout, and the right one."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distributed.pretraining import pretrain, write_corpus
from tests.target_weights import write_weights

LENGTHS = [7, 19, 3, 70, 11, 5, 24, 16, 200, 9, 13] * 3
PER_TOKEN = "--calculate-per-token-loss "


@pytest.fixture(scope="module")
def weights():
    """Float weights; the document of 200 tokens has none, so some samples have no target."""
    random, parts = np.random.default_rng(0), []
    for length in LENGTHS:
        parts.append(random.random(length + 1) * (random.random(length + 1) < 0.6))
        if length == 200:
            parts[-1][:] = 0
    return np.concatenate(parts).astype(np.float32)


@pytest.fixture(scope="module")
def curve(tmp_path_factory, weights):
    folder = tmp_path_factory.mktemp("weighted")
    corpus = write_corpus(folder / "c", LENGTHS)
    write_weights(corpus, weights)

    def train(name: str, ranks: int, more: str, steps: int = 4) -> dict[str, np.ndarray]:
        common = f"--train-iters {steps} --data-path {corpus} --data-cache-path {folder}/cache "
        scalars = pretrain(ranks, common + more, tensorboard=folder / name.replace(" ", "-"))
        return {name: np.array([*scalars[name].values()]) for name in scalars}

    return train


SAVE = "--save {0} --save-interval 1 --no-save-optim --no-save-rng "
LOAD = "--load {0} --ckpt-step 1 --finetune --no-load-optim --no-load-rng "


@pytest.fixture(scope="module")
def start(curve, tmp_path_factory):
    """Weights to begin with: initial ones depend on the layout."""
    folder = tmp_path_factory.mktemp("start")
    curve("start", 1, SAVE.format(folder), steps=1)
    return LOAD.format(folder)


@pytest.fixture(scope="module")
def alone(curve, start):
    return curve("alone", 1, PER_TOKEN + start)


LAYOUTS = {
    "micro-batches of 2": (1, "--micro-batch-size 2"),
    "DP2": (2, ""),
    "CP2 gather": (2, "--context-parallel-size 2 --cp-comm-type gather"),
    "CP2 a2a": (2, "--context-parallel-size 2 --cp-comm-type a2a"),
    "TP2 SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_gradient_are_the_same_at_every_layout(curve, start, alone, name):
    ranks, layout = LAYOUTS[name]
    found = curve(name, ranks, PER_TOKEN + start + layout)
    for scalar in ("lm loss", "lm loss unweighted", "grad-norm"):
        np.testing.assert_allclose(found[scalar][:2], alone[scalar][:2], rtol=2e-6, err_msg=scalar)
        np.testing.assert_allclose(found[scalar], alone[scalar], rtol=1e-5, err_msg=scalar)


def test_micro_batch_means_are_the_same_under_context_parallelism(curve):
    one = curve("means", 1, "")
    two = curve("means CP2", 2, "--context-parallel-size 2 --cp-comm-type gather")
    assert np.isfinite(one["lm loss"]).all()
    for scalar in ("lm loss", "grad-norm"):
        np.testing.assert_allclose(two[scalar][:2], one[scalar][:2], rtol=2e-6, err_msg=scalar)


def test_the_loss_is_linear_in_the_weights(tmp_path, weights):
    """sum(w) L(w) adds up over weights; with all weights 1 it is the loss without any."""
    corpus = write_corpus(tmp_path / "c", LENGTHS)
    common = f"--data-path {corpus} --train-iters 1 --global-batch-size 16 {PER_TOKEN}"

    def first(name: str) -> tuple[float, float]:
        scalars = pretrain(1, common, tensorboard=tmp_path / name)
        return scalars["lm loss"][1], scalars["grad-norm"][1]

    plain = first("plain")
    write_weights(corpus, np.ones(len(weights)))
    np.testing.assert_allclose(first("ones"), plain, rtol=1e-6)
    write_weights(corpus, np.full(len(weights), 3.7))
    np.testing.assert_allclose(first("threes"), plain, rtol=1e-6)
    small = np.full(len(weights), 1e-3, dtype=np.float32)
    write_weights(corpus, small)
    np.testing.assert_allclose(first("thousandths"), plain, rtol=1e-6)


def test_experts_and_predictions_further_ahead_count_by_weight(curve, tmp_path):
    model = (
        "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
        "--moe-aux-loss-coeff 0.1 --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3 "
    )
    curve("experts start", 1, model + SAVE.format(tmp_path), steps=1)
    model += PER_TOKEN + LOAD.format(tmp_path)
    one = curve("experts", 1, model)
    two = curve("experts CP2", 2, model + "--context-parallel-size 2 --cp-comm-type gather")
    for scalar in ("lm loss", "mtp_1 loss", "grad-norm"):
        np.testing.assert_allclose(two[scalar][:2], one[scalar][:2], rtol=5e-6, err_msg=scalar)
    assert not np.allclose(one["lm loss"], one["lm loss unweighted"])


def test_document_means_and_contexts_train_and_evaluate_unweighted(tmp_path):
    corpus = write_corpus(tmp_path / "c", LENGTHS)
    common = (
        f"--data-path {corpus} --split 70,30,0 --train-iters 2 --eval-interval 1 --eval-iters 1 "
        f"{PER_TOKEN}"
    )
    seen = {}
    for weighting in ("uniform", "document-mean", "effective-context"):
        more = f"--loss-weighting {weighting} --effective-context-tail 16 --lr 0 --min-lr 0"
        seen[weighting] = pretrain(
            1, common + more, tensorboard=tmp_path / weighting, without="--split 100,0,0"
        )
    plain = seen.pop("uniform")
    assert "lm loss unweighted" not in plain
    for scalars in seen.values():
        assert scalars["lm loss unweighted"][1] == pytest.approx(plain["lm loss"][1], rel=1e-6)
        assert abs(scalars["lm loss"][1] - plain["lm loss"][1]) > 1e-5
        validation = "lm loss validation"
        assert scalars[validation][1] == pytest.approx(plain[validation][1], rel=1e-6)
