"""Laying out and counting, against the packing that trains and against dense masks."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_anchor.errors import UserError
from megatron_anchor.indexed.pair import write_index
from megatron_anchor.packing.index import concatenate, count_slots
from megatron_anchor.planner.lengths import Lengths, find_lengths, of_corpus
from megatron_anchor.planner.samples import TILE, attention_work, cut, lay_out


def slices_of_training(content, sequence_length, alignment):
    """Slots of all slices of each full sample, from the sample index that training uses."""
    order = np.arange(len(content), dtype=np.int32)
    content = content.astype(np.int32)
    slots = count_slots(order, content, alignment=alignment)
    packed = concatenate(
        order, content, sequence_length=sequence_length, slots=slots, alignment=alignment
    )
    samples = []
    for (first, done), (last, until) in zip(
        packed.sample_index[:-1], packed.sample_index[1:], strict=True
    ):
        sizes = []
        for document in range(first, min(last + (until > 0), len(content))):
            begin = max(int(done) - 1, 0) if document == first else 0
            end = int(until) - 1 if document == last else int(content[document])
            sizes.append(-(-(1 + end - begin) // alignment) * alignment)
        samples.append(sizes)
    return samples


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.integers(1, 6),
    st.sampled_from([1, 2, 4]),
)
def test_documents_fill_samples_as_in_training(content, units, alignment):
    length = units * 4 if alignment > 1 or units > 1 else 2
    content = np.array(content)
    ours = cut(content, sequence_length=length, alignment=alignment)
    theirs = slices_of_training(content, length, alignment)
    assert [list(s) for s in ours] == theirs[: len(ours)]
    assert len(theirs) - len(ours) <= 1, "all but the last, partly filled one"


def tiles_of_a_mask(slots, split):
    """Tiles that hold a visible pair when every rank tiles each pair of its chunks by itself."""
    total = 0
    for length in slots:
        edges = np.linspace(0, length, 2 * split + 1).astype(int) if split > 1 else [0, length]
        for row, (begin, end) in enumerate(itertools.pairwise(edges)):
            for column in range(row + 1):
                rows = -(-(end - begin) // TILE)
                columns = -(-(edges[column + 1] - edges[column]) // TILE)
                total += rows * (rows + 1) // 2 if column == row else rows * columns
    return total


@pytest.mark.parametrize("split", [1, 2, 4])
def test_tiles_are_those_that_the_mask_touches(split):
    slots = np.array([8, 128, 1024, 24, 2048, 4096 - 8 - 128 - 1024 - 24 - 2048])
    samples = lay_out(Lengths("any", np.array([5])), sequence_length=64)
    samples.slices[:] = [slots]
    work = attention_work(samples, sequence_length=4096, pattern="anchor", split=split)
    assert work.tile_pairs == tiles_of_a_mask(slots, split) * TILE**2
    assert work.pairs == sum(n * (n + 1) / 2 for n in slots.tolist())


def test_full_attention_counts_the_whole_sample_whatever_its_documents():
    samples = lay_out(Lengths("any", np.array([5, 9])), sequence_length=64)
    work = attention_work(samples, sequence_length=64, pattern="full")
    assert work.pairs == 64 * 65 / 2
    assert work.imbalance == 0


def test_filling_is_what_the_alignment_adds():
    samples = lay_out(Lengths("any", np.array([5])), sequence_length=64, alignment=8)
    assert samples.filling == pytest.approx(2 / 8)  # an anchor, 5 tokens, 2 slots of nothing


def test_a_corpus_gives_its_document_lengths(tmp_path):
    np.array([3, 7], dtype=np.int32).tofile(tmp_path / "lengths")
    np.array([1, 1, 2], dtype=np.int64).tofile(tmp_path / "ends")  # the second document is empty
    np.zeros(10, dtype=np.uint16).tofile(tmp_path / "c.bin")
    write_index(
        tmp_path / "c.idx",
        dtype=np.dtype(np.uint16),
        lengths_file=tmp_path / "lengths",
        document_ends_file=tmp_path / "ends",
    )
    for name in ("c", "c.idx", "c.bin"):
        assert of_corpus(tmp_path / name).lengths.tolist() == [3, 7]


def test_unknown_tables_and_missing_corpora_are_refused(tmp_path):
    with pytest.raises(UserError, match="--length-table pile: known are slimpajama-like"):
        find_lengths(corpus=None, table="pile")
    with pytest.raises(ValueError, match=r"nothing\.bin does not exist"):
        find_lengths(corpus=str(tmp_path / "nothing"), table="slimpajama-like")


def test_the_built_in_table_has_the_mean_of_its_source():
    lengths = find_lengths(corpus=None, table="slimpajama-like").lengths
    assert lengths.mean() == pytest.approx(1089, rel=0.02)
