"""What this package does on your GPU, in one command and a few minutes.

The most telling checks come first: kernels against float64, the compiled rotation, training steps
against the CPU; then speed and memory, `full` against `anchor`; then two ranks of NCCL. Every part
is a program of this folder in a process of its own: one that fails, hangs or loses the device is
named in the report, and the others go on. The report is written after each part, so that ending
this program early (Ctrl-C) leaves what it found. Needs torch from 2.8 on and megatron-core;
matplotlib for the picture.

    make gpu-report PYTHON=python3 MINUTES=8
    python benchmarks/gpu_report.py --device cpu --quick --output /tmp/rehearsal
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

NEEDED = {
    "torch": "this report uses the torch that you have: name its Python by PYTHON=",
    "megatron.core": "pip install --no-deps 'megatron-core>=0.19.2,<0.20'",
    "numpy": "pip install numpy",
    "packaging": "pip install packaging",
}
GRACE = 15.0
"""Seconds for a part to end after the minutes that it was given, before it is killed."""


@dataclass(frozen=True)
class Part:
    """One program of this folder."""

    title: str
    program: str
    seconds: float
    """What it may take of eight minutes; what it leaves goes to those after it."""
    tells: str
    checks: bool = True
    """Whether it judges right and wrong; else it measures."""
    arguments: tuple[str, ...] = ()


PARTS = (
    Part(
        "Kernels against float64",
        "gpu_kernels.py",
        90,
        "Output and gradients against dense attention in float64. Allowed: twice (gradients: three "
        "times) what the same mathematics without a kernel errs in the same precision.",
    ),
    Part(
        "Rotation",
        "gpu_rotation.py",
        60,
        "The rotation that torch compiles for this GPU against the CPU's, up to position 131071.",
    ),
    Part(
        "Five training steps",
        "gpu_steps.py",
        75,
        "Losses against the CPU's from the same weights; allowed is what rounding does to the CPU.",
    ),
    Part(
        "Attention",
        "gpu_attention.py",
        130,
        "Forward and backward; `full`: one document, `anchor`: documents of the named lengths. "
        "Work is counted as visible pairs; `share` is the rate over the best at that length.",
        checks=False,
    ),
    Part(
        "Layer stack",
        "gpu_train.py",
        90,
        "One training step of a Llama-shaped stack: time and peak memory.",
        checks=False,
        arguments=("--layers", "8", "--repeats", "2"),
    ),
    Part(
        "Two ranks",
        "gpu_ranks.py",
        50,
        "Collectives, and context parallelism over both ranks against one.",
    ),
)


@dataclass
class Outcome:
    """What came of a part."""

    part: Part
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    trouble: str = ""
    """Why it did not end well, with its last words."""

    @property
    def verdict(self) -> str:
        """The part in a few words."""
        import gpu_checks

        results = [row.get("result") for row in self.rows]
        failed = results.count(gpu_checks.FAILED)
        failed += sum(str(row.get("note", "")).startswith("failed") for row in self.rows)
        ran = sum(result != gpu_checks.NOT_RUN for result in results)
        if not self.part.checks:
            ran = sum("not run" not in str(row.get("note")) for row in self.rows)
        words = [f"{failed} of {ran} FAILED" if failed else f"{ran} done"]
        if self.part.checks and not failed:
            words = [f"{ran} of {ran} passed" if ran else "nothing ran"]
        return ", ".join([*words, *([self.trouble] if self.trouble else [])])


def main() -> int:
    """Run the parts in turn; 0 when all that ran passed, else 1."""
    options = parse()
    began = time.monotonic()
    ends = began + 60 * options.minutes
    where = _machine(options.device)
    output = options.output or _default_output(where["device"])
    outcomes: list[Outcome] = []
    total = sum(part.seconds for part in PARTS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for number, part in enumerate(PARTS):
            later = sum(other.seconds for other in PARTS[number + 1 :])
            spare = ends - time.monotonic() - later / total * options.minutes * 60
            outcomes.append(run(part, options, seconds=spare))
            write(output, outcomes, where, options)
    finally:
        print(f"\n{write(output, outcomes, where, options)}")
    return int(any("FAILED" in o.verdict or o.trouble for o in outcomes))


def parse() -> argparse.Namespace:
    """Read the flags, and end with a remedy where something that is needed is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="all of it (default: 8)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that all runs")
    parser.add_argument(
        "--output",
        type=Path,
        help="path without suffix; default: docs/measurements/DATE-gpu-NAME",
    )
    options = parser.parse_args()
    for name, remedy in NEEDED.items():
        if not _exists(name):
            parser.error(f"{sys.executable} has no {name}; {remedy}")
    import torch

    if tuple(int(x) for x in torch.__version__.split(".")[:2]) < (2, 8):
        parser.error(f"torch {torch.__version__} is too old; this package needs 2.8 or newer")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu --quick --output PATH rehearses the report")
    if options.device == "cpu" and options.output is None:
        parser.error("--device cpu is a rehearsal and no measurement; give it an --output PATH")
    return options


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def _machine(device: str) -> dict[str, str]:
    """Ask in a process of its own: one that has touched the device holds memory of it."""
    code = "import gpu_report, json, sys; print(json.dumps(gpu_report.machine(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, device],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        return {
            "device": "unknown: see above why it does not tell",
            "Python": sys.version.split()[0],
        }
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def machine(device: str) -> dict[str, str]:
    """Say what the figures were measured on; uses the device."""
    import gpu_lengths
    import torch

    from megatron_anchor import __version__

    found = gpu_lengths.machine() | {
        "megatron-anchor": _revision() or __version__,
        "Python": sys.version.split()[0],
        "CUDA of torch": str(torch.version.cuda),
    }
    if device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        found |= {"memory": f"{memory:.0f} GiB", "devices": str(torch.cuda.device_count())}
        found["cuDNN"] = str(torch.backends.cudnn.version())
    return found


