"""Megatron's own argument sets, parsed by our program's parser and judged by its refusals.

    MEGATRON_CHECKOUT=/path/to/Megatron-LM python -m tests.host_argument_sets [--each] [--json] \\
        [--add "--position-embedding-type rope"] [--scripts FOLDER]

`benchmarks/argument_sets.py` makes a page of it, and trains what is accepted.

Three kinds: the functional tests of GPT, MoE and Mixtral whose recipe names pretrain_gpt.py or no
program, the launch scripts in examples/, and the launch lines of docs/. Nothing is trained, and no
file that they name is needed: variables stay as they are written. The machine is taken for an H100
with Transformer Engine, flash-attn and every package that a flag asks for: reasons are those of the
arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

PROGRAM = "pretrain_gpt.py"
FAMILIES = ("gpt", "moe", "mixtral")
POSITIONAL = ("/checkpoints", "/logs", "/tokenizer", "/data", "/x", "/y")
SLURM = ("SLURM_NNODES=4", "SLURM_GPUS_PER_NODE=8", "SLURM_NTASKS=32", "SLURM_JOBID=1")
STAND_INS = ("torchrun", "python", "python3", "srun", "mpirun", "ft_launcher")


class ArgumentSet(NamedTuple):
    """One command line of Megatron's pretrain_gpt.py."""

    name: str
    words: list[str]


def checkout() -> Path | None:
    """The checkout of Megatron-LM that MEGATRON_CHECKOUT names."""
    named = os.environ.get("MEGATRON_CHECKOUT")
    return Path(named) if named else None


def functional_tests(root: Path) -> Iterator[ArgumentSet]:
    """The functional tests of our program's counterpart."""
    import yaml

    programs = _programs_of_recipes(root)
    for family in FAMILIES:
        folder = root / "tests/functional_tests/test_cases" / family
        for path in sorted(folder.glob("*/model_config.yaml")):
            if PROGRAM in programs.get((family, path.parent.name), {PROGRAM}):
                config = yaml.safe_load(path.read_text())
                arguments = _words(config["MODEL_ARGS"] or {})
                yield ArgumentSet(f"{family}/{path.parent.name}", arguments)


def launch_scripts(root: Path) -> Iterator[ArgumentSet]:
    """What the scripts of examples/ start, seen by running them with stand-ins for all programs."""
    for path in sorted((root / "examples").rglob("*.sh")):
        if PROGRAM in path.read_text():
            for number, words in enumerate(_started_by(path, positional=POSITIONAL)):
                name = str(path.relative_to(root)) + (f" ({number + 1})" if number else "")
                yield ArgumentSet(name, words)


def scripts_of(folder: Path) -> Iterator[ArgumentSet]:
    """What the scripts of a folder start; they are run, with stand-ins for the programs."""
    for path in sorted(folder.rglob("*.sh")):
        for words in _started_by(path, *SLURM):
            yield ArgumentSet(str(path.relative_to(folder)), words)


def launch_lines(root: Path) -> Iterator[ArgumentSet]:
    """The command lines of the documentation; most are fragments."""
    for path in sorted((root / "docs").rglob("*.md")):
        fences = re.findall(r"```(?:bash|sh|shell)\n(.*?)```", path.read_text(), re.DOTALL)
        lines = [line for fence in fences for line in fence.replace("\\\n", " ").splitlines()]
        started = [line for line in lines if re.search(rf"^[^#'\"]*{PROGRAM}\s", line)]
        for number, line in enumerate(started):
            words = _after_the_program(shlex.split(line, comments=True))
            yield ArgumentSet(f"{path.relative_to(root)} ({number + 1})", words)


