"""The command line of `tools/convert_hf_to_megatron.py`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_anchor.checkpoint.cli import DTYPES, add_output_arguments, quiet_megatron
from megatron_anchor.checkpoint.extension import BASES
from megatron_anchor.checkpoint.families import FAMILIES, LOCAL, TARGETS
from megatron_anchor.checkpoint.to_megatron import ARGS_FILE, convert_to_megatron
from megatron_anchor.command_line import make_parser
from megatron_anchor.terminal import say, say_json

_EXAMPLE = f"""\
  python tools/convert_hf_to_megatron.py --hf models/Llama-2-7b --out models/llama --extend-to 65536
  torchrun --nproc-per-node 8 -m megatron_anchor.pretrain_gpt $(cat models/llama/{ARGS_FILE}) \\
      --pretrained-checkpoint models/llama --load run --save run \\
      --dist-ckpt-optim-fully-reshardable --seq-length 65536 ...
"""


def parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = make_parser(
        "Convert a Hugging Face model to a torch_dist checkpoint that Megatron loads at any "
        f"layout, and write the flags that describe it. Families: {', '.join(FAMILIES)}.",
        _EXAMPLE,
    )
    add = parser.add_argument
    add("--hf", required=True, metavar="DIR", help="Hugging Face model folder")
    add_output_arguments(parser)
    add(
        "--extend-to",
        type=int,
        metavar="LENGTH",
        help="set RoPE base and max length for this context length, as the paper does: "
        + ", ".join(f"{length}: {base:g}" for length, base in BASES.items()),
    )
    add("--rotary-base", type=float, metavar="BASE", help="RoPE base; default: the model's")
    add(
        "--max-position-embeddings",
        type=int,
        metavar="LENGTH",
        help="longest sequence; default: the model's, or --extend-to",
    )
    add(
        "--target-impl",
        choices=TARGETS,
        default=LOCAL,
        help="--transformer-impl of the run that loads it: Transformer Engine's separate norms ask "
        "for (empty) states of their own, and the norm in front of experts has another name",
    )
    add(
        "--drop-sliding-window",
        action="store_true",
        help="train a model with a sliding window without it; the export then has none either",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, convert, print."""
    args = parser().parse_args(argv)
    quiet_megatron()
    done = convert_to_megatron(
        args.hf,
        args.out,
        extend_to=args.extend_to,
        rotary_base=args.rotary_base,
        positions=args.max_position_embeddings,
        dtype=DTYPES[args.dtype] if args.dtype else None,
        target=args.target_impl,
        drop_sliding_window=args.drop_sliding_window,
        allow_non_finite=args.allow_non_finite,
        progress=not args.no_progress and not args.json,
    )
    if args.json:
        result = {
            "out": args.out,
            "family": done.model.family,
            "tensors": done.tensors,
            "bytes": done.bytes,
            "not_carried": done.not_carried,
            "flags": done.flags,
        }
        say_json(result)
        return 0
    for reason in sorted(set(done.not_carried.values())):
        names = [name for name, why in done.not_carried.items() if why == reason]
        say(f"not carried over: {names[0]} ({len(names)} such tensors; {reason})")
    say(
        f"{args.out}: {done.model.family}, {done.tensors} tensors, {done.bytes / 1e9:.2f} GB; "
        f"flags for pretrain_gpt in {Path(args.out) / ARGS_FILE}"
    )
    return 0
