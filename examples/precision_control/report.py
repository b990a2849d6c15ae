"""The table, the picture and the JSON of all runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from task import CHANCE, chance_of_as_many

from megatron_anchor.whole_files import atomic_write_text

BUCKETS = ((1, 16), (16, 32), (32, 64), (64, 128), (128, 256))
"""Distances from question to fact, from this to below that; the last is longer than trained."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One arm from one seed."""

    arm: str
    seed: int
    scores: dict[str, Any]
    """What run.py wrote: `scoring.Scores`, steps, attention_work, seconds."""

    def accuracy(self, bucket: tuple[int, int] | None = None) -> float | None:
        """Share of right answers, of all or of those in a bucket; None where there is none."""
        right = [
            bool(ok)
            for distance, ok in self.scores["answers"]
            if bucket is None or bucket[0] <= distance < bucket[1]
        ]
        return sum(right) / len(right) if right else None


@dataclass(frozen=True)
class Spread:
    """A figure over the seeds."""

    mean: float
    deviation: float | None
    """Standard deviation over the seeds (n - 1); None for a single one."""

    def __str__(self) -> str:
        """Mean and deviation."""
        if self.deviation is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} ± {self.deviation:.3f}"


def spread(values: Sequence[float | None]) -> Spread | None:
    """Mean and standard deviation; None without a value."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(statistics.mean(known), statistics.stdev(known) if len(known) > 1 else None)


def bucket_name(bucket: tuple[int, int]) -> str:
    """A bucket for people."""
    return f"{bucket[0]} to {bucket[1] - 1}"


FIGURES: dict[str, Callable[[Run], float | None]] = {
    "text loss": lambda run: run.scores["text_loss"],
    "text loss, longer": lambda run: run.scores["text_loss_longer"],
    "retrieval": lambda run: run.accuracy(),
    **{bucket_name(b): lambda run, b=b: run.accuracy(b) for b in BUCKETS},  # type: ignore[misc]
    "loss moved": lambda run: run.scores["shift_loss"],
}
"""Column to figure of one run."""


def summarize(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Arm to its figures over the seeds, and how likely guessing is to do as well."""
    summary: dict[str, dict[str, Any]] = {}
    for arm in dict.fromkeys(run.arm for run in runs):
        of_arm = [run for run in runs if run.arm == arm]
        answers = [bool(ok) for run in of_arm for _, ok in run.scores["answers"]]
        summary[arm] = {name: spread([f(run) for run in of_arm]) for name, f in FIGURES.items()}
        summary[arm] |= {
            "seeds": len(of_arm),
            "right": sum(answers),
            "questions": len(answers),
            "by guessing": chance_of_as_many(sum(answers), len(answers)),
        }
    return summary


def table(summary: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    columns = ["seeds", *FIGURES, "right answers", "by guessing"]
    lines = ["| arm | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for arm, found in summary.items():
        cells = [str(found["seeds"]), *(_cell(name, found[name]) for name in FIGURES)]
        cells += [f"{found['right']} of {found['questions']}", f"{found['by guessing']:.0e}"]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(name: str, figure: Spread | None) -> str:
    if figure is None:
        return "-"
    return f"{figure.mean:.1e}" if name == "loss moved" else str(figure)


def write_report(output: Path, runs: Sequence[Run]) -> str:
    """Write results.md, results.json and results.png; give the table."""
    summary = summarize(runs)
    text = table(summary) + (
        "\n\nMean ± standard deviation over the seeds. "
        "Loss in nats a token on held-out text, each document alone behind the anchor. Retrieval: "
        "share of right answers, of all and by distance in tokens from question to fact; chance is "
        f"{CHANCE:.2f}. Loss moved: mean absolute change of a token's loss when all position ids "
        "grow by 65536. By guessing: probability of as many right answers by chance."
    )
    plain = {
        arm: {
            name: {"mean": value.mean, "deviation": value.deviation}
            if isinstance(value, Spread)
            else value
            for name, value in found.items()
        }
        for arm, found in summary.items()
    }
    raw = [{"arm": run.arm, "seed": run.seed, **run.scores} for run in runs]
    for name, content in {
        "results.md": text + "\n",
        "results.json": json.dumps({"summary": plain, "runs": raw}) + "\n",
    }.items():
        with atomic_write_text(output / name) as stream:
            stream.write(content)
    draw(output / "results.png", runs, summary)
    return text


def draw(path: Path, runs: Sequence[Run], summary: dict[str, dict[str, Any]]) -> None:
    """Retrieval by distance, loss on text, and the learning curves, one colour an arm."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    FigureCanvasAgg(figure)
    by_distance, losses, curves = figure.subplots(1, 3)
    arms = list(summary)
    for number, arm in enumerate(arms):
        color, found = f"C{number}", summary[arm]
        shown = [(n, found[bucket_name(b)]) for n, b in enumerate(BUCKETS)]
        places, values = zip(*[(n, s) for n, s in shown if s is not None], strict=True)
        by_distance.errorbar(
            [n + (number - len(arms) / 2) * 0.06 for n in places],
            [s.mean for s in values],
            [s.deviation or 0.0 for s in values],
            color=color, marker="o", markersize=4, lw=1, capsize=2, label=arm,
        )  # fmt: skip
        for offset, name in ((-0.15, "text loss"), (0.15, "text loss, longer")):
            figures = [FIGURES[name](run) for run in runs if run.arm == arm]
            marker = "o" if name == "text loss" else "s"
            losses.plot(figures, [number + offset] * len(figures), marker, color=color, alpha=0.7)
        for run in runs:
            if run.arm == arm:
                iterations, values = zip(*run.scores["steps"], strict=True)
                curves.plot(iterations, values, color=color, lw=0.8, alpha=0.8)
    by_distance.axhline(CHANCE, color="0.4", ls=":", label="chance")
    by_distance.set_xticks(range(len(BUCKETS)), [bucket_name(b) for b in BUCKETS])
    by_distance.set_ylim(0, 1.02)
    by_distance.set_xlabel("distance from question to fact (tokens)")
    by_distance.set_ylabel("share of right answers (bars: deviation over seeds)")
    by_distance.legend(fontsize=8)
    losses.set_yticks(range(len(arms)), arms)
    losses.invert_yaxis()
    losses.set_xlabel("loss on held-out text (nats a token), a mark a seed\n"
                      "circle: trained lengths, square: longer")  # fmt: skip
    curves.set_xlabel("iteration")
    curves.set_ylabel("training loss (nats a token)")
    for axes in (by_distance, losses, curves):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=110)
