"""--cp-comm-type: how context parallelism communicates, and with which groups.

Besides Megatron's own kinds (p2p, all_gather, a2a+p2p, which are Transformer Engine's) there are

    a2a           Ulysses: heads for slots, among all ranks
    gather        every rank gathers the keys and values of all others
    a2a+gather    Ulysses among A neighbouring ranks, gathered across B groups, A x B = P;
                  A and B from --hierarchical-context-parallel-sizes, else chosen as under auto
    auto          (the default) A is the largest divisor of P that divides the query and key/value
                  heads of a tensor-parallel rank and is not larger than the GPUs of a node

Legend: P context-parallel size, A ranks of an all-to-all, B groups that gather.
"""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_anchor.attention import ulysses
from megatron_anchor.attention.backends.request import (
    GATHER,
    TRANSFORMER_ENGINE,
    ULYSSES,
    ULYSSES_GATHER,
)
from megatron_anchor.context_parallel.sizes import largest_heads_ranks
from megatron_anchor.context_parallel.split import CHUNKS, CONTIGUOUS, ZIGZAG, SlotSplit
from megatron_anchor.training import number_rules

OURS = {"auto": None, "a2a": ULYSSES, "gather": GATHER, "a2a+gather": ULYSSES_GATHER}
"""Values of --cp-comm-type that are not Transformer Engine's, and what they mean."""

NAMES = {ULYSSES: "a2a", GATHER: "gather", ULYSSES_GATHER: "a2a+gather"}

GPUS_PER_NODE = 8
"""Where torchrun does not say how many processes a node has."""


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """Who communicates with whom."""

    kind: str
    """One of `request.CONTEXT_PARALLEL`."""
    comm_types: tuple[str, ...] = ("a2a",)
    """What --cp-comm-type comes to, `auto` replaced."""
    heads_ranks: int = 1
    """A."""
    keys_ranks: int = 1
    """B."""

    @property
    def split(self) -> SlotSplit:
        """How the slots of a sample are spread over the ranks."""
        P = self.heads_ranks * self.keys_ranks
        if self.kind == TRANSFORMER_ENGINE:
            return SlotSplit(cp_size=P, kind=ZIGZAG)
        if self.keys_ranks > 1:
            return SlotSplit(cp_size=P, kind=CHUNKS, parts=self.keys_ranks)
        return SlotSplit(cp_size=P, kind=CONTIGUOUS)

    def explain(self) -> str:
        """One line for the log."""
        A, B = self.heads_ranks, self.keys_ranks
        how = {
            ULYSSES: f"Ulysses among {A} ranks",
            GATHER: f"keys and values gathered among {B} ranks",
            ULYSSES_GATHER: f"Ulysses among {A} neighbouring ranks, keys and values gathered "
            f"across {B} groups",
            TRANSFORMER_ENGINE: "by Transformer Engine",
        }
        return f"context parallelism: {how[self.kind]}"


