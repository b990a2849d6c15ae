"""Weights of targets, from corpora, documents and contexts to the slots of a sample."""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_anchor.errors import UserError
from megatron_anchor.indexed.weights import TargetWeights, weights_manifest_path, weights_path
from megatron_anchor.packing.effective_context import (
    bucket_edges,
    exact_weights,
    weigh_by_context,
)
from megatron_anchor.packing.settings import PackingSettings
from tests.target_weights import write_weights
from tests.unit.packing_oracle import build_train, write_corpus

ANCHOR, EOS = 1, 9


def samples_of(prefix, **settings):
    return [dict(sample) for sample in build_train(prefix, **settings)]


def weight_by_target(prefix, **settings):
    """Token to the sum of the weights of its targets; tokens of the tests are all different."""
    found = defaultdict(float)
    for sample in samples_of(prefix, **settings):
        for label, weight in zip(sample["labels"], sample["loss_mask"], strict=True):
            found[int(label)] += float(weight)
    del found[0]
    return dict(found)


def test_labels_and_weights_of_a_conversation(tmp_path):
    """Three tokens of a user, then an answer of two and its end, in eight slots."""
    prefix = write_corpus(tmp_path / "c", [[[5, 6, EOS, 7, 8, EOS]]])
    write_weights(prefix, [0, 0, 0, 1, 1, 1], dtype="uint8")
    [sample] = samples_of(prefix, sequence_length=8)
    assert sample["tokens"].tolist()[:7] == [ANCHOR, 5, 6, EOS, 7, 8, EOS]
    assert sample["labels"].tolist()[:7] == [5, 6, EOS, 7, 8, EOS, 0]
    assert sample["loss_mask"].tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    write_weights(prefix, [1, 0, 0, 0, 0, 0.5], dtype="float16")
    [sample] = samples_of(prefix, sequence_length=8)
    assert sample["loss_mask"].tolist() == [1, 0, 0, 0, 0, 0.5, 0, 0], (
        "the anchor's slot: the first"
    )


def test_padding_of_the_same_id_as_eos_weighs_nothing(tmp_path):
    prefix = write_corpus(tmp_path / "c", [[[5, EOS]], [[6, EOS]]])
    write_weights(prefix, [0, 1, 0, 1], dtype="uint8")
    [sample] = samples_of(prefix, sequence_length=10, pad_token_id=EOS)
    kept = sample["labels"][sample["loss_mask"] > 0]
    assert kept.tolist() == [EOS, EOS]
    assert sample["loss_mask"].sum() == 2


DOCUMENTS = st.lists(st.integers(1, 12), min_size=1, max_size=8)


def different_tokens(lengths):
    first = 10 + np.concatenate(([0], np.cumsum(lengths)[:-1]))
    return [
        [list(range(begin, begin + length))] for begin, length in zip(first, lengths, strict=True)
    ]


