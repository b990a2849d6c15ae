"""What all CPU benchmarks share: two ways of doing one thing, measured in turns, as one row."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One row of the table: ours next to a peer's, measured in one run.

    Ratios are of speeds: above 1 ours is the faster.
    """

    what: str
    peer: str
    ours: str
    """median, with its unit"""
    theirs: str
    ratio: float
    """median, or the ratio of medians"""
    ratio_min: float | None = None
    ratio_max: float | None = None
    repeats: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured figure that has no peer."""

    what: str
    value: str


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that one benchmark measured."""

    comparisons: Sequence[Comparison]
    figures: Sequence[Figure] = ()

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Findings:
        """What `write` wrote."""
        content = json.loads(path.read_text())
        return cls(
            comparisons=[Comparison(**row) for row in content["comparisons"]],
            figures=[Figure(**row) for row in content["figures"]],
        )

    def table(self) -> str:
        """Markdown, the comparisons first."""
        lines = []
        if self.comparisons:
            lines = ["| what | peer | peer's | ours | speed against peer | range | note |"]
            lines.append("|---|---|---|---|---|---|---|")
        for row in self.comparisons:
            span = "" if row.ratio_min is None else f"{row.ratio_min:.2f} to {row.ratio_max:.2f}"
            lines.append(
                f"| {row.what} | {row.peer} | {row.theirs} | {row.ours} "
                f"| {row.ratio:.2f} x | {span} | {row.note} |"
            )
        if self.figures:
            lines += ["", "| without a peer | |", "|---|---|"]
            lines += [f"| {figure.what} | {figure.value} |" for figure in self.figures]
        return "\n".join(lines)


def compare(
    what: str,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    *,
    peer: str,
    repeats: int,
    clock: Callable[[], float] = time.process_time,
    note: str = "",
) -> Comparison:
    """Measure both in turns after a warm-up each; medians, and the median and range of the ratios.

    Args:
        what: the thing that is done.
        ours: does it our way.
        theirs: does it the peer's way.
        peer: its name.
        repeats: measured turns.
        clock: by default CPU time, which other programs on the machine blur least.
        note: what a reader has to know.
    """
    ours(), theirs()
    turns = [(_spent(ours, clock), _spent(theirs, clock)) for _ in range(repeats)]
    ratios = [theirs / ours for ours, theirs in turns]
    mine, others = (statistics.median(column) for column in zip(*turns, strict=True))
    return Comparison(
        what=what,
        peer=peer,
        ours=duration(mine),
        theirs=duration(others),
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        repeats=repeats,
        note=note,
    )


def _spent(function: Callable[[], Any], clock: Callable[[], float]) -> float:
    begin = clock()
    function()
    return clock() - begin


def duration(seconds: float) -> str:
    """Three digits with a unit."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def at_least_one(text: str) -> int:
    """A number of turns, as an argument.

    Raises:
        argparse.ArgumentTypeError: for less than one, of which there is no median.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number from 1 on")
    return int(text)
