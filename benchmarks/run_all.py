"""All CPU benchmarks in one run, and one table of them: docs/measurements/DATE-cpu.md.

Everything that is needed is made first, in a folder of its own: documents that every machine with
Python has, a tokenizer, corpora (as the demo does), a random model. Each benchmark is a program of
this folder and runs in a process of its own; one that fails is named in the table and makes this
one fail, after the others have run.

    make bench
    python benchmarks/run_all.py --quick --report /tmp/try.md
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "cpu_demo")]

from side_by_side import Findings  # noqa: E402

PACKAGES = ("torch", "megatron-core", "numpy", "numba", "tokenizers", "gigatoken", "transformers")


@dataclass(frozen=True)
class Benchmark:
    """A program of this folder with its arguments."""

    title: str
    program: str
    arguments: tuple[str, ...]


def benchmarks(work: Path, *, quick: bool) -> list[Benchmark]:
    """Choose sizes for a quarter of an hour on two cores, or toy sizes."""
    tokenizer, corpus = work / "tokenizer", work / "corpus" / "docstrings_text_document"
    return [
        Benchmark(
            "Packing (one thread, CPU time)",
            "packing.py",
            ("--documents", "100000", "--plan-documents", "100000", "--seq-length", "8192")
            if quick
            else ("--documents", "10000000", "--plan-documents", "10000000"),
        ),
        Benchmark(
            "Attention (one thread, CPU time)",
            "attention.py",
            ("--seq-lengths", "512", "--repeats", "2") if quick else (),
        ),
        Benchmark(
            "Context parallelism (work of the ranks; CPU time)",
            "context_parallel.py",
            ("--seq-length", "8192", "--samples", "2") if quick else (),
        ),
        Benchmark(
            "Training steps (one thread, CPU time)",
            "step_time.py",
            ("--corpus", str(corpus), "--samples", "2", "--seq-lengths")
            + (("512",) if quick else ("1024", "2048", "4096", "8192", "16384")),
        ),
        Benchmark(
            "Preprocessing (core seconds of all processes)",
            "preprocess.py",
            ("--tokenizer-model", str(tokenizer), "--megabytes", "0.5" if quick else "8"),
        ),
        Benchmark(
            "Conversion (wall time)",
            "convert.py",
            ("--folder", str(work / "convert"), "--parameters", "2e8" if quick else "1e9"),
        ),
    ]


@dataclass(frozen=True)
class Run:
    """What came of a benchmark."""

    benchmark: Benchmark
    seconds: float
    load: float
    """of the machine when it began, this program's own included"""
    findings: Findings | None
    """None = it failed"""


def run(benchmark: Benchmark, work: Path) -> Run:
    """Run one benchmark; its output goes through."""
    print(f"\n== {benchmark.title}", flush=True)
    path = work / f"{benchmark.program}.json"
    command = [sys.executable, "-W", "ignore", str(HERE / benchmark.program)]
    command += [*benchmark.arguments, "--json", str(path)]
    load, began = os.getloadavg()[0], time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    failed = subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode
    seconds = time.perf_counter() - began
    return Run(benchmark, seconds, load, None if failed else Findings.read(path))


def report(runs: list[Run], *, command: str) -> str:
    """Write the page."""
    lines = [f"# CPU benchmarks, {datetime.date.today().isoformat()}", "", f"`{command}`", ""]
    lines += [f"- {key}: {value}" for key, value in machine().items()]
    minutes = sum(r.seconds for r in runs) / 60
    lines += [
        f"- all of it took {minutes:.0f} minutes",
        "",
        "Medians of turns that alternate with the peer's, in one run. Ratios are of speeds: above "
        "1 this package is the faster. They are what counts; the times are those of this machine, "
        "on this day.",
    ]
    for r in runs:
        program = f"benchmarks/{r.benchmark.program}"
        lines += ["", f"## {r.benchmark.title}", ""]
        lines += [f"`{program}`, {r.seconds:.0f} s, load {r.load:.1f} when it began.", ""]
        lines.append("It failed." if r.findings is None else r.findings.table())
    return "\n".join(lines) + "\n"


def machine() -> dict[str, str]:
    """Say what the figures were measured on."""
    versions = {name: version for name in PACKAGES if (version := _version(name))}
    return {
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def main() -> int:
    """Make what is needed, run all, write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that all runs")
    parser.add_argument("--report", type=Path, help="default: docs/measurements/DATE-cpu.md")
    args = parser.parse_args()
    from run import make_corpora

    page = args.report or ROOT / f"docs/measurements/{datetime.date.today().isoformat()}-cpu.md"
    part = page.with_suffix(".md.tmp")
    try:  # now, and not after a quarter of an hour
        page.parent.mkdir(parents=True, exist_ok=True)
        part.write_text("")
    except OSError as error:
        parser.error(f"--report {page}: {error.strerror}; name a file that can be written")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_corpora(work)
        runs = [run(benchmark, work) for benchmark in benchmarks(work, quick=args.quick)]
    quick = " --quick" if args.quick else ""
    text = report(runs, command=f"python benchmarks/run_all.py{quick}")
    part.write_text(text)
    part.replace(page)
    print(f"\n{page}")
    return int(any(r.findings is None for r in runs))


if __name__ == "__main__":
    sys.exit(main())
