"""Interleaved chunks: no token lost or doubled, order kept inside documents, bounds kept."""

import itertools
import tempfile
from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_anchor.packing.interleave import Interleaving, _split, interleave
from tests.unit.packing_oracle import build_case, packings, plain


def test_chunks_are_shuffled_documents_in_order_within_the_bounds() -> None:
    seen: Counter[str] = Counter()

    @settings(deadline=None, max_examples=200)
    @given(
        st.lists(st.integers(1, 40), max_size=6),
        st.integers(1, 5),
        st.integers(1, 12),
        st.integers(0, 99),
    )
    def check(slots: list[int], most: int, least: int, seed: int) -> None:
        bounds = Interleaving(max_chunks=most, min_chunk_length=least)
        order = interleave(
            np.array(slots, dtype=np.int64), interleaving=bounds, random=np.random.default_rng(seed)
        )
        assert sorted(order) == list(range(sum(slots)))
        owner = np.repeat(np.arange(len(slots)), slots)[order]
        for piece in range(len(slots)):
            assert (np.diff(order[owner == piece]) == 1).all()
        runs = [(piece, len(list(run))) for piece, run in itertools.groupby(owner)]
        for piece, length in runs:  # of one chunk, or more that happen to meet
            assert length >= min(least, slots[piece])
        numbers = Counter(piece for piece, _ in runs)
        assert all(number <= most for number in numbers.values())
        seen["split"] += len(runs) > len(slots)
        seen["documents in another order"] += len(slots) > 1 and bool(order[0] >= slots[0])
        seen["as many chunks as allowed"] += most in numbers.values() and most > 2

    check()
    assert set(+seen) == {
        "split",
        "documents in another order",
        "as many chunks as allowed",
    }


def test_chunks_keep_both_length_bounds_and_fill_their_documents() -> None:
    seen: Counter[str] = Counter()

    @settings(deadline=None, max_examples=300)
    @given(
        st.lists(st.integers(1, 60), min_size=1, max_size=5),
        st.integers(1, 5),
        st.integers(1, 9),
        st.integers(0, 9),
        st.integers(0, 99),
    )
    def check(slots: list[int], most: int, least: int, above: int, seed: int) -> None:
        longest = 2 * least - 1 + above
        bounds = Interleaving(max_chunks=most, min_chunk_length=least, max_chunk_length=longest)
        owner, lengths = _split(np.array(slots), bounds, np.random.default_rng(seed))
        assert owner.tolist() == sorted(owner)
        assert len(owner) == len(lengths)
        for piece, document in enumerate(slots):
            chunks = lengths[owner == piece].tolist()
            assert sum(chunks) == document
            assert all(min(least, document) <= length <= longest for length in chunks)
            assert len(chunks) <= max(most, -(-document // longest))
            seen["more chunks than allowed, for their length"] += len(chunks) > most
            seen["a longest chunk among others"] += longest in chunks and len(set(chunks)) > 2

    check()
    assert min(seen.values()) > 10
    assert len(seen) == 2


def test_every_way_to_split_is_about_as_likely() -> None:
    """Three slots in up to three chunks: each number of chunks and each place of a cut occurs."""
    found: Counter[tuple[int, ...]] = Counter()
    bounds = Interleaving(max_chunks=3, min_chunk_length=1)
    for seed in range(300):
        _, lengths = _split(np.array([4]), bounds, np.random.default_rng(seed))
        found[tuple(lengths.tolist())] += 1
    assert set(found) == {(4,), (1, 3), (2, 2), (3, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)}
    assert min(found.values()) > 300 / 7 / 3


def test_full_moves_tokens_and_masked_patterns_move_positions_alike() -> None:
    """The masked patterns' positions say where "full" puts each token."""
    seen: Counter[str] = Counter()

    @settings(deadline=None, max_examples=20)
    @given(packings(unique=True))
    def check(case: dict[str, Any]) -> None:
        options = case["settings"]
        options |= {"anchor_position": 0, "document_alignment": 1}
        chunks = {
            "interleave_chunks": True,
            "interleave_max_chunks": 3,
            "interleave_min_chunk_length": 1,
        }
        with tempfile.TemporaryDirectory() as folder:
            options["attention_pattern"] = "intra-document"
            whole = list(build_case(case, folder))
            masked = list(build_case(case, folder, **chunks))
            anchored = list(build_case(case, folder, **chunks, attention_pattern="anchor"))
            full = list(build_case(case, folder, **chunks, attention_pattern="full"))
            again = list(build_case(case, folder, **chunks))
        assert [plain(sample) for sample in masked] == [plain(sample) for sample in again]
        for before, moved, anchor, laid in zip(whole, masked, anchored, full, strict=True):
            for name in set(before) - {"position_ids"}:
                assert before[name].tolist() == moved[name].tolist()
                assert name == "router_mask" or before[name].tolist() == anchor[name].tolist()
            filled = len(before["tokens"]) - int(before["num_padding"])
            place = moved["position_ids"][:filled]
            assert sorted(place.tolist()) == list(range(filled))
            for name in ("tokens", "labels", "loss_mask"):
                assert laid[name][place].tolist() == before[name][:filled].tolist()
            heads = set(before["cu_seqlens"][: int(before["num_documents"])].tolist())
            copies = heads - {0}
            for slot, counts in enumerate(before["router_mask"].tolist()):
                assert anchor["router_mask"][slot] == (counts and slot not in copies)
            counted = 0
            for slot in place.argsort().tolist():
                counted += slot not in heads
                assert anchor["position_ids"][slot] == (0 if slot in heads else counted)
            seen["moved"] += place.tolist() != list(range(filled))

    check()
    assert seen["moved"] > 2
