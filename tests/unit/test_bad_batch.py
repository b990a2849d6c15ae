"""Which samples and documents a number that is not finite is put down to."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_anchor.training import bad_batch
from megatron_anchor.training.bad_batch_files import SampleRecord, _ranges
from megatron_anchor.training.context_parallel import ContextParallel
from tests.unit.packing_oracle import (
    ATTENTION_PATTERNS,
    build,
    build_train,
    make_config,
    write_corpus,
)

S, P = 16, 2


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Documents of five tokens, filled up to eight slots: two a sample."""
    prefix = write_corpus(tmp_path / "c", [[[10 * n + k for k in range(5)]] for n in range(1, 9)])
    dataset = build_train(prefix, sequence_length=S, document_alignment=2 * P)
    monkeypatch.setattr(bad_batch, "_watch", bad_batch._Watch())
    bad_batch.register(dataset)
    return dataset


SPLITS = {
    "contiguous": ContextParallel(kind="ulysses", heads_ranks=P),
    "zigzag": ContextParallel(kind="te", heads_ranks=P),
    "chunks": ContextParallel(kind="gather", keys_ranks=P),
}


@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize("slot", range(S))
def test_a_slot_of_any_context_parallel_rank_leads_to_its_document(
    dataset: Any, monkeypatch: pytest.MonkeyPatch, slot: int, kind: str
) -> None:
    split = SPLITS[kind].split
    dataset.config.context_parts = split.parts
    sample = dataset[3]
    chunks = sample["part_of_chunk"].numpy() if split.gathers else None
    losses_S = torch.zeros(S)
    losses_S[slot] = torch.nan
    found = []
    monkeypatch.setattr(bad_batch, "get_args", Namespace)
    monkeypatch.setattr(bad_batch, "context_parallel", lambda _: SPLITS[kind])
    for rank in range(P):
        monkeypatch.setattr(bad_batch.mpu, "get_context_parallel_rank", lambda rank=rank: rank)
        piece = losses_S[split.slots(sample["cu_seqlens"].numpy(), chunks, rank=rank)]
        if piece.isnan().any():
            other = torch.zeros_like(piece)
            origins = torch.stack([dataset[1]["origin"], dataset[3]["origin"]])
            found += bad_batch._records_of_losses(torch.stack([other, piece]), origins)
    [record] = found
    assert (record.number, record.bad_slots.tolist()) == (3, [slot])
    assert record.bad_documents == [dataset.slices(3).document[slot // 8]]
    assert f"not finite from slot {slot} on" in record.in_words(8)


def test_full_attention_mixes_documents_and_none_is_blamed(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", [[[5, 6, 7]], [[8, 9, 10]]])
    dataset = build_train(prefix, attention_pattern="full")
    record = SampleRecord(dataset, 0, np.array([2, 3, 7]))
    assert record.bad_documents == []
    assert record.as_json()["slots_not_finite"] == [[2, 4], [7, 8]]
    assert sorted(record.documents) == [0, 1]


def test_every_corpus_of_a_blend_and_every_split_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = bad_batch._Watch()
    monkeypatch.setattr(bad_batch, "_watch", watch)
    prefixes = [write_corpus(tmp_path / name, [[[5, 6, 7]]] * 20) for name in "ab"]
    train, valid, _ = build(make_config((prefixes, [0.5, 0.5]), split="1,1,0"), [8, 4, 0])
    single = build_train(prefixes[0])
    bad_batch.register(train, [valid, single], None)
    assert len(watch.datasets) == 5
    for sample in (train[0], valid[2], single[1]):
        number, idx = sample["origin"].tolist()
        again = watch.datasets[number][idx]
        assert torch.equal(again["tokens"], sample["tokens"])


def test_a_sample_of_another_dataset_is_not_looked_up(dataset: Any) -> None:
    assert bad_batch._records(torch.tensor([[1, 2]])) == []
    known = dataset[2]["origin"]
    records = bad_batch._records(torch.stack([torch.tensor([1, 2]), known]))
    assert [record.number for record in records] == [2]


def test_a_sample_that_several_chunks_of_the_model_read_is_named_once(dataset: Any) -> None:
    first, second = dataset[1]["origin"], dataset[3]["origin"]
    records = bad_batch._records(torch.stack([second, first, second, first]))
    assert [record.number for record in records] == [3, 1]


def test_runs_of_slots_are_ranges() -> None:
    assert _ranges(np.array([], np.int64)) == []
    assert _ranges(np.array([3])) == [[3, 4]]
    assert _ranges(np.array([0, 1, 2, 5, 7, 8])) == [[0, 3], [5, 6], [7, 9]]


@pytest.mark.parametrize("pattern", [p for p in ATTENTION_PATTERNS if p != "full"])
def test_every_slot_leads_to_its_document_under_every_masked_pattern(
    tmp_path: Path, pattern: str
) -> None:
    documents = [[[10 * n + k for k in range(n)]] for n in range(1, 9)]
    dataset = build_train(
        write_corpus(tmp_path / "c", documents), attention_pattern=pattern, sequence_length=S
    )
    for number in range(len(dataset)):
        pieces = dataset.slices(number)
        owners = np.repeat(pieces.document, pieces.prefix + pieces.length)
        for slot, owner in enumerate(owners):
            assert SampleRecord(dataset, number, np.array([slot])).bad_documents == [owner]
