"""Merging: any number of corpora, checked, with offsets and domains that stay right."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_anchor.corpus import (
    CorpusError,
    IndexedCorpus,
    PreprocessConfig,
    TokenizerConfig,
    preprocess,
    read_domains,
)
from megatron_anchor.corpus.cli_merge import expand
from megatron_anchor.corpus.merge import merge_corpora
from tests.corpus_fixtures import corpus_files, texts, write_jsonl
from tests.unit.test_corpus_indexed import make

BYTES = TokenizerConfig(tokenizer_type="ByteLevelTokenizer")


def build(tmp_path, name, documents, **config):
    source = write_jsonl(tmp_path / f"{name}.jsonl", documents)
    settings = {"tokenizer": BYTES, "workers": 1, "progress": False, **config}
    preprocess(
        PreprocessConfig(input=(str(source),), output_prefix=str(tmp_path / name), **settings)
    )
    return tmp_path / f"{name}_text_document"


def test_domains_are_united_by_name(tmp_path):
    parts = [
        build(tmp_path, "a", texts()[:3], domain=("web",)),
        build(tmp_path, "b", texts()[3:5], domain=("books",)),
        build(tmp_path, "c", texts()[5:6], domain=("web",)),
    ]
    manifest = merge_corpora(parts, tmp_path / "all", progress=False)
    names, ids = read_domains(tmp_path / "all")
    assert [names[i] for i in ids] == ["web"] * 3 + ["books"] * 2 + ["web"]
    assert manifest.documents == 6
    assert [d.documents for d in manifest.domains] == [4, 2]
    assert sum(d.tokens for d in manifest.domains) == manifest.tokens
    merged = IndexedCorpus.open(tmp_path / "all")
    whole = np.concatenate([IndexedCorpus.open(part).tokens for part in parts])
    np.testing.assert_array_equal(merged.tokens, whole)


def test_the_result_is_megatron_s_merge(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    parts = [
        make(tmp_path / "a", [[], [[1, 2]]]).prefix,  # an empty first document
        make(tmp_path / "b", []).prefix,
        make(tmp_path / "c", [[[3], [4, 5]], [[6]]]).prefix,
    ]
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for part in parts:
        builder.add_index(str(part))
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert merge_corpora(parts, tmp_path / "ours", progress=False) is None
    for ending in ("bin", "idx"):
        ours, theirs = (tmp_path / f"{name}.{ending}" for name in ("ours", "theirs"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_offsets_beyond_2_to_32_survive_merging(tmp_path, monkeypatch):
    """Two corpora of 6 GB as holes; only the copying of their tokens is left out."""
    from megatron_anchor.corpus import merge
    from megatron_anchor.corpus.indexed import write_index

    lengths = np.array([2**30, 2**29, 3], np.int32)
    for name in "ab":
        lengths.tofile(tmp_path / "l")
        np.array([1, 3], np.int64).tofile(tmp_path / "e")
        with open(tmp_path / f"{name}.bin", "wb") as stream:
            stream.truncate(4 * int(lengths.sum(dtype=np.int64)))
        write_index(
            tmp_path / f"{name}.idx",
            dtype=np.dtype(np.int32),
            lengths_file=tmp_path / "l",
            document_ends_file=tmp_path / "e",
        )

    class Hole:
        def read(self, size):
            return b""

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    real = open
    monkeypatch.setattr(
        merge,
        "open",
        lambda path, mode: (
            Hole() if mode == "rb" and str(path).endswith(".bin") else real(path, mode)
        ),
        raising=False,
    )
    merge_corpora([tmp_path / "a", tmp_path / "b"], tmp_path / "all", progress=False)
    with real(tmp_path / "all.bin", "wb") as stream:
        stream.truncate(8 * int(lengths.sum(dtype=np.int64)))
    merged = IndexedCorpus.open(tmp_path / "all")
    assert merged.document_indices.tolist() == [0, 1, 3, 4, 6]
    starts = np.concatenate(([0], np.cumsum(np.tile(lengths, 2), dtype=np.int64)))
    assert merged.pointers.tolist() == (4 * starts[:-1]).tolist()
    assert int(merged.pointers[-1]) > 2**32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"append_eod": True}, "has eod_id"),
        (
            {"tokenizer": TokenizerConfig(tokenizer_type="ByteLevelTokenizer", eod_id=7)},
            "tokenizer fingerprint",
        ),
        (
            {"tokenizer": TokenizerConfig(tokenizer_type="ByteLevelTokenizer", vocab_size=70000)},
            "dtype",
        ),
    ],
)
def test_corpora_that_differ_are_refused(tmp_path, change, message):
    parts = [build(tmp_path, "a", ["x"]), build(tmp_path, "b", ["y"], **change)]
    with pytest.raises(CorpusError, match=message):
        merge_corpora(parts, tmp_path / "all", progress=False)
    assert not (tmp_path / "all.idx").exists()
    assert not (tmp_path / "all.merging").exists()


def test_wrong_calls_are_refused(tmp_path):
    part = build(tmp_path, "a", ["x", "y"])
    foreign = make(tmp_path / "foreign", [[[1]]]).prefix
    for parts, output, message in (
        ([], "all", "nothing to merge"),
        ([part], "a_text_document", "both an input and the output"),
        ([part, tmp_path / "none"], "all", "does not exist"),
        ([part, foreign], "all", "manifest.json is missing"),
    ):
        with pytest.raises(CorpusError, match=message):
            merge_corpora(parts, tmp_path / output, progress=False)
    merge_corpora([part], tmp_path / "all", progress=False)
    with pytest.raises(CorpusError, match="exists"):
        merge_corpora([part], tmp_path / "all", progress=False)
    merge_corpora([part, part], tmp_path / "all", overwrite=True, progress=False)
    assert len(IndexedCorpus.open(tmp_path / "all")) == 4
    with open(tmp_path / "a_text_document.bin", "ab") as stream:
        stream.write(b"\x00\x00")
    with pytest.raises(CorpusError, match="its index"):
        merge_corpora([part], tmp_path / "again", progress=False)


def test_patterns_are_sorted_by_their_numbers(tmp_path):
    for number in (10, 9, 1):
        make(tmp_path / f"part{number}", [[[number]]])
    found = expand([str(tmp_path / "part*")])
    assert [path.rsplit("part")[-1] for path in found] == ["1", "9", "10"]
    with pytest.raises(CorpusError, match=r"no .idx file matches"):
        expand([str(tmp_path / "other*")])


def test_one_part_is_copied_as_it_is(tmp_path):
    part = build(tmp_path, "a", texts()[:4], domain=("d",))
    merge_corpora([part], tmp_path / "z_text_document", progress=False)
    ours = {k: v for k, v in corpus_files(tmp_path / "a").items() if k != ".jsonl"}
    assert corpus_files(tmp_path / "z") == ours
