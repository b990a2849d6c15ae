"""Pictures of document lengths (needs matplotlib, the `plot` extra)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_anchor.errors import UserError


def draw_lengths(
    path: str | Path,
    edges: Sequence[int],
    groups: Mapping[str, Sequence[float]],
    *,
    title: str,
    compare: bool = False,
) -> None:
    """Write a PNG: share of tokens by document length; stacked, or (`compare`) side by side.

    `edges` are the lower ends of the length bins, `groups` the tokens in each bin.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("a picture needs `pip install matplotlib`") from error
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    first = next((i for i in range(len(edges)) if any(g[i] for g in groups.values())), 0)
    shown = range(first, len(edges))
    total = sum(map(sum, groups.values())) or 1
    base = [0.0] * len(shown)
    width = 0.8 / len(groups) if compare else 0.85
    for number, (name, tokens) in enumerate(groups.items()):
        whole = (sum(tokens) or 1) if compare else total
        heights = [100 * tokens[i] / whole for i in shown]
        shift = (number - (len(groups) - 1) / 2) * width if compare else 0.0
        places = [place + shift for place in range(len(shown))]
        axes.bar(places, heights, width=width, bottom=None if compare else base, label=name)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    labels = [_short(edges[i]) for i in shown]
    axes.set_xticks(range(len(shown)), labels)
    axes.set_xlabel("document length, tokens (from this length up to the next)")
    axes.set_ylabel("share of tokens, %")
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    if len(groups) > 1:
        axes.legend(frameon=False, fontsize="small")
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise UserError(f"--png {path} cannot be written: {error.strerror}") from error


def _short(number: int) -> str:
    if number >= 1 << 20:
        return f"{number >> 20}M"
    return f"{number >> 10}K" if number >= 1 << 10 else str(number)
