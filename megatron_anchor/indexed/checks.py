"""Whether an index agrees with itself and with its `.bin`, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from megatron_anchor.errors import UserError
from megatron_anchor.indexed.pair import IndexedCorpus, bin_path

_BLOCK = 1 << 20  # entries looked at once
_SHOWN = 5  # offenders named in a message


def index_problems(corpus: IndexedCorpus) -> list[str]:
    """Every way in which the index contradicts itself or the `.bin`; empty where it is sound."""
    lengths, indices, problems = corpus.lengths, corpus.document_indices, []
    if not len(indices) or indices[0] != 0:
        problems.append("the first document index is not 0")
    elif indices[-1] != len(lengths):
        problems.append(
            f"the last document index is {indices[-1]}, but there are {len(lengths)} sequences"
        )
    falls = (np.diff(indices[at : at + _BLOCK + 1]) < 0 for at in _starts(len(indices) - 1))
    problems += named("document indices fall", falls)
    negative = (lengths[at : at + _BLOCK] < 0 for at in _starts(len(lengths)))
    problems += named("sequences with a negative length", negative)
    problems += named(
        "sequences whose offset is not the sum of the lengths before", _misplaced(corpus)
    )
    held, stated = len(corpus.tokens), int(lengths.sum(dtype=np.int64))
    if held != stated:
        problems.append(f"{bin_path(corpus.prefix)} holds {held} tokens, the index states {stated}")
    return problems


def require_sound(corpus: IndexedCorpus) -> None:
    """Refuse a corpus whose index has a problem.

    Raises:
        UserError: it has; the message names the first one.
    """
    problems = index_problems(corpus)
    if problems:
        raise UserError(
            f"{corpus.prefix}: .idx and .bin do not agree: {problems[0]}; make the corpus again "
            "(tools/inspect_corpus.py tells more)"
        )


def named(what: str, blocks: Iterable[np.ndarray]) -> list[str]:
    """`COUNT WHAT, at ...` for the flags that are set, which come block after block."""
    count, at = 0, 0
    places: list[int] = []
    for flags in blocks:
        found = np.flatnonzero(flags)
        count += len(found)
        places += (at + found[: _SHOWN - len(places)]).tolist()
        at += len(flags)
    if not count:
        return []
    shown = ", ".join(map(str, places))
    return [f"{count} {what}, at {shown}{', ...' if count > _SHOWN else ''}"]


def _starts(count: int) -> range:
    return range(0, max(count, 0), _BLOCK)


def _misplaced(corpus: IndexedCorpus) -> Iterator[np.ndarray]:
    begin = 0
    for at in _starts(len(corpus.lengths)):
        ends = begin + np.cumsum(corpus.lengths[at : at + _BLOCK], dtype=np.int64)
        starts = np.concatenate(([begin], ends[:-1])) * corpus.dtype.itemsize
        yield corpus.pointers[at : at + _BLOCK] != starts
        begin = int(ends[-1])
