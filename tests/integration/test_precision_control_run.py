"""examples/precision_control as users start it, a few steps of one arm, and once more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "examples" / "precision_control" / "run.py"


def run(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), "--output", str(output), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, check=False
    )


def test_an_arm_trains_is_scored_and_is_not_run_again(tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = ("--quick", "--seeds", "1", "--arms", "anchor-masked")
    done = run(output, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| anchor-masked |" in done.stdout
    (scores,) = json.loads((output / "results.json").read_text())["runs"]
    assert scores["steps"][-1][0] == 8
    assert scores["steps"][-1][1] < scores["steps"][0][1]
    assert len(scores["answers"]) == 2 * 2 * 5
    assert 0 < scores["shift_loss"] < 1 < scores["text_loss"] < 10
    again = run(output, *arguments)
    assert "anchor-masked, seed 1: done before" in again.stdout
    other = run(output, "--seeds", "1", "--arms", "anchor-masked")
    assert other.returncode != 0
    assert "holds results of other settings" in other.stderr
