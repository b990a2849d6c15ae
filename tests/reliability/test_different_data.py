"""Ranks that see different files end at start, with both descriptions, the paths and the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pretraining import write_corpus
from tests.reliability import jobs
from tests.reliability.jobs import Ended

LENGTHS = [40, 3, 7, 12, 60, 5, 90, 2, 33, 18, 9, 27, 4, 55, 11, 6] * 2


def go_to_own_node(nodes: Path) -> None:
    """Give each rank a disk, where one relative path is another file, and a launch script."""
    rank = os.environ["RANK"]
    os.chdir(nodes / rank)
    run_program = jobs.run_program
    pattern, weight = {"0": ("anchor", "0.5"), "1": ("full", "0.7")}[rank]
    jobs.run_program = lambda given: run_program(
        given.replace("PATTERN-OF-RANK", pattern).replace("WEIGHT-OF-RANK", weight)
    )


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., dict[int, Ended]]:
    """Train on two ranks whose corpora are written by `write(prefix, rank)`."""

    def run(write: Callable[[Path, int], Any], flags: str = "") -> dict[int, Ended]:
        for rank in (0, 1):
            (tmp_path / str(rank)).mkdir()
            write_corpus(tmp_path / str(rank) / "same", LENGTHS, seed=9)
            write(tmp_path / str(rank) / "text", rank)
        arguments = f"--data-path 0.5 same 0.5 text --data-cache-path {tmp_path / 'cache'} "
        return jobs.run_ranks_until_one_ends(
            f"{arguments} --train-iters 2 {flags}",
            2,
            log=tmp_path / "log",
            before=partial(go_to_own_node, tmp_path),
        )

    return run


@pytest.mark.parametrize(
    "layout", ["", "--pipeline-model-parallel-size 2", "--context-parallel-size 2"]
)
def test_other_tokens_in_files_of_the_same_size(launch: Any, layout: str) -> None:
    """Data-parallel ranks, pipeline stages, context-parallel ranks: all of them read."""
    ended = launch(lambda prefix, rank: write_corpus(prefix, LENGTHS, seed=rank), layout)
    [job] = ended.values()
    assert list(ended) == [0]
    assert job.exit_code == 2
    assert "error: the ranks of this job do not read the same data" in job.log
    for rank in (0, 1):
        [said] = [line for line in job.log.splitlines() if line.startswith(f"  rank {rank} (")]
        assert ", description " in said
    said = job.log.split("error: ")[1].splitlines()
    differing = [line for line in said if line.startswith("    ")]
    assert "    train split of text: corpus.bin.sha256 = " in job.log
    assert len(differing) == 2, "the sizes, the .idx and the other corpus are the same"
    assert len(set(differing)) == 2
    assert "copy the corpora again" in job.log
    assert "Traceback" not in job.log


def test_other_documents(launch: Any) -> None:
    """Other numbers of documents and samples; both ranks build an index first."""
    ended = launch(
        lambda prefix, rank: write_corpus(prefix, LENGTHS * (rank + 1)),
        "--split 90,10,0 --eval-iters 1",
    )
    job = ended[0]
    assert job.exit_code == 2
    assert "train split of text: documents = [0, 29]" in job.log
    assert "train split of text: documents = [0, 58]" in job.log
    assert "iteration        1" not in job.log


def test_copies_on_every_node_train(launch: Any, tmp_path: Path) -> None:
    def write(prefix: Path, rank: int) -> None:
        write_corpus(prefix, LENGTHS)
        for suffix in (".bin", ".idx"):
            os.utime(f"{prefix}{suffix}", ns=(rank, rank))

    ended = launch(write)
    assert [job.exit_code for job in ended.values()] == [0, 0], ended[0].log[-3000:]


def test_other_settings_of_a_rank(launch: Any) -> None:
    """A launch script that was changed on one node only."""
    ended = launch(
        lambda prefix, rank: write_corpus(prefix, LENGTHS),
        "--anchor-position 0 --attention-pattern PATTERN-OF-RANK",
    )
    job = ended[0]
    assert job.exit_code == 2
    assert "    attention_pattern = anchor\n" in job.log
    assert "    attention_pattern = full\n" in job.log


def test_other_weights_of_a_rank(launch: Any) -> None:
    ended = launch(
        lambda prefix, rank: write_corpus(prefix, LENGTHS), "--data-path WEIGHT-OF-RANK same 1 text"
    )
    job = ended[0]
    assert job.exit_code == 2
    assert "    train blend: weights = [0.3333" in job.log
    assert "    train blend: weights = [0.4117" in job.log
