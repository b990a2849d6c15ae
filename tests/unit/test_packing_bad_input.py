"""What users get wrong: each error shows the value, the place and the remedy."""

import logging
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_anchor.indexed.headers import inspect_corpus
from megatron_anchor.packing import documents as documents_module
from megatron_anchor.packing.documents import Documents
from tests.unit.packing_oracle import (
    ANCHOR,
    VOCAB_SIZE,
    build,
    build_train,
    make_config,
    write_corpus,
)

DOCUMENTS = [[[11, 12], [13, 2]], [[21, 22, 2]], [[31, 32, 33, 34, 35, 2]]]
HEADER = struct.calcsize("<9sQBQQ")


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "corpus", DOCUMENTS)


def overwrite(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as stream:
        stream.seek(offset)
        stream.write(data)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_file_is_named(prefix: str, suffix: str) -> None:
    os.remove(prefix + suffix)
    with pytest.raises(FileNotFoundError, match=rf"corpus\{suffix} not found; .*--data-path"):
        build_train(prefix)


def test_a_path_with_a_suffix_gets_the_prefix_as_remedy(prefix: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"give the prefix without .bin: {prefix}$"):
        build_train(f"{prefix}.bin")


@pytest.mark.parametrize("size", [0, 5, 20, HEADER, HEADER + 7, -1])
def test_a_truncated_idx_is_found_at_construction(prefix: str, size: int) -> None:
    whole = os.path.getsize(f"{prefix}.idx")
    os.truncate(f"{prefix}.idx", size if size >= 0 else whole + size)
    with pytest.raises(ValueError, match=r"corpus\.idx is truncated: it has \d+ bytes.*again"):
        build_train(prefix)


@pytest.mark.parametrize("missing", [1, 4, 20])
def test_a_bin_shorter_than_its_idx_is_found_at_construction(prefix: str, missing: int) -> None:
    whole = os.path.getsize(f"{prefix}.bin")
    os.truncate(f"{prefix}.bin", whole - missing)
    with pytest.raises(ValueError, match=rf"too short: it has {whole - missing} .* for {whole}\."):
        build_train(prefix)


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"GARBAGE", "is no index of a Megatron corpus: it begins with b'GARBAGE"),
        (9, struct.pack("<Q", 7), "has version 7, expected 1"),
        (17, b"\x63", "has tokens of type 99, expected one of 1 = uint8"),
        (17, b"\x06", "has tokens of type 6, expected one of"),  # float64
        (18, struct.pack("<Q", 10**12), "is truncated"),
        (26, struct.pack("<Q", 0), "its document table is empty"),
        (HEADER + 12 * 4, struct.pack("<q", 1), "runs from sequence 1 to 4, expected 0 to 4"),
        (HEADER + 12 * 4 + 24, struct.pack("<q", 3), "runs from sequence 0 to 3"),
        (HEADER + 4 * 4, struct.pack("<q", 8), "sequence 0 and the next do not stand side by side"),
        (HEADER + 4 * 4 + 8, struct.pack("<q", 4), "sequence 0 and the next do not stand"),
        (HEADER + 4, struct.pack("<i", -2), "sequence 1 and the next do not stand side by side"),
        (HEADER + 12 * 4 + 8, struct.pack("<q", 4), r"document 1 has -\d+ tokens"),
    ],
)
def test_a_damaged_idx_is_found_at_construction(
    prefix: str, offset: int, data: bytes, message: str
) -> None:
    overwrite(f"{prefix}.idx", offset, data)
    with pytest.raises(ValueError, match=rf"corpus\.idx.*{message}.*corpus again"):
        build_train(prefix)


def test_a_corpus_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no token"):
        build_train(write_corpus(tmp_path / "a", []))
    with pytest.raises(ValueError, match="holds no token"):
        build_train(write_corpus(tmp_path / "b", [[[]], [[]]]))


