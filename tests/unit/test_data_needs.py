"""What a run will read is compared with what there is before it trains."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_anchor.training.data_needs import require_enough, validation_samples
from megatron_anchor.training.full_validation import WholeBatches, whole_batches


def arguments(**changed: Any) -> Namespace:
    settings = {
        "skip_train": False,
        "full_validation": False,
        "validation_set_names": None,
        "eval_iters": 2,
        "eval_interval": 10,
        "eval_global_batch_size": 8,
        "eval_micro_batch_size": 2,
        "data_parallel_size": 2,
        "train_iters": 100,
        "iteration": 0,
        "consumed_valid_samples": 0,
        "split": "90,10,0",
    }
    return Namespace(**(settings | changed))


def check(train: Any = 800, valid: Any = 176, test: Any = None, **changed: Any) -> None:
    sets = [None if size is None else range(size) for size in (train, valid, test)]
    needed = [800, None if changed.get("full_validation") else 176, 16]
    if changed.get("eval_iters") == 0:
        needed[1:] = [0, 0]
    require_enough(*sets, args=arguments(**changed), needed=needed)


def test_enough_is_enough() -> None:
    check()
    check(test=16)
    check(train=10**6, valid=10**6, test=10**6)
    check(valid=3, full_validation=True)
    check(valid=None, eval_iters=0)
    check(train=None, skip_train=True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train": None}, "no document is left for training: --split 90,10,0 .*--train-data-path"),
        ({"train": 799}, "needs 800 training samples, and the blend holds 799: .*--train-iters"),
        (
            {"valid": None},
            "no document is left for validation: .*--valid-data-path.*--eval-iters 0",
        ),
        (
            {"valid": None, "split": None},
            "no document is left for validation: no --valid-data-path is given; name corpora",
        ),
        ({"valid": 175}, "needs 176 validation samples, and the blend holds 175: .*--eval-iters"),
        ({"valid": 0}, "needs 176 validation samples, and the blend holds 0: .*--eval-iters"),
        ({"test": 15}, "needs 16 test samples, and the blend holds 15: .*--eval-iters"),
        ({"valid": None, "full_validation": True}, "no document is left for validation"),
        ({"test": 99, "full_validation": True}, "--full-validation: .*--test-data-path"),
        (
            {"full_validation": True, "validation_set_names": ["a", "b"]},
            "--validation-set-names a b: 2 names for 1 validation sets",
        ),
    ],
)
def test_what_would_end_in_the_middle_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(**changed)


@pytest.mark.parametrize("interval", [1, 7, 10, 100, 1000])
@pytest.mark.parametrize("train_iters", [10, 99, 100])
def test_validation_samples_are_those_that_the_loop_reads(interval: int, train_iters: int) -> None:
    """Count them as Megatron's loop runs: at every interval, and once at the end."""
    args = arguments(eval_interval=interval, train_iters=train_iters)
    asked = (train_iters // interval + 1) * 2 * 8
    for begun_at in range(0, train_iters + 1, 3):
        args.iteration = begun_at
        for read in (0, 160, 16 * (begun_at // interval)):
            args.consumed_valid_samples = read
            later = sum(step % interval == 0 for step in range(begun_at + 1, train_iters + 1)) + 1
            assert validation_samples(args, asked) == max(asked, read + later * 16)


def test_whole_sets_and_no_evaluation_need_no_more_than_was_asked() -> None:
    assert validation_samples(arguments(full_validation=True), None) is None
    assert validation_samples(arguments(eval_iters=0, consumed_valid_samples=50), 0) == 0
    assert validation_samples(arguments(skip_train=True, consumed_valid_samples=50), 16) == 16


class Samples(torch.utils.data.Dataset):
    """A packed dataset, or a blend of one with a corpus' number in its samples."""

    def __init__(self, count: int, *, blended: bool = False) -> None:
        self.count, self.blended = count, blended

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        sample = {"tokens": torch.full((3,), -1 if idx is None else idx)}
        return sample | ({"dataset_id": 0} if self.blended and idx is not None else {})


@pytest.mark.parametrize("blended", [False, True])
@pytest.mark.parametrize("count", [1, 3, 8, 15, 16, 17])
@pytest.mark.parametrize(("ranks", "micro", "step"), [(1, 1, 1), (2, 1, 4), (3, 2, 12), (4, 3, 12)])
def test_micro_batches_of_all_ranks_hold_every_sample_once(
    monkeypatch: pytest.MonkeyPatch, blended: bool, count: int, ranks: int, micro: int, step: int
) -> None:
    """Dealt out as Megatron's sampler for full validation does."""
    from megatron.training.datasets.data_samplers import MegatronFullValidationSampler

    samples = Samples(count, blended=blended)
    monkeypatch.setattr(
        "megatron_anchor.training.full_validation.corpora_of", lambda dataset: [dataset]
    )
    args = Namespace(
        eval_micro_batch_size=micro, eval_global_batch_size=step, data_parallel_size=ranks
    )
    whole = whole_batches(samples, args, ranks=ranks)
    assert isinstance(whole, WholeBatches)
    each = []
    for rank in range(ranks):
        sampler = MegatronFullValidationSampler(len(whole), rank, ranks)
        each.append([whole[number]["tokens"] for [number] in sampler])
        assert len(sampler) == len(each[-1])
        assert all(batch.shape == (micro, 3) for batch in each[-1])
    assert {len(batches) for batches in each} == {-(-count // step) * step // (micro * ranks)}
    found = torch.cat([batch[:, 0] for batches in each for batch in batches]).tolist()
    assert sorted(n for n in found if n >= 0) == list(range(count))
    assert len(found) - count < step


def test_fillers_come_from_the_corpus_of_a_blend() -> None:
    """Blends answer no question for a sample without targets."""
    from megatron_anchor.packing.blend import corpora_of

    assert list(corpora_of([None, SimpleNamespace(datasets=[]), SimpleNamespace()])) == []
