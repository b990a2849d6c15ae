"""Document lengths for the GPU benchmarks, and the files that their tables are written to."""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_anchor.planner import lengths as tables
from megatron_anchor.whole_files import atomic_write_text

DRAWS = 21


class Lengths(tables.Lengths):
    """A source of document lengths, to draw samples from."""

    def pack(self, seq_length: int) -> list[int]:
        """Draw samples and give the one of median attention work."""
        samples = [self._draw(seq_length, seed) for seed in range(DRAWS)]
        return sorted(samples, key=lambda lengths: sum(n * n for n in lengths))[DRAWS // 2]

    def _draw(self, seq_length: int, seed: int) -> list[int]:
        """Draw documents until a sample is full; the last is cut, each has one anchor more."""
        generator, left = np.random.default_rng(seed), seq_length
        lengths: list[int] = []
        while left:
            lengths.append(min(int(generator.choice(self.lengths)) + 1, left))
            left -= lengths[-1]
        return lengths


def slimpajama_like() -> Lengths:
    """Lengths with SlimPajama's mean."""
    return Lengths(*astuple(tables.slimpajama_like()))


def long_documents() -> Lengths:
    """The same with documents of 32 K to 128 K tokens mixed in."""
    return Lengths(*astuple(tables.long_documents()))


def from_corpus(prefix: str) -> Lengths:
    """Lengths of a real corpus in Megatron's .bin/.idx form."""
    return Lengths(*astuple(tables.of_corpus(prefix)))


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what both benchmarks take."""
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that it runs")
    parser.add_argument("--seq-lengths", type=int, nargs="+")
    parser.add_argument("--backends", nargs="+", help="default: all that can serve here")
    parser.add_argument("--corpus", help="prefix of a .bin/.idx corpus whose lengths to use, too")
    parser.add_argument("--minutes", type=float, default=7.0, help="start no case after so long")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json, OUTPUT.md and OUTPUT.png")


def attempt(measurement: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Take a measurement; one that fails becomes a row with the reason, and the others go on."""
    try:
        return measurement(*arguments)
    except torch.OutOfMemoryError:
        note = "out of memory"
    except Exception as error:  # a kernel may raise anything, and the reason is in the table
        lines = str(error).strip().splitlines() or [""]
        note = f"failed: {type(error).__name__}: {lines[0][:100]}".replace("|", "/")
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # a device that failed for good says so here again
            torch.cuda.empty_cache()
    return {"note": note}


def machine() -> dict[str, str]:
    """Say what the figures were measured on."""
    from megatron_anchor.attention.backends import this_hardware

    hardware = this_hardware()
    on_gpu = hardware.capability is not None
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "cpu",
        "capability": hardware.name,
        "torch": torch.__version__,
        **hardware.packages,
    }


def in_columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the same keys in the same order, the note last."""
    columns = dict.fromkeys(key for row in rows for key in row if key != "note")
    return [{key: row.get(key) for key in [*columns, "note"]} for row in rows]


def table(rows: list[dict[str, Any]]) -> str:
    """Lay rows out as a Markdown table; numbers keep four digits."""
    columns = list(rows[0])
    cells = [[_text(row.get(column)) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    lines = [columns, ["-" * width for width in widths], *cells]
    return "\n".join(
        "| " + " | ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def save(path: Path, rows: list[dict[str, Any]], *, title: str = "") -> None:
    """Write the rows as JSON, whole or not at all: the program may be ended at any time."""
    content = {"title": title, "machine": machine(), "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write_text(path) as stream:
        stream.write(json.dumps(content, indent=1) + "\n")


def write(output: Path, rows: list[dict[str, Any]], *, title: str, value: str, label: str) -> None:
    """Write the rows as JSON and Markdown, and one of their columns as a picture.

    Args:
        output: path without suffix.
        rows: dictionaries with ``tokens``, ``lengths``, ``pattern`` and ``kernel``.
        title: heading.
        value: column to draw against ``tokens``.
        label: of that column, with its unit.
    """
    save(output.with_suffix(".json"), rows, title=title)
    about = "\n".join(f"- {key}: {text}" for key, text in machine().items())
    output.with_suffix(".md").write_text(f"# {title}\n\n{about}\n\n{table(rows)}\n")
    try:
        draw(output.with_suffix(".png"), rows, title=title, value=value, label=label)
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)")


def draw(path: Path, rows: list[dict[str, Any]], *, title: str, value: str, label: str) -> None:
    """Draw one line for each kernel and pattern, one panel for each table of lengths."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(panels_of(rows)), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    draw_row(figure, rows, title=title, value=value, label=label)
    figure.savefig(path, dpi=130)


def panels_of(rows: list[dict[str, Any]]) -> list[str]:
    """The tables of lengths, one panel each."""
    return list(dict.fromkeys(row["lengths"] for row in rows if row["pattern"] != "full"))


def draw_row(
    figure: Any, rows: list[dict[str, Any]], *, title: str, value: str, label: str
) -> None:
    """Draw the panels of `draw` into a figure, or a part of one."""
    panels = panels_of(rows)
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    for panel, axes in zip(
        panels, figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], strict=True
    ):
        for number, kernel in enumerate(kernels):
            for pattern, style in (("full", "--"), ("anchor", "-")):
                points = [
                    (row["tokens"], row[value])
                    for row in rows
                    if (row["kernel"], row["pattern"]) == (kernel, pattern)
                    and (pattern == "full" or row["lengths"] == panel)
                    and row.get(value) is not None
                ]
                if points:
                    name = f"{kernel}, {pattern}"
                    x_y = zip(*points, strict=True)
                    axes.plot(*x_y, style, marker="o", color=f"C{number}", label=name)
        ticks = sorted({row["tokens"] for row in rows})
        axes.set(title=panel, xlabel="tokens of a sample", ylabel=label, xscale="log")
        axes.set_xticks(ticks, [f"{t // 1024}K" if t >= 1024 else str(t) for t in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    first = figure.axes[-len(panels)]
    first.set_ylim(bottom=0)  # shared by all, so only now that all are drawn
    if first.get_legend_handles_labels()[0]:
        first.legend(fontsize=8)
    figure.suptitle(title)
