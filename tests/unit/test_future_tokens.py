"""What multi-token prediction predicts: the law said slot by slot, and counted over an epoch."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from megatron_anchor.attention.future_tokens import future_tokens
from tests.unit.packing_oracle import (
    PAD,
    build_train,
    corpora,
    flatten,
    write_corpus,
)
from tests.unit.test_packing_loss_law import contents

PATTERNS = ("anchor", "intra-document", "intra-document-reset")


def read(documents: list, **settings: Any) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        return list(build_train(write_corpus(f"{folder}/c", documents), None, **settings))


def collate(samples: list[dict]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def law(sample: dict, depth: int) -> list[tuple[int, int, bool, bool]]:
    """(token, label, counts, is a token) of each slot, in plain Python."""
    borders = sample["cu_seqlens"].unique().tolist()
    slots = list(
        zip(
            sample["tokens"].tolist(),
            sample["labels"].tolist(),
            [bool(m) for m in sample["loss_mask"].tolist()],
            strict=True,
        )
    )
    found = []
    for begin, end in itertools.pairwise(borders):
        for slot in range(begin, end):
            if slot + depth < end:
                token, label, counts = slots[slot + depth]
                found.append((token, label, counts, token != PAD))
            else:
                found.append((0, 0, False, False))
    return found


def of_slots(depth: Any, row: int) -> list[tuple[int, int, bool, bool]]:
    columns = depth.tokens_Bs, depth.labels_Bs, depth.loss_mask_Bs, depth.router.counted_Bs
    tokens, labels, mask, counted = (column[row].tolist() for column in columns)
    return [
        (token, label, bool(m), c)
        for token, label, m, c in zip(tokens, labels, mask, counted, strict=True)
    ]


@settings(deadline=None, max_examples=40)
@given(corpora(unique=True), st.data())
def test_a_slot_predicts_what_is_so_many_tokens_further_in_its_document(corpus, data) -> None:
    sequence_length, documents = corpus
    unit = data.draw(st.sampled_from([n for n in (1, 2, 4) if sequence_length % n == 0]))
    pattern = data.draw(st.sampled_from(PATTERNS))
    interleaved = data.draw(st.booleans()) and pattern != "intra-document-reset"
    setting = {
        "packing": data.draw(st.sampled_from(["concat", "best-fit"])),
        "attention_pattern": pattern,
        "document_alignment": unit,
        "anchor_first_token_loss": data.draw(st.booleans()),
        "interleave_chunks": interleaved,
        "interleave_min_chunk_length": 1,
    }
    samples = read(documents, sequence_length=sequence_length, **setting)
    if not samples:
        return
    batch, depths = collate(samples), data.draw(st.integers(1, 4))
    future = future_tokens(batch, depths=depths, has_experts=True)
    assert len(future.depths) == depths
    assert future.targets == batch["loss_mask"].sum()
    for number, depth in enumerate(future.depths, 1):
        for row, sample in enumerate(samples):
            assert of_slots(depth, row) == law(sample, number)
            assert depth.router.tokens_B[row] == depth.router.counted_Bs[row].sum()
        assert torch.equal(depth.router.targets_B, batch["loss_mask"].sum(1).long())
        event("targets" if depth.loss_mask_Bs.any() else "no targets")


def targets_of(samples: list[dict], depth: int) -> Counter[int]:
    """The tokens that are targets at a depth; of each the input lies that far behind it."""
    found: Counter[int] = Counter()
    for sample in samples:
        future = future_tokens(collate([sample]), depths=depth).depths[depth - 1]
        found.update(future.labels_Bs[future.loss_mask_Bs > 0].tolist())
    return found


@settings(deadline=None, max_examples=40)
@given(corpora(unique=True), st.sampled_from(["concat", "best-fit"]), st.integers(0, 9))
def test_with_one_depth_every_token_but_a_documents_first_is_a_target_once(
    corpus, packing, seed
) -> None:
    sequence_length, documents = corpus
    samples = read(documents, sequence_length=sequence_length, packing=packing, random_seed=seed)
    expected = Counter(t for tokens in contents(documents) for t in tokens[1:])
    assert targets_of(samples, 1) == expected
    event("cut documents" if any(sample["num_cut"] for sample in samples) else "none cut")


@pytest.mark.parametrize(("tokens", "depth"), itertools.product((1, 2, 5, 9), (1, 2, 3, 6)))
def test_a_whole_document_of_n_tokens_has_n_less_k_targets(tokens, depth) -> None:
    documents = [[list(range(10, 10 + tokens))], [list(range(30, 34))]]
    samples = read(documents, sequence_length=32, packing="best-fit")
    found = targets_of(samples, depth)
    assert found == Counter(t for d in flatten(documents) for t in d[depth:])
    assert len([t for t in found if t < 30]) == max(0, tokens - depth)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_at_a_cut_k_less_one_tokens_are_left_out(depth) -> None:
    """20 tokens in samples of 8 slots: 7 tokens each, cut behind the 7th and the 14th."""
    tokens = list(range(10, 30))
    found = targets_of(read([[tokens]], sequence_length=8), depth)
    lost = [tokens[cut + i] for cut in (7, 14) for i in range(1, depth)]
    assert found == Counter(t for t in tokens[depth:] if t not in lost)


def test_a_rank_holds_the_slots_of_its_piece() -> None:
    batch = collate(read([[list(range(10, 40))], [list(range(50, 57))]], sequence_length=16))
    whole = future_tokens(batch, depths=2, has_experts=True)
    slots = torch.tensor([[0, 5, 9, 3]] * len(batch["tokens"]))
    piece = future_tokens(batch, depths=2, own_slots=slots, has_experts=True)
    half = future_tokens(batch, depths=2, own_slots=slice(8, 16))
    for n in range(2):
        for name in ("tokens_Bs", "labels_Bs", "loss_mask_Bs"):
            everything = getattr(whole.depths[n], name)
            assert torch.equal(getattr(piece.depths[n], name), everything.gather(1, slots))
            assert torch.equal(getattr(half.depths[n], name), everything[:, 8:])
        counted = whole.depths[n].router.counted_Bs
        assert torch.equal(piece.depths[n].router.counted_Bs, counted.gather(1, slots))
        assert torch.equal(piece.depths[n].router.tokens_B, counted.sum(1))
        assert half.depths[n].router is None
    assert piece.targets == half.targets == whole.targets
