"""The command line of `tools/convert_megatron_to_hf.py`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from megatron_anchor.checkpoint.cli import DTYPES, add_output_arguments, quiet_megatron
from megatron_anchor.checkpoint.hugging_face_weights import SHARD_BYTES
from megatron_anchor.checkpoint.to_hugging_face import convert_to_hugging_face
from megatron_anchor.command_line import make_parser
from megatron_anchor.errors import UserError
from megatron_anchor.terminal import say, say_json

_EXAMPLE = """\
  python tools/convert_megatron_to_hf.py --megatron run --out models/Llama-2-7b-64K \\
      --like models/Llama-2-7b
  python tools/convert_megatron_to_hf.py --megatron run --average 800 900 1000 --out models/mean
"""


def parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = make_parser(
        "Convert a torch_dist checkpoint, written under any layout, to a Hugging Face model. RoPE "
        "and maximum length are those it was trained with; optimizer states are left out.",
        _EXAMPLE,
    )
    add = parser.add_argument
    add(
        "--megatron",
        required=True,
        metavar="DIR",
        help="what --save named, or one iteration's folder",
    )
    add_output_arguments(parser)
    add("--iteration", type=int, metavar="N", help="default: the latest")
    add(
        "--average",
        type=int,
        nargs="+",
        default=(),
        metavar="N",
        help="export the mean of these iterations",
    )
    add(
        "--like",
        metavar="DIR",
        help="Hugging Face folder to take architecture, vocabulary, token ids, generation config "
        "and tokenizer from; default: the run's --tokenizer-model where it is the same model",
    )
    add(
        "--ignore-arguments",
        nargs="+",
        default=(),
        metavar="NAME",
        help="arguments of the run, as an error named them, that the exported model does without",
    )
    add(
        "--keep-tokenizer",
        action="store_true",
        help="copy the tokenizer as it is; default: one that does not begin texts and chats with "
        "the run's anchor is rewritten to do so",
    )
    add(
        "--max-shard-size",
        type=float,
        default=SHARD_BYTES / 1e9,
        metavar="GB",
        help="largest weight file (default: %(default)g)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, convert, print."""
    args = parser().parse_args(argv)
    quiet_megatron()
    if not 0 < args.max_shard_size < math.inf:
        raise UserError(f"--max-shard-size {args.max_shard_size}: expected more than 0 GB")
    done = convert_to_hugging_face(
        args.megatron,
        args.out,
        iteration=args.iteration,
        average=args.average,
        like=args.like,
        ignored_arguments=args.ignore_arguments,
        dtype=DTYPES[args.dtype] if args.dtype else None,
        shard_bytes=int(args.max_shard_size * 1e9),
        allow_non_finite=args.allow_non_finite,
        keep_tokenizer=args.keep_tokenizer,
        progress=not args.no_progress and not args.json,
    )
    if args.json:
        result = {
            "out": args.out,
            "family": done.model.family,
            "tensors": done.tensors,
            "bytes": done.bytes,
            "files": done.files,
            "like": done.like,
            "notes": done.notes,
        }
        say_json(result)
        return 0
    for note in done.notes:
        say(f"note: {note}")
    say(
        f"{args.out}: {done.model.family}, {done.tensors} tensors, {done.bytes / 1e9:.2f} GB in "
        f"{len(done.files)} file(s); RoPE base {done.model.rotary_base:g}, "
        f"{done.model.positions} positions, vocabulary {done.model.vocabulary}"
    )
    return 0
