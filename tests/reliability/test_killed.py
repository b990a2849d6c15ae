"""Killed at any moment, a run goes on where its last checkpoint is, with the same bits."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path

import pytest

from tests.reliability.conftest import LAST, SAVE_EVERY, Data, saving
from tests.reliability.jobs import Ended, Killed, run

SEED = int(os.environ.get("RELIABILITY_SEED", "20241120"))
"""Of the moments; any other does as well."""

SAVE = 8
"""Changes to the file system that saving a checkpoint takes: its folder (asked for twice), data,
metadata in two steps, the mark that it is whole, and the tracker in two steps."""

RECORD = 2
"""Changes when a run begins for the first time: the list of what it reads, in two steps."""


def last_change(ended: Ended) -> str:
    return re.findall(r"^change \d+ below .*", ended.log, re.MULTILINE)[-1]


def tracked(folder: Path) -> int:
    tracker = folder / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


@pytest.fixture
def job(data: Data, tmp_path: Path, is_on_the_curve):
    """Run the job, in the state that earlier runs left it in, until it is killed or ends."""
    arguments = data.arguments(cache=tmp_path / "cache") + saving(tmp_path / "saved")
    logs = iter(range(100))
    random_ = random.Random(SEED)
    print(f"RELIABILITY_SEED={SEED}")

    def go_on(killed: Killed | None = None) -> Ended:
        ended = run(arguments, log=tmp_path / f"log{next(logs)}", killed=killed)
        is_on_the_curve(ended)
        if killed is None:
            assert ended.exit_code == 0, ended.log[-3000:]
        else:
            print(f"killed {killed.after:.3f} s after: {last_change(ended)}")
            assert ended.exit_code == -signal.SIGKILL, ended.log[-3000:]
        return ended

    return go_on, random_


def test_killed_while_it_builds_the_index_it_trains_on_the_same_samples(
    job, tmp_path: Path
) -> None:
    go_on, random_ = job
    cache = tmp_path / "cache"
    for event in (1, random_.randint(2, 8), 2 * random_.randint(4, 6)):
        ended = go_on(Killed(folder=cache, event=event))
        assert not ended.curve, "it died before it trained"
    assert list(cache.glob(".*.tmp")), "it died between writing a file and giving it its name"
    assert sorted(go_on().curve) == list(range(1, LAST + 1))


def test_killed_while_it_saves_it_goes_on_from_the_checkpoint_before(job, tmp_path: Path) -> None:
    go_on, random_ = job
    saved = tmp_path / "saved"
    seen: set[int] = set()
    # The first save of each run: twice the same one, then the next one, each at another step.
    first, second, third = sorted(random_.sample(range(3, SAVE), 3))
    moments = ((RECORD + first, 0), (SAVE + second, SAVE_EVERY), (third, SAVE_EVERY))
    for event, before in moments:
        ended = go_on(Killed(folder=saved, event=event))
        seen |= set(ended.curve)
        assert tracked(saved) == before
        assert (saved / f"iter_{before + SAVE_EVERY:07d}").is_dir(), "it died while it was saving"
    seen |= set(go_on().curve)
    assert seen == set(range(1, LAST + 1))
    assert tracked(saved) == LAST


def test_killed_at_any_time_it_goes_on_where_its_tracker_says(job, tmp_path: Path) -> None:
    """Seconds after its first save begins: while it writes, computes, or saves again."""
    go_on, random_ = job
    saved = tmp_path / "saved"
    seen: set[int] = set()
    for _ in range(2):
        if tracked(saved) == LAST:
            break
        before = tracked(saved)
        event = 3 if before else RECORD + 3
        ended = go_on(Killed(folder=saved, event=event, after=random_.uniform(0.001, 0.4)))
        assert min(ended.curve) == before + 1
        seen |= set(ended.curve)
    seen |= set(go_on().curve)
    assert seen == set(range(1, LAST + 1))
