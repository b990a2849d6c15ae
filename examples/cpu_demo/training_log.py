"""A training run on this machine, followed by the lines of Megatron's log."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import astuple, dataclass
from pathlib import Path

from tqdm import tqdm

LOG_LINE = re.compile(
    r"iteration +(?P<iteration>\d+)/.*elapsed time per iteration \(ms\): (?P<ms>[\d.]+)"
    r".*lm loss: (?P<loss>\S+).*\| documents per sample: (?P<documents>\S+)"
    r".*attention work: (?P<work>\S+)"
)

ERROR_LINE = re.compile(r"(\[rank\d\]: )?\w*(Error|error)(: |$)")


@dataclass(frozen=True)
class Step:
    """One line of Megatron's log."""

    iteration: int
    seconds: float
    loss: float
    documents: float
    attention_work: float


def follow(command: list[str], *, log: Path, iterations: int, starting: str) -> list[Step]:
    """Run a training command with a progress bar; the complete log goes to a file.

    Args:
        command: what to run.
        log: appended to.
        iterations: of the whole run.
        starting: what the bar says until the first iteration.

    Returns:
        The iterations of this run.

    Raises:
        SystemExit: the command failed; with what its log says of errors.
    """
    errors, steps = list[str](), list[Step]()
    environment = {**os.environ, "PYTHON": sys.executable}
    with (
        log.open("a") as out,
        tqdm(total=iterations, unit="step", desc=f"    {starting}") as bar,
        subprocess.Popen(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            out.write(line)
            if ERROR_LINE.match(line) and line not in errors:
                errors.append(line)
            if step := parse(line):
                steps.append(step)
                bar.update(step.iteration - bar.n)
                bar.set_description(f"    loss {step.loss:.3f}")
    if process.returncode:
        raise SystemExit(f"training failed, see {log}:\n{''.join(errors)}")
    return undo_mean(steps)


def undo_mean(steps: list[Step]) -> list[Step]:
    """Take the first line out of the second, which Megatron prints as the mean of both."""
    if len(steps) < 2:
        return steps
    first, mean = (astuple(step)[1:] for step in steps[:2])
    second = Step(steps[1].iteration, *(2 * m - f for f, m in zip(first, mean, strict=True)))
    return [steps[0], second, *steps[2:]]


def parse(line: str) -> Step | None:
    """Read one iteration from a line of Megatron's log."""
    found = LOG_LINE.search(line)
    if found is None:
        return None
    return Step(
        iteration=int(found["iteration"]),
        seconds=float(found["ms"]) / 1e3,
        loss=float(found["loss"]),
        documents=float(found["documents"]),
        attention_work=float(found["work"]),
    )
