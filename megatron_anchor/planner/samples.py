"""How documents fill samples, and how many pairs of query and key that leaves to attention.

The packing is `--packing concat` (docs/packing.md): the documents in random order, each behind an
anchor and filled up to the alignment, cut where a sample is full.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_anchor.context_parallel.split import assign_chunks, slots_in_chunks
from megatron_anchor.packing.patterns import attention_pattern
from megatron_anchor.planner.lengths import Lengths
from megatron_anchor.windows import FULL, LayerWindows, Window

SAMPLES = 64
"""Samples that are laid out to know a mean."""

TILE = 128
"""Rows and columns of the tiles that attention kernels compute; what a document touches of a tile
costs the whole tile."""


@dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """Means over samples and layers; one head, one layer, forward."""

    pairs: float
    """Pairs of query and key that the mask leaves."""
    tile_pairs: float
    """Pairs in the tiles that a kernel computes, ranks of a split document together."""
    documents: float
    """Document slices."""
    imbalance: float
    """Standard deviation of a sample's pairs over their mean."""
    filling: float
    """Share of the slots that only fill documents up to the alignment."""


@dataclass(frozen=True)
class Samples:
    """Samples that were laid out."""

    slices: list[np.ndarray]
    """int64 slots of every slice, sample by sample"""
    filling: float
    """Share of the slots that hold nothing, for the sake of the alignment."""


def cut(content_D: np.ndarray, *, sequence_length: int, alignment: int = 1) -> list[np.ndarray]:
    """Lay documents end to end; give the slots of every slice, sample by sample.

    Args:
        content_D: int64 tokens of each document behind its anchor, all above 0, in reading order.
        sequence_length: S, a multiple of the alignment.
        alignment: each slice takes a multiple of it.

    Returns:
        Full samples only; where a head did not fit, they hold less than S slots.
    """

    ends = np.cumsum(_aligned(content_D + 1, alignment))
    samples: list[np.ndarray] = []
    document, rest = 0, 0  # rest: tokens of the document before that no sample holds yet
    while True:
        room, slices = sequence_length, []
        if rest:
            need = int(_aligned(np.int64(rest + 1), alignment))
            if need > room:
                rest -= room - 1
                samples.append(np.array([room]))
                continue
            slices.append(np.array([need]))
            room, rest = room - need, 0
        before = int(ends[document - 1]) if document else 0
        last = int(np.searchsorted(ends, before + room, side="right"))
        slices.append(np.diff(ends[document:last], prepend=before))
        room -= int(slices[-1].sum())
        document = last
        if document == len(content_D):
            return samples
        if room > 0:
            slices.append(np.array([room]))
            rest = int(content_D[document]) - (room - 1)
            document += 1
        samples.append(np.concatenate(slices))


