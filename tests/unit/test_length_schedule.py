"""Bounds that grow with training: where samples are cut, and that nothing else changes."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_anchor.errors import UserError
from megatron_anchor.packing.balance import sample_work
from megatron_anchor.packing.effective_context import bucket_edges, exact_weights
from megatron_anchor.packing.length_schedule import (
    LengthSchedule,
    ScheduledDataset,
    cut_lengths,
    refusals,
)
from tests.unit.packing_oracle import build, build_train, make_config, write_corpus

ANCHOR = 1


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), longest=st.integers(2, 45))
def test_pieces_cover_their_segment_and_none_is_a_slot_alone(lengths, longest):
    found = cut_lengths(np.array(lengths), longest).tolist()
    assert sum(found) == sum(lengths)
    slow = []
    for length in lengths:
        left = length
        while left > longest + 1:
            slow.append(longest)
            left -= longest
        if left == longest + 1 or left <= longest:
            slow.append(left)
    assert found == slow


def different(lengths):
    begin, documents = 10, []
    for length in lengths:
        documents.append([list(range(begin, begin + length))])
        begin += length
    return documents


CASES = {
    "lengths": st.lists(st.integers(1, 30), min_size=1, max_size=8),
    "sequence_length": st.integers(2, 24),
    "packing": st.sampled_from(["concat", "best-fit"]),
    "pattern": st.sampled_from(
        ["anchor", "intra-document", "intra-document-reset", "full", "anchor-masked"]
    ),
    "bound": st.integers(2, 26),
    "alignment": st.sampled_from([1, 1, 2, 4]),
}


@given(**CASES)
def test_every_token_is_a_target_once_under_any_bound(
    tmp_path_factory, lengths, sequence_length, packing, pattern, bound, alignment
):
    if pattern == "anchor-masked":
        alignment = 1
    bound = max(bound // alignment, 1) * alignment if alignment > 1 else bound
    prefix = write_corpus(tmp_path_factory.mktemp("s") / "c", different(lengths))
    dataset = build_train(
        prefix,
        sequence_length=sequence_length * alignment,
        packing=packing,
        attention_pattern=pattern,
        document_alignment=alignment,
    )
    seen = Counter()
    for number in range(len(dataset)):
        plain, sample = dataset[number], dataset.sample(number, longest=bound)
        for name in ("labels", "loss_mask", "num_documents", "num_padding"):
            assert sample[name].tolist() == plain[name].tolist(), name
        seen.update(sample["labels"][sample["loss_mask"] > 0].tolist())
        borders = np.unique(sample["cu_seqlens"].numpy())
        old = np.unique(plain["cu_seqlens"].numpy())
        sizes = np.diff(borders)
        assert sizes.max() <= bound + 1
        assert sample["max_seqlen"] == sizes.max()
        assert sample["cu_seqlens"].shape == plain["cu_seqlens"].shape
        assert set(old) <= set(borders)
        new = sorted(set(borders) - set(old))
        changed = [n for n in new if pattern == "anchor"]
        for name, value in (("tokens", ANCHOR), ("position_ids", 0), ("router_mask", False)):
            expected = plain[name].clone()
            expected[changed] = value
            assert sample[name].tolist() == expected.tolist(), name
        works = sample_work(ScheduledDataset(dataset, schedule_of(bound), global_batch_size=1), 0,
                            linear=0.0)  # fmt: skip
        if number == 0:
            assert works == (sizes.astype(float) ** 2).sum()
    assert set(seen.values()) == {1}
    assert len(seen) == sum(lengths)


def schedule_of(bound):
    return LengthSchedule(((0, bound),), False)


def test_contexts_begin_anew_in_every_piece(tmp_path):
    prefix = write_corpus(tmp_path / "c", different([20]))
    edges = bucket_edges(32)
    weights = exact_weights(np.array([10, 5, 3, 1]), edges, alpha=1, gamma=1, tail=8)
    contexts = {}
    for pattern in ("anchor", "intra-document"):
        dataset = build_train(prefix, sequence_length=24, attention_pattern=pattern)
        dataset.context_weights = weights
        kept = dataset.sample(0, longest=10)["loss_mask"][:20]
        # Slots 0 to 9 see 0 to 9 tokens; 10 to 19 begin anew, with or without an anchor in front.
        begin = 0 if pattern == "anchor" else 1
        contexts[pattern] = [*range(10), *range(begin, begin + 10)]
        assert kept.tolist() == pytest.approx([float(weights.of(c)) for c in contexts[pattern]])


def test_a_bound_is_that_of_the_samples_before_the_batch():
    steps = LengthSchedule.parse("steps:0=8,10=16,20=64")
    assert [steps.at(n) for n in (0, 9, 10, 19, 20, 99)] == [8, 8, 16, 16, 64, 64]
    linear = LengthSchedule.parse("linear:8:24:16")
    assert [linear.at(n) for n in (0, 1, 8, 16, 99)] == [8, 9, 16, 24, 24]
    assert [linear.at(n, alignment=4) for n in (0, 1, 5, 8)] == [8, 8, 12, 16]
    assert linear.at(0, alignment=32) == 32


def test_samples_of_a_batch_are_bounded_alike_and_a_resumed_run_goes_on(tmp_path):
    prefix = write_corpus(tmp_path / "c", different([40] * 12))
    other = write_corpus(tmp_path / "d", different([17] * 20))
    config = make_config(([prefix, other], [0.6, 0.4]), sequence_length=32, split="1,0,0")
    blend = build(config, [24, 0, 0])[0]
    schedule = LengthSchedule.parse("linear:4:32:20")
    whole = ScheduledDataset(blend, schedule, global_batch_size=4)
    resumed = pickle.loads(
        pickle.dumps(ScheduledDataset(blend, schedule, global_batch_size=4, first=8 % 4))
    )
    limits = [int(whole[n]["length_limit"]) for n in range(24)]
    assert limits == [limits[n // 4 * 4] for n in range(24)]
    assert limits[0] == 4
    assert limits[20] == 32
    assert sorted(limits) == limits
    for number in range(8, 24):
        ours, theirs = whole[number], resumed[number]
        assert ours.keys() == theirs.keys()
        assert all((ours[name] == theirs[name]).all() for name in ours)
        assert ours["dataset_id"] == blend[number]["dataset_id"]
        assert (ours["origin"] == blend[number]["origin"]).all()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("linear:8:64", "expected linear"),
        ("linear:8:64:x", "expected linear"),
        ("sine:8:64:9", "expected linear"),
        ("steps:1=8,9=64", "begin at 0"),
        ("steps:0=8,9=16,9=64", "ascend"),
        ("steps:0=1,9=64", "2 slots"),
        ("linear:8:64:0", "ascend"),
        ("linear:8:32:9", "never be seen whole"),
    ],
)
def test_a_schedule_without_meaning_is_refused(text, said):
    [reason] = refusals(text, sequence_length=64)
    assert reason.startswith("--document-length-schedule")
    assert said in reason
    if said != "never be seen whole":
        with pytest.raises(UserError):
            LengthSchedule.parse(text)
