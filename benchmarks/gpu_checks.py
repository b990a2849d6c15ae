"""What the checks of `make gpu-report` share: a list of outcomes that survives the process.

Outcomes are written after each check, so a program that is killed, or a device that fails for good,
leaves what came before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_lengths

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests.kernel_oracle

PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"


class Checks:
    """Outcomes of one program, one row a check."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.path: Path = options.output
        self.ends = time.monotonic() + 60 * options.minutes
        self.rows: list[dict[str, Any]] = []

    def run(self, what: str, case: str, measure: Callable[[], tuple[float, str]]) -> None:
        """Run a check and write its outcome.

        Args:
            what: the thing that is checked; the page has one line for each.
            case: how it is called.
            measure: gives its error as a share of the allowed one (up to 1 is right), and a note.
        """
        row: dict[str, Any] = {"check": what, "case": case, "error / allowed": None}
        if time.monotonic() > self.ends:
            row |= {"result": NOT_RUN, "note": "out of time"}
        else:
            found = gpu_lengths.attempt(_measured, measure)
            row |= {"result": FAILED} | found
        self.add(row)

    def leave_out(self, what: str, reason: str) -> None:
        """Say why something is not checked."""
        self.add({"check": what, "case": "", "result": NOT_RUN, "note": reason})

    def add(self, row: dict[str, Any]) -> None:
        """Append a row, print it, and write all."""
        self.rows.append(row)
        print(" | ".join(str(value) for value in row.values()), flush=True)
        gpu_lengths.save(self.path, self.rows)


def _measured(measure: Callable[[], tuple[float, str]]) -> dict[str, Any]:
    share, note = measure()
    return {
        "error / allowed": share,
        "result": PASSED if share <= 1 else FAILED,
        "note": note,
    }


def parse(description: str | None) -> argparse.Namespace:
    """Read the flags that all checks have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that it runs")
    parser.add_argument("--minutes", type=float, default=7.0, help="start no check after so long")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    return parser.parse_args()


def by_check(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each thing that was checked: how many checks passed, and the worst."""
    lines = []
    for what in dict.fromkeys(row["check"] for row in rows):
        own = [row for row in rows if row["check"] == what]
        ran = [row for row in own if row["result"] != NOT_RUN]
        failed = [row for row in ran if row["result"] == FAILED]
        shares = [row for row in ran if row.get("error / allowed") is not None]
        worst = max(shares, key=lambda row: row["error / allowed"], default=None)
        told = failed[0] if failed else worst or own[0]
        notes = [told["case"], told.get("note", "")]
        lines.append(
            {
                "check": what,
                "passed": f"{len(ran) - len(failed)} of {len(ran)}" if ran else NOT_RUN,
                "not run": len(own) - len(ran),
                "worst error / allowed": worst and worst["error / allowed"],
                "worst, or first that failed": ": ".join(note for note in notes if note),
            }
        )
    return lines


def read(path: Path) -> list[dict[str, Any]]:
    """The rows that a program left, none where it left nothing."""
    return json.loads(path.read_text())["rows"] if path.is_file() else []
