"""Fingerprints see what the files of a corpus can differ in."""

from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import _IndexWriter

from megatron_anchor.indexed.fingerprint import BLOCK, BLOCKS, fingerprint


@pytest.mark.parametrize("size", [0, 1, BLOCK * BLOCKS, BLOCK * BLOCKS + 1, 5 * BLOCK * BLOCKS])
def test_size_first_and_last_byte_count_and_the_time_does_not(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    contents = bytearray(size)
    path.write_bytes(contents)
    seen = [fingerprint(path)]
    path.touch()
    assert fingerprint(path) == seen[0]
    for place in (0, size - 1) if size else ():
        contents[place] += 1
        path.write_bytes(contents)
        seen.append(fingerprint(path))
    path.write_bytes(contents + b"x")
    seen.append(fingerprint(path))
    assert len({str(each) for each in seen}) == len(seen)


def test_one_document_of_another_length_changes_a_large_index(tmp_path: Path) -> None:
    """The number of documents, and so the size of the .idx, stays."""
    found = set()
    for longer in (None, 3, 99_997):
        lengths = np.full(100_000, 2)
        if longer is not None:
            lengths[longer] += 1
        with _IndexWriter(str(tmp_path / "c.idx"), np.uint16) as writer:
            writer.write(lengths, None, np.arange(len(lengths) + 1))
        assert (tmp_path / "c.idx").stat().st_size > BLOCK * BLOCKS
        found.add(str(fingerprint(tmp_path / "c.idx")))
    assert len(found) == 3
