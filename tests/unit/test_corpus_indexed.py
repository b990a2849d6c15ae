"""The `.bin/.idx` format: Megatron's, also beyond 2^32 bytes, and refused where it is damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_anchor.corpus import IndexedCorpus, token_dtype
from megatron_anchor.errors import UserError
from megatron_anchor.indexed.pair import write_index


def make(prefix: Path, documents, dtype=np.uint16) -> IndexedCorpus:
    """A corpus of documents, each a list of sequences."""
    sequences = [sequence for document in documents for sequence in document]
    np.concatenate([np.array(s, dtype) for s in sequences] or [np.empty(0, dtype)]).tofile(
        f"{prefix}.bin"
    )
    lengths, ends = Path(f"{prefix}.l"), Path(f"{prefix}.e")
    np.array([len(s) for s in sequences], np.int32).tofile(lengths)
    np.cumsum([len(d) for d in documents], dtype=np.int64).tofile(ends)
    write_index(
        Path(f"{prefix}.idx"),
        dtype=np.dtype(dtype),
        lengths_file=lengths,
        document_ends_file=ends,
    )
    return IndexedCorpus.open(prefix)


DOCUMENTS = [[[1, 2, 3]], [[4], [5, 6]], [], [[7, 8, 9, 10]]]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_the_index_is_megatron_s_byte_for_byte(tmp_path, dtype):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in DOCUMENTS:
        flat = [token for sequence in document for token in sequence]
        builder.add_document(flat, [len(sequence) for sequence in document])
    builder.finalize(str(tmp_path / "theirs.idx"))
    make(tmp_path / "ours", DOCUMENTS, dtype)
    for ending in ("bin", "idx"):
        ours, theirs = (tmp_path / f"{name}.{ending}" for name in ("ours", "theirs"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_the_dtype_rule_is_megatron_s():
    from megatron.core.datasets.indexed_dataset import DType

    for size in (1, 32000, 65499, 65500, 65536, 1 << 20):
        assert token_dtype(size) == np.dtype(DType.optimal_dtype(size))


def test_documents_are_ranges_of_sequences(tmp_path):
    corpus = make(tmp_path / "c", DOCUMENTS)
    found = [corpus.document(i).tolist() for i in range(len(corpus))]
    assert found == [[1, 2, 3], [4, 5, 6], [], [7, 8, 9, 10]]
    assert corpus.document_lengths().tolist() == [3, 3, 0, 4]
    with pytest.raises(UserError, match="holds 0 to 3"):
        corpus.document(4)


def test_offsets_beyond_2_to_32_do_not_overflow(tmp_path):
    """A corpus of 12 GB that takes no room: the token file is a hole."""
    lengths = np.array([2**30, 2**30 - 1, 2**30, 5, 7], np.int32)
    lengths.tofile(tmp_path / "l")
    np.array([1, 3, 5], np.int64).tofile(tmp_path / "e")
    with open(tmp_path / "big.bin", "wb") as stream:
        stream.truncate(4 * int(lengths.sum(dtype=np.int64)))
        stream.seek(4 * int(lengths[:3].sum(dtype=np.int64)))
        stream.write(np.arange(12, dtype=np.int32).tobytes())
    write_index(
        tmp_path / "big.idx",
        dtype=np.dtype(np.int32),
        lengths_file=tmp_path / "l",
        document_ends_file=tmp_path / "e",
    )
    corpus = IndexedCorpus.open(tmp_path / "big")
    expected = [0, *np.cumsum(lengths, dtype=object)[:-1]]
    assert corpus.pointers.tolist() == [4 * int(value) for value in expected]
    assert int(corpus.pointers[-1]) > 2**32
    assert corpus.document(2).tolist() == list(range(12))
    assert corpus.document_lengths().tolist() == [2**30, 2**31 - 1, 12]


def test_damaged_files_are_told_apart(tmp_path):
    make(tmp_path / "c", DOCUMENTS)
    idx = (tmp_path / "c.idx").read_bytes()

    def broken(data: bytes, message: str) -> None:
        (tmp_path / "c.idx").write_bytes(data)
        with pytest.raises(UserError, match=message):
            IndexedCorpus.open(tmp_path / "c")

    broken(b"", "is truncated: it has 0 bytes")
    broken(b"PK\x03\x04" + idx[4:], "no index of a Megatron corpus")
    broken(idx[:-1], "cut short")
    broken(idx[:9] + struct.pack("<Q", 2) + idx[17:], "version 2")
    broken(idx[:17] + b"\x63" + idx[18:], "tokens of type 99")
    (tmp_path / "c.idx").write_bytes(idx)
    (tmp_path / "c.bin").write_bytes(b"\x01")
    with pytest.raises(UserError, match="no whole number"):
        IndexedCorpus.open(tmp_path / "c")
    (tmp_path / "c.bin").unlink()
    with pytest.raises(UserError, match="does not exist"):
        IndexedCorpus.open(tmp_path / "c")


def test_an_empty_corpus_opens(tmp_path):
    corpus = make(tmp_path / "c", [])
    assert (len(corpus), len(corpus.tokens), corpus.document_lengths().tolist()) == (0, 0, [])
