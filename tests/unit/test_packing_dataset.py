"""The laws on datasets that Megatron's own builder made from files."""

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index

from megatron_anchor.packing.dataset import PackedDataset
from tests.unit.packing_oracle import (
    ANCHOR,
    ATTENTION_PATTERNS,
    PAD,
    build,
    build_train,
    corpora,
    expected_fields,
    flatten,
    make_config,
    pack,
    plain,
    targets,
    write_corpus,
)

SAMPLES = (4, [[[11, 12, 13, 2]], [[21, 22, 2]], [[31, 32, 33, 34, 35, 2]], [[41]]])


@settings(deadline=None, max_examples=30)
@given(
    corpora(),
    st.sampled_from(ATTENTION_PATTERNS),
    st.sampled_from([np.int32, np.uint16, np.int64]),
    st.booleans(),
    st.sampled_from([PAD, 2, ANCHOR]),
    st.integers(0, 9),
)
@example(SAMPLES, "anchor", np.int32, True, 2, 0)
@example(SAMPLES, "anchor", np.uint16, False, 2, 0)
def test_every_sample_equals_the_slow_packer_in_megatrons_order(
    corpus: tuple[int, list], pattern: str, dtype: type, mmap: bool, pad: int, seed: int
) -> None:
    sequence_length, documents = corpus
    with tempfile.TemporaryDirectory() as folder:
        ours = build_train(
            write_corpus(f"{folder}/c", documents, dtype),
            sequence_length=sequence_length,
            attention_pattern=pattern,
            mmap_bin_files=mmap,
            pad_token_id=pad,
            random_seed=seed,
        )
        random_state = np.random.RandomState(seed)
        order = _build_document_index(np.arange(len(documents)), 1, random_state, False)
        samples = pack(
            [flatten(documents)[document] for document in order],
            anchor=ANCHOR,
            sequence_length=sequence_length,
        )
        shuffled = _build_shuffle_index(len(samples), len(samples), random_state)
        assert len(ours) == len(samples)
        assert [plain(sample) for sample in ours] == [
            expected_fields(
                samples[number], sequence_length=sequence_length, pad=pad, pattern=pattern
            )
            for number in shuffled
        ]


def test_splits_are_ranges_of_documents_and_share_no_token(tmp_path: Path) -> None:
    documents = [[[100 + 10 * n, 101 + 10 * n], [102 + 10 * n]] for n in range(20)]
    prefix = write_corpus(tmp_path / "c", documents)
    config = make_config(prefix, split="70,20,10")
    splits = build(config, [None, None, None])
    found = [{t for sample in dataset for t in targets(sample)} for dataset in splits]
    expected = [
        {t for document in flatten(documents)[a:b] for t in document}
        for a, b in ((0, 14), (14, 18), (18, 20))
    ]
    assert found == expected


def test_an_unweighted_blend_serves_every_token_once(tmp_path: Path) -> None:
    first = [[[n, n + 1, n + 2]] for n in range(100, 160, 3)]
    second = [[list(range(200, 230))], [[]], [[231]]]
    prefixes = [
        write_corpus(tmp_path / name, corpus) for name, corpus in (("a", first), ("b", second))
    ]
    [blend, *_] = build(make_config((prefixes, None)))
    assert {int(sample["dataset_id"]) for sample in blend} == {0, 1}
    counts = Counter(t for sample in blend for t in targets(sample))
    assert counts == Counter(t for d in flatten(first + second) for t in d)


@pytest.mark.parametrize("weights", [[0.3, 0.7], [0.001, 0.999]])
def test_a_weighted_blend_serves_the_samples_of_its_corpora(
    tmp_path: Path, weights: list[float]
) -> None:
    corpus = [[[n, n + 1, n + 2]] for n in range(100, 160, 3)]
    prefixes = [write_corpus(tmp_path / name, corpus) for name in "ab"]
    [blend, *_] = build(make_config((prefixes, weights)), [500, 0, 0])
    assert 500 <= len(blend) <= 502
    share = np.bincount([int(sample["dataset_id"]) for sample in blend]) / len(blend)
    assert share == pytest.approx(weights, abs=0.01)
    for number in (0, 1, 250, 499):
        source = blend.datasets[blend.dataset_index[number]]
        sample = blend[number]
        assert sample.pop("dataset_id") == blend.dataset_index[number]
        assert plain(sample) == plain(source[int(blend.dataset_sample_index[number])])


def test_splits_may_have_blends_of_their_own(tmp_path: Path) -> None:
    corpora = {"train": [[[11, 12, 13]]], "valid": [[[21, 22]]], "more": [[[31] * 9]]}
    prefix = {name: write_corpus(tmp_path / name, corpus) for name, corpus in corpora.items()}
    per_split = [([prefix["train"], prefix["more"]], None), ([prefix["valid"]], None), None]
    train, valid, test = build(make_config(None, blend_per_split=per_split))
    assert sorted(t for sample in train for t in targets(sample)) == [11, 12, 13] + [31] * 9
    assert [targets(sample) for sample in valid] == [[21, 22]]
    assert test is None


