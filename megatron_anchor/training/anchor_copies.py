"""What makes the copies of the anchor differ from one another, said once at start.

Copies stand for one anchor because each has the same hidden state in every layer. Some settings of
Megatron treat slots differently at random or by their number; with them the model still trains, but
it is not exactly the one with a shared anchor.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron_anchor.packing.patterns import attention_pattern


def warnings(args: Namespace) -> list[str]:
    """Collect what is not exact in this run.

    Args:
        args: Megatron's namespace with our flags.
    """
    found = list(_random(args)) if attention_pattern(args.attention_pattern).one_anchor else []
    if args.num_experts and args.moe_expert_capacity_factor is not None:
        found.append(
            f"--moe-expert-capacity-factor {args.moe_expert_capacity_factor}: padding and copies "
            "of the anchor take places in full experts too, and some copies are dropped while "
            "others are not; leave it out to keep every token"
        )
    return found


def _random(args: Namespace) -> Iterator[str]:
    unequal = "it differs between the copies of the anchor, which then are not one token any more"
    for name in ("hidden_dropout", "attention_dropout"):
        if value := getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            yield f"{flag} {value:g}: {unequal}; set {flag} 0"
    if not args.num_experts:
        return
    if args.moe_input_jitter_eps is not None:
        yield f"--moe-input-jitter-eps {args.moe_input_jitter_eps:g}: {unequal}; leave it out"
    for name in ("moe_router_force_load_balancing", "moe_router_force_biased"):
        if getattr(args, name):
            yield (
                f"--{name.replace('_', '-')} routes at random, for measurements of speed: {unequal}"
            )
