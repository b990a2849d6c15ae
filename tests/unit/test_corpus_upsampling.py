"""Upsampling: the shares of the domains stay, long documents are drawn more often."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_anchor.corpus import PreprocessConfig, TokenizerConfig, preprocess
from megatron_anchor.corpus.upsampling import (
    make_document_list,
    parse_mixture,
    target_shares,
    upsample,
)
from megatron_anchor.errors import UserError
from megatron_anchor.indexed.document_lists import read_document_list
from tests.corpus_fixtures import texts

DOMAINS = st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=40), min_size=1, max_size=4)


@given(DOMAINS, st.integers(1, 200_000), st.integers(1, 6000), st.integers(0, 2**32))
@settings(deadline=None)
def test_every_domain_keeps_its_budget_within_two_documents(domains, tokens, long_tokens, seed):
    """The bound of systematic draws along the lengths, for any lengths and any seed."""
    lengths = np.array([length for domain in domains for length in domain])
    codes = np.repeat(np.arange(len(domains)), [len(domain) for domain in domains])
    shares = np.array([sum(domain) for domain in domains]) / lengths.sum()
    ids = upsample(
        lengths, codes, shares.tolist(), tokens=tokens, long_tokens=long_tokens, seed=seed
    )
    for code, domain in enumerate(domains):
        drawn = lengths[ids[codes[ids] == code]].sum()
        assert abs(drawn - shares[code] * tokens) < 2 * max(domain)


def test_draws_are_proportional_to_the_weights():
    lengths = np.array([100] * 500 + [5000] * 50)
    codes = np.zeros(550, dtype=int)
    counts = np.zeros(550)
    rounds = 200
    for seed in range(rounds):
        ids = upsample(lengths, codes, [1.0], tokens=int(lengths.sum()), seed=seed)
        counts += np.bincount(ids, minlength=550)
    weights = np.where(lengths >= 4096, 1.0, 0.1)
    expected = weights * lengths.sum() / (weights @ lengths)
    error = np.sqrt(expected * (1 - expected % 1) / rounds) + 0.01
    assert np.all(np.abs(counts / rounds - expected) < 5 * error)
    assert counts[500:].mean() / counts[:500].mean() == pytest.approx(10, rel=0.02)


def test_the_list_is_shuffled_and_reproducible():
    lengths = np.arange(1, 400) * 30
    codes = np.zeros(399, dtype=int)
    first, again, other = (
        upsample(lengths, codes, [1.0], tokens=10**6, seed=seed) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert first.tolist() != other.tolist()
    assert first.tolist() != sorted(first.tolist())


def build(tmp_path, name="c"):
    rows = [{"text": t[: 40 * (i % 9) + 20], "d": f"d{i % 3}"} for i, t in enumerate(texts())]
    source = tmp_path / f"{name}.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = PreprocessConfig(
        input=(str(source),),
        output_prefix=str(tmp_path / name),
        tokenizer=TokenizerConfig(tokenizer_type="ByteLevelTokenizer"),
        domain_key="d",
        workers=1,
        progress=False,
    )
    preprocess(config)
    return tmp_path / f"{name}_text_document"


def test_a_mixture_replaces_the_shares(tmp_path):
    prefix = build(tmp_path)
    mixture = {"d0": 0.5, "d1": 0.5, "d2": 0.0}
    made = make_document_list(
        prefix, tmp_path / "l.npy", tokens=200_000, long_tokens=200, mixture=mixture
    )
    after = {share.name: share.share for share in made.after}
    assert after == pytest.approx(mixture, abs=0.01)
    for before, share in zip(made.before, made.after, strict=True):
        assert share.long_share > before.long_share or share.name == "d2"
    ids = read_document_list(tmp_path / "l.npy", prefix)
    assert (ids.dtype, len(ids)) == (np.int64, made.documents)


def test_shares_stay_by_default(tmp_path):
    made = make_document_list(build(tmp_path), tmp_path / "l.npy", tokens=300_000, long_tokens=200)
    before, after = ({s.name: s.share for s in shares} for shares in (made.before, made.after))
    assert after == pytest.approx(before, abs=0.005)


def test_a_list_of_another_corpus_is_refused(tmp_path):
    prefix = build(tmp_path)
    made = make_document_list(prefix, tmp_path / "l.npy", long_tokens=200)
    other = build(tmp_path, "other")
    assert len(read_document_list(tmp_path / "l.npy", other)) == made.documents  # equal index
    from tests.unit.test_corpus_indexed import make

    make(tmp_path / "third", [[[1]]])
    with pytest.raises(UserError, match="was made for"):
        read_document_list(tmp_path / "l.npy", tmp_path / "third")
    ids = np.load(tmp_path / "l.npy")
    ids[0] = 10**6
    np.save(tmp_path / "l.npy", ids)
    with pytest.raises(UserError, match=r"names document 1000000 \(entry 0\), expected 0 to"):
        read_document_list(tmp_path / "l.npy", prefix)


BAD_LISTS = {
    "nothing": (b"", "is no .npy file of numbers, or is cut short"),
    "garbage": (b"x" * 300, "is no .npy file of numbers, or is cut short"),
    "objects": (np.array([object()]), "is no .npy file of numbers, or is cut short"),
    "floats": (np.array([0.0, 1.0]), r"holds float64 of shape \(2,\), expected integers"),
    "a table": (np.zeros((2, 2), int), r"holds int64 of shape \(2, 2\), expected integers"),
    "no ids": (np.zeros(0, int), "is empty"),
    "negative": (np.array([0, -1]), r"names document -1 \(entry 1\), expected 0 to 59"),
}


@pytest.mark.parametrize("name", BAD_LISTS)
def test_what_is_no_list_of_documents_is_refused_with_the_reason(tmp_path, name):
    contents, reason = BAD_LISTS[name]
    path, prefix = tmp_path / "l.npy", build(tmp_path)
    if isinstance(contents, bytes):
        path.write_bytes(contents)
    else:
        np.save(path, contents, allow_pickle=True)
    with pytest.raises(UserError, match=f"--document-list .*l.npy {reason}.*np.save"):
        read_document_list(path, prefix)


def test_a_list_saved_by_hand_needs_no_description(tmp_path):
    np.save(tmp_path / "l.npy", np.array([5, 0, 5], dtype=np.int32))
    assert read_document_list(tmp_path / "l.npy", build(tmp_path)).tolist() == [5, 0, 5]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "x"}', "[" * 100_000])
def test_a_damaged_description_is_refused(tmp_path, text):
    np.save(tmp_path / "l.npy", np.array([0]))
    (tmp_path / "l.json").write_text(text)
    with pytest.raises(UserError, match=r"l\.json does not describe a list"):
        read_document_list(tmp_path / "l.npy", build(tmp_path))


@pytest.mark.parametrize("text", ["", "a", "a=", "=1", "a=x", "a=-1", "a=inf", "a=nan", "a=0"])
def test_mixtures_that_say_nothing_are_refused(text):
    with pytest.raises(UserError, match="--mixture"):
        parse_mixture(text)


def test_mixtures_must_name_every_domain():
    assert parse_mixture("a=1, b.c=0.5") == {"a": 1, "b.c": 0.5}
    assert target_shares(["a", "b"], [1, 1], {"a": 3, "b": 1}) == [0.75, 0.25]
    assert target_shares(["a", "b"], [30, 10], None) == [0.75, 0.25]
    for mixture, message in (
        ({"a": 1}, "says nothing of 'b'"),
        ({"a": 1, "b": 1, "c": 1}, "names 'c'"),
        ({"a": 1, "b": 1}, "no token"),
    ):
        with pytest.raises(UserError, match=message):
            target_shares(["a", "b"], [5, 0], mixture)


def test_wrong_calls_are_refused(tmp_path):
    prefix = build(tmp_path)
    for config, message in (
        ({"output": tmp_path / "list"}, "name it"),
        ({"output": tmp_path / "l.npy", "short_weight": 0}, "--short-weight 0"),
        ({"output": tmp_path / "l.npy", "tokens": 0}, "--tokens 0"),
    ):
        with pytest.raises(UserError, match=message):
            make_document_list(prefix, **config)
    make_document_list(prefix, tmp_path / "l.npy")
    with pytest.raises(UserError, match="exists"):
        make_document_list(prefix, tmp_path / "l.npy")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"seed": -1}, "--seed -1: expected 0 or more"),
        ({"tokens": 10**20}, "--tokens 100000000000000000000: expected at most .*, 1000 times"),
        ({"tokens": 0}, "--tokens 0: expected at least 1"),
    ],
)
def test_numbers_out_of_bounds_are_refused(tmp_path, given, said):
    with pytest.raises(UserError, match=said):
        make_document_list(build(tmp_path), tmp_path / "l.npy", **given)
    assert not (tmp_path / "l.npy").exists()


def test_a_manifest_nested_too_deeply_is_none(tmp_path):
    prefix = build(tmp_path)
    Path(f"{prefix}.manifest.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"is no corpus manifest .RecursionError"):
        make_document_list(prefix, tmp_path / "l.npy")
