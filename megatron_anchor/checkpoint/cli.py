"""What all conversion commands share: help with an example, errors without tracebacks, dtypes."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Sequence

import torch

from megatron_anchor.checkpoint.errors import CheckpointError
from megatron_anchor.terminal import say

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that writes a model."""
    add = parser.add_argument
    add("--out", required=True, metavar="DIR", help="new folder; must not exist or be empty")
    add("--dtype", choices=DTYPES, help="of the weights; default: as they are")
    add("--json", action="store_true", help="print the result as JSON")
    add("--no-progress", action="store_true", help="no progress bar")


def run(command: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None = None) -> int:
    """Run a command: errors become a message and exit code 1, Ctrl-C exit code 130."""
    for module in ("megatron", "torch.distributed.checkpoint"):  # about their own internals
        warnings.filterwarnings("ignore", module=module)
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        return command(argv)
    except (CheckpointError, OSError) as error:  # OSError names the file itself
        say(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("interrupted; nothing was left behind", file=sys.stderr)
        return 130
