"""Megatron-FSDP and overlapped expert communication: what is refused beside them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron_anchor import compat


def refusals(args: Namespace) -> Iterator[str]:
    """Say which arguments do not go with --use-megatron-fsdp or overlapped experts."""
    if args.use_megatron_fsdp:
        yield from _sharded_weights(args)
    if args.overlap_moe_expert_parallel_comm and args.mtp_num_layers:
        yield (
            "--overlap-moe-expert-parallel-comm with --mtp-num-layers: Megatron's schedule would "
            "run layers of multi-token prediction without the tokens of their depths; leave out "
            "one of the two"
        )


def _sharded_weights(args: Namespace) -> Iterator[str]:
    flag = "--use-megatron-fsdp"
    if args.ckpt_format != "fsdp_dtensor":
        yield f"{flag}: Megatron saves such a run with --ckpt-format fsdp_dtensor only; pass that"
    if args.save and not compat.have_transformer_engine():
        yield (
            f"{flag} with --save {args.save}: with torch's Adam, ranks of Megatron 0.19.2 wait for "
            "each other without end when they save; install Transformer Engine, or use "
            "--use-distributed-optimizer without --use-megatron-fsdp"
        )
