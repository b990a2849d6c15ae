"""One corpus and one uninterrupted run, which all hard knocks are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.pretraining import S, write_corpus
from tests.reliability.jobs import Ended, run
from tests.reliability.poisoned import Poisoned, write_poisoned

LAST, SAVE_EVERY = 12, 4
"""Iterations of a run, and between checkpoints."""


@dataclass(frozen=True)
class Data:
    """Two corpora in one folder."""

    folder: Path
    prefixes: tuple[Path, Path]

    def arguments(self, *, cache: Path | None = None) -> str:
        """A blend of both, for a whole run."""
        blend = f"--data-path 0.6 {self.prefixes[0]} 0.4 {self.prefixes[1]} "
        cached = f"--data-cache-path {cache} " if cache else ""
        return blend + cached + f"--train-iters {LAST} "


def saving(folder: Path) -> str:
    """Arguments of a run that saves to a folder and goes on from what is there."""
    return f"--save {folder} --load {folder} --save-interval {SAVE_EVERY} "


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder = tmp_path_factory.mktemp("corpus")
    lengths = [1, 5, 40, S - 2, 3, 300, 17, 9, 150, 2, 2, 66] * 10
    prefixes = (
        write_corpus(folder / "odd", lengths),
        write_corpus(folder / "even", [30, 5, 90, 1] * 15, seed=1),
    )
    return Data(folder, prefixes)


@pytest.fixture(scope="session")
def uninterrupted(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run that nothing happens to."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    ended = run(
        data.arguments(cache=folder / "cache") + saving(folder / "saved"), log=folder / "log"
    )
    assert ended.exit_code == 0, ended.log[-3000:]
    losses = [loss for loss, _ in ended.curve.values()]
    assert sorted(ended.curve) == list(range(1, LAST + 1))
    assert losses[-1] < losses[0] - 0.1, "the curve would be the same whatever it was trained on"
    return ended


@pytest.fixture(scope="session")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Poisoned:
    """A corpus in which one document makes NaN."""
    return write_poisoned(tmp_path_factory.mktemp("poisoned"))


@pytest.fixture
def is_on_the_curve(uninterrupted: Ended) -> Callable[[Ended], None]:
    """Assert that every iteration that a run logged has the uninterrupted run's bits."""

    def check(ended: Ended) -> None:
        for iteration, found in ended.curve.items():
            assert found == uninterrupted.curve[iteration], f"iteration {iteration}"

    return check
