"""The validation loss is the mean over targets, each counted once, at every layout.

The exact value comes from one process that writes down the sum and the count of every sample it
reads: its float64 mean over the samples that there are is what every layout has to report.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.distributed.pretraining import MODEL, TRAINING, read_scalars, write_corpus
from tests.distributed.ranks import run_ranks

STEPS = 2
WITHOUT_SPLIT = TRAINING.replace("--split 100,0,0 ", "")
LAYOUTS = {
    "DP1, micro-batch 2": (1, "--micro-batch-size 2"),
    "DP2": (2, ""),
    "DP2, evaluated by 3": (2, "--eval-micro-batch-size 3 --eval-global-batch-size 6"),
    "DP4": (4, ""),
    "TP2, micro-batch 2": (2, "--tensor-model-parallel-size 2 --micro-batch-size 2"),
    "PP2 DP2, micro-batch 2": (4, "--pipeline-model-parallel-size 2 --micro-batch-size 2"),
    "CP2": (2, "--context-parallel-size 2"),
}


class Row(NamedTuple):
    """What one rank computed of one validation sample."""

    dataset: int
    sample: int
    loss: float
    targets: int


def run(arguments: str) -> list[Row]:
    """Run the program; what this rank evaluated."""
    from megatron.training import get_tensorboard_writer

    from megatron_anchor import pretrain_gpt
    from megatron_anchor.training import forward_step

    rows: list[Row] = []
    original = forward_step.loss_function

    def loss_function(losses_Bs: torch.Tensor, **settings: Any) -> Any:
        batch = settings["batch"]
        if not settings["report_packing"] and batch.origin_B2 is not None:
            losses = (losses_Bs.double() * batch.loss_mask).sum(1).tolist()
            targets = batch.loss_mask.sum(1).int().tolist()
            places = batch.origin_B2.tolist()
            found = (Row(*p, *r) for p, *r in zip(places, losses, targets, strict=True))
            rows.extend(row for row in found if row.targets)  # the others fill up a batch
        return original(losses_Bs, **settings)

    forward_step.loss_function = loss_function
    sys.argv = ["pretrain_gpt", *(MODEL + WITHOUT_SPLIT + arguments).split()]
    pretrain_gpt.main()
    if writer := get_tensorboard_writer():
        writer.flush()
    return rows


def evaluate(ranks: int, arguments: str, folder: Path) -> tuple[dict[str, float], list[Row]]:
    """({set: reported mean}, what all ranks evaluated)."""
    rows = run_ranks(run, ranks, f"{arguments} --tensorboard-dir {folder}")
    name = "lm loss validation"
    scalars = read_scalars(folder)
    tags = [tag for tag in scalars if tag.startswith(name) and "vs samples" not in tag]
    found = {tag.removeprefix(name): scalars[tag][STEPS] for tag in sorted(tags)}
    return found, [row for of_rank in rows for row in of_rank]


def exact(rows: Iterable[Row]) -> float:
    """Mean over targets, every sample once."""
    once = {(row.dataset, row.sample): row for row in rows}.values()
    return sum(row.loss for row in once) / sum(row.targets for row in once)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Arguments that load the checkpoint of the last step: nothing is left but to evaluate."""
    folder = tmp_path_factory.mktemp("validation")
    train = write_corpus(folder / "train", [30, 5, 90, 1, 17] * 20)
    sets = [
        write_corpus(folder / "large", [62] * 13 + [100, 3, 2], seed=1),  # 15 samples
        write_corpus(folder / "small", [1, 120, 40], seed=2),  # 3 samples: fewer than ranks
        write_corpus(folder / "one", [5], seed=3),
    ]
    arguments = (
        f"--train-data-path {train} --valid-data-path {' '.join(map(str, sets))} "
        f"--data-cache-path {folder / 'cache'} --train-iters {STEPS} --save {folder / 'saved'} "
        "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable "
    )
    run_ranks(run, 1, f"{arguments} --save-interval {STEPS}")
    return arguments.replace("--save ", "--load ")


@pytest.fixture(scope="module")
def one_process(
    trained: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, float], list[Row]]:
    arguments = f"{trained} --full-validation --multiple-validation-sets "
    return evaluate(1, arguments, tmp_path_factory.mktemp("one"))


def test_one_process_reports_the_mean_of_every_set(
    one_process: tuple[dict[str, float], list[Row]],
) -> None:
    reported, rows = one_process
    assert set(reported) == {"-0", "-1", "-2"}
    sizes = Counter(row.dataset for row in rows)
    assert list(sizes.values()) == [15, 3, 1]
    assert Counter(row[:2] for row in rows).most_common(1)[0][1] == 1
    for tag, dataset in zip(reported, sizes, strict=True):
        mean = exact(row for row in rows if row.dataset == dataset)
        print(f"set {tag}: {mean:.9f}, reported {reported[tag]:.9f}")
        assert reported[tag] == pytest.approx(mean, rel=5e-7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_validation_counts_every_target_once_at_every_layout(
    layout: str, trained: str, one_process: tuple[dict[str, float], list[Row]], tmp_path: Path
) -> None:
    ranks, flags = LAYOUTS[layout]
    arguments = f"{trained} --full-validation --multiple-validation-sets {flags}"
    reported, rows = evaluate(ranks, arguments, tmp_path)
    for (tag, value), (_, expected) in zip(reported.items(), one_process[0].items(), strict=True):
        print(f"{layout}, set {tag}: {value:.9f}, one process {expected:.9f}")
        assert value == pytest.approx(expected, rel=1e-6)
    read = Counter(row[:2] for row in rows)
    assert set(read) == {row[:2] for row in one_process[1]}
    pieces = 2 if "CP2" in layout or "TP2" in layout else 1
    assert max(read.values()) <= pieces, "nothing is evaluated twice"


@pytest.mark.parametrize("layout", ["DP1, micro-batch 2", "DP2", "PP2 DP2, micro-batch 2"])
def test_some_iterations_of_validation_are_the_mean_of_their_targets(
    layout: str, trained: str, tmp_path: Path
) -> None:
    """Three batches of four: the first twelve samples."""
    ranks, flags = LAYOUTS[layout]
    few = trained.replace("--valid-data-path ", "--valid-data-path 1 ", 1).split()
    first = few.index("--valid-data-path")
    few[first + 1 : first + 5] = few[first + 2 : first + 3]
    arguments = f"{' '.join(few)} --eval-iters 3 "
    _, rows = evaluate(1, arguments, tmp_path / "one")
    assert len(rows) == 12 == len({row.sample for row in rows})
    reported, _ = evaluate(ranks, f"{arguments} {flags}", tmp_path / "layout")
    print(f"{layout}: {reported['']:.9f}, exact {exact(rows):.9f}")
    assert reported[""] == pytest.approx(exact(rows), rel=1e-6)
