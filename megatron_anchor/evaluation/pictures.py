"""Pictures of results (needs matplotlib, the `plot` extra)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_anchor.errors import UserError
from megatron_anchor.evaluation.published import mean_name
from megatron_anchor.evaluation.report import lengths_of, short_length
from megatron_anchor.evaluation.summary import Group

HEAT_MAP, DEPTHS, CURVES, PERPLEXITY = "heatmap.png", "depths.png", "curves.png", "perplexity.png"


def draw_all(folder: Path, results: Mapping[str, Any]) -> list[Path]:
    """Draw what the results have.

    Returns:
        The PNG files written.

    Raises:
        UserError: matplotlib is not installed.
    """
    groups: Mapping[str, Group] = results["groups"]
    written = []
    if any(group["scores"] for group in groups.values()):
        draw_heat_maps(folder / HEAT_MAP, groups)
        draw_curves(folder / CURVES, groups)
        written += [folder / HEAT_MAP, folder / CURVES]
    if any(group["depths"] for group in groups.values()):
        draw_depths(folder / DEPTHS, groups)
        written.append(folder / DEPTHS)
    if any(group["perplexity"] for group in groups.values()):
        draw_perplexity(folder / PERPLEXITY, groups)
        written.append(folder / PERPLEXITY)
    return written


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("pictures need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_heat_maps(path: Path, groups: Mapping[str, Group]) -> None:
    """Write a PNG: task by length for each group, and what a second group has more."""
    tasks = list(dict.fromkeys(name for group in groups.values() for name in group["scores"]))
    lengths = sorted({n for group in groups.values() for n in lengths_of(group)})
    grids = {
        label: _grid([*(group["scores"].get(t, {}) for t in tasks), group["mean"]], lengths)
        for label, group in groups.items()
    }
    _draw_grids(path, grids, [*tasks, _mean_of(groups)], lengths, "score, %")


def _mean_of(groups: Mapping[str, Group]) -> str:
    return mean_name(*(len(group["scores"]) for group in groups.values()))


def draw_depths(path: Path, groups: Mapping[str, Group]) -> None:
    """Write a PNG: depth of the asked needle by length, over all tasks that have one."""
    some = {label: group["depths"] for label, group in groups.items() if group["depths"]}
    depths = sorted({depth for rows in some.values() for depth in rows}, key=float)
    lengths = sorted({int(n) for rows in some.values() for row in rows.values() for n in row})
    grids = {
        label: _grid([rows.get(d, {}) for d in depths], lengths) for label, rows in some.items()
    }
    _draw_grids(path, grids, [f"{d} %" for d in depths], lengths, "score, %", "depth of the needle")


def _grid(rows: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> np.ndarray:
    """Means, [rows, lengths]; nan where there is none."""
    return np.array(
        [[row[str(n)]["mean"] if str(n) in row else math.nan for n in lengths] for row in rows]
    )


def _draw_grids(
    path: Path,
    grids: Mapping[str, np.ndarray],
    rows: Sequence[str],
    lengths: Sequence[int],
    meaning: str,
    rows_are: str = "",
) -> None:
    labels = list(grids)
    compares = len(labels) == 2
    panels = len(labels) + compares
    width, height = 1.4 + panels * max(2.2, 0.75 * len(lengths) + 0.9), 1.5 + 0.36 * len(rows)
    figure = _figure(width, height)
    axes = figure.subplots(1, panels, squeeze=False, sharey=True)[0]
    for panel, label in zip(axes, labels, strict=False):
        image = _draw_grid(panel, grids[label], "viridis", (0, 100), "{:.0f}")
        panel.set_title(label, fontsize=10)
    figure.colorbar(image, ax=axes[: len(labels)].tolist(), label=meaning, shrink=0.9)
    if compares:
        first, second = (grids[label] for label in labels)
        more = second - first
        most = max(10.0, float(np.nanmax(np.abs(more), initial=0)))  # noise stays pale
        image = _draw_grid(axes[-1], more, "PuOr", (-most, most), "{:+.0f}")
        axes[-1].set_title(f"{labels[1]} - {labels[0]}", fontsize=10)
        figure.colorbar(image, ax=axes[-1], label="points", shrink=0.9)
    for panel in axes:
        panel.set_xticks(range(len(lengths)), [short_length(n) for n in lengths])
        panel.set_xlabel("length (tokens)")
    axes[0].set_yticks(range(len(rows)), rows)
    axes[0].set_ylabel(rows_are)
    figure.savefig(path, dpi=120, format="png")


def _draw_grid(
    axes: Any, values: np.ndarray, colors: str, limits: tuple[float, float], form: str
) -> Any:
    image = axes.imshow(values, cmap=colors, vmin=limits[0], vmax=limits[1], aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if not math.isnan(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            light = 0.3 * red + 0.6 * green + 0.1 * blue
            color = "black" if light > 0.5 else "white"
            text = form.format(value + 0.0)
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8)
    return image


def draw_curves(path: Path, groups: Mapping[str, Group]) -> None:
    """Write a PNG: score against length, all groups on the same axes; bands: least to largest."""
    tasks = list(dict.fromkeys(name for group in groups.values() for name in group["scores"]))
    mean = _mean_of(groups)
    names = [mean, *tasks] if len(tasks) > 1 else tasks
    columns = min(4, len(names))
    rows = math.ceil(len(names) / columns)
    figure = _figure(1.0 + 3.1 * columns, 0.7 + 2.5 * rows)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True, sharex=True).ravel()
    for panel, name in zip(panels, names, strict=False):
        for number, (label, group) in enumerate(groups.items()):
            cells = group["mean"] if name == mean else group["scores"].get(name, {})
            _draw_curve(panel, cells, label, f"C{number}")
        panel.set_title(name, fontsize=10, fontweight="bold" if name == mean else "normal")
        panel.set_ylim(-4, 104)
        panel.grid(alpha=0.3)
    lengths = sorted({n for group in groups.values() for n in lengths_of(group)})
    _length_axis(panels[0], lengths)
    for panel in panels[len(names) :]:
        panel.set_axis_off()
    for number, panel in enumerate(panels[: len(names)]):
        if number % columns == 0:
            panel.set_ylabel("score, %")
        if number + columns >= len(names):
            panel.set_xlabel("length (tokens)")
            panel.tick_params(labelbottom=True)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=120, format="png")


def _draw_curve(axes: Any, cells: Mapping[str, Any], label: str, color: str) -> None:
    lengths = sorted(map(int, cells))
    found = [cells[str(n)] for n in lengths]
    low, high = ([cell[name] for cell in found] for name in ("min", "max"))
    means = [cell["mean"] for cell in found]
    several = bool(found) and len(found[0]["checkpoints"]) > 1
    told = f"{label} (mean of {len(found[0]['checkpoints'])})" if several else label
    axes.plot(lengths, means, "o-", color=color, label=told, markersize=4)
    if several:
        axes.fill_between(lengths, low, high, color=color, alpha=0.2, linewidth=0)


def _length_axis(axes: Any, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [short_length(n) for n in lengths])
    axes.minorticks_off()


def draw_perplexity(path: Path, groups: Mapping[str, Group]) -> None:
    """Write a PNG: loss by position, and beside it the scores that it says nothing about."""
    figure = _figure(10, 4)
    left, right = figure.subplots(1, 2)
    for number, (label, group) in enumerate(groups.items()):
        color = f"C{number}"
        rows = (group["perplexity"] or [])[:-1]
        places = [math.sqrt(row["from"] * row["to"]) for row in rows]
        losses = [row["loss"]["mean"] for row in rows]
        left.plot(places, losses, "o-", color=color, label=label, markersize=4)
        if rows and rows[0]["loss"]["std"] is not None:
            low, high = ([row["loss"][name] for row in rows] for name in ("min", "max"))
            left.fill_between(places, low, high, color=color, alpha=0.2, linewidth=0)
        _draw_curve(right, group["mean"], label, color)
    left.set_xscale("log", base=2)
    left.set(xlabel="position of the token", ylabel="negative log-likelihood (nats a token)")
    left.set_title("what perplexity says", fontsize=10)
    right.set_title("what retrieval says", fontsize=10)
    lengths = sorted({n for group in groups.values() for n in lengths_of(group)})
    if lengths:
        _length_axis(right, lengths)
    else:
        right.text(0.5, 0.5, "no tasks were run", transform=right.transAxes, ha="center")
    right.set(xlabel="length (tokens)", ylabel=f"score, % ({_mean_of(groups)})", ylim=(-4, 104))
    for panel in (left, right):
        panel.grid(alpha=0.3)
    left.legend(frameon=False)
    figure.savefig(path, dpi=120, format="png")