def _revision() -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def _default_output(device: str) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return ROOT / f"docs/measurements/{datetime.date.today().isoformat()}-gpu-{name}"


def run(part: Part, options: argparse.Namespace, *, seconds: float) -> Outcome:
    """Run a part within its time, and read the rows that it left."""
    import gpu_checks

    print(f"\n== {part.title} (up to {max(0.0, seconds):.0f} s)", flush=True)
    if seconds < GRACE:
        return Outcome(part, trouble="not run: out of time")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part.json"
        minutes = str(max(0.1, (seconds - GRACE) / 60))
        command = [sys.executable, "-W", "ignore", str(HERE / part.program), *part.arguments]
        command += ["--device", options.device, "--minutes", minutes, "--output", str(path)]
        command += ["--quick"] if options.quick else []
        began = time.monotonic()
        trouble = _run(command, seconds, device=options.device)
        rows = gpu_checks.read(path)
        return Outcome(part, rows, time.monotonic() - began, trouble)


def _run(command: list[str], seconds: float, *, device: str) -> str:
    """Run a program and its children to their end, and say what went wrong, if anything did."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    if device == "cpu":  # a rehearsal: small tensors, and threads that wait for each other
        environment["OMP_NUM_THREADS"] = "1"
    process = subprocess.Popen(
        command,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, words = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _end_group(process)
        return f"ended after {seconds:.0f} s, when its time was over"
    except BaseException:
        _end_group(process)
        raise
    if not process.returncode:
        return ""
    last = (words.strip().splitlines() or [""])[-1][:200].replace("|", "/")
    print(words[-3000:], file=sys.stderr)
    return f"ended with exit code {process.returncode}: {last}"


def _end_group(process: subprocess.Popen[str]) -> None:
    """End a part with the processes that it started, which are a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def write(
    output: Path, outcomes: list[Outcome], where: dict[str, str], options: argparse.Namespace
) -> Path:
    """Write the JSON, the picture and the page, and give the page's path."""
    import gpu_report_page

    return gpu_report_page.write(output, outcomes, where, options)


if __name__ == "__main__":
    sys.exit(main())
