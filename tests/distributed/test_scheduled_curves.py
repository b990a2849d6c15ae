"""Training under a length schedule: the same at every layout, and after a resumption."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distributed.pretraining import pretrain, write_corpus

SCHEDULE = (
    "--document-length-schedule linear:8:64:20 --loss-weighting effective-context "
    "--effective-context-tail 8 --calculate-per-token-loss "
)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scheduled")
    corpus = write_corpus(folder / "c", [7, 90, 3, 70, 11, 33, 24, 200] * 4)

    def train(name, ranks, more):
        common = f"--train-iters 6 --data-path {corpus} --data-cache-path {folder}/cache "
        scalars = pretrain(ranks, common + SCHEDULE + more, tensorboard=folder / name)
        return {scalar: np.array([*values.values()]) for scalar, values in scalars.items()}

    return train


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    return folder, train("alone", 1, f"--save {folder} --save-interval 3 ")


def test_the_bound_is_logged_and_the_work_follows_it(train, alone):
    found = alone[1]
    assert found["document length limit"].tolist() == [8, 19, 30, 41, 52, 64]
    assert found["attention work"][0] < found["attention work"][2] < found["attention work"][5]
    assert np.isfinite(found["lm loss"]).all()


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("balanced", "--balance-attention-work"),
        ("gather", "--context-parallel-size 2 --cp-comm-type gather"),
    ],
)
def test_layouts_see_the_same_bounds(train, alone, name, layout):
    found = train(name, 2, layout)
    for scalar in ("lm loss", "grad-norm", "document length limit"):
        np.testing.assert_allclose(found[scalar], alone[1][scalar], rtol=1e-5, err_msg=scalar)
    np.testing.assert_allclose(found["attention work"], alone[1]["attention work"], rtol=1e-5)


def test_a_resumed_run_goes_on_as_an_uninterrupted_one(train, alone):
    folder, whole = alone
    found = train("resumed", 1, f"--load {folder} --ckpt-step 3 ")
    for scalar in ("lm loss", "document length limit"):
        np.testing.assert_allclose(found[scalar], whole[scalar][3:], rtol=1e-6, err_msg=scalar)
