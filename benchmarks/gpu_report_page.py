"""The page, the JSON and the picture of `gpu_report.py`."""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import gpu_attention
import gpu_checks
import gpu_lengths
import gpu_train

from megatron_anchor.whole_files import atomic_write_text

PICTURES = {"Attention": gpu_attention.PICTURE, "Layer stack": gpu_train.PICTURE}
"""Title of a part to the column that is drawn of it, with its label."""


def write(
    output: Path, outcomes: list[Any], where: dict[str, str], options: argparse.Namespace
) -> Path:
    """Write OUTPUT.json, OUTPUT.png and OUTPUT.md.

    Args:
        output: path without suffix.
        outcomes: of the parts so far (`gpu_report.Outcome`).
        where: what the machine is.
        options: of the command.

    Returns:
        The page's path.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    json_path, page, picture = (
        output.with_name(f"{output.name}.{suffix}") for suffix in ("json", "md", "png")
    )
    parts = [
        {"title": o.part.title, "seconds": o.seconds, "trouble": o.trouble, "rows": o.rows}
        for o in outcomes
    ]
    content = {"machine": where, "rehearsal": options.device == "cpu", "parts": parts}
    with atomic_write_text(json_path) as stream:
        stream.write(json.dumps(content, indent=1) + "\n")
    drawn = _draw(picture, outcomes)
    with atomic_write_text(page) as stream:
        stream.write(_text(outcomes, where, options, drawn=drawn, name=output.name))
    return page


def _text(
    outcomes: list[Any],
    where: dict[str, str],
    options: argparse.Namespace,
    *,
    drawn: str,
    name: str,
) -> str:
    today = datetime.date.today().isoformat()
    rehearsal = options.device == "cpu"
    title = "Rehearsal on a CPU, no measurement" if rehearsal else f"On {where['device']}"
    lines = [f"# {title}, {today}", ""]
    lines += [f"- {key}: {value}" for key, value in where.items()]
    lines += [f"- `make gpu-report MINUTES={options.minutes:g}`", ""]
    lines += ["| part | outcome | seconds |", "|---|---|---|"]
    lines += [f"| {o.part.title} | {o.verdict} | {o.seconds:.0f} |" for o in outcomes]
    lines += ["", f"![speed]({name}.png)" if not drawn else f"No picture: {drawn}."]
    for outcome in outcomes:
        lines += ["", f"## {outcome.part.title}", "", outcome.part.tells, ""]
        lines.append(_table(outcome))
    lines += ["", f"Every single check and figure is in `{name}.json`."]
    return "\n".join(lines) + "\n"


def _table(outcome: Any) -> str:
    if not outcome.rows:
        return outcome.trouble or "It left no figures."
    if outcome.part.checks:
        return gpu_lengths.table(gpu_checks.by_check(outcome.rows))
    return gpu_lengths.table(gpu_lengths.in_columns(outcome.rows))


def _draw(path: Path, outcomes: list[Any]) -> str:
    """Draw the measured parts, one above the other; gives the reason where nothing is drawn."""
    shown = [
        (o, PICTURES[o.part.title])
        for o in outcomes
        if o.part.title in PICTURES
        and any(row.get(PICTURES[o.part.title]["value"]) is not None for row in o.rows)
    ]
    if not shown:
        return "nothing was measured"
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "matplotlib is not installed (pip install matplotlib)"
    panels = max(max(1, len(gpu_lengths.panels_of(o.rows))) for o, _ in shown)
    figure = Figure(figsize=(5.5 * panels, 4.2 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    parts = figure.subfigures(len(shown), 1, squeeze=False)[:, 0]
    for part, (outcome, picture) in zip(parts, shown, strict=True):
        gpu_lengths.draw_row(part, outcome.rows, **({"title": outcome.part.title} | picture))
    figure.savefig(path, dpi=110)
    return ""
