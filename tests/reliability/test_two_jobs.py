"""Two jobs that start at once with one empty cache, as a sweep does."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.distributed.ranks import _CONTEXT
from tests.reliability.conftest import LAST, Data
from tests.reliability.jobs import run, start


def write_in_step(folder: Path, together: Any) -> None:
    """Wait for the other job before every file that is written to a folder."""
    below = f"{folder}/"

    def watch(event: str, args: tuple) -> None:
        if event == "open" and str(args[0]).startswith(below) and args[2] & os.O_WRONLY:
            together.wait(60)

    sys.addaudithook(watch)


def test_two_jobs_that_build_one_index_at_once_train_on_the_same_samples(
    data: Data, tmp_path: Path, is_on_the_curve
) -> None:
    cache = tmp_path / "cache"
    together = _CONTEXT.Barrier(2)
    jobs = [
        start(
            data.arguments(cache=cache),
            log=tmp_path / f"log{number}",
            before=write_in_step,
            before_args=(cache, together),
        )
        for number in range(2)
    ]
    for job in jobs:
        ended = job.wait()
        assert ended.exit_code == 0, ended.log[-3000:]
        assert len(ended.curve) == LAST
        is_on_the_curve(ended)
    assert not list(cache.glob(".*")), "no temporary file is left"
    written = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert any("BlendedDataset" in path.name for path in written)
    again = run(data.arguments(cache=cache) + "--exit-interval 2", log=tmp_path / "again")
    is_on_the_curve(again)
    assert "damaged" not in again.log
    assert written == {path: path.stat().st_mtime_ns for path in cache.iterdir()}, "built again"
