"""What `--log-max-attention-logit` and `--qk-clip` ask for, and where they cannot be had."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron_anchor.attention.backends.request import ULYSSES
from megatron_anchor.training.context_parallel import context_parallel
from megatron_anchor.training.context_parallel import refusals as context_refusals

FLAGS = {"qk_clip": "--qk-clip", "log_max_attention_logit": "--log-max-attention-logit"}


def refusals(args: Namespace) -> Iterator[str]:
    """Say under which arguments the largest logit of a head is not known."""
    flags = [flag for name, flag in FLAGS.items() if getattr(args, name)]
    if not flags:
        return
    asked = " and ".join(flags)
    if not (args.bf16 or args.fp16):
        yield f"{asked}: Megatron finds the layers of --bf16 and --fp16 models only; add --bf16"
    if args.context_parallel_size > 1 and next(context_refusals(args), None) is None:
        kind = context_parallel(args).kind
        if kind != ULYSSES:
            yield (
                f"{asked} under this context parallelism: no rank sees a whole document of its "
                "heads; pass --cp-comm-type a2a --anchor-context-parallel ulysses"
            )
    if args.qk_clip:
        yield from _numbers_of_clipping(args)


def _numbers_of_clipping(args: Namespace) -> Iterator[str]:
    if not 0 < args.qk_clip_alpha < 1:
        yield f"--qk-clip-alpha {args.qk_clip_alpha}: expected a number between 0 and 1"
    if not args.qk_clip_threshold > 0:
        yield f"--qk-clip-threshold {args.qk_clip_threshold}: expected a number above 0"
