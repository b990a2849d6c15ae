"""What a run reads, and what it says of its data, through the program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pretraining import write_corpus
from tests.reliability.jobs import Ended, run

EPOCH = 125
SAVING = "--override-opt-param-scheduler --save {0} --load {0} --save-interval 1000 "


def log_origins() -> None:
    """Print the number of every sample that is trained on."""
    from megatron_anchor.training import forward_step

    get_batch = forward_step.get_batch

    def logged(*args: Any, **settings: Any) -> Any:
        batch = get_batch(*args, **settings)
        for _, number in batch.origin_B2.tolist():
            print(f"trained on: {number}", flush=True)
        return batch

    forward_step.get_batch = logged


def trained_on(ended: Ended) -> list[int]:
    assert ended.exit_code == 0, ended.log[-3000:]
    return [int(number) for number in re.findall(r"^trained on: (\d+)$", ended.log, re.M)]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("corpora")
    return {
        "epoch": write_corpus(folder / "epoch", [62] * (EPOCH - 6) + [29] * 10),
        "large": write_corpus(folder / "large", [30, 5, 90, 1, 17, 44] * 20, seed=1),
        "small": write_corpus(folder / "small", [200, 300, 100], seed=2),
    }


def test_a_run_that_is_extended_is_the_run_that_asked_for_more_at_once(
    corpora: dict[str, Path], tmp_path: Path
) -> None:
    """117 of an epoch of 125 samples, then 16 more: the same samples, losses and gradients."""

    def train(steps: int, name: str) -> Ended:
        arguments = (
            f"--data-path {corpora['epoch']} --data-cache-path {tmp_path / name}-cache "
            f"--micro-batch-size 1 --global-batch-size 1 --train-iters {steps} --logging-level 20 "
            + SAVING.format(tmp_path / name)
        )
        return run(arguments, log=tmp_path / f"{name}-{steps}.log", before=log_origins)

    parts = [train(steps, "extended") for steps in (117, 133)]
    whole = train(133, "whole")
    read = [number for part in parts for number in trained_on(part)]
    assert read == trained_on(whole) == list(range(133))
    assert all(f"in {EPOCH} samples" in part.log for part in parts)
    assert parts[0].curve | parts[1].curve == whole.curve
    assert sorted(whole.curve) == list(range(1, 134))
    assert all("> warning" not in ended.log for ended in (*parts, whole))


def test_changed_weights_on_resume_are_said(corpora: dict[str, Path], tmp_path: Path) -> None:
    def train(steps: int, weights: tuple[float, float]) -> Ended:
        blend = f"{weights[0]} {corpora['large']} {weights[1]} {corpora['epoch']}"
        arguments = f"--data-path {blend} --train-iters {steps} " + SAVING.format(tmp_path / "s")
        return run(
            f"{arguments} --data-cache-path {tmp_path / 'cache'}",
            log=tmp_path / f"{steps}.log",
            before=log_origins,
        )

    first, second = train(9, (0.5, 0.5)), train(11, (0.3, 0.7))
    assert "> warning" not in first.log
    [said] = re.findall(r"> warning: the blend of the training data is another.*?\n", second.log)
    assert "first 36 samples" in said
    found = re.search(rf"{corpora['large']} goes on at its sample (\d+): (\d+) samples", second.log)
    assert found is not None
    assert found.groups() == ("11", "2")  # 18 were read, and 2 of them are among the next 8
    assert "--finetune" in second.log


def test_one_corpus_twice_and_one_without_validation_documents(
    corpora: dict[str, Path], tmp_path: Path
) -> None:
    blend = f"0.25 {corpora['large']} 0.25 {corpora['large']} 0.5 {corpora['small']}"
    ended = run(
        f"--data-path {blend} --data-cache-path {tmp_path / 'cache'} --train-iters 10 "
        "--split 90,10,0 --eval-iters 1",
        log=tmp_path / "log",
        before=log_origins,
    )
    assert ended.exit_code == 0, ended.log[-3000:]
    assert "validation loss at iteration 10" in ended.log
    doubles = re.findall(r"of (\d+) samples drawn from it (\d+) are different", ended.log)
    assert f"the train blend holds one corpus 2 times ({corpora['large']}" in ended.log
    assert all(int(drawn) >= 2 * int(different) - 1 for drawn, different in doubles)
    assert (
        f"the corpus {corpora['small']} has no document with a token in the valid split"
        in ended.log
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--data-path {large} {small} {epoch} --train-iters 500",
            r"needs 2000 training samples, and the blend holds \d+: .*WEIGHT PREFIX",
        ),
        (
            "--data-path {large} --train-iters 2 --split 90,9,1 --full-validation "
            "--multiple-validation-sets",
            "--full-validation: Megatron 0.19.2 ends with an error when it comes to a test set",
        ),
        (
            "--data-path {large} --train-iters 2 --split 90,10,0 --full-validation "
            "--multiple-validation-sets --validation-set-names a b",
            "--validation-set-names a b: 2 names for 1 validation sets",
        ),
        (
            "--data-path 0.5 {large} 0.5 {small} --train-iters 2 --split 90,10,0 "
            "--full-validation --multiple-validation-sets",
            "--full-validation reads every validation set once, so weights have no meaning",
        ),
        (
            "--data-path 1 {small} --train-iters 2 --split 99,1,0 --eval-iters 1",
            "the valid split of the corpus .*small holds no document with a token",
        ),
        (
            "--data-path 0.5 {small} 0.5 {small} --train-iters 2 --split 99,1,0 --eval-iters 1",
            "none of the 2 corpora of the blend has a document .* valid split.*--valid-data-path",
        ),
    ],
)
def test_data_that_would_end_the_run_later_end_it_at_start(
    corpora: dict[str, Path], tmp_path: Path, arguments: str, message: str
) -> None:
    ended = run(
        arguments.format(**corpora) + f" --data-cache-path {tmp_path / 'cache'}",
        log=tmp_path / "log",
    )
    assert ended.exit_code == 2, ended.log[-3000:]
    assert re.search(f"^error: .*{message}", ended.log, re.M), ended.log[-2000:]
    assert "Traceback" not in ended.log
    assert not re.search(r"iteration +1/", ended.log)