def _aligned(slots: np.ndarray | np.int64, alignment: int) -> np.ndarray | np.int64:
    return -(-slots // alignment) * alignment


def lay_out(
    lengths: Lengths, *, sequence_length: int, alignment: int = 1, seed: int = 1
) -> Samples:
    """Lay out `SAMPLES` samples; documents are drawn at random, with repetitions."""
    generator = np.random.default_rng(seed)
    slots = int(SAMPLES * sequence_length * 1.1) + int(lengths.lengths.max())
    count = max(int(slots / (lengths.lengths.mean() + 1) * 1.2), 8)
    drawn: np.ndarray = generator.choice(lengths.lengths, count)
    while drawn.sum() + len(drawn) < slots:
        drawn = np.append(drawn, generator.choice(lengths.lengths, count))
    filled = int(np.sum(_aligned(drawn + 1, alignment)))
    return Samples(
        slices=cut(drawn, sequence_length=sequence_length, alignment=alignment)[:SAMPLES],
        filling=1 - (int(drawn.sum()) + len(drawn)) / filled,
    )


def attention_work(
    samples: Samples,
    *,
    sequence_length: int,
    pattern: str,
    split: int = 1,
    parts: int = 1,
    windows: LayerWindows = FULL,
) -> AttentionWork:
    """Count pairs.

    Args:
        samples: from `lay_out`.
        sequence_length: S.
        pattern: of attention, by name.
        split: ranks that share every document zigzag (Transformer Engine's context parallelism);
            1 where ranks share heads, or there is one.
        parts: groups that the queries are dealt out to, where keys and values are gathered; the
            tiles are then those of the group with most of them, times the groups.
        windows: of the model's layers; none where documents are split.

    Raises:
        UserError: for an unknown pattern.
    """
    segment_lengths = attention_pattern(pattern).segment_lengths
    slices = [segment_lengths(s, sequence_length=sequence_length) for s in samples.slices]
    pairs = np.array([windows.pairs(s) for s in slices])
    if parts > 1:
        tiles = np.array(
            [_tiles_of_parts(s, sequence_length, parts, windows).max() * parts for s in slices]
        )
    elif split > 1:
        tiles = np.array([_tiles_of_chunks(s, split).sum() for s in slices])
    else:
        tiles = np.array([_in_tiles(windows).pairs(-(-s // TILE)) for s in slices])
    return AttentionWork(
        pairs=float(pairs.mean()),
        tile_pairs=float(tiles.mean()) * TILE**2,
        documents=float(np.mean([len(s) for s in samples.slices])),
        imbalance=float(pairs.std() / pairs.mean()),
        filling=samples.filling,
    )


def _in_tiles(windows: LayerWindows) -> LayerWindows:
    """The same windows, counted in tiles: those that a row of tiles reaches back to at most."""
    kinds = []
    for kind in windows.kinds:
        window = kind.window
        if window is not None:
            kept = window.keeps_anchor
            window = Window(size=1 + -(-(window.size - 1) // TILE), keeps_anchor=kept)
        kinds.append(kind._replace(window=window))
    return LayerWindows(tuple(kinds))


def _tiles_of_chunks(slots: np.ndarray, split: int) -> np.ndarray:
    """Tiles under the diagonal of documents cut into 2 x split chunks, each tiled by itself."""
    chunk = -(-slots // (2 * split * TILE))
    return split * ((2 * split - 1) * chunk**2 + chunk * (chunk + 1))


def _tiles_of_parts(
    slots: np.ndarray, sequence_length: int, parts: int, windows: LayerWindows
) -> np.ndarray:
    """float64 [parts]: tiles of the runs that each part computes, a mean over the layers."""
    borders = np.unique(np.concatenate((np.cumsum(slots), [0, sequence_length])))
    chunks = assign_chunks(borders, sequence_length=sequence_length, parts=parts, windows=windows)
    layers = sum(kind.layers for kind in windows.kinds)
    found = np.zeros(parts)
    for part, held in enumerate(slots_in_chunks(chunks, sequence_length=sequence_length)):
        document = np.searchsorted(borders, held, side="right") - 1
        new = np.flatnonzero((np.diff(held) != 1) | (np.diff(document) != 0)) + 1
        starts, ends = np.append(0, new), np.append(new, len(held))
        before = held[starts] - borders[document[starts]]  # keys in front of a run's first query
        rows = -(-(ends - starts) // TILE)
        for kind, in_tiles in zip(windows.kinds, _in_tiles(windows).kinds, strict=True):
            whole = _tiles_of_runs(rows, before / TILE, in_tiles.window)
            found[part] += np.ceil(whole).sum() * kind.layers / layers
    return found


def _tiles_of_runs(rows: np.ndarray, before: np.ndarray, window: Window | None) -> np.ndarray:
    """Tiles of runs: each row of tiles reaches from the document's start to the row's last query.

    Args:
        rows: int64 [runs], tiles of queries.
        before: float64 [runs], tiles of keys in front of a run's first query.
        window: in tiles.
    """
    if window is None:
        return np.asarray(rows * before + rows * (rows + 1) / 2)
    reach = window.size + window.keeps_anchor
    shorter = np.clip(np.floor(reach - before), 0, rows)  # rows that see less than the window
    inside = shorter * before + shorter * (shorter + 1) / 2
    return np.asarray(inside + (rows - shorter) * reach)