def test_a_split_without_usable_documents_is_refused(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", [[[ANCHOR]], [[]], [[5]]])
    with pytest.raises(ValueError, match=r"train split .*\(1 documents, all empty or .*--split"):
        build(make_config(prefix, split="40,60,0"), [3, 3, None])
    with pytest.raises(ValueError, match=r"valid split .*\(0 documents"):
        build(make_config(prefix, split="999,1,0"), [3, 3, None])


def test_a_bin_longer_than_its_idx_is_found_at_construction(prefix: str) -> None:
    whole = os.path.getsize(f"{prefix}.bin")
    with open(f"{prefix}.bin", "ab") as stream:
        stream.write(b"\x00" * 10)
    with pytest.raises(
        ValueError, match=rf"too long: it has {whole + 10} .* for {whole}\. Do both"
    ):
        build_train(prefix)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize(
    ("documents", "dtype", "place", "token_id"),
    [
        ([[[11, 12]], [[ANCHOR, 21], [22, 77, 2]]], np.uint16, "document 1, token 3", 77),
        ([[[11, 12]], [[21, 22, 2, 50]]], np.int32, "document 1, token 3", 50),
        ([[[11, -3]], [[21, 22, 2, 5]]], np.int32, "document 0, token 1", -3),
    ],
)
def test_a_token_outside_the_vocabulary_is_located(
    tmp_path: Path, documents: list, dtype: type, place: str, token_id: int, mmap: bool
) -> None:
    prefix = write_corpus(tmp_path / "c", documents, dtype)
    dataset = build_train(prefix, vocab_size=50, sequence_length=4, mmap_bin_files=mmap)
    message = (
        f"token id {token_id} in the corpus {prefix}, {place} .* outside the vocabulary of 50: "
        ".*--tokenizer-model"
    )
    with pytest.raises(ValueError, match=message):
        list(dataset)


def test_the_token_behind_a_cut_is_checked_too(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", [[[11, 12, 13, 99]]])
    dataset = build_train(prefix, vocab_size=50, sequence_length=4)
    first = next(i for i in range(2) if dataset.slices(i).anchor_has_target[0])
    with pytest.raises(ValueError, match=r"token id 99 .* document 0, token 3"):
        dataset[first]  # 99 is only the last label here


def test_without_a_vocabulary_size_only_negative_ids_are_refused(tmp_path: Path) -> None:
    large = build_train(write_corpus(tmp_path / "a", [[[2**31 - 1]]]), vocab_size=None)
    assert large[0]["labels"].tolist()[0] == 2**31 - 1
    with pytest.raises(ValueError, match=r"token id -1 .* outside the vocabulary of any size"):
        build_train(write_corpus(tmp_path / "b", [[[-1]]]), vocab_size=None)[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sequence_length": 1}, "got sequence_length 1, expected at least 2.*--seq-length"),
        ({"attention_pattern": "ancor"}, "did you mean 'anchor'"),
        ({"anchor_token_id": None}, "no anchor token: set --anchor-token "),
        ({"anchor_token_id": -1}, "got anchor_token_id -1, expected 0 to .*--anchor-token "),
        ({"anchor_token_id": VOCAB_SIZE}, f"anchor_token_id {VOCAB_SIZE}, expected 0 to 59999"),
        ({"pad_token_id": -1, "vocab_size": None}, "got pad_token_id -1, expected 0 or more"),
        ({"packing": "first-fit"}, "--packing first-fit: expected one of concat, best-fit"),
        ({"document_alignment": 3}, "alignment 3: --seq-length 8 must be a multiple of it"),
        ({"document_alignment": 0}, "--document-alignment 0: expected 1 or more"),
        ({"domain_tags": True, "domain_tag_format": "x"}, "--domain-tag-format 'x', expected a"),
        (
            {"domain_tags": True, "tokenizer": SimpleNamespace(vocab_size=VOCAB_SIZE)},
            "--domain-tags needs a tokenizer",
        ),
        ({"anchor_position": -1}, "--anchor-position -1: expected 0 or more"),
        ({"anchor_position": 2, "attention_pattern": "full"}, "has a meaning under .*got full"),
        (
            {"interleave_chunks": True, "attention_pattern": "intra-document-reset"},
            "--interleave-chunks has no effect",
        ),
        ({"hybrid_context_parallel": True}, "--hybrid-context-parallel"),
    ],
)
def test_a_bad_setting_is_refused_with_its_remedy(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config("corpus", **settings)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("per_split", [False, True])
def test_a_weight_that_is_no_weight_is_refused(weight: float, per_split: bool) -> None:
    blend = (["first", "second"], [1.0, weight])
    settings = {"blend_per_split": [None, blend, None]} if per_split else {}
    message = rf"gives the corpus second the weight {weight}, expected a finite number above 0"
    with pytest.raises(ValueError, match=message):
        make_config(blend, **settings)


def test_weights_are_refused_where_a_whole_set_is_read_once() -> None:
    blend = (["first", "second"], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"--full-validation .* --valid-data-path"):
        make_config(blend, full_validation=True)
    make_config((blend[0], None), full_validation=True)
    make_config(None, blend_per_split=[blend, (["third"], None), None], full_validation=True)


def test_mock_data_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a corpus: set --data-path"):
        make_config(None, blend_per_split=None)


def test_object_stores_are_refused() -> None:
    with pytest.raises(ValueError, match="s3://bucket/corpus is in an object store"):
        build_train("s3://bucket/corpus")


@pytest.mark.parametrize(
    "flag",
    ["reset_position_ids", "reset_attention_mask", "eod_mask_loss", "inter_document_masking"],
)
def test_options_without_effect_are_reported(flag: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = make_config("corpus", **{flag: True})
    assert f"--{flag.replace('_', '-')} has no effect on packed samples" in caplog.text
    assert getattr(config, flag) is False


def test_an_ambiguous_padding_token_frightens_nobody(
    prefix: str, recwarn: pytest.WarningsRecorder
) -> None:
    config = make_config(prefix)
    config.tokenizer.pad = config.tokenizer.eos = config.tokenizer.eod = 2
    assert len(build(config)[0]) > 0
    assert not [str(w.message) for w in recwarn if "pad token" in str(w.message)]


@pytest.mark.parametrize(("block", "block_bytes"), [(1, 4), (2, 8), (3, 64), (1 << 20, 1 << 26)])
@pytest.mark.parametrize("mmap", [True, False])
def test_own_anchors_and_lengths_are_exact_in_every_block_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mmap: bool, block: int, block_bytes: int
) -> None:
    documents = [
        [],
        [[1, 5]],
        [[]],
        [[], [1]],
        [[5, 1]],
        [[7], [1, 1]],
        [[1], [1]],
        [[]],
        [[9] * 40],
    ]
    documents += [[[1, 2, 3]], [[]], []]
    monkeypatch.setattr(documents_module, "_BLOCK", block)
    monkeypatch.setattr(documents_module, "_BLOCK_BYTES", block_bytes)
    prefix = write_corpus(tmp_path / "c", documents)
    dataset = build_train(prefix, mmap_bin_files=mmap)
    table = Documents(dataset.dataset)
    flat = [[token for sequence in document for token in sequence] for document in documents]
    own = [tokens[:1] == [ANCHOR] for tokens in flat]
    found = table.find_own_anchors(ANCHOR)
    assert found.tolist() == own
    assert table.content_lengths(found).tolist() == [
        len(tokens) - anchor for tokens, anchor in zip(flat, own, strict=True)
    ]
    table.check()


def test_the_headers_of_a_sound_corpus_are_read(prefix: str) -> None:
    files = inspect_corpus(prefix)
    assert (files.num_sequences, files.num_documents, files.num_tokens) == (4, 3, 13)
    assert files.dtype == np.int32