def test_one_index_serves_all_patterns_and_both_ways_of_reading(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", SAMPLES[1])
    cache = tmp_path / "cache"
    for pattern in ATTENTION_PATTERNS:
        for mmap in (True, False):
            build_train(
                prefix, attention_pattern=pattern, mmap_bin_files=mmap, path_to_cache=str(cache)
            )
    assert len(list(cache.glob("*description.json"))) == 2  # own anchors, and the sample index


def test_building_twice_gives_the_same_samples_and_another_seed_gives_others(
    tmp_path: Path,
) -> None:
    documents = [[[10 * n + k for k in range(n % 7 + 1)]] for n in range(1, 60)]
    prefix = write_corpus(tmp_path / "c", documents)
    runs = [
        [
            plain(sample)
            for sample in build_train(prefix, path_to_cache=str(tmp_path / name), **seed)
        ]
        for name, seed in (("a", {}), ("b", {}), ("c", {"random_seed": 4321}))
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    tokens = [Counter(t for sample in run for t in sample["labels"] if t) for run in runs]
    assert tokens[0] == tokens[2]


def test_samples_collate_into_batches(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", [[list(range(10, 50))]])
    dataset = build_train(prefix, sequence_length=9)
    batch = next(iter(torch.utils.data.DataLoader(dataset, batch_size=3)))
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in batch.items()}
    assert shapes == {
        "tokens": (torch.int64, (3, 9)),
        "labels": (torch.int64, (3, 9)),
        "loss_mask": (torch.float32, (3, 9)),
        "position_ids": (torch.int64, (3, 9)),
        "router_mask": (torch.bool, (3, 9)),
        "cu_seqlens": (torch.int32, (3, 6)),
        "max_seqlen": (torch.int32, (3,)),
        "num_documents": (torch.int32, (3,)),
        "num_cut": (torch.int32, (3,)),
        "num_padding": (torch.int32, (3,)),
        "origin": (torch.int64, (3, 2)),
    }


def test_a_sample_for_filling_a_batch_counts_nowhere(tmp_path: Path) -> None:
    dataset = build_train(write_corpus(tmp_path / "c", SAMPLES[1]))
    sample = dataset[None]
    assert sample["loss_mask"].sum() == 0
    assert sample["labels"].sum() == 0
    assert sample["router_mask"].sum() == 0
    assert torch.equal(sample["tokens"], dataset[0]["tokens"])


def test_indices_beyond_the_samples_are_refused(tmp_path: Path) -> None:
    dataset = build_train(write_corpus(tmp_path / "c", SAMPLES[1]))
    assert plain(dataset[-1]) == plain(dataset[len(dataset) - 1])
    for index in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError, match=f"sample {index} of a dataset with {len(dataset)}"):
            dataset[index]


def test_anchor_may_be_the_end_of_document_and_the_padding(tmp_path: Path) -> None:
    """Qwen has no bos: its eos serves as anchor, and often as padding."""
    documents = [[[11, 12, 2]], [[2, 21, 2]], [[2, 2]], [[2]]]
    dataset = build_train(
        write_corpus(tmp_path / "c", documents),
        anchor_token_id=2,
        pad_token_id=2,
        sequence_length=12,
    )
    assert len(dataset) == 1
    assert sorted(targets(dataset[0])) == [2, 2, 2, 11, 12, 21]  # each real end, no anchor
    assert int(dataset[0]["num_documents"]) == 3
    assert int(dataset[0]["num_padding"]) == 3


def test_a_split_that_needs_no_samples_may_be_empty(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", SAMPLES[1])
    _, valid, test = build(make_config(prefix, split="998,1,1"), [5, 0, 0])
    assert (len(valid), len(test)) == (0, 0)


def test_fast_cache_load_gives_the_same_samples(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", SAMPLES[1])
    common = {
        "blend_per_split": [([prefix], None), None, None],
        "path_to_cache": str(tmp_path / "cache"),
    }
    first = build(make_config(None, **common))[0]
    second = build(make_config(None, **common, fast_cache_load=True, defer_npy_index_mmap=True))[0]
    assert [plain(sample) for sample in first] == [plain(sample) for sample in second]


def test_documents_are_the_unit_that_is_counted(tmp_path: Path) -> None:
    dataset = build_train(write_corpus(tmp_path / "c", [[[1], [5]], [[6], [7], [8]], []]))
    assert PackedDataset.numel_low_level_dataset(dataset.dataset) == 3
    assert dataset.config.tokenizer is not None
