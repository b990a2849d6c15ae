"""Draw who holds what under context parallelism, for docs/context-parallel.md.

    python docs/draw_context_parallel.py docs/images

One sample of 32 slots on four ranks. Full colour: the slots that a rank holds, its own queries.
Pale: slots whose keys (and, where heads are exchanged, queries) it receives for the attention call.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from megatron_anchor.context_parallel.split import (
    CHUNKS,
    CONTIGUOUS,
    ZIGZAG,
    SlotSplit,
    split_sample,
)

RANKS, BORDERS = 4, np.array([0, 8, 24, 32])
DOCUMENTS = ("#4477aa", "#66ccee", "#228833")
PALE = 0.72
"""How much of the colour of received slots is white."""

KINDS = {
    "a2a (Ulysses): a quarter of the heads, all slots": (SlotSplit(cp_size=4, kind=CONTIGUOUS), 4),
    "gather: all heads, own queries, every key of their documents": (
        SlotSplit(cp_size=4, kind=CHUNKS, parts=4),
        1,
    ),
    "a2a+gather 2 x 2: half of the heads, the queries of a pair of ranks": (
        SlotSplit(cp_size=4, kind=CHUNKS, parts=2),
        2,
    ),
    "p2p (Transformer Engine): pieces of every document, keys around a ring": (
        SlotSplit(cp_size=4, kind=ZIGZAG),
        1,
    ),
}
"""Title to the split, and the ranks of an all-to-all."""


def main() -> None:
    """Write the picture into a folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    draw(folder / "context-parallel.png")


def draw(path: Path) -> None:
    """One panel per kind: rows are ranks, columns slots."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, (split, exchanging)) in zip(
        figure.subplots(len(KINDS)), KINDS.items(), strict=True
    ):
        _panel(axes, split, exchanging)
        axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("slot of the sample; white lines between documents", fontsize=9)
    figure.savefig(path, dpi=110)


def _panel(axes, split: SlotSplit, exchanging: int) -> None:
    from matplotlib.colors import to_rgb

    S = int(BORDERS[-1])
    chunks = None
    if split.gathers:
        chunks = split_sample(BORDERS, sequence_length=S, parts=split.parts)["part_of_chunk"]
    held = [split.slots(BORDERS, chunks, rank=rank) for rank in range(RANKS)]
    document_S = np.searchsorted(BORDERS, np.arange(S), side="right") - 1
    color_S = np.array([to_rgb(DOCUMENTS[document]) for document in document_S])
    picture = np.ones((RANKS, S, 3))
    for rank in range(RANKS):
        first = rank // exchanging * exchanging
        queries = np.concatenate(held[first : first + exchanging])
        seen = np.zeros(S, dtype=bool)
        for query in queries:
            seen[BORDERS[document_S[query]] : query + 1] = True
        picture[rank, seen] = PALE + (1 - PALE) * color_S[seen]
        picture[rank, held[rank]] = color_S[held[rank]]
    axes.imshow(picture, aspect="auto")
    axes.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)], fontsize=8)
    axes.set_xticks(range(0, S, 4), [str(slot) for slot in range(0, S, 4)], fontsize=8)
    axes.set_xticks(np.arange(S + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(RANKS + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="#dddddd", linewidth=0.6)
    axes.tick_params(which="both", length=0)
    for border in BORDERS[1:-1]:
        axes.axvline(border - 0.5, color="white", linewidth=3)
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    main()
