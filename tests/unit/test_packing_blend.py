"""Blends of corpora: who is left out, who is one and the same, and enough samples of each."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_anchor import patches
from megatron_anchor.packing.blend import PATCH as BLENDS
from tests.unit.packing_oracle import build, make_config, plain, targets, write_corpus

LARGE = [[[10 * n, 10 * n + 1, 10 * n + 2]] for n in range(100, 200)]
SMALL = [[[10 * n, 10 * n + 1]] for n in range(10, 14)]
MIDDLE = [[[10 * n]] for n in range(300, 330)]


@pytest.fixture(autouse=True)
def _whole_blends() -> None:
    patches.apply(BLENDS)


def corpora(folder: Path, **documents: Any) -> list[str]:
    return [write_corpus(folder / name, corpus) for name, corpus in documents.items()]


def tokens_of(dataset: Any) -> Counter[int]:
    return Counter(token for sample in dataset for token in targets(sample))


@pytest.mark.parametrize("weights", [None, [0.4, 0.5, 0.1], [0.1, 0.8, 0.1]])
@pytest.mark.parametrize("cached", [False, True])
def test_a_corpus_without_validation_documents_is_left_out_of_validation(
    tmp_path: Path, weights: Any, cached: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """And trained on; the others share its weight, with as many samples as that takes."""
    prefixes = corpora(tmp_path, large=LARGE, small=SMALL, middle=MIDDLE)
    cache = {"path_to_cache": str(tmp_path / "cache")} if cached else {}
    config = make_config((prefixes, weights), split="90,10,0", **cache)
    size = 40 if weights else None
    with caplog.at_level(logging.WARNING):
        train, valid, test = build(config, [size, size, None if weights is None else 0])
    assert test is None
    assert len(train.datasets) == 3
    assert [dataset.dataset_path for dataset in valid.datasets] == [prefixes[0], prefixes[2]]
    assert (
        f"the corpus {prefixes[1]} has no document with a token in the valid split" in caplog.text
    )
    assert "--valid-data-path" in caplog.text
    assert prefixes[0] not in caplog.text
    expected = {t for document in LARGE[90:] + MIDDLE[27:] for t in document[0]}
    found = tokens_of(valid)
    assert set(found) == expected
    if weights is None:
        assert set(found.values()) == {1}
    else:
        share = np.bincount(valid.dataset_index) / len(valid)
        scaled = np.array([weights[0], weights[2]]) / (weights[0] + weights[2])
        assert len(valid) >= 40
        assert share == pytest.approx(scaled, abs=0.03)
        assert all(
            count <= len(dataset)
            for count, dataset in zip(valid.samples_of_corpora, valid.datasets, strict=True)
        )


def test_a_blend_without_any_validation_document_names_what_can_be_done(tmp_path: Path) -> None:
    prefixes = corpora(tmp_path, a=SMALL, b=SMALL[:3])
    for weights, size in ((None, None), ([0.5, 0.5], 20)):
        config = make_config((prefixes, weights), split="99,1,0")
        with pytest.raises(ValueError, match=r"none of the 2 corpora .* valid split.*--valid-data"):
            build(config, [20, size, 0])
        train, valid, _ = build(config, [20, 0, 0])  # no evaluation: nothing to say
        assert len(valid) == 0
        assert len(train)


def test_a_corpus_named_for_validation_must_have_documents(tmp_path: Path) -> None:
    prefixes = corpora(tmp_path, a=LARGE, b=SMALL, c=[[[1]]])
    per_split = [(prefixes[:1], None), (prefixes[1:], [0.5, 0.5]), None]
    with pytest.raises(ValueError, match=rf"valid split of the corpus {prefixes[2]} holds no"):
        build(make_config(None, blend_per_split=per_split), [20, 20, 0])


def test_a_training_corpus_must_have_documents(tmp_path: Path) -> None:
    prefixes = corpora(tmp_path, a=LARGE, b=[[[1]], [[1]]])
    with pytest.raises(ValueError, match=rf"train split of the corpus {prefixes[1]} holds no"):
        build(make_config((prefixes, [0.5, 0.5]), split="50,50,0"), [20, 20, 0])


@pytest.mark.parametrize("name", ["c", "copy"])
def test_one_corpus_twice_is_said_with_the_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Also where it is a copy under another name; corpora that only share documents are not."""
    for folder in ("c", "copy"):
        (tmp_path / folder).mkdir()
    prefixes = [
        write_corpus(tmp_path / "c" / "text", LARGE),
        write_corpus(tmp_path / name / "text", LARGE),
        write_corpus(tmp_path / "c" / "more", LARGE[:-1]),
    ]
    cache = {"path_to_cache": str(tmp_path / "cache")}
    config = make_config((prefixes, [0.5, 0.25, 0.25]), split="90,10,0", **cache)
    with caplog.at_level(logging.WARNING):
        train, valid, _ = build(config, [132, 0, 0])
    [said] = caplog.messages
    first, second, _ = (plain_samples(train, number) for number in range(3))
    assert second == first[: len(second)]
    drawn, different = len(first) + len(second), len(first)
    assert f"the train blend holds one corpus 2 times ({prefixes[0]}, {prefixes[1]})" in said
    assert f"of {drawn} samples drawn from it {different} are different" in said
    assert len(valid) == 0


def plain_samples(blend: Any, number: int) -> list[dict]:
    return [plain(s) for s in blend if s["dataset_id"] == number]


def test_different_corpora_are_no_doubles(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prefixes = corpora(tmp_path, a=LARGE, b=[[[11, *document[0][1:]]] for document in LARGE])
    with caplog.at_level(logging.WARNING):
        build(make_config((prefixes, None), path_to_cache=str(tmp_path / "cache")))
    assert not caplog.messages
