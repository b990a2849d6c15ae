"""Damaged corpora are found before training, whatever the cache holds."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.reliability.conftest import Data
from tests.reliability.jobs import run, start


def cut_the_bin(prefix: Path, other: Path) -> str:
    size = os.path.getsize(f"{prefix}.bin")
    os.truncate(f"{prefix}.bin", size - 100)
    return rf"{prefix}\.bin is too short: it has {size - 100} bytes, but .* accounts for {size}"


def cut_the_idx(prefix: Path, other: Path) -> str:
    os.truncate(f"{prefix}.idx", 500)
    return rf"{prefix}\.idx is truncated: it has 500 bytes"


def scramble_the_idx(prefix: Path, other: Path) -> str:
    """The length of a document in the middle, and nothing at the ends."""
    with open(f"{prefix}.idx", "r+b") as stream:
        stream.seek(34 + 4 * 17)
        stream.write(b"\x07\x00\x00\x00")
    return rf"{prefix}\.idx is damaged: sequence 17 and the next do not stand side by side"


def take_the_bin_of_another(prefix: Path, other: Path) -> str:
    shutil.copy(f"{other}.bin", f"{prefix}.bin")
    return rf"{prefix}\.bin is too (long|short): .*Do both files belong together\?"


DAMAGES: tuple[Callable[[Path, Path], str], ...] = (
    cut_the_bin,
    cut_the_idx,
    scramble_the_idx,
    take_the_bin_of_another,
)


def test_a_damaged_corpus_ends_the_job_with_its_name_before_training(
    data: Data, tmp_path: Path
) -> None:
    first, second = data.prefixes
    whole = tmp_path / "whole"
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{first}{suffix}", f"{whole}{suffix}")

    def arguments(prefix: Path) -> str:
        return f"--data-path {prefix} --data-cache-path {tmp_path}/cache --train-iters 1 "

    assert run(arguments(whole), log=tmp_path / "whole.log").exit_code == 0
    expected, jobs = {}, {}
    for damage in DAMAGES:
        # At the path that the cache knows, and each seen by one job only.
        prefix = tmp_path / damage.__name__ / "corpus"
        prefix.parent.mkdir()
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{first}{suffix}", f"{prefix}{suffix}")
        expected[damage] = damage(prefix, second)
        jobs[damage] = start(arguments(prefix), log=tmp_path / f"{damage.__name__}.log")
    for damage, job in jobs.items():
        ended = job.wait()
        assert ended.exit_code == 2, ended.log[-2000:]
        assert re.search(f"^error: {expected[damage]}", ended.log, re.MULTILINE), ended.log[-2000:]
        assert "Traceback" not in ended.log
        assert not ended.curve
