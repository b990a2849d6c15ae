"""The command `megatron-anchor`: one table of all commands, the same code as in `tools/`.

Nothing of a command is imported before it is asked for, so `megatron-anchor --help` takes no time.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import sys
from collections.abc import Sequence
from typing import NamedTuple

from megatron_anchor import __version__
from megatron_anchor.command_line import Main, run
from megatron_anchor.terminal import say, say_block


class Command(NamedTuple):
    """One row of the table."""

    summary: str
    tool: str
    """The thin script over the same code in `tools/`."""
    main: str
    """`module:function`: arguments to exit code, for `command_line.run`."""


_CORPUS = "megatron_anchor.corpus"
_CHECKPOINT = "megatron_anchor.checkpoint"

COMMANDS = {
    "preprocess": Command(
        "texts to a .bin/.idx corpus",
        "preprocess_data.py",
        f"{_CORPUS}.cli_preprocess:main",
    ),
    "merge": Command(
        "join shards or corpora",
        "merge_corpora.py",
        f"{_CORPUS}.cli_merge:main",
    ),
    "inspect-corpus": Command(
        "count, draw and verify a corpus",
        "inspect_corpus.py",
        f"{_CORPUS}.cli_inspect:main",
    ),
    "upsample": Command(
        "draw long documents more often",
        "upsample_long_documents.py",
        f"{_CORPUS}.cli_upsample:main",
    ),
    "inspect-packing": Command(
        "show what a corpus becomes when it is packed",
        "inspect_packing.py",
        "megatron_anchor.packing.cli:main",
    ),
    "plan": Command(
        "layouts, memory and days before a run",
        "plan_training.py",
        "megatron_anchor.planner.cli:main",
    ),
    "convert to-megatron": Command(
        "a Hugging Face model to a Megatron checkpoint",
        "convert_hf_to_megatron.py",
        f"{_CHECKPOINT}.cli_to_megatron:main",
    ),
    "convert to-hf": Command(
        "a Megatron checkpoint to a Hugging Face model",
        "convert_megatron_to_hf.py",
        f"{_CHECKPOINT}.cli_to_hugging_face:main",
    ),
    "convert verify": Command(
        "compare the two, bit by bit and in logits",
        "verify_conversion.py",
        f"{_CHECKPOINT}.cli_verify:main",
    ),
    "measure-drift": Command(
        "how far positions in low precision move the attention",
        "measure_rope_drift.py",
        "megatron_anchor.precision.cli:main",
    ),
    "evaluate": Command(
        "ask models questions about long texts, and compare runs",
        "evaluate_long_context.py",
        "megatron_anchor.evaluation.cli:main",
    ),
}
"""Name, as it is typed, to what it does and where."""

_EXAMPLE = """\
example, from texts to a model in Hugging Face's form:
  megatron-anchor preprocess --input 'texts/*.jsonl' --tokenizer-model models/Llama-2-7b \\
      --append-eod --output-prefix corpus/mine
  megatron-anchor convert to-megatron --hf models/Llama-2-7b --out models/llama --extend-to 65536
  torchrun --nproc-per-node 8 -m megatron_anchor.pretrain_gpt \\
      $(cat models/llama/megatron_args.txt) --pretrained-checkpoint models/llama \\
      --data-path corpus/mine_text_document --seq-length 65536 --save run \\
      --dist-ckpt-optim-fully-reshardable ...
  megatron-anchor convert to-hf --megatron run --out models/Llama-2-7b-64K

`megatron-anchor COMMAND --help` shows a command's flags with a worked example of its own. Training
is `python -m megatron_anchor.pretrain_gpt` under torchrun; without a GPU put
`-m megatron_anchor.on_cpu` before it."""


_TRAINING = ("train", "training", "pretrain", "pretrain_gpt", "pretrain-gpt")


def help_text() -> str:
    """The table for people, with a worked example."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: megatron-anchor COMMAND [arguments]", "", "commands:", *rows, "", _EXAMPLE]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of the table.

    Args:
        argv: command and arguments; None = those of the process.

    Returns:
        The command's exit code; 2 with a message when there is no such command.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        say_block(help_text())
        return 0 if words else 2
    if words[0] == "--version":
        say(f"megatron-anchor {__version__}")
        return 0
    pair = " ".join(words[:2])
    name = pair if pair in COMMANDS else words[0]
    if name not in COMMANDS:
        return _no_such_command(words)
    command, arguments = COMMANDS[name], words[len(name.split()) :]
    before = sys.argv[0]
    sys.argv[0] = f"megatron-anchor {name}"  # the name that argparse shows
    try:
        if "-h" in arguments or "--help" in arguments:
            return _show_help(command, arguments)
        return _call(command, arguments)
    finally:
        sys.argv[0] = before


def _no_such_command(words: Sequence[str]) -> int:
    group = [name for name in COMMANDS if name.startswith(f"{words[0]} ")]
    asked = " ".join(words[:2] if group else words[:1])
    asks_for_help = group and words[1:2] in ([], ["-h"], ["--help"])
    if asks_for_help:
        rows = [f"  megatron-anchor {name} --help" for name in group]
        say(f"{words[0]} is one of", *rows)
        return 0 if words[1:] else 2
    groups = {name.split()[0] for name in COMMANDS}
    near = difflib.get_close_matches(asked, [*COMMANDS, *groups], n=1)
    remedy = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}"
    if asked in _TRAINING:
        remedy = "training is `torchrun -m megatron_anchor.pretrain_gpt`, a program of its own"
    say(f"error: no command {asked!r}: {remedy}", file=sys.stderr)
    return 2


def _call(command: Command, arguments: Sequence[str]) -> int:
    return run(lambda words: _load(command.main)(words), arguments)  # Ctrl-C may come early


def _show_help(command: Command, arguments: Sequence[str]) -> int:
    """A command's own help, with the examples in the words of this command line."""

    def show(words: Sequence[str] | None) -> int:
        text = io.StringIO()
        try:
            with contextlib.redirect_stdout(text):
                return _load(command.main)(words)
        finally:
            say_block(_in_our_words(text.getvalue()).rstrip("\n"))

    return run(show, arguments)


def _in_our_words(text: str) -> str:
    for name, command in COMMANDS.items():
        for spelling in (f"python tools/{command.tool}", f"tools/{command.tool}"):
            text = text.replace(spelling, f"megatron-anchor {name}")
    return text


def _load(place: str) -> Main:
    module, function = place.split(":")
    return getattr(importlib.import_module(module), function)
