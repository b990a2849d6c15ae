"""A picture of a packed corpus (needs matplotlib, the `plot` extra)."""

from pathlib import Path

import numpy as np

from megatron_anchor.packing.inspection import PackingReport


def draw_packing(path: str | Path, report: PackingReport, cu_seqlens: np.ndarray) -> None:
    """Write a PNG: document lengths, documents per sample, and the mask of one sample.

    Args:
        path: of the PNG.
        report: the figures.
        cu_seqlens: int [any], segment borders of the sample whose mask is drawn.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("a picture needs `pip install matplotlib`") from error
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    lengths, documents, mask = figure.subplots(1, 3)
    figure.suptitle(
        f"{Path(report.corpus).name}: {report.packing}, {report.samples:,} samples of "
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
    lengths.set_xlabel("document length (tokens, from this to the next)")
    lengths.set_ylabel("documents")
    found = np.array(report.documents_of_samples)
    bins = np.arange(found.min(), found.max() + 2) - 0.5
    documents.hist(found, bins=bins.tolist() if len(bins) < 60 else 40)
    documents.set_xlabel("document slices in a sample")
    documents.set_ylabel("samples")
    _draw_mask(mask, np.asarray(cu_seqlens, dtype=np.float64), report.sequence_length)
    for axes in (lengths, documents, mask):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100, format="png")


def _draw_mask(axes, borders: np.ndarray, sequence_length: int) -> None:
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
    axes.add_collection(PolyCollection(list(triangles[end > begin]), linewidths=0.3, edgecolor="w"))
    axes.set_xlim(0, sequence_length)
    axes.set_ylim(sequence_length, 0)
    axes.set_aspect("equal")
    ticks = np.linspace(0, sequence_length, 5).astype(int)
    labels = [_short(tick) for tick in ticks]
    axes.set_xticks(ticks, labels)
    axes.set_yticks(ticks, labels)
    axes.set_xlabel("key (slot)")
    axes.set_ylabel("query (slot)")
    axes.set_title("mask of one sample", fontsize=9)


def _short(number: int) -> str:
    if number >= 1 << 20:
        return f"{number / (1 << 20):.3g}M"
    return f"{number / (1 << 10):.3g}K" if number >= 1 << 10 else str(number)