def context_parallel(args: Namespace) -> ContextParallel:
    """Resolve --cp-comm-type, --hierarchical-context-parallel-sizes and --anchor-context-parallel.

    Args:
        args: Megatron's namespace, with a shape that `refusals` lets pass.
    """
    P, kinds = args.context_parallel_size, set(args.cp_comm_type)
    if P == 1:
        return ContextParallel(kind=ULYSSES)
    foreign = not kinds <= set(OURS)
    if args.anchor_context_parallel == "te" or (foreign and args.anchor_context_parallel == "auto"):
        # Of ours, Transformer Engine has Ulysses.
        own = tuple("a2a" if kind == "auto" else kind for kind in args.cp_comm_type)
        return ContextParallel(kind=TRANSFORMER_ENGINE, comm_types=own, heads_ranks=P)
    kind = "a2a" if foreign or args.anchor_context_parallel == "ulysses" else min(kinds)
    A = {"a2a": P, "gather": 1}.get(kind)
    if A is None:
        sizes = args.hierarchical_context_parallel_sizes
        A = sizes[0] if sizes else _heads_ranks(args)
    resolved = ULYSSES if P == A else GATHER if A == 1 else ULYSSES_GATHER
    own = tuple(args.cp_comm_type) if foreign else (NAMES[resolved],)
    return ContextParallel(kind=resolved, comm_types=own, heads_ranks=A, keys_ranks=P // A)


def resolve(args: Namespace) -> None:
    """Write what `auto` comes to into the arguments, for Megatron makes groups from them."""
    if next(number_rules.refusals(args), None) or next(refusals(args), None):
        return
    found = context_parallel(args)
    args.cp_comm_type = list(found.comm_types)
    if found.kind == ULYSSES_GATHER:
        args.hierarchical_context_parallel_sizes = [found.heads_ranks, found.keys_ranks]
    elif found.kind != TRANSFORMER_ENGINE:
        args.hierarchical_context_parallel_sizes = None


def _heads_ranks(args: Namespace) -> int:
    """A of `auto`."""
    P, (query_heads, kv_heads) = args.context_parallel_size, _heads(args)
    whole = (
        ulysses.unsupported_reason(query_heads=query_heads, kv_heads=kv_heads, cp_size=P) is None
    )
    if whole and args.anchor_attention_backend == "te":
        return P  # Transformer Engine's kernel takes whole documents only
    node = int(os.environ.get("LOCAL_WORLD_SIZE", GPUS_PER_NODE))
    return largest_heads_ranks(
        cp_size=P,
        query_heads=query_heads,
        kv_heads=kv_heads,
        # Tensor-parallel ranks are neighbours; context-parallel ones come next.
        ranks_per_node=max(1, node // args.tensor_model_parallel_size),
    )


def _heads(args: Namespace) -> tuple[int, int]:
    """Query and key/value heads of a tensor-parallel rank."""
    tp, heads = args.tensor_model_parallel_size, args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else heads
    return max(1, heads // tp), max(1, groups // tp)


def refusals(args: Namespace) -> Iterator[str]:
    """Say why the ranks cannot share the work as asked."""
    kinds, layers = args.cp_comm_type, args.num_layers
    if layers is not None and len(kinds) not in (1, layers):
        yield (
            f"--cp-comm-type {' '.join(kinds)}: {len(kinds)} kinds for {layers} layers; give one "
            "for all of them, or one per layer (--num-layers)"
        )
    from megatron_anchor.attention.backends.te_rules import FIRST_VERSION

    known = dict.fromkeys([*OURS, *FIRST_VERSION])
    for kind in dict.fromkeys(kinds):
        if kind not in known:
            yield (
                f"unknown --cp-comm-type {kind!r}: expected one of {', '.join(known)}"
                + ("; write it all_gather" if kind == "allgather" else "")
            )
    own = set(kinds) & set(OURS)
    if len(set(kinds)) > 1 and own - {"a2a"}:
        yield (
            f"--cp-comm-type {' '.join(kinds)}: {min(own - {'a2a'})} is for all layers alike, "
            "since it decides which rank holds which slots; give it alone"
        )
        return
    yield from _contradictions(args)
    yield from _size_refusals(args)


def _contradictions(args: Namespace) -> Iterator[str]:
    """Say which of two flags would decide against the other."""
    kinds, sizes = set(args.cp_comm_type), args.hierarchical_context_parallel_sizes
    if args.context_parallel_size == 1:
        if sizes and math.prod(sizes) != 1:
            yield (
                f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))}: there is "
                "--context-parallel-size 1; set it to the product of the two, or leave them out"
            )
        return
    gathered = kinds & {"gather", "a2a+gather"}
    if gathered and args.anchor_context_parallel != "auto":
        yield (
            f"--cp-comm-type {min(gathered)} and --anchor-context-parallel "
            f"{args.anchor_context_parallel} ask for two kinds; leave one of them out"
        )
    if sizes and kinds & {"gather", "a2a"}:
        yield (
            f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))} are for "
            f"--cp-comm-type a2a+gather (and Transformer Engine's a2a+p2p), got "
            f"{' '.join(args.cp_comm_type)}; leave one of them out"
        )


def _size_refusals(args: Namespace) -> Iterator[str]:
    sizes, P = args.hierarchical_context_parallel_sizes, args.context_parallel_size
    if not sizes or P == 1 or not set(args.cp_comm_type) <= {"auto", "a2a+gather"}:
        return
    if len(sizes) != 2 or sizes[0] * sizes[1] != P:
        yield (
            f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))}: expected two "
            f"numbers A B with A x B = --context-parallel-size {P}: Ulysses among A ranks, keys "
            "and values gathered across B groups"
        )
