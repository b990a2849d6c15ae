"""Draw the masks of docs/how-it-works.md from the package's own definitions.

    python docs/draw_masks.py docs/images

The sample is the worked example of docs/packing.md: 12 slots, the documents `11 12 13 E`, `21 22 E`
and the beginning of `31 32 33 34 35 E`, each behind the anchor `a`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from megatron_anchor.packing.patterns import ANCHOR as ANCHOR_PATTERN
from megatron_anchor.packing.patterns import attention_patterns
from megatron_anchor.packing.positions import positions

sys.path.insert(0, str(Path(__file__).parents[1]))  # the definition that tests compare with
from tests.masks import dense_mask, document_of_slot

TOKENS = ["a", "11", "12", "13", "E", "a", "21", "22", "E", "a", "31", "32"]
BORDERS = np.array([0, 5, 9, 12])
SHARED_TOKENS = [TOKENS[0], *(token for token in TOKENS if token != "a")]
SHARED_BORDERS = np.array([0, 1, 5, 8, 10])
"""The paper's form: the one anchor stands alone, before all documents."""

DOCUMENTS = ("#4477aa", "#66ccee", "#228833")
ANCHOR, FULL, HIDDEN = "#ee6677", "#8c8c8c", "#f4f4f4"
CELL = 0.31
"""Inches."""


def main() -> None:
    """Write every picture into a folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    draw_patterns(folder / "patterns.png")
    draw_forms(folder / "anchor-forms.png")


def draw_patterns(path: Path) -> None:
    """The attention patterns over one and the same token buffer."""
    patterns, slots = attention_patterns(), len(TOKENS)
    figure, panels = _figure(len(patterns), columns=3)
    for axes in panels[len(patterns) :]:
        axes.axis("off")
    for axes, pattern in zip(panels, patterns, strict=False):
        if pattern.masks_documents:
            borders, position_S = BORDERS, positions(BORDERS, slots, pattern=pattern)
            segments = pattern.segments(borders)
        else:
            borders, position_S = np.array([0, slots]), np.arange(slots)
            segments = borders
        _draw(axes, dense_mask(segments), borders, TOKENS, position_S)
        axes.set_title(f"--attention-pattern {pattern.name}", family="monospace", fontsize=10)
    figure.savefig(path, dpi=110)


def draw_forms(path: Path) -> None:
    """AnchorAttention as the paper draws it, and as any variable-length kernel computes it."""
    figure, (shared, copies) = _figure(2, columns=2)
    _draw(
        shared,
        dense_mask(SHARED_BORDERS, anchor_index=0),
        SHARED_BORDERS,
        SHARED_TOKENS,
        np.arange(len(SHARED_TOKENS)),
        first_document=-1,
    )
    shared.set_title("one anchor, seen by all documents", fontsize=10)
    position_S = positions(BORDERS, len(TOKENS), pattern=ANCHOR_PATTERN)
    _draw(copies, dense_mask(BORDERS), BORDERS, TOKENS, position_S)
    copies.set_title("a copy of it at the head of every document", fontsize=10)
    figure.savefig(path, dpi=110)


def _figure(panels: int, *, columns: int):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, side = -(-panels // columns), CELL * len(TOKENS) + 1.0
    figure = Figure(figsize=(side * columns, side * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns).flat)


def _draw(
    axes,
    mask_SS: np.ndarray,
    borders: np.ndarray,
    tokens: list[str],
    position_S: np.ndarray,
    *,
    first_document: int = 0,
) -> None:
    """One mask: rows are queries, columns keys; a cell has the colour of the key's document."""
    from matplotlib.colors import to_rgb

    document_S = document_of_slot(borders) + first_document
    whole = len(borders) == 2
    colors = [FULL if whole else DOCUMENTS[document] for document in document_S]
    colors = [
        ANCHOR if token == "a" else color for token, color in zip(tokens, colors, strict=True)
    ]
    picture = np.where(
        mask_SS[..., None], np.array([to_rgb(c) for c in colors])[None], to_rgb(HIDDEN)
    )
    slots = range(len(tokens))
    axes.imshow(picture)
    axes.set_xticks(slots, [f"{t}\n{p}" for t, p in zip(tokens, position_S, strict=True)])
    axes.set_yticks(slots, tokens)
    axes.tick_params(length=0, labelsize=8)
    axes.set_xticks(np.arange(len(tokens) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(tokens) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="w", linewidth=1)
    axes.tick_params(which="minor", length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("sees this token; below it, its position id", fontsize=8)
    axes.set_ylabel("this token", fontsize=8)


if __name__ == "__main__":
    main()
