"""Statistics of samples, by counting pairs of slots, in numpy and torch."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_anchor.packing import statistics


def padded(lengths: list[int], *, size: int) -> list[int]:
    borders = [0, *np.cumsum(lengths).tolist()]
    return borders + borders[-1:] * (size - len(borders))


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_a_batch_by_hand(kind: Any) -> None:
    batch = {
        "cu_seqlens": kind([[0, 4, 6, 6, 6], [0, 1, 3, 6, 6]]),
        "num_documents": kind([2, 2]),
        "num_padding": kind([0, 3]),
    }
    ours = statistics.batch_statistics(batch, sequence_length=6)
    assert ours.documents_per_sample == 2.0
    assert ours.padding_share == 0.25
    assert ours.attention_work_share == pytest.approx((13 / 21 + 10 / 21) / 2)
    assert statistics.count_segments(batch["cu_seqlens"]).tolist() == [2, 3]
    assert statistics.attention_work(batch["cu_seqlens"]).tolist() == [13.0, 10.0]


@settings(max_examples=100)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_work_is_the_number_of_pairs_that_the_mask_lets_through(lengths: list[int]) -> None:
    total = sum(lengths)
    segment = np.repeat(np.arange(len(lengths)), lengths)
    pairs = sum(
        segment[query] == segment[key] for query in range(total) for key in range(query + 1)
    )
    cu_seqlens = np.array(padded(lengths, size=len(lengths) + 3), dtype=np.int32)
    assert statistics.attention_work(cu_seqlens) == pairs
    share = statistics.attention_work_share(cu_seqlens, sequence_length=total)
    assert share == pairs / (total * (total + 1) / 2)
    assert statistics.count_segments(cu_seqlens) == len(lengths)


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_full_attention_over_a_million_slots_is_all_the_work(kind: Any) -> None:
    cu_seqlens = kind([0, 1 << 20, 1 << 20])
    cu_seqlens = cu_seqlens.astype(np.int32) if kind is np.array else cu_seqlens.int()
    assert statistics.attention_work_share(cu_seqlens, sequence_length=1 << 20) == 1.0
    assert statistics.attention_work(cu_seqlens) == 2**39 + 2**19  # beyond 32 bits


def test_one_sample_of_a_dataset_may_be_given() -> None:
    sample = {
        "cu_seqlens": torch.tensor([0, 2, 4, 4], dtype=torch.int32),
        "num_documents": torch.tensor(1, dtype=torch.int32),
        "num_padding": torch.tensor(2, dtype=torch.int32),
    }
    ours = statistics.batch_statistics(sample, sequence_length=4)
    assert ours == (1.0, 0.5, 0.6)
