"""A picture of a plan: time against sequence length, full attention and the pattern."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_anchor.errors import UserError
from megatron_anchor.planner.plan import Question, make_plan

LENGTHS = tuple(4096 << n for n in range(7))
"""4K to 256K."""


def time_by_length(
    question: Question, lengths: tuple[int, ...] = LENGTHS
) -> list[tuple[int, float, float, str]]:
    """Days for 10^9 tokens at each length that fits: (length, pattern, full, layout).

    The tokens of a global batch stay the same as far as whole samples allow. At each length the
    pattern and full attention have each the layout that is the fastest for it; the pattern's is
    named.
    """
    rows = []
    tokens = question.sequence_length * question.global_batch
    for length in lengths:
        batch = max(1, tokens // length)
        asked = dataclasses.replace(question, sequence_length=length, global_batch=batch)
        plan, full = make_plan(asked), make_plan(dataclasses.replace(asked, pattern="full"))
        if plan.choices:
            rows.append((length, plan.best.days, full.best.days, str(plan.best.layout)))
    return rows


def draw_plan(path: str | Path, question: Question) -> None:
    """Write a PNG.

    Raises:
        UserError: matplotlib is not installed, or no length fits.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("--png needs matplotlib: pip install matplotlib") from error
    rows = time_by_length(question)
    if not rows:
        raise UserError(f"--png {path}: no length from {LENGTHS[0]} on fits; give more GPUs")
    lengths, pattern, full, layouts = zip(*rows, strict=True)
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    places = range(len(lengths))
    axes.bar([p - 0.2 for p in places], full, 0.4, color="C1", label="full")
    axes.bar([p + 0.2 for p in places], pattern, 0.4, color="C0", label=question.pattern)
    for place, days, all_days in zip(places, pattern, full, strict=True):
        axes.text(place + 0.2, days, f"-{1 - days / all_days:.0%}", ha="center", va="bottom")
    names = [
        f"{length // 1024}K\n{layout.replace(' CP', chr(10) + 'CP')}"
        for length, layout in zip(lengths, layouts, strict=True)
    ]
    axes.set_xticks(places, names, fontsize=8)
    axes.set(
        xlabel="tokens of a sample, and the layout",
        ylabel="days for 10^9 tokens (estimate)",
        title=f"{question.name}, {question.gpus} x {question.gpu.name}, "
        f"documents: {question.lengths.name}",
    )
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend()
    figure.savefig(path, dpi=130)
