"""Megatron's own argument sets and launch scripts: refused, accepted, and trained when made small.

    python benchmarks/argument_sets.py --megatron ../Megatron-LM --before ../first_version \\
        --scripts ../scripts_of_others

Writes docs/measurements/DATE-argument-sets.md. Every set is judged by the parser and the refusals
of this version, and of the checkout of an earlier one (`--before`), as it is written and with
`--position-embedding-type rope`. Those that this version accepts are made small
(`tests/shrunk_argument_sets.py`); what is left of different ones trains for two steps on CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.host_argument_sets import (  # noqa: E402
    Tally,
    reasons,
    scripts_of,
    sources,
    without_unknown,
)
from tests.shrunk_argument_sets import (  # noqa: E402
    STEPS,
    Shrunk,
    Trained,
    corpus_for_all,
    fingerprint,
    shrink,
    train,
)

MOST_LETTERS = 200
TESTS = "functional tests"
ROPE = ["--position-embedding-type", "rope"]
Judged = dict[str, Tally]


class Case(NamedTuple):
    """A small command line and the sets that become it."""

    small: Shrunk
    names: list[str]


def judge(options: argparse.Namespace, tree: Path, *more: str) -> Judged:
    """Judge all sets by the program of a checkout of this project."""
    command = [sys.executable, str(ROOT / "tests/host_argument_sets.py"), "--json"]
    command += ["--add", " ".join(more)] if more else []
    command += ["--scripts", str(options.scripts)] if options.scripts else []
    environment = os.environ | {"PYTHONPATH": str(tree), "MEGATRON_CHECKOUT": str(options.megatron)}
    said = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    judged = {}
    for line in said.splitlines():
        if line.startswith("{"):
            [(title, fields)] = json.loads(line).items()
            judged[title] = Tally()
            vars(judged[title]).update(fields)
    return judged


def cases(options: argparse.Namespace, accepted: set[str]) -> list[Case]:
    """What accepted functional tests become when they are small, each once."""
    found: dict[str, Case] = {}
    for one in sources(options.megatron)[TESTS]:
        if one.name in accepted:
            small = shrink(one)
            found.setdefault(fingerprint(small), Case(small, [])).names.append(one.name)
    return list(found.values())


def train_all(given: list[Case], every: int, record: Path | None) -> list[tuple[Case, Trained]]:
    """Train every so-manieth case, but for those of the record; say each as it ends."""
    known = json.loads(record.read_text()) if record and record.exists() else {}
    ended = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = corpus_for_all(Path(folder))
        for number, case in enumerate(given[::every]):
            key = fingerprint(case.small)
            if key not in known:
                known[key] = train(case.small, corpus)
                if record:
                    record.write_text(json.dumps(known))
            ended.append((case, Trained(*known[key])))
            print(number + 1, case.small.ranks, case.names[0], *ended[-1][1], flush=True)
    return ended


def revision(tree: Path) -> str:
    """Commit of a checkout."""
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def judged_table(before: dict[str, Judged], now: dict[str, Judged]) -> str:
    """Counts of accepted sets."""
    lines = ["| sets | of | as written, first version | as written | with RoPE, first version |"]
    lines[0] += " with RoPE |"
    lines.append("|---|---|---|---|---|---|")
    for title, tally in now["written"].items():
        total = len(tally.accepted) + len(tally.refused)
        row = [title, str(total)]
        for how in ("written", "rope"):
            for judged in (before, now):
                row.append(str(len(judged[how][title].accepted)) if judged else "")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def reasons_table(tally: Tally) -> str:
    """Reasons, most frequent first."""
    lines = ["| refused | for this alone | reason |", "|---|---|---|"]
    for kind, number, alone in tally.counts():
        kind = kind[:MOST_LETTERS] + "..." * (len(kind) > MOST_LETTERS)
        lines.append(f"| {number} | {alone} | {_cell(kind)} |")
    return "\n".join(lines)


def trained_table(ended: list[tuple[Case, Trained]]) -> str:
    """Each small command line that did not train, and why."""
    lines = ["| sets | first of them | ended with |", "|---|---|---|"]
    for case, trained in ended:
        if len(trained.losses) != STEPS:
            names = f"| {len(case.names)} | {case.names[0]} | "
            lines.append(f"{names}{_cell(trained.why_not.strip().removeprefix('- '))} |")
    return "\n".join(lines) if len(lines) > 2 else "All trained."


def scripts_table(folder: Path) -> str:
    """Each script of others, and what is against it."""
    lines = ["| script | Megatron 0.19 does not know | refused here of the rest |", "|---|---|---|"]
    for one in scripts_of(folder):
        words, unknown = without_unknown(one.words)
        refused = _cell("; ".join(reasons(words))) or "nothing"
        flags = ", ".join(f"`{flag}`" for flag in unknown)
        lines.append(f"| `{one.name.removesuffix('.sh')}` | {flags} | {refused} |")
    return "\n".join(lines)


def refused_section(before: dict[str, Judged], now: dict[str, Judged]) -> list[str]:
    """Why functional tests are refused that have rotary positions."""
    tests = now["rope"][TESTS]
    parts = [
        f"## Functional tests, with RoPE: why {len(tests.refused)} are refused",
        reasons_table(tests),
        '"Not parsed" is the answer of Megatron\'s own parser: arguments of NVIDIA ModelOpt, which '
        "Megatron's program adds where that is installed, and a list that is written as one word. "
        "The set without sizes is a test of inference.",
    ]
    if before:
        earlier = before["rope"][TESTS]
        parts += [
            f"In the first version {len(earlier.refused)} were:",
            reasons_table(earlier),
        ]
    return parts


def trained_section(given: list[Case], ended: list[tuple[Case, Trained]]) -> list[str]:
    """What was started, and how it ended."""
    trained = [case for case, found in ended if len(found.losses) == STEPS]
    left_out = Counter(flag for case in given for flag in case.small.left_out)
    ranks = Counter(case.small.ranks for case, _ in ended)
    return [
        "## Trained",
        f"The {sum(len(case.names) for case in given)} functional tests that are accepted with "
        f"RoPE become {len(given)} different command lines when they are made small: at most 2 of "
        "each kind of parallelism (4 of experts' tensor parallelism), 2 to 6 layers, width 64, 64 "
        f"slots, no checkpoints, Megatron's local layers. {len(ended)} of them were started for "
        f"{STEPS} steps on CPUs "
        f"(command lines by ranks: {', '.join(f'{n} on {r}' for r, n in sorted(ranks.items()))}); "
        f"{len(trained)} trained, which stand for {sum(len(case.names) for case in trained)} "
        "functional tests.",
        trained_table(ended),
        "Left out of small command lines, since only a GPU, Transformer Engine or a package that "
        "is not pinned has it (flag: command lines): "
        + ", ".join(f"`{flag}`: {number}" for flag, number in left_out.most_common())
        + ".",
    ]


def scripts_section(folder: Path) -> list[str]:
    """Scripts of others."""
    origins = folder / "ORIGINS"
    return [
        "## Scripts of others",
        "Launch scripts of public repositories. Each was run where no other program is installed, "
        "with a few of Slurm's variables and with its stops at errors (`set -e`, `exit 1`) and its "
        "absolute path of mpirun taken out, to see the words that it starts. Flags and values that "
        "Megatron's own parser refuses (those of forks and other versions) are named and left "
        "out, and the rest is judged.",
        scripts_table(folder),
        *(
            ["Where they are from (repository, branch or commit, path, blob):", origins.read_text()]
            if origins.exists()
            else []
        ),
    ]


def opening(before: dict[str, Judged], now: dict[str, Judged], version: str) -> list[str]:
    """What was judged, and how many are accepted."""
    first = f"The first version is commit {version}." if version else ""
    return [
        "# Megatron's argument sets",
        "Argument sets of Megatron-LM core_v0.19.0 through this program's parser and refusals: its "
        "functional tests of GPT, MoE and Mixtral, what the scripts of its `examples/` start, the "
        "launch lines of its `docs/`, and launch scripts from public repositories. The machine is "
        "taken for an H100 with all packages. `benchmarks/argument_sets.py` wrote this page.",
        "## Accepted",
        judged_table(before, now),
        "Most sets name no `--position-embedding-type`: Megatron's default is learned positions, "
        f"which are refused with the remedy, and the columns with RoPE follow it. {first}".strip(),
    ]


def _cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def main() -> None:
    """Judge, train, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megatron", type=Path, required=True, help="checkout of Megatron-LM")
    parser.add_argument(
        "--before", type=Path, help="checkout of an earlier version of this project"
    )
    parser.add_argument("--scripts", type=Path, help="folder with launch scripts of others")
    parser.add_argument("--every", type=int, default=1, help="train every so-manieth set [1]")
    parser.add_argument(
        "--record", type=Path, help="JSON of what has trained, gone on with if it is there"
    )
    parser.add_argument("--output", type=Path, help="[docs/measurements/DATE-argument-sets.md]")
    options = parser.parse_args()
    kinds = {"written": [], "rope": ROPE}
    now = {how: judge(options, ROOT, *more) for how, more in kinds.items()}
    before = {}
    if options.before:
        before = {how: judge(options, options.before, *more) for how, more in kinds.items()}
    given = cases(options, set(now["rope"][TESTS].accepted))
    ended = train_all(given, options.every, options.record)
    version = revision(options.before) if options.before else ""
    name = f"docs/measurements/{date.today().isoformat()}-argument-sets.md"
    parts = opening(before, now, version)
    parts += refused_section(before, now) + trained_section(given, ended)
    parts += scripts_section(options.scripts) if options.scripts else []
    (options.output or ROOT / name).write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
