"""An attention pattern of one's own is one object: it packs, trains and is checked as ours are."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from megatron_anchor.packing import patterns
from megatron_anchor.packing.patterns import AttentionPattern, register, separate_anchors
from tests.distributed import pretraining
from tests.distributed.pretraining import pretrain, run_program, write_corpus
from tests.unit.packing_oracle import build_train
from tests.unit.packing_oracle import write_corpus as write_documents


def second_documents_only(document_borders: np.ndarray) -> np.ndarray:
    """The anchor is visible to every second document, the sample's first one included."""
    return separate_anchors(document_borders, np.arange(1, len(document_borders) - 1, 2))


OURS = AttentionPattern(
    name="every-second",
    summary="its document, and in every second document the anchor",
    one_anchor=True,
    segments=second_documents_only,
    separates_anchors=True,
)


def run(*arguments: str) -> None:
    """What a launcher of one's own is: the pattern, then the program."""
    register(OURS)
    run_program(*arguments)


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(patterns, "_PATTERNS", dict(patterns._PATTERNS))
    register(OURS)


def test_its_samples_are_what_its_object_says(known, tmp_path) -> None:
    documents = [[[10 * n + k for k in range(n % 4 + 1)]] for n in range(1, 12)]
    prefix = write_documents(tmp_path / "c", documents)
    for sample in build_train(prefix, sequence_length=16, attention_pattern="every-second"):
        anchors = np.flatnonzero(sample["tokens"].numpy() == 1)
        borders = np.unique(sample["cu_seqlens"].numpy()).tolist()
        alone = [begin for begin, end in pairwise(borders) if end - begin == 1]
        assert set(anchors[1::2]) <= set(alone)
        assert not set(anchors[0:-1:2]) & set(alone)
        assert not sample["position_ids"][anchors].any()
        assert not sample["router_mask"][anchors[1:]].any()


def test_two_steps_at_two_layouts_and_unlike_every_other_pattern(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pretraining, "run_program", run)
    corpus = write_corpus(tmp_path / "corpus", [7, 19, 3, 30, 11, 5, 24, 16] * 4)
    common = f"--train-iters 2 --data-path {corpus} --data-cache-path {tmp_path}/cache "

    def losses(name: str, ranks: int, more: str) -> list[float]:
        scalars = pretrain(ranks, common + more, tensorboard=tmp_path / name)
        return list(scalars["lm loss"].values())

    ours = losses("one", 1, "--attention-pattern every-second")
    layout = "--context-parallel-size 2 --cp-comm-type gather"
    assert len(ours) == 2
    np.testing.assert_allclose(
        losses("two", 2, f"--attention-pattern every-second {layout}"), ours, rtol=0, atol=1e-5
    )
    for other in ("anchor", "anchor-masked"):
        there = losses(other, 1, f"--attention-pattern {other}")
        assert abs(there[1] - ours[1]) > 1e-4, other
