"""Which slots of a sample each context-parallel rank holds.

Three ways, each a function of the sample's segment borders alone, so that every rank and every run
finds the same slots:

    contiguous   Ulysses: rank r holds the r-th of P equal pieces
    zigzag       Transformer Engine: chunks r and 2 P - 1 - r of every document
    chunks       gathered keys and values: the sample is cut into equal chunks, and each of the
                 `parts` (ranks, or groups of ranks) gets as many chunks, chosen for equal work

With causal attention inside documents, a slot's work is its place in its document plus one (or
what the layers' windows leave of it), so
equal pieces are far from equal work: at 131072 slots and SlimPajama's lengths the largest of 32
contiguous pieces has 4.8 times the mean. Chunks are assigned largest first, each to the part with
the least work that still has room (Graham's rule with equal counts). Two chunks per part are tried
first, then more, until the largest part is within `GOOD_ENOUGH` of the mean. Few large chunks are
better than many small ones: kernels work in tiles, and each run of queries copies its document's
prefix of keys.

Cost: about a millisecond a sample at 32 parts.

Legend: S slots of a sample, P context-parallel ranks, n chunks, c = S / n slots of a chunk.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_anchor.windows import FULL, LayerWindows

CONTIGUOUS, ZIGZAG, CHUNKS = "contiguous", "zigzag", "chunks"

MOST_CHUNKS = 32
"""Chunks of a part, at most."""

GOOD_ENOUGH = 1.03
"""Largest work of a part over the mean at which more chunks are not tried."""


@dataclass(frozen=True, kw_only=True)
class SlotSplit:
    """How the slots of every sample are spread over context-parallel ranks."""

    cp_size: int = 1
    """P."""
    kind: str = CONTIGUOUS
    """`CONTIGUOUS`, `ZIGZAG` or `CHUNKS`."""
    parts: int = 1
    """Under `CHUNKS`, groups of P / `parts` neighbouring ranks; a group holds a part, and each of
    its ranks a contiguous piece of that."""

    @property
    def gathers(self) -> bool:
        """Whether keys and values are gathered, so that samples come with assigned chunks."""
        return self.kind == CHUNKS

    def slots(
        self, cu_seqlens: np.ndarray, part_of_chunk: np.ndarray | None, *, rank: int
    ) -> np.ndarray:
        """int64 [S / P]: the slots of a sample that a rank holds, in the order in which it does.

        Args:
            cu_seqlens: integers from 0 to S, segment borders of the sample; repeated entries are
                empty segments.
            part_of_chunk: under `CHUNKS`, as `assign_chunks` gives it, -1 behind the last chunk.
            rank: context-parallel rank.

        Raises:
            ValueError: under `ZIGZAG`, see `slots_in_zigzag`.
        """
        S = int(cu_seqlens[-1])
        if self.kind == CONTIGUOUS:
            s = S // self.cp_size
            return np.arange(rank * s, (rank + 1) * s)
        if self.kind == ZIGZAG:
            return slots_in_zigzag(cu_seqlens, cp_size=self.cp_size)[rank]
        assert part_of_chunk is not None
        inner = self.cp_size // self.parts
        part = slots_in_chunks(part_of_chunk[part_of_chunk >= 0], sequence_length=S)[rank // inner]
        return part.reshape(inner, -1)[rank % inner]


def work_before(
    slots: np.ndarray, borders: np.ndarray, *, windows: LayerWindows = FULL
) -> np.ndarray:
    """float64: attention pairs of all queries before each of `slots`.

    Args:
        slots: integers from 0 to S.
        borders: integers [segments + 1] from 0 to S; repeated entries are empty segments.
        windows: of the model's layers.
    """
    borders = np.unique(borders).astype(np.int64)
    whole = np.concatenate(([0.0], np.cumsum(windows.pairs_before(np.diff(borders)))))
    segment = np.searchsorted(borders, slots, side="right") - 1
    return whole[segment] + windows.pairs_before(slots - borders[segment])


def assign_chunks(
    borders: np.ndarray, *, sequence_length: int, parts: int, windows: LayerWindows = FULL
) -> np.ndarray:
    """Deal the chunks of a sample to parts with equal slots and nearly equal work.

    Args:
        borders: integers [segments + 1], where the segments that attend together begin, from 0 to
            S; repeated entries are empty segments.
        sequence_length: S, a multiple of `parts`.
        parts: ranks or groups of ranks.
        windows: of the model's layers.

    Returns:
        int32 [n], the part of each chunk of S / n slots; n is `parts` x one of the divisors of
        S / parts up to `MOST_CHUNKS`.
    """
    share = sequence_length // parts
    assert share * parts == sequence_length, f"{sequence_length} slots for {parts} parts"
    best, best_imbalance = np.arange(parts, dtype=np.int32), np.inf
    for chunks in range(1 if share == 1 else 2, MOST_CHUNKS + 1):
        if share % chunks:
            continue
        work = chunk_work(
            borders, sequence_length=sequence_length, chunks=parts * chunks, windows=windows
        )
        candidate = _largest_first(work, parts=parts)
        found = imbalance(work, candidate, parts=parts)
        if found < best_imbalance:
            best, best_imbalance = candidate, found
        if best_imbalance <= GOOD_ENOUGH:
            break
    return best


CONTEXT_IMBALANCE = "context_imbalance"
"""Name of the figure that `split_sample` adds to a sample, in millionths."""


def split_sample(
    cu_seqlens: np.ndarray, *, sequence_length: int, parts: int, windows: LayerWindows = FULL
) -> dict[str, np.ndarray]:
    """Assign the chunks of a sample, in arrays whose shapes do not depend on it.

    Args:
        cu_seqlens: see `assign_chunks`.
        sequence_length: S.
        parts: see `assign_chunks`.
        windows: the same.

    Returns:
        part_of_chunk: int32 [parts x MOST_CHUNKS], -1 behind the last chunk; context_imbalance:
        int32 scalar, largest work of a part over the mean, in millionths.
    """
    sizes: dict[str, Any] = {"sequence_length": sequence_length, "windows": windows}
    part_of_chunk = assign_chunks(cu_seqlens, parts=parts, **sizes)
    work = chunk_work(cu_seqlens, chunks=len(part_of_chunk), **sizes)
    padded = np.full(parts * MOST_CHUNKS, -1, dtype=np.int32)
    padded[: len(part_of_chunk)] = part_of_chunk
    found = round(imbalance(work, part_of_chunk, parts=parts) * 1e6)
    return {"part_of_chunk": padded, CONTEXT_IMBALANCE: np.array(found, dtype=np.int32)}


def chunk_work(
    borders: np.ndarray, *, sequence_length: int, chunks: int, windows: LayerWindows = FULL
) -> np.ndarray:
    """float64 [chunks]: attention pairs of the queries of each of `chunks` equal chunks."""
    edges = np.arange(chunks + 1) * (sequence_length // chunks)
    return np.diff(work_before(edges, borders, windows=windows))


def imbalance(work: np.ndarray, part_of_chunk: np.ndarray, *, parts: int) -> float:
    """Largest work of a part over the mean; 1 is perfect."""
    load = np.bincount(part_of_chunk, weights=work, minlength=parts)
    return float(load.max() / load.mean())


def _largest_first(work: np.ndarray, *, parts: int) -> np.ndarray:
    part_of_chunk = np.empty(len(work), dtype=np.int32)
    room = [len(work) // parts] * parts
    least = [(0.0, part) for part in range(parts)]
    for chunk in np.argsort(-work, kind="stable"):
        load, part = heapq.heappop(least)
        part_of_chunk[chunk] = part
        room[part] -= 1
        if room[part]:
            heapq.heappush(least, (load + work[chunk], part))
    return part_of_chunk


def slots_in_chunks(part_of_chunk: np.ndarray, *, sequence_length: int) -> np.ndarray:
    """int64 [parts, S / parts]: the slots of every part, ascending.

    Args:
        part_of_chunk: integers [n], as `assign_chunks` gives them.
        sequence_length: S.
    """
    length = sequence_length // len(part_of_chunk)
    parts = int(part_of_chunk.max()) + 1
    chunks = np.argsort(part_of_chunk, kind="stable")
    slots = chunks[:, None] * length + np.arange(length)
    return slots.reshape(parts, -1)


def slots_in_zigzag(cu_seqlens: np.ndarray, *, cp_size: int) -> np.ndarray:
    """int64 [P, S / P]: the slots of every rank where Transformer Engine communicates.

    Every document is cut into 2 P equal chunks; rank r holds chunks r and 2 P - 1 - r of each
    (Transformer Engine's dual chunk swap, ``thd_get_partitioned_indices``). For P = 2 and documents
    of 8 and 4 slots::

        slot      0 1 2 3 4 5 6 7 | 8 9 10 11
        rank      0 0 1 1 1 1 0 0 | 0 1  1  0

    Args:
        cu_seqlens: integers, cumulative document lengths from 0 to S; repeated entries are empty.
        cp_size: P.

    Raises:
        ValueError: a document is not a multiple of 2 P slots, where Transformer Engine, which
            checks only the total, would be silently wrong.
    """
    cu_seqlens = np.asarray(cu_seqlens, dtype=np.int64)
    lengths = np.diff(cu_seqlens)
    ragged = np.flatnonzero(lengths % (2 * cp_size))
    if len(ragged):
        document = int(ragged[0])
        raise ValueError(
            f"document {document} of the sample has {lengths[document]} slots, not a multiple of "
            f"{2 * cp_size} (2 x --context-parallel-size): Transformer Engine's context "
            f"parallelism would be silently wrong; set --document-alignment {2 * cp_size}"
        )
    slot_in_document = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths)
    chunk = slot_in_document // np.repeat(lengths // (2 * cp_size), lengths)
    rank = np.minimum(chunk, 2 * cp_size - 1 - chunk)
    return np.argsort(rank, kind="stable").reshape(cp_size, -1)
