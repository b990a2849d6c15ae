"""Inspection: right counts, and every disagreement of the files named."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_anchor.corpus import IndexedCorpus
from megatron_anchor.corpus.inspection import inspect_corpus, length_edges, verify
from megatron_anchor.corpus.pictures import draw_lengths
from tests.unit.test_corpus_indexed import make

GOOD = [[[1, 2, 9]], [[3], [9]], [[4] * 40 + [9]]]


def test_counts_and_histogram_add_up(tmp_path):
    make(tmp_path / "c", GOOD)
    report = inspect_corpus(tmp_path / "c", vocab_size=10, eod_id=9)
    whole = report.domains[0]
    assert report.problems == ()
    assert (whole.documents, whole.tokens, report.sequences) == (3, 46, 4)
    assert report.edges == (0, 1, 2, 4, 8, 16, 32)
    assert whole.counts == (0, 0, 2, 0, 0, 0, 1)
    assert whole.bin_tokens == (0, 0, 5, 0, 0, 0, 41)
    assert whole.percentiles == (3, 41, 41, 41)


def test_bins_hold_what_lies_between_their_edges():
    edges = length_edges(1000)
    assert edges.tolist() == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert length_edges(1024)[-1] == 1024


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: c.tokens.__setitem__(1, 10), r"token 1 \(document 0\) is 10, outside"),
        (lambda c: c.tokens.__setitem__(-1, 5), r"1 documents that do not end with eod 9, at 2"),
        (lambda c: c.tokens.__setitem__(4, 5), r"1 documents that do not end with eod 9, at 1"),
        (lambda c: c.pointers.__setitem__(2, 0), r"1 sequences whose offset .* at 2"),
        (lambda c: c.lengths.__setitem__(0, -3), r"negative length, at 0"),
        (lambda c: c.lengths.__setitem__(3, 40), r"holds 46 tokens, the index states 45"),
        (lambda c: c.document_indices.__setitem__(3, 3), r"last document index is 3, but"),
        (lambda c: c.document_indices.__setitem__(0, 1), r"first document index is not 0"),
        (lambda c: c.document_indices.__setitem__(1, 4), r"document indices fall, at 1"),
    ],
)
def test_every_damage_is_named(tmp_path, damage, message):
    mapped = make(tmp_path / "c", GOOD)
    names = ("lengths", "pointers", "document_indices", "tokens")
    parts = {name: np.array(getattr(mapped, name)) for name in names}
    corpus = IndexedCorpus(prefix=mapped.prefix, **parts)
    assert verify(corpus, vocab_size=10, eod_id=9) == []
    damage(corpus)
    [problem, *_] = verify(corpus, vocab_size=10, eod_id=9)
    assert __import__("re").search(message, problem), problem


def test_empty_documents_are_named_where_eod_is_known(tmp_path):
    corpus = make(tmp_path / "c", [[[9]], [], [[1, 9]]])
    assert verify(corpus) == []
    assert verify(corpus, eod_id=9) == ["1 documents without tokens, at 1"]


def test_an_empty_corpus_is_no_crash(tmp_path):
    make(tmp_path / "c", [])
    report = inspect_corpus(tmp_path / "c", vocab_size=10, eod_id=9)
    assert report.domains[0].documents == 0
    assert report.problems == ()


@pytest.mark.parametrize("compare", [False, True])
def test_pictures_are_written(tmp_path, compare):
    pytest.importorskip("matplotlib")
    edges = length_edges(5000).tolist()
    groups = {"a": [i * 10 for i in range(len(edges))], "b": [5] * len(edges)}
    draw_lengths(tmp_path / "x.png", edges, groups, title="t", compare=compare)
    data = (tmp_path / "x.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 5000
