"""A picture of a packed corpus (needs matplotlib, the `plot` extra)."""

from pathlib import Path

import numpy as np

from megatron_anchor.errors import UserError
from megatron_anchor.packing.inspection import PackingReport

FEW = 40
"""Documents of a sample up to which white borders between them can be seen."""

LONGEST_NAME = 48


def draw_packing(
    path: str | Path, report: PackingReport, *, number: int, cu_seqlens: np.ndarray, documents: int
) -> None:
    """Write a PNG: document lengths, documents per sample, and the mask of one sample.

    Args:
        path: of the PNG.
        report: the figures.
        number: of the sample whose mask is drawn.
        cu_seqlens: int [any], segment borders of that sample.
        documents: segments of it that hold documents; the others are padding.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("a picture needs `pip install matplotlib`") from error
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    lengths, slices, mask = figure.subplots(1, 3)
    name = Path(report.corpus).name
    if len(name) > LONGEST_NAME:
        name = f"{name[: LONGEST_NAME // 2]} ... {name[-LONGEST_NAME // 2 :]}"
    figure.suptitle(
        f"{name}: {report.packing}, {report.samples:,} samples of "
        f"{report.sequence_length:,} slots, padding {report.padding_share:.2%}, "
        f"{report.attention_pattern} does {report.attention_work_share:.1%} of full attention's "
        "work",
        fontsize=10,
    )
    counts = report.document_lengths
    first = next(power for power, count in enumerate(counts) if count)
    places = range(first, len(counts))
    lengths.bar(places, [counts[power] for power in places], width=0.9)
    named = places[:: 1 if len(places) < 10 else 2]
    lengths.set_xticks(named, [_short(1 << power) for power in named])
    lengths.set_yscale("log")
    lengths.set_ylim(bottom=0.5)
    lengths.set_xlabel("document length (tokens, from this to the next)")
    lengths.set_ylabel("documents")
    found = np.array(report.documents_of_samples)
    bins = np.arange(found.min(), found.max() + 2) - 0.5
    slices.hist(found, bins=bins.tolist() if len(bins) < 60 else 40)
    slices.set_xlabel("document slices in a sample")
    slices.set_ylabel("samples")
    slices.locator_params(integer=True)
    _draw_mask(mask, np.asarray(cu_seqlens, dtype=np.float64), documents, report.sequence_length)
    mask.set_title(f"mask of sample {number} (grey: padding)", fontsize=9)
    for axes in (lengths, slices, mask):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100, format="png")


def _draw_mask(axes, borders: np.ndarray, documents: int, sequence_length: int) -> None:
    """Every segment as the triangle of its query-key pairs."""
    from matplotlib.collections import PolyCollection

    begin, end = borders[:-1], borders[1:]
    triangles = np.stack(
        [
            np.stack([begin, begin], axis=-1),
            np.stack([begin, end], axis=-1),
            np.stack([end, end], axis=-1),
        ],
        axis=1,
    )
    kinds = {"C0": triangles[:documents], "0.75": triangles[documents:]}
    for color, drawn in kinds.items():
        edge = "w" if documents <= FEW else color  # white would hide small triangles
        axes.add_collection(PolyCollection(list(drawn), lw=0.4, fc=color, ec=edge))
    axes.set_xlim(0, sequence_length)
    axes.set_ylim(sequence_length, 0)
    axes.set_aspect("equal")
    ticks = np.linspace(0, sequence_length, 5).astype(int)
    labels = [_short(tick) for tick in ticks]
    axes.set_xticks(ticks, labels)
    axes.set_yticks(ticks, labels)
    axes.set_xlabel("key (slot)")
    axes.set_ylabel("query (slot)")


def _short(number: int) -> str:
    if number >= 1 << 20:
        return f"{number / (1 << 20):.3g}M"
    return f"{number / (1 << 10):.3g}K" if number >= 1 << 10 else str(number)
