"""The loss law: every document token is a target exactly once an epoch, and nothing else ever is.

The corpora hold no token twice (but for leading anchors), so a token tells its place.
"""

import itertools
import tempfile
from collections import Counter
from typing import Any

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from tests.unit.packing_oracle import (
    ANCHOR,
    PAD,
    build_train,
    corpora,
    flatten,
    targets,
    write_corpus,
)


def contents(documents: list) -> list[list[int]]:
    """The documents' tokens but a leading anchor."""
    return [tokens[1:] if tokens[:1] == [ANCHOR] else tokens for tokens in flatten(documents)]


def read(documents: list, num_samples: int | None = None, **settings: Any) -> list[dict]:
    """All samples of a dataset over `documents`."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_corpus(f"{folder}/c", documents)
        return list(build_train(prefix, num_samples, **settings))


def segments(sample: dict) -> list[list[tuple[int, int | None]]]:
    """A sample's segments as lists of (token, label), the label None where it does not count."""
    labels = [
        label if counts else None
        for label, counts in zip(
            sample["labels"].tolist(), sample["loss_mask"].tolist(), strict=True
        )
    ]
    slots = list(zip(sample["tokens"].tolist(), labels, strict=True))
    borders = sample["cu_seqlens"].unique().tolist()
    return [slots[begin:end] for begin, end in itertools.pairwise(borders)]


def test_the_loss_law_over_one_epoch() -> None:
    seen: Counter[str] = Counter()

    @settings(deadline=None, max_examples=60)
    @given(corpora(unique=True), st.integers(0, 9))
    @example((4, [[[10, 11]], [[]], [[*range(12, 21)]], [[ANCHOR]], [[ANCHOR, 21]]]), 0)
    @example((3, [[[10]], [[11]], [[12]], [[13, 14]]]), 1)
    def check(corpus: tuple[int, list], seed: int) -> None:
        sequence_length, documents = corpus
        successor: dict[int, int | None] = {}
        for tokens in contents(documents):
            successor.update(zip(tokens, [*tokens[1:], None], strict=False))
        firsts = {tokens[0] for tokens in contents(documents) if tokens}
        inputs: Counter[int] = Counter()
        samples = read(documents, sequence_length=sequence_length, random_seed=seed)
        for sample in samples:
            pieces = segments(sample)
            if sample["num_padding"]:
                seen["padding"] += 1
                assert pieces.pop() == [(PAD, None)] * int(sample["num_padding"])
            assert len(pieces) == sample["num_documents"]
            for (anchor, first_label), *rest in pieces:
                assert anchor == ANCHOR
                assert first_label is None or first_label in firsts
                assert [label for _, label in rest] == [successor[token] for token, _ in rest]
                if rest and first_label is not None:
                    assert rest[0][0] == first_label
                inputs.update(token for token, _ in rest)
                seen["continuation"] += first_label is None
                seen["anchor in the last slot"] += not rest
        assert inputs == Counter(successor.keys())
        assert Counter(t for sample in samples for t in targets(sample)) == inputs
        seen["nothing but an anchor"] += [ANCHOR] in flatten(documents)
        seen["more than two samples"] += max(map(len, contents(documents))) > 2 * sequence_length
        seen["empty document"] += [] in flatten(documents)

    check()
    assert set(+seen) == {
        "padding",
        "continuation",
        "anchor in the last slot",
        "nothing but an anchor",
        "more than two samples",
        "empty document",
    }


@settings(deadline=None, max_examples=40)
@given(corpora(unique=True), st.integers(1, 4), st.integers(0, 5))
def test_the_loss_law_over_several_epochs(corpus: tuple[int, list], epochs: int, seed: int) -> None:
    sequence_length, documents = corpus
    settings = {"sequence_length": sequence_length, "random_seed": seed}
    number = epochs * len(read(documents, **settings))
    samples = read(documents, number, **settings)
    counts = Counter(t for sample in samples for t in targets(sample))
    event(f"{epochs} epochs")
    assert len(samples) >= number
    assert set(counts) == {token for tokens in contents(documents) for token in tokens}
    assert len(set(counts.values())) == 1  # whole epochs: all tokens equally often
    assert max(counts.values()) <= epochs + 1
