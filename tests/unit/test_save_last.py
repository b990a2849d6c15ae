"""--save-last: which checkpoints are kept, and what is refused."""

from __future__ import annotations

import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_anchor.training import last_checkpoints
from megatron_anchor.training.last_checkpoints import refusals, steps_to_keep


def arguments(**given):
    defaults = {
        "save_last": 5,
        "save_last_every": None,
        "save": "run",
        "save_interval": 1000,
        "save_retain_interval": None,
        "train_iters": 100,
        "train_samples": None,
        "step_batch_size_schedule": None,
        "global_batch_size": 4,
    }
    return SimpleNamespace(**(defaults | given))


def test_the_papers_advice_is_the_last_five_ten_steps_apart() -> None:
    assert steps_to_keep(2000, count=5, every=10) == (1960, 1970, 1980, 1990, 2000)
    assert list(refusals(arguments())) == []


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 30))
def test_steps_end_with_the_last_iteration_and_are_equally_far_apart(
    train_iters: int, count: int, every: int
) -> None:
    steps = steps_to_keep(train_iters, count=count, every=every)
    assert steps[-1] == train_iters
    assert {b - a for a, b in pairwise(steps)} <= {every}
    assert len(steps) == min(count, 1 + (train_iters - 1) // every)
    refused = list(
        refusals(arguments(train_iters=train_iters, save_last=count, save_last_every=every))
    )
    assert bool(refused) == (len(steps) < count)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"save_last": 0}, "--save-last 0: expected 1 or more"),
        ({"save_last": -2}, "--save-last -2: expected 1 or more"),
        ({"save_last_every": 0}, "--save-last-every 0: expected 1 or more"),
        ({"save": None, "save_interval": None}, "--save-last 5 needs a folder: give --save"),
        ({"save_interval": None}, "Megatron needs --save-interval with --save"),
        ({"train_iters": 40}, "begins 40 iterations before the end, but there are 40"),
        (
            {"train_iters": None, "train_samples": 160},
            "begins 40 iterations before the end, but there are 40",
        ),
        ({"save_last": None, "save_last_every": 3}, "--save-last-every 3 has no effect without"),
        (
            {"save_retain_interval": 50, "save_interval": 25},
            "--save-retain-interval 50 would delete checkpoints that --save-last keeps "
            r"\(60 70 80 90 100\)",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_with_value_and_remedy(given, reason) -> None:
    (refused,) = refusals(arguments(**given))
    assert re.search(reason, refused), refused


def test_a_retain_interval_that_deletes_none_of_them_is_accepted() -> None:
    assert list(refusals(arguments(save_retain_interval=10, save_interval=5))) == []
    assert list(refusals(arguments(save_last=None, train_iters=1))) == []


def test_a_resumed_run_says_which_checkpoints_it_cannot_keep(tmp_path, capsys) -> None:
    (tmp_path / "iter_0000060").mkdir()
    is_due = last_checkpoints._IsDue(count=5, every=10)
    args = arguments(save=str(tmp_path))
    assert [i for i in range(76, 101) if is_due(args, i)] == [80, 90]
    said = capsys.readouterr().out
    assert "keeps the checkpoints 60 70 80 90 100" in said
    assert "has no checkpoint 70: there will be 4 of 5" in said


def test_what_save_interval_saves_is_not_saved_twice() -> None:
    is_due = last_checkpoints._IsDue(count=5, every=10)
    assert [i for i in range(1, 101) if is_due(arguments(save_interval=40), i)] == [60, 70, 90]
