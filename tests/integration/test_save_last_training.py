"""--save-last in Megatron's real loop: which checkpoints are there at the end, and do they load."""

from __future__ import annotations

import pytest

from tests.distributed.pretraining import pretrain, run_program, write_corpus
from tests.distributed.ranks import run_ranks

SAVING = "--save-last 3 --save-last-every 2 --save-interval 3 --train-iters 8 "


def checkpoints(folder) -> list[int]:
    return sorted(int(path.name.removeprefix("iter_")) for path in folder.glob("iter_*"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    corpus = write_corpus(folder / "few", [30, 5, 90, 1] * 20)
    return folder, f"--data-path {corpus} --data-cache-path {folder / 'cache'} "


@pytest.mark.parametrize("extra", ["", "--async-save "])
def test_the_last_checkpoints_are_there_besides_the_others_and_resume(run, tmp_path, extra) -> None:
    _, data = run
    save = f"--save {tmp_path / 'save'} "
    # Ends early at an iteration that is due itself (4 = 8 - 2 x 2), then goes on.
    run_ranks(run_program, 1, data + SAVING + save + extra + "--exit-interval 4")
    assert checkpoints(tmp_path / "save") == [3, 4]
    load = f"--load {tmp_path / 'save'} "
    curve = pretrain(1, data + SAVING + save + load + extra, tensorboard=tmp_path / "b")
    assert checkpoints(tmp_path / "save") == [3, 4, 6, 8]
    assert set(curve["lm loss"]) == {5, 6, 7, 8}
    if extra:
        return
    again = pretrain(
        1,
        f"{data} --load {tmp_path / 'save'} --ckpt-step 6 --train-iters 8",
        tensorboard=tmp_path / "c",
    )
    for step in (7, 8):
        assert again["lm loss"][step] == pytest.approx(curve["lm loss"][step], rel=1e-6)