def reasons(words: list[str], *, world_size: int = 8) -> list[str]:
    """Why our program would not start with these arguments; empty: it would."""
    from megatron.training.arguments import parse_args

    from megatron_anchor import compat
    from megatron_anchor.attention.backends import Hardware
    from megatron_anchor.training import validation
    from megatron_anchor.training.arguments import add_anchor_arguments

    h100 = Hardware(
        capability=(9, 0), packages={"transformer-engine": "2.20.2", "flash-attn": "2.8.3"}
    )
    with (
        mock.patch.object(sys, "argv", ["pretrain_gpt", *words]),
        mock.patch.dict(os.environ, {"WORLD_SIZE": str(world_size), "RANK": "0"}),
        # Earlier versions, which are judged too, do not ask all of this.
        mock.patch.object(validation, "this_hardware", return_value=h100, create=True),
        mock.patch.object(compat, "have_transformer_engine", return_value=True, create=True),
        mock.patch.object(compat, "have_fused_weight_gradient", return_value=True, create=True),
        mock.patch.object(compat, "is_installed", return_value=True, create=True),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        try:
            return validation.refusals(parse_args(add_anchor_arguments))
        except ValueError as error:
            return [f"not parsed: {str(error).splitlines()[0]}"]
        except SystemExit:  # an earlier version's parser
            return [f"not parsed: {said.getvalue().splitlines()[-1].split('error: ')[-1]}"]


def without_unknown(words: list[str]) -> tuple[list[str], list[str]]:
    """Leave out what Megatron's own parser refuses: flags of forks and of other versions.

    Returns:
        The rest, and the flags that were left out (with values that are no choices).
    """
    words, left_out = list(words), []
    while said := next((r for r in reasons(words) if r.startswith("not parsed: ")), None):
        if found := re.match(r"not parsed: unrecognized arguments: (.*)", said):
            unknown = set(found[1].split())
            left_out += [word for word in words if word in unknown and word.startswith("--")]
            words = [word for word in words if word not in unknown]
            continue
        found = re.match(
            r"not parsed: argument (--[\w-]+)[^:]*: (?:invalid choice: '(.*?)')?", said
        )
        if found is None or found[1] not in words:
            return words, left_out
        left_out.append(" ".join(filter(None, found.groups())))
        first = words.index(found[1])
        last = first + 1
        while last < len(words) and not words[last].startswith("--"):
            last += 1
        del words[first:last]
    return words, left_out


def kind_of(reason: str) -> str:
    """A reason without the values of this set."""
    reason = re.sub(r"^(--[\w-]+)(?: (?!is |gives |leaves )[^:;]*?)?:", r"\1:", reason)
    return re.sub(r"\b\d[\d.e+-]*\b", "N", reason)


class Tally:
    """Reasons of many sets, counted."""

    def __init__(self) -> None:
        self.accepted: list[str] = []
        self.refused: dict[str, list[str]] = {}

    def add(self, one: ArgumentSet) -> None:
        """Judge a set."""
        found = reasons(one.words)
        if found:
            self.refused[one.name] = found
        else:
            self.accepted.append(one.name)

    def counts(self) -> list[tuple[str, int, int]]:
        """Kind of reason, sets that it refuses, and those that it alone refuses; most first."""
        kinds = {
            name: {kind_of(reason) for reason in found} for name, found in self.refused.items()
        }
        sets = Counter(kind for found in kinds.values() for kind in found)
        alone = Counter(next(iter(found)) for found in kinds.values() if len(found) == 1)
        return [(kind, number, alone[kind]) for kind, number in sets.most_common()]


def _programs_of_recipes(root: Path) -> dict[tuple[str, str], set[str]]:
    import yaml

    programs: dict[tuple[str, str], set[str]] = {}
    for path in (root / "tests/test_utils/recipes").rglob("*.yaml"):
        named = re.search(r'TRAINING_SCRIPT_PATH=([^"\\]+)', path.read_text())
        if named:
            recipe = yaml.safe_load(path.read_text())
            for product in recipe.get("products", []):
                for case in product["test_case"]:
                    key = (recipe["spec"].get("model"), case)
                    programs.setdefault(key, set()).add(named[1])
    return programs


def _words(arguments: dict[str, Any]) -> list[str]:
    """Write a test's arguments as Megatron's own runner does."""
    words: list[str] = []
    for flag, value in arguments.items():
        text = str(value).replace("${REPEAT}", "1").strip()  # the runner's count of repetitions
        if value is True or text == "true":
            words.append(flag)
        elif re.fullmatch(r"\[[^]]+\]", text):
            words += [flag, *text[1:-1].split()]
        elif value is None or text == "":
            words.append(flag)
        elif re.fullmatch(r"\([^)]+\)", text) or re.search(r"[|() ]", text):
            words += [flag, text.strip("\"'")]
        else:
            words += [flag, text]
    return words


def _after_the_program(words: list[str]) -> list[str]:
    place = next(place for place, word in enumerate(words) if word.endswith(PROGRAM))
    return [word for word in words[place + 1 :] if word not in ("...", "\\")]


def _started_by(script: Path, *variables: str, positional: Sequence[str] = ()) -> list[list[str]]:
    """Command lines of our program that a script hands to torchrun and its like.

    Args:
        script: a bash script; all programs but the stand-ins are missing when it runs.
        variables: NAME=VALUE of its environment.
        positional: its own arguments.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        for name in STAND_INS:
            stand_in = Path(folder, name)
            stand_in.write_text(
                f'#!/bin/bash\nprintf "%s\\0" "$@" >> {log}\necho -ne "\\0" >> {log}\n'
            )
            stand_in.chmod(0o755)
        Path(folder, PROGRAM).touch()  # scripts look whether it is there
        environment = {"PATH": folder, "HOME": folder}
        environment |= dict(variable.split("=", 1) for variable in variables)
        subprocess.run(
            ["/bin/bash", str(script.resolve()), *positional],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
        )
        calls = log.read_text().split("\0\0") if log.exists() else []
    lines = [call.strip("\0").split("\0") for call in calls if PROGRAM in call]
    return [_after_the_program(_flat(words)) for words in lines]


def _flat(words: list[str]) -> list[str]:
    """Words of a command line, of which a part may be quoted as one word (`bash -c "..."`)."""
    whole = [word for word in words if PROGRAM in word and len(word.split()) > 1]
    return shlex.split(whole[0]) if whole else words


def sources(root: Path, scripts: Path | None = None) -> dict[str, Iterator[ArgumentSet]]:
    """Title to sets."""
    found = {
        "functional tests": functional_tests(root),
        "launch scripts of examples/": launch_scripts(root),
        "launch lines of docs/": launch_lines(root),
    }
    return found if scripts is None else found | {"scripts of others": scripts_of(scripts)}


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", action="store_true", help="name every set and all its reasons")
    parser.add_argument("--add", default="", help="arguments that every set is given besides")
    parser.add_argument("--json", action="store_true", help="one JSON object per kind of sets")
    parser.add_argument("--scripts", type=Path, help="folder with launch scripts of others")
    options = parser.parse_args()
    root = checkout()
    if root is None:
        parser.error("set MEGATRON_CHECKOUT to a checkout of Megatron-LM")
    for title, sets in sources(root, options.scripts).items():
        tally = Tally()
        for one in sets:
            tally.add(one._replace(words=[*one.words, *shlex.split(options.add)]))
        if options.json:
            print(json.dumps({title: vars(tally)}))
            continue
        total = len(tally.accepted) + len(tally.refused)
        print(f"\n## {title}: {total} sets, {len(tally.accepted)} accepted\n")
        print("| refused | of these alone | reason |\n|---|---|---|")
        for kind, number, alone in tally.counts():
            print(f"| {number} | {alone} | {kind} |")
        if options.each:
            print("accepted:", *tally.accepted, sep="\n  ")
            for name, found in tally.refused.items():
                print(name, *found, sep="\n  - ")


if __name__ == "__main__":
    main()
