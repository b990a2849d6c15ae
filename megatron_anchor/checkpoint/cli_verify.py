"""The command line of `tools/verify_conversion.py`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_anchor.checkpoint.cli import DTYPES, quiet_megatron
from megatron_anchor.checkpoint.rows import Files
from megatron_anchor.checkpoint.verify import (
    LogitVerdict,
    TensorVerdict,
    compare_logits,
    compare_tensors,
    open_checkpoint,
    setting_differences,
    text_tokens,
)
from megatron_anchor.command_line import make_parser
from megatron_anchor.errors import UserError
from megatron_anchor.terminal import say, say_json

TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1687 Isaac Newton published the Principia, in "
    "which he stated the three laws of motion; def f(x): return x * x + 1\n\n"
) * 4

_EXAMPLE = """\
  python tools/verify_conversion.py --megatron models/llama --hf models/Llama-2-7b
"""


def parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = make_parser(
        "Compare a Megatron checkpoint with a Hugging Face model: every tensor bit by bit, and the "
        "logits of both sides on a text, on the CPU. Exits with 1 when they are not the same.",
        _EXAMPLE,
    )
    add = parser.add_argument
    add("--megatron", required=True, metavar="DIR", help="checkpoint, or one iteration's folder")
    add("--hf", required=True, metavar="DIR", help="Hugging Face model folder")
    add("--iteration", type=int, metavar="N", help="default: the latest")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text", help="text to compare logits on; default: a few lines")
    text.add_argument("--text-file", metavar="FILE", help="file with such a text")
    add("--max-tokens", type=int, default=512, help="of the text (default: %(default)s)")
    add("--dtype", choices=DTYPES, default="float32", help="of the logits (default: float32)")
    add(
        "--extended",
        action="store_true",
        help="the checkpoint was given another RoPE base or length: compare under the model's own",
    )
    add("--no-logits", action="store_true", help="compare the bits only (little memory)")
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, compare, print the verdict."""
    args = parser().parse_args(argv)
    quiet_megatron()
    folder = Path(args.hf)
    if args.max_tokens < 1:
        raise UserError(f"--max-tokens {args.max_tokens}: expected at least 1")
    if not args.no_logits:
        from megatron_anchor import on_cpu

        on_cpu.enable(force=True)  # before anything of Megatron is imported
    with Files() as files:
        checkpoint = open_checkpoint(args.megatron, files, iteration=args.iteration)
        bits = compare_tensors(checkpoint, folder, files)
        settings = setting_differences(checkpoint, folder, their_rope=args.extended)
        found = None
        if not args.no_logits:
            text = TEXT if args.text is None else args.text
            if args.text_file:
                text = Path(args.text_file).read_text()
            tokens_S = text_tokens(text, folder, limit=args.max_tokens)
            found = compare_logits(
                checkpoint,
                folder,
                tokens_S,
                dtype=DTYPES[args.dtype],
                their_rope=args.extended,
            )
    passed = bits.passed and (found is None or found.passed) and not settings
    if args.json:
        logits = None if found is None else {**asdict(found), "passed": found.passed}
        say_json(
            {
                "passed": passed,
                "tensors": asdict(bits),
                "settings": settings,
                "logits": logits,
            }
        )
    else:
        _print(bits, settings, found, passed=passed)
    return 0 if passed else 1


def _print(
    bits: TensorVerdict, settings: list[str], found: LogitVerdict | None, *, passed: bool
) -> None:
    say(
        f"tensors: {bits.tensors - len(bits.different)} of {bits.tensors} equal bit by bit"
        + (" after a cast" if bits.cast else "")
    )
    for pair, count in bits.cast.items():
        say(f"  other dtype: {count} tensors are {pair}")
    for name in bits.different[:10]:
        say(f"  differs: {name}")
    for line in bits.not_finite[:10]:
        say(f"  {line}")
    for difference in settings:
        say(f"other setting: {difference}")
    if found is not None:
        say(
            f"logits on {found.tokens} tokens: largest difference {found.largest_difference:.3g} "
            f"(allowed {found.tolerance:.3g}; Hugging Face eager against its sdpa "
            f"{found.floor:.3g}; standard deviation {found.spread:.3g})"
        )
        say(f"  KL divergence {found.kl:.3g} nats, top-1 agreement {found.top1_agreement:.2%}")
    cast = " but for its dtype" if bits.cast else ""
    failed = "not the same model"
    if found is not None and math.isnan(found.largest_difference):
        many = f" ({len(bits.not_finite)} tensors have NaN or Inf)" if bits.not_finite else ""
        failed = f"logits are NaN or Inf{many}: they cannot be compared"
    say(f"PASSED: the same model{cast}" if passed else f"FAILED: {failed}")