@given(
    lengths=DOCUMENTS,
    sequence_length=st.integers(2, 17),
    packing=st.sampled_from(["concat", "best-fit"]),
    pattern=st.sampled_from(["anchor", "intra-document-reset", "full", "anchor-masked"]),
    mmap=st.booleans(),
    weighting=st.sampled_from(["uniform", "document-mean", "document-sqrt"]),
    own=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_token_has_its_weight_however_it_is_packed(
    tmp_path_factory, lengths, sequence_length, packing, pattern, mmap, weighting, own, seed
):
    prefix = write_corpus(tmp_path_factory.mktemp("w") / "c", different_tokens(lengths))
    total = sum(lengths)
    weights = np.ones(total)
    if own:
        weights = np.random.default_rng(seed).integers(0, 5, total) / 4
        weights[0] = 1
        write_weights(prefix, weights)
    expected, begin = {}, 0
    for length in lengths:
        part = weights[begin : begin + length]
        n = part.sum() or 1
        factor = {"uniform": 1, "document-mean": 1 / n, "document-sqrt": n**-0.5}[weighting]
        expected |= {10 + begin + i: weight * factor for i, weight in enumerate(part)}
        begin += length
    found = weight_by_target(
        prefix,
        sequence_length=sequence_length,
        packing=packing,
        attention_pattern=pattern,
        mmap_bin_files=mmap,
        loss_weighting=weighting,
    )
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_the_mean_of_two_documents_means(tmp_path):
    """Documents of two and six targets: their weights sum to 1 each."""
    prefix = write_corpus(tmp_path / "c", different_tokens([2, 6]))
    for sequence_length in (4, 5, 16):
        found = weight_by_target(
            prefix, sequence_length=sequence_length, loss_weighting="document-mean"
        )
        assert sum(found[t] for t in (10, 11)) == pytest.approx(1)
        assert sum(found[t] for t in range(12, 18)) == pytest.approx(1)


def test_the_first_token_leaves_the_mean_where_it_is_no_target(tmp_path):
    prefix = write_corpus(tmp_path / "c", different_tokens([3, 5]))
    found = weight_by_target(
        prefix,
        sequence_length=16,
        loss_weighting="document-mean",
        anchor_first_token_loss=False,
    )
    assert {token: weight for token, weight in found.items() if weight} == pytest.approx(
        dict.fromkeys((11, 12), 1 / 2) | dict.fromkeys((14, 15, 16, 17), 1 / 4)
    )


def test_only_training_is_weighed_by_document(tmp_path):
    from tests.unit.packing_oracle import build, make_config

    prefix = write_corpus(tmp_path / "c", different_tokens([4] * 10))
    config = make_config(
        ([prefix], None), sequence_length=8, split="50,50,0", loss_weighting="document-mean"
    )
    train, valid, _ = build(config)
    assert 0 < train[0]["loss_mask"].max() < 1
    assert valid[0]["loss_mask"].max() == 1


# Effective context.


def contexts_by_brute_force(sample, *, masked):
    """The tokens that predict each target: no anchors, padding or other documents."""
    tokens, borders = sample["tokens"].tolist(), sample["cu_seqlens"].tolist()
    found = []
    for slot, (label, mask) in enumerate(zip(sample["labels"], sample["loss_mask"], strict=True)):
        begin = max(b for b in borders if b <= slot) if masked else 0
        if mask:
            visible = [t for t in tokens[begin : slot + 1] if t >= 10]
            found.append((int(label), len(visible)))
    return found


@given(
    lengths=DOCUMENTS,
    sequence_length=st.integers(2, 40),
    packing=st.sampled_from(["concat", "best-fit"]),
    pattern=st.sampled_from(["anchor", "intra-document", "full", "anchor-masked"]),
    first_token=st.booleans(),
)
def test_contexts_are_counted_and_weighed_as_by_brute_force(
    tmp_path_factory, lengths, sequence_length, packing, pattern, first_token
):
    prefix = write_corpus(tmp_path_factory.mktemp("w") / "c", different_tokens(lengths))
    settings = {
        "sequence_length": sequence_length,
        "packing": packing,
        "attention_pattern": pattern,
        "anchor_first_token_loss": first_token,
        "loss_weighting": "effective-context",
        "effective_context_tail": 1,
    }
    plain = build_train(prefix, **settings | {"loss_weighting": "uniform"})
    masked = pattern != "full"
    contexts = [contexts_by_brute_force(plain[i], masked=masked) for i in range(len(plain))]
    edges = bucket_edges(sequence_length)
    counted = Counter(
        int(np.searchsorted(edges, c, side="right") - 1) for part in contexts for _, c in part
    )
    dataset = build_train(prefix, **settings)
    weights = weigh_by_context(dataset)
    expected = [counted[b] for b in range(len(edges) - 1)]
    assert dataset.context_counts(edges).tolist() == expected
    for i, part in enumerate(contexts):
        sample = dataset[i]
        kept = sample["loss_mask"][plain[i]["loss_mask"] > 0]
        assert kept.tolist() == pytest.approx([float(weights.of(c)) for _, c in part])


def test_the_tails_weights_exceed_one_by_alpha_on_average():
    edges = bucket_edges(4096)
    counts = np.random.default_rng(0).integers(0, 1000, len(edges) - 1)
    counts[3] = 0
    found = exact_weights(counts, edges, alpha=0.15, gamma=0.5, tail=64)
    tail = edges[:-1] >= 64
    assert (found.weights[~tail] == 1).all()
    share = counts[tail] / counts[tail].sum()
    assert (share * found.weights[tail]).sum() == pytest.approx(1.15, rel=1e-6)


def test_weights_against_a_table_by_hand():
    """Tail of 300, 75 and 25 targets: q = .75 .1875 .0625, r = q^-.5, sum q r = 1.549."""
    edges = np.array([0, 8, 16, 32, 64])
    found = exact_weights(np.array([500, 300, 75, 25]), edges, alpha=0.15, gamma=0.5, tail=8)
    r = [1.1547005, 2.3094011, 4.0]
    mean = 0.75 * r[0] + 0.1875 * r[1] + 0.0625 * r[2]
    assert found.weights.tolist() == pytest.approx([1, *(1 + 0.15 * x / mean for x in r)])
    assert found.weights.tolist() == pytest.approx([1, 1.111815, 1.223629, 1.387337], abs=1e-6)
    assert "0 to 7" in found.table()[1]
    assert "55.56%" in found.table()[1]


def test_an_empty_tail_weighs_one():
    edges = bucket_edges(64)
    counts = np.array([5, 4, 0, 0, 0])
    assert (exact_weights(counts, edges, alpha=0.5, gamma=1, tail=16).weights == 1).all()


# Files.


@pytest.fixture
def corpus(tmp_path):
    prefix = write_corpus(tmp_path / "c", different_tokens([3, 4]))
    write_weights(prefix, [1, 0, 0, 0.5, 0, 0, 1])
    return prefix


def test_weights_pickle_as_paths_and_differ_by_contents(corpus):
    weights = TargetWeights.open(corpus)
    assert weights.at(2, 3).tolist() == [0, 0.5, 0]
    assert len(pickle.dumps(weights)) < 2000
    assert pickle.loads(pickle.dumps(weights)).at(0, 1).tolist() == [1]
    before = weights.identity
    write_weights(corpus, [1, 0, 0, 0.5, 0, 0, 0.5])
    assert TargetWeights.open(corpus).identity != before
    assert weights.manifest.weighted_tokens == 3


@pytest.mark.parametrize("weights", [[0] * 7, [1, 0, 0, -1, 0, 0, 0], [np.nan] * 7, [np.inf] * 7])
def test_weights_that_teach_nothing_or_are_none_are_refused(corpus, weights):
    with pytest.raises(UserError, match=r"weights are 0|has the weight"):
        write_weights(corpus, weights)


def test_files_that_do_not_belong_together_are_refused(corpus, tmp_path):
    numbers, described = weights_path(corpus), weights_manifest_path(corpus)
    contents, words = numbers.read_bytes(), described.read_text()

    def refused(message):
        with pytest.raises(UserError, match=message):
            build_train(corpus, sequence_length=8)

    numbers.write_bytes(contents[:-4] + b"\0\0\0\0")
    refused("is not what")
    numbers.write_bytes(contents[:-1])
    refused("is not what")
    numbers.unlink()
    refused("is there, but")
    numbers.write_bytes(contents)
    described.write_text(words.replace("weights 1", "weights 9"))
    refused("format")
    described.write_text("[1]")
    refused("does not describe")
    described.unlink()
    refused("is there, but")
    described.write_text(words)
    write_corpus(corpus, different_tokens([3, 3, 1]))
    refused("another corpus")


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_weighting": "mean"},
        {"effective_context_alpha": -1.0},
        {"effective_context_gamma": float("nan")},
        {"effective_context_tail": 0},
        {"effective_context_tail": 64},
    ],
)
def test_settings_without_meaning_are_refused(settings):
    [name] = settings
    [reason] = PackingSettings(**settings).refusals(sequence_length=64)
    assert reason.startswith(f"--{name.replace('_', '-')} ")
