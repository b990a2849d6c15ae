"""Balanced work: the same samples in every global batch, nearly equal work on every rank."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

from megatron_anchor.packing.balance import (
    IMBALANCE_FIGURES,
    BalancedDataset,
    Balancing,
    imbalance,
    order_batch,
    partition,
    sample_work,
)
from tests.unit.packing_oracle import build, build_train, make_config, plain, write_corpus


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(0, 999))
def test_an_order_is_a_permutation_that_no_swap_makes_better(
    ranks: int, micro: int, steps: int, seed: int
) -> None:
    size = ranks * micro * steps
    random = np.random.default_rng(seed)
    few, many = random.integers(1, 3, size), random.lognormal(size=size)
    work = np.where(random.random(size) < 0.5, few, many)
    sizes = Balancing(global_batch_size=size, micro_batch_size=micro, ranks=ranks)
    order = order_batch(work, sizes)
    assert sorted(order) == list(range(size))
    assert np.array_equal(order, order_batch(work, sizes))
    rows = order.reshape(steps, ranks, micro).transpose(1, 0, 2).reshape(ranks, -1)
    load = work[rows].sum(axis=1)
    heaviest = [row for row in range(ranks) if load[row] > load.max() * (1 - 1e-9)]
    assert any(not swaps_that_help(work, rows, load, row) for row in heaviest)


def swaps_that_help(work: np.ndarray, rows: np.ndarray, load: np.ndarray, heavy: int) -> list:
    """Pairs of samples of a rank and of another one whose swap makes both lighter than the rank."""
    return [
        (ours, theirs)
        for other in range(len(rows))
        for ours, theirs in itertools.product(rows[heavy], rows[other])
        if max(
            load[heavy] - work[ours] + work[theirs],
            load[other] + work[ours] - work[theirs] if other != heavy else np.inf,
        )
        < load[heavy] * (1 - 1.001e-3)
    ]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.01, 10), min_size=6, max_size=6))
def test_two_hands_are_near_the_best_of_all_deals(work: list[float]) -> None:
    numbers = np.array(work)
    best = min(
        max(numbers[list(half)].sum(), numbers.sum() - numbers[list(half)].sum())
        for half in itertools.combinations(range(6), 3)
    )
    ours = numbers[partition(numbers, num_groups=2)].sum(axis=1).max()
    assert best - 1e-9 <= ours <= best * 1.25


def skewed_corpus(path: Path) -> str:
    """A few long documents, many short ones."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(3, 1.2, 4000), 2, 255).astype(int).tolist()
    return write_corpus(path, [[[7] * length] for length in lengths])


def test_ranks_of_a_skewed_corpus_come_within_5_percent(tmp_path: Path) -> None:
    dataset = build_train(skewed_corpus(tmp_path / "c"), sequence_length=256, packing="best-fit")
    sizes = Balancing(global_batch_size=64, micro_batch_size=1, ranks=8, linear=0)
    found = BalancedDataset(dataset, sizes).imbalances(6)
    assert np.mean([before for before, _ in found]) > 1.3
    assert max(after for _, after in found) < 1.05


def test_the_sampler_deals_out_what_was_planned_and_no_sample_changes_its_batch(
    tmp_path: Path,
) -> None:
    dataset = build_train(skewed_corpus(tmp_path / "c"), sequence_length=256, packing="best-fit")
    consumed, batch, micro, ranks = 5, 24, 2, 3
    sizes = Balancing(global_batch_size=batch, micro_batch_size=micro, ranks=ranks, first=5)
    balanced = BalancedDataset(dataset, sizes)
    assert len(balanced) == len(dataset)
    assert balanced.config is dataset.config
    whole = [sample["tokens"].tolist() for sample in dataset]
    moved = [sample["tokens"].tolist() for sample in (balanced[n] for n in range(len(dataset)))]
    assert moved[:5] == whole[:5]
    assert not any(int(balanced[4][name]) for name in IMBALANCE_FIGURES)
    for number in (5, 28):
        found = tuple(int(balanced[number][name]) / 1e6 for name in IMBALANCE_FIGURES)
        assert found == pytest.approx(balanced.imbalances(1)[0], abs=1e-6)
    for begin in range(5, len(whole), batch):
        ours, theirs = moved[begin : begin + batch], whole[begin : begin + batch]
        assert Counter(map(tuple, ours)) == Counter(map(tuple, theirs))
        assert ours != theirs or len(ours) < batch
    loads = []
    for rank in range(ranks):
        sampler = MegatronPretrainingSampler(len(balanced), consumed, micro, rank, ranks)
        steps = [numbers for numbers, _ in zip(sampler, range(batch // micro // ranks))]  # noqa: B905
        squares = [
            [float((balanced[n]["cu_seqlens"].diff().double() ** 2).sum()) for n in numbers]
            for numbers in steps
        ]
        loads.append(np.sum(squares))
    before = imbalance(balanced.work(5), sizes)
    assert max(loads) / np.mean(loads) == pytest.approx(balanced.imbalances(1)[0].after)
    assert max(loads) / np.mean(loads) < before


@pytest.mark.parametrize("pattern", ["anchor", "full"])
def test_work_is_that_of_the_samples_segments_also_in_blends(tmp_path: Path, pattern: str) -> None:
    corpora = [write_corpus(tmp_path / n, [[[7] * k] for k in range(1, 30)]) for n in "ab"]
    config = make_config(
        (corpora, [0.5, 0.5]), sequence_length=16, attention_pattern=pattern, document_alignment=2
    )
    blend = build(config, [20, 0, 0])[0]
    for number in range(20):
        length = blend[number]["cu_seqlens"].diff().double()
        expected = float((length**2).sum()) + 3.0 * 16
        assert sample_work(blend, number, linear=3.0) == expected
    sizes = Balancing(global_batch_size=4, micro_batch_size=1, ranks=2)
    assert sorted(
        str(plain(sample)) for sample in (BalancedDataset(blend, sizes)[n] for n in range(4))
    ) == sorted(str(plain(blend[n])) for n in range(4))


def test_a_global_batch_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    dataset = build_train(write_corpus(tmp_path / "c", [[[7, 8]]]))
    sizes = Balancing(global_batch_size=6, micro_batch_size=2, ranks=2)
    with pytest.raises(ValueError, match=r"batch of 6 samples, expected a multiple of 4 \(2 data"):
        BalancedDataset(dataset, sizes)
