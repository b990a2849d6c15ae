"""What all conversion commands share."""

from __future__ import annotations

import argparse
import logging
import warnings

import torch

from megatron_anchor.checkpoint.finite import ALLOW_FLAG

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that writes a model."""
    add = parser.add_argument
    add("--out", required=True, metavar="DIR", help="new folder; must not exist or be empty")
    add("--dtype", choices=DTYPES, help="of the weights; default: as they are")
    add(
        ALLOW_FLAG,
        action="store_true",
        help="convert weights that are NaN or Inf, too, which are refused otherwise",
    )
    add("--json", action="store_true", help="print the result as JSON")
    add("--no-progress", action="store_true", help="no progress bar")


def quiet_megatron() -> None:
    """Silence what Megatron says about its own internals."""
    for module in ("megatron", "torch.distributed.checkpoint"):
        warnings.filterwarnings("ignore", module=module)
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
