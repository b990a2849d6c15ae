"""Rearranged documents hold what they held, and are packed as if the corpus held them so."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_anchor.errors import UserError
from megatron_anchor.packing.fill_in_the_middle import ADDED, FillInTheMiddle
from megatron_anchor.training import fill_in_rules
from tests.unit.packing_oracle import ANCHOR, build_train, write_corpus

P, S, M, EOD = 3, 4, 5, 2
HALF = FillInTheMiddle(
    rate=0.5, suffix_first_rate=0.5, prefix=P, suffix=S, middle=M, end=EOD, seed=7
)


def restored(tokens):
    """The document before it was rearranged, and whether its suffix came first."""
    tokens = list(tokens)
    end = [tokens.pop()] if tokens[-1] == EOD else []
    assert tokens[0] == P
    s, m = tokens.index(S), tokens.index(M)
    assert 0 < s < m
    assert {P, S, M}.isdisjoint(set(tokens[1:]) - {S, M})
    if s == 1:
        return [*tokens[m + 1 :], *tokens[2:m], *end], True  # a and b stand side by side
    return [*tokens[1:s], *tokens[m + 1 :], *tokens[s + 1 : m], *end], False


def documents(random, *, number=60, longest=30):
    """Documents of 0 to `longest` tokens; some end with an end-of-document token, some begin with
    the anchor."""
    texts = [
        random.integers(10, 90, size=length).tolist()
        for length in random.integers(0, longest, size=number)
    ]
    ends = [[EOD] if random.random() < 0.7 else [] for _ in texts]
    heads = [[ANCHOR] if random.random() < 0.2 else [] for _ in texts]
    return [[head + text + end] for head, text, end in zip(heads, texts, ends, strict=True)]


@pytest.mark.parametrize("end", [[], [EOD]])
def test_nothing_is_lost_and_both_forms_occur(end):
    random = np.random.default_rng(0)
    forms = set()
    for document in range(80):
        text = random.integers(10, 90, size=random.integers(2, 20)).tolist() + end
        found = HALF.rearranged(document, np.array(text, dtype=np.uint16))
        assert found.tolist() == HALF.rearranged(document, np.array(text)).tolist()
        assert len(found) == len(text) + ADDED
        original, suffix_first = restored(found)
        assert original == text
        forms.add(suffix_first)
    assert forms == {True, False}


def test_the_chosen_share_is_the_rate_and_another_seed_chooses_others():
    numbers, content = np.arange(40_000), np.full(40_000, 9, dtype=np.int32)
    chosen = HALF.is_chosen(numbers, content)
    five_deviations = 5 * np.sqrt(0.25 / len(numbers))
    assert abs(chosen.mean() - 0.5) < five_deviations
    others = replace(HALF, seed=8).is_chosen(numbers, content)
    assert abs((chosen == others).mean() - 0.5) < five_deviations
    assert (HALF.lengths(numbers, content) - 9 == ADDED * chosen).all()
    assert HALF.lengths(numbers, content).dtype == np.int32
    assert not HALF.is_chosen(numbers, np.ones_like(content)).any(), "an end alone stays"


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_samples_are_those_of_a_corpus_with_rearranged_documents(tmp_path, packing, mmap):
    texts = documents(np.random.default_rng(3))
    changed = []
    for number, [text] in enumerate(texts):
        head = text[:1] if text[:1] == [ANCHOR] else []
        content = np.array(text[len(head) :], dtype=np.int64)
        chosen = HALF.is_chosen(np.array([number]), np.array([len(content)]))[0]
        new = HALF.rearranged(number, content).tolist() if chosen else content.tolist()
        changed.append([head + new])
    assert 10 < sum(a != b for a, b in zip(texts, changed, strict=True)) < 50

    settings = {"sequence_length": 16, "packing": packing, "mmap_bin_files": mmap}
    plain = build_train(write_corpus(tmp_path / "plain", texts), 90, **settings)
    ours = build_train(
        write_corpus(tmp_path / "plain2", texts), 90, fill_in_the_middle=HALF, **settings
    )
    theirs = build_train(write_corpus(tmp_path / "changed", changed), 90, **settings)
    assert len(ours) == len(theirs) != len(plain)
    for mine, other in zip(ours, theirs, strict=True):
        for name in mine.keys() - {"origin"}:
            assert (mine[name] == other[name]).all(), name


def test_settings_are_part_of_the_samples_identity_and_only_when_set(tmp_path):
    prefix = write_corpus(tmp_path / "c", documents(np.random.default_rng(1)))
    plain, ours = build_train(prefix), build_train(prefix, fill_in_the_middle=HALF)
    assert "fill_in_the_middle" not in plain.sample_identifiers
    assert ours.contents_hash != plain.contents_hash
    other = replace(HALF, suffix_first_rate=0.25)
    assert build_train(prefix, fill_in_the_middle=other).contents_hash != ours.contents_hash


class Words:
    """A tokenizer in the form of Megatron's."""

    vocab_size = 50

    class _tokenizer:  # noqa: N801
        unk_id = 0

        @staticmethod
        def tokens_to_ids(names):
            known = {"<P>": 3, "<S>": 4, "<M>": 5, "<E>": 2, "<far>": 50}
            return [known.get(name, 0) for name in names]


def namespace(**changed):
    names = {"prefix": "<P>", "suffix": "<S>", "middle": "<M>", "eod": "<E>"}
    tokens = {f"fim_{part}_token": name for part, name in names.items()}
    usual = {"fim_data": True, "fim_rate": 0.5, "fim_spm_rate": 0.5, "seed": 7}
    return SimpleNamespace(**(usual | tokens | {"loss_weighting": "uniform"} | changed))


def test_flags_become_settings_by_the_names_of_tokens():
    assert fill_in_rules.fill_in_the_middle(namespace(), Words()) == HALF
    assert fill_in_rules.fill_in_the_middle(namespace(fim_data=False), Words()) is None
    assert list(fill_in_rules.refusals(namespace())) == []
    assert list(fill_in_rules.refusals(namespace(fim_data=False, fim_rate=2))) == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"fim_prefix_token": "<x>"}, "--fim-prefix-token '<x>' is no token"),
        ({"fim_eod_token": "<far>"}, "has the id 50, outside the vocabulary of 50"),
        ({"fim_middle_token": "<S>"}, "are the same token"),
    ],
)
def test_tokens_that_cannot_be_are_refused(changed, reason):
    with pytest.raises(UserError, match=reason):
        fill_in_rules.fill_in_the_middle(namespace(**changed), Words())


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"fim_rate": 1.5}, "--fim-rate 1.5: expected a share"),
        ({"fim_spm_rate": 0.0}, "--fim-spm-rate 0.0: expected a share"),
        ({"loss_weighting": "document-mean"}, "--loss-weighting document-mean with --fim-data"),
    ],
)
def test_what_does_not_go_together_is_refused(changed, reason):
    [said] = fill_in_rules.refusals(namespace(**changed))
    assert said.startswith(reason)


def test_weights_that_would_point_elsewhere_are_refused(tmp_path):
    from tests.target_weights import write_weights

    prefix = write_corpus(tmp_path / "c", [[[10, 11, 12, EOD]]])
    write_weights(prefix, [1.0, 0.5, 1.0, 1.0])
    with pytest.raises(UserError, match="--fim-data moves them"):
        build_train(prefix, fill_in_the_middle=HALF)
