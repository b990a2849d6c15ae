"""Disks that are full or read-only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.reliability.conftest import LAST, SAVE_EVERY, Data, saving
from tests.reliability.jobs import run
from tests.reliability.mounts import enter, private_mounts


@pytest.fixture
def mounts():
    with private_mounts() as mounts:
        yield mounts


def test_a_full_disk_keeps_the_checkpoint_before_and_training_goes_on_from_it(
    data: Data, tmp_path: Path, is_on_the_curve, mounts
) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    arguments = data.arguments(cache=tmp_path / "cache") + saving(saved)
    inside = {"before": enter, "before_args": (mounts.pid,)}
    mounts.mount(f"mount -t tmpfs -o size=2700k none {saved}")  # a checkpoint takes 1.9 MB
    stopped = run(arguments, log=tmp_path / "stopped", **inside)
    assert stopped.exit_code == 1
    assert max(stopped.curve) == 2 * SAVE_EVERY
    last_line = stopped.log.strip().splitlines()[-1]
    assert re.search(
        rf"RuntimeError: the checkpoint of iteration {2 * SAVE_EVERY} could not be saved to {saved}"
        rf" .* The disk has 0\.\d MB left of 2\.8 MB\. The checkpoint of iteration {SAVE_EVERY} is "
        r"whole: make room and start the same command again",
        last_line,
    ), last_line
    tracker = mounts.seen(saved / "latest_checkpointed_iteration.txt")
    assert tracker.read_text() == str(SAVE_EVERY)

    mounts.mount(f"mount -o remount,size=20m {saved}")
    resumed = run(arguments, log=tmp_path / "resumed", **inside)
    assert resumed.exit_code == 0, resumed.log[-3000:]
    assert sorted(resumed.curve) == list(range(SAVE_EVERY + 1, LAST + 1))
    for ended in (stopped, resumed):
        is_on_the_curve(ended)


def test_a_read_only_corpus_needs_a_cache_elsewhere_and_trains_with_one(
    data: Data, tmp_path: Path, is_on_the_curve, mounts
) -> None:
    folder = data.folder
    mounts.mount(f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}")
    inside = {"before": enter, "before_args": (mounts.pid,)}
    refused = run(data.arguments(), log=tmp_path / "refused", **inside)
    assert refused.exit_code == 2
    assert re.search(
        rf"^error: cannot write the packing index to {folder}.*Read-only file system.*; give a "
        "directory that can be written and has space with --data-cache-path",
        refused.log,
        re.MULTILINE,
    ), refused.log[-2000:]
    assert "Traceback" not in refused.log
    trained = run(
        data.arguments(cache=tmp_path / "cache") + "--exit-interval 2",
        log=tmp_path / "trained",
        **inside,
    )
    assert sorted(trained.curve) == [1, 2], trained.log[-2000:]
    is_on_the_curve(trained)
