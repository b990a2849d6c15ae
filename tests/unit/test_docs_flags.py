"""Every flag in a documented command exists in that command's parser."""

import importlib
import re
from functools import cache

import pytest

from megatron_anchor.console import COMMANDS
from tests.documentation import PAGES, ROOT, commands, flags, page_id, shell_commands

OF_OTHERS = {
    *("--nproc-per-node", "--standalone", "--master-port", "--max-restarts"),  # torchrun
    *("--no-deps", "--pre", "--find-links"),  # pip
    *("--its", "--arguments"),  # stand-ins of a user's own
    *(
        "--ipc",
        "--ulimit",
        "--gpus",
        "--build-arg",
        "--tag",
        "--dry-run",
    ),  # docker; a script in tools/
    *("--model_args", "--num_fewshot", "--batch_size", "--output_path", "--metadata"),  # lm-eval
    *("--all-files", "--signoff", "--kill-on-bad-exit"),  # pre-commit, git, srun
    "--signal",  # sbatch
}
"""Flags in the running text that belong to other programs."""


@cache
def flags_of_command(name):
    module = importlib.import_module(COMMANDS[name].main.split(":")[0])
    return flags_of_parser(module.parser())


@cache
def flags_of_training():
    """Megatron's flags and ours."""
    from argparse import ArgumentParser

    from megatron.training.arguments import add_megatron_arguments

    from megatron_anchor.training.arguments import add_anchor_arguments

    parser = ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return flags_of_parser(add_anchor_arguments(parser))


@cache
def flags_of_on_cpu():
    return flags_of_parser(importlib.import_module("megatron_anchor.on_cpu.__main__")._parser())


def flags_of_parser(parser):
    return frozenset(option for action in parser._actions for option in action.option_strings)


@cache
def flags_of_script(path):
    """What a script of ours names; shell scripts pass the flags of training on."""
    found = frozenset(re.findall(r"--[a-z][\w-]*", (ROOT / path).read_text()))
    return found | flags_of_training() if path.endswith(".sh") else found


def known_flags(words):
    """(flags that the command knows, its words), or None where the command is not ours."""
    tools = {f"tools/{row.tool}": name for name, row in COMMANDS.items()}
    for place, word in enumerate(words):
        rest = words[place + 1 :]
        if word == "megatron-anchor" and rest and not rest[0].startswith("-"):
            pair = " ".join(rest[:2])
            return flags_of_command(pair if pair in COMMANDS else rest[0]), rest
        if word in tools:
            return flags_of_command(tools[word]), rest
        if word == "megatron_anchor.pretrain_gpt" or word.endswith("pretrain_gpt.py"):
            return flags_of_training(), rest
        if word == "megatron_anchor.on_cpu" and not {"-m", "pretrain_gpt.py"} & set(rest):
            return flags_of_on_cpu(), [rest[0]] if rest else []
        if word.startswith(("examples/", "benchmarks/")) and word.endswith((".py", ".sh")):
            return flags_of_script(word), rest
    return None


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_flag_of_a_documented_command_exists(page):
    for words in shell_commands(page):
        if found := known_flags(words):
            known, rest = found
            wrong = set(flags(rest)) - known
            assert not wrong, f"{page.name}: {' '.join(words[:4])} ... has no {sorted(wrong)}"


# Its tables name what scripts of others say.
OF_OUR_PROGRAMS = [page for page in PAGES if not page.name.endswith("-argument-sets.md")]


@pytest.mark.parametrize("page", OF_OUR_PROGRAMS, ids=page_id)
def test_every_flag_in_the_text_is_one_of_a_program_of_ours(page):
    known = {"--help", "--version"}.union(
        flags_of_training(), flags_of_on_cpu(), *map(flags_of_command, COMMANDS), OF_OTHERS
    )
    for path in [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        known |= flags_of_script(str(path.relative_to(ROOT)))
    text = re.sub(r"https?://\S+", "", page.read_text(encoding="utf-8"))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9]", text))
    assert named - known == set(), page.name


def test_commands_are_read_as_the_shell_reads_them():
    text = "a --x 1 \\\n  --y=2 && b 'c d' | e # --no\nf <<'END'\n--inside\nEND\n"
    assert list(commands(text)) == [["a", "--x", "1", "--y=2"], ["b", "c d"], ["e"], ["f"]]


def test_a_wrong_flag_would_be_found():
    known, rest = known_flags(["torchrun", "-m", "megatron_anchor.pretrain_gpt", "--packign"])
    assert set(flags(rest)) - known == {"--packign"}
    known, rest = known_flags(["python", "tools/inspect_corpus.py", "x", "--pgn", "--png"])
    assert set(flags(rest)) - known == {"--pgn"}
