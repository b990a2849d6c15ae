"""Domain tags and document lists: read from what the corpus tools write."""

import itertools
import json
import logging
import pickle
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_anchor.corpus.upsampling import make_document_list
from megatron_anchor.packing.domains import check_format, tag_tokenizer
from tests.unit.packing_oracle import (
    ANCHOR,
    VOCAB_SIZE,
    build,
    build_train,
    make_config,
    plain,
    spell,
    targets,
    write_corpus,
    write_domains,
)

A, B, C, COLON, SPACE = spell("abc: ")[1:]


def test_a_tag_stands_behind_the_anchor_and_is_never_a_target(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = write_corpus(tmp_path / "c", [[[11, 12]], [[21, 22]], [[31, 32]]])
    write_domains(prefix, [0, 1, 2])  # "a", "bc", "unknown"
    with caplog.at_level(logging.WARNING):
        dataset = build_train(prefix, domain_tags=True, sequence_length=20)
    [sample] = dataset
    slots = list(zip(*(sample[n].tolist() for n in ("tokens", "labels", "loss_mask")), strict=True))
    assert int(sample["num_documents"]) == 3
    expected = {
        11: [(ANCHOR, 0, 0), (A, 0, 0), (COLON, 0, 0), (SPACE, 11, 1), (11, 12, 1), (12, 0, 0)],
        21: [(ANCHOR, 0, 0), (B, 0, 0), (C, 0, 0), (COLON, 0, 0), (SPACE, 21, 1), (21, 22, 1),
             (22, 0, 0)],
        31: [(ANCHOR, 31, 1), (31, 32, 1), (32, 0, 0)],
    }  # fmt: skip
    borders = sample["cu_seqlens"].tolist()
    for begin, end in itertools.pairwise(borders[:4]):
        assert slots[begin:end] == expected[int(slots[end - 1][0]) - 1]
    assert "1 of 3 documents of the corpus" in caplog.text
    assert "no known domain" in caplog.text
    assert plain(pickle.loads(pickle.dumps(dataset))[0]) == plain(sample)


def test_a_corpus_without_domains_gets_no_tags_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = write_corpus(tmp_path / "c", [[[11, 12]], [[21, 22]]])
    with caplog.at_level(logging.WARNING):
        tagged = build_train(prefix, domain_tags=True)
    assert [plain(sample) for sample in tagged] == [plain(sample) for sample in build_train(prefix)]
    assert "2 of 2 documents" in caplog.text
    assert "--domain-key" in caplog.text


def test_a_tag_that_leaves_no_room_is_refused(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", [[[11, 12]]])
    write_domains(prefix, [0])
    assert len(build_train(prefix, domain_tags=True, sequence_length=6)) == 1  # "bc: " and 2 slots
    with pytest.raises(ValueError, match=r"tag of the corpus .* has 4 tokens.*--domain-tag-format"):
        build_train(prefix, domain_tags=True, sequence_length=5)


@pytest.mark.parametrize(("vocab_size", "size"), [(50050, "50050"), (None, "any size")])
def test_a_tag_outside_the_vocabulary_is_refused_at_start(
    tmp_path: Path, vocab_size: int | None, size: str
) -> None:
    prefix = write_corpus(tmp_path / "c", [[[11, 12]]])
    write_domains(prefix, [1])
    first = -1 if vocab_size is None else 50000 + ord("a")  # the tag of a domain without documents
    tokenizer = SimpleNamespace(
        vocab_size=VOCAB_SIZE,
        tokenize=lambda text: [first + ord(letter) - ord("a") for letter in text],
    )
    message = rf"the tag 'a: ' of the domain 'a' .*token id {first}, .* vocabulary of {size}: "
    with pytest.raises(ValueError, match=message):
        build_train(prefix, domain_tags=True, vocab_size=vocab_size, tokenizer=tokenizer)


@pytest.mark.parametrize("text", ["", "domain", "{source}", "{domain", "{0}: "])
def test_a_format_without_domain_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--domain-tag-format"):
        check_format(text)


def test_tags_lose_the_special_tokens_that_a_tokenizer_adds() -> None:
    """Only those, and only once, however the tag's own tokens look."""
    spelled = {"x": [50, 51], "bos": [7], "eos": [8, 8], "": []}
    for front, behind in itertools.product(([], [7], [7, 7]), ([], [8])):
        tokenizer = SimpleNamespace(tokenize=lambda text, f=front, b=behind: f + spelled[text] + b)
        for text, tokens in spelled.items():
            assert tag_tokenizer(tokenizer)(text) == tokens


def write_list(prefix: str, ids: list[int]) -> str:
    path = f"{prefix}.list.npy"
    make_document_list(prefix, path)
    np.save(path, np.array(ids, dtype=np.int64))
    described = json.loads(Path(f"{prefix}.list.json").read_text()) | {"documents": len(ids)}
    Path(f"{prefix}.list.json").write_text(json.dumps(described))
    return path


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_listed_documents_are_served_as_often_as_listed(
    tmp_path: Path, packing: str, epochs: int
) -> None:
    prefix = write_corpus(tmp_path / "c", [[[10 * n, 10 * n + 1]] for n in range(1, 9)])
    ids = [3, 3, 3, 5, 0, 5]
    settings: dict[str, Any] = {"packing": packing, "sequence_length": 6}
    settings["document_lists"] = {"": write_list(prefix, ids)}
    number = len(build_train(prefix, **settings)) * epochs
    counts = Counter(t for s in build_train(prefix, number, **settings) for t in targets(s))
    times = {10 * (d + 1) + k: epochs * n for d, n in Counter(ids).items() for k in (0, 1)}
    assert counts == times


def test_validation_documents_stay_out_of_training_and_are_read_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = write_corpus(tmp_path / "c", [[[10 * n, 10 * n + 1]] for n in range(1, 9)])
    lists = {prefix: write_list(prefix, [0, 0, 1, 7])}
    config = make_config(prefix, split="75,25,0", document_lists=lists)
    with caplog.at_level(logging.WARNING):
        train, valid, _ = build(config, [None, None, None])
    assert Counter(t for s in train for t in targets(s)) == {10: 2, 11: 2, 20: 1, 21: 1}
    assert sorted(t for s in valid for t in targets(s)) == [70, 71, 80, 81]
    assert "1 of 4 entries of --document-list" in caplog.text


def test_a_list_of_another_corpus_or_none_is_refused(tmp_path: Path) -> None:
    first = write_corpus(tmp_path / "a", [[[11, 12]], [[21]]])
    second = write_corpus(tmp_path / "b", [[[11, 12, 13]], [[21]]])
    with pytest.raises(ValueError, match=r"was made for .*/a, whose index differs"):
        build_train(second, document_lists={"": write_list(first, [0, 1])})
    with pytest.raises(FileNotFoundError, match=r"--document-list missing\.npy not found"):
        build_train(first, document_lists={"": "missing.npy"})
