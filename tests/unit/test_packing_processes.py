"""Several processes: building at once, ranks of a job, workers of a data loader."""

import logging
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_anchor.packing import dataset as dataset_module
from megatron_anchor.packing import epoch_planner as planner_module
from tests.unit.packing_oracle import build_train, plain, write_corpus

DOCUMENTS = [[[10 * n + k for k in range(n % 7 + 1)]] for n in range(1, 40)]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "c", DOCUMENTS)


def contents(dataset: Any) -> list[dict]:
    return [plain(sample) for sample in dataset]


def in_two_processes(work: Callable[[int], Any]) -> list[Any]:
    """Results of `work(0)` and `work(1)`, each in a forked process of its own."""
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()

    def run(rank: int) -> None:
        try:
            results.put((rank, work(rank)))
        except BaseException as error:
            results.put((rank, repr(error)))
            raise

    processes = [context.Process(target=run, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0, found
    return [found[rank] for rank in range(2)]


def test_two_jobs_may_build_one_index_at_once(prefix: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    start = multiprocessing.get_context("fork").Barrier(2)
    plan_epochs = planner_module.plan_epochs

    def work(_: int) -> list[dict]:
        def after_both_found_nothing(*args: Any, **settings: Any) -> Any:
            start.wait(timeout=30)
            return plan_epochs(*args, **settings)

        planner_module.plan_epochs = after_both_found_nothing
        return contents(build_train(prefix, path_to_cache=str(cache)))

    first, second = in_two_processes(work)
    assert first == second == contents(build_train(prefix, path_to_cache=str(cache)))
    assert not list(cache.glob(".*"))  # no temporary file is left


def in_a_job_of_two_ranks(
    prefix: str, tmp_path: Path, cache_of_rank: Callable[[int], Path]
) -> list[tuple[list[dict], int, list[str]]]:
    """(samples, indices built, warnings) of both ranks of a torch.distributed job."""

    def work(rank: int) -> tuple[list[dict], int, list[str]]:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=rank, world_size=2
        )
        built: list[int] = []
        warned: list[str] = []
        plan_epochs = planner_module.plan_epochs

        def counted(*args: Any, **settings: Any) -> Any:
            built.append(1)
            return plan_epochs(*args, **settings)

        class Warned(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                warned.append(record.getMessage())

        planner_module.plan_epochs = counted
        dataset_module.logger.addHandler(Warned(level=logging.WARNING))
        dataset = build_train(prefix, path_to_cache=str(cache_of_rank(rank)))
        found = contents(dataset)
        torch.distributed.destroy_process_group()
        return found, len(built), warned

    return in_two_processes(work)


def test_rank_0_builds_and_the_others_read(prefix: str, tmp_path: Path) -> None:
    (first, built_by_0, _), (second, built_by_1, warned) = in_a_job_of_two_ranks(
        prefix, tmp_path, lambda _: tmp_path / "cache"
    )
    assert first == second
    assert (built_by_0, built_by_1) == (1, 0)
    assert not warned


def test_a_rank_that_does_not_see_the_cache_builds_the_same_and_says_so(
    prefix: str, tmp_path: Path
) -> None:
    (first, *_), (second, built_by_1, warned) = in_a_job_of_two_ranks(
        prefix, tmp_path, lambda rank: tmp_path / f"node{rank}"
    )
    assert first == second
    assert built_by_1 == 1
    assert any("rank 1 builds" in w and "--data-cache-path" in w for w in warned)


@pytest.mark.parametrize(("method", "mmap"), [("fork", True), ("fork", False), ("spawn", True)])
def test_workers_of_a_data_loader_read_the_same_samples(
    prefix: str, method: str, mmap: bool
) -> None:
    dataset = build_train(prefix, mmap_bin_files=mmap)
    before = contents(dataset)  # opens all that is opened at first use
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=1, multiprocessing_context=method
    )
    assert contents(loader) == before


def test_a_pickled_dataset_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    sizes = []
    for number in (10, 2000):
        prefix = write_corpus(tmp_path / f"c{number:04}", [[[11, 12, 13]]] * number)
        dataset = build_train(prefix, num_samples=5)
        dataset[0]
        sizes.append(len(pickle.dumps(dataset)))
        again = pickle.loads(pickle.dumps(dataset))
        assert contents(again) == contents(dataset)
    assert abs(sizes[1] - sizes[0]) < 100
