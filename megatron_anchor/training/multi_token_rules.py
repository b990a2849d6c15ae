"""Multi-token prediction (--mtp-num-layers): what is refused."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_anchor.packing.patterns import attention_patterns


def refusals(args: Namespace) -> Iterator[str]:
    """Say which arguments do not go with --mtp-num-layers."""
    depths = args.mtp_num_layers
    if not depths:
        return
    flag = f"--mtp-num-layers {depths}"
    if depths < 0:
        yield f"{flag}: expected 1 or more, or none"
        return
    if reason := _pattern(args.attention_pattern):
        yield (
            f"{flag} with --attention-pattern {args.attention_pattern}: {reason}; use anchor or "
            "intra-document"
        )
    yield from _recomputation(args, flag)
    yield from _unequal_layers(args, flag)
    yield from _pipeline(args, flag)


def _pattern(name: str) -> str:
    """Why the segments of a pattern cannot have further targets; "" = they can."""
    known = {pattern.name: pattern for pattern in attention_patterns()}
    if name not in known or known[name].has_whole_documents:
        return ""
    if known[name].masks_documents:
        return "copies of the anchor are segments of their own, which hold no further token"
    return "documents see each other, and tokens of the next one would be targets of this one"


def _recomputation(args: Namespace, flag: str) -> Iterator[str]:
    if args.recompute_granularity != "full":
        return
    if args.recompute_method == "block":
        yield (
            f"{flag} with --recompute-method block: Megatron would not recompute these layers; use "
            "uniform"
        )
    elif args.recompute_num_layers not in (None, 1):
        yield (
            f"{flag} with --recompute-num-layers {args.recompute_num_layers}: Megatron recomputes "
            "these layers one by one only; use 1"
        )


def _unequal_layers(args: Namespace, flag: str) -> Iterator[str]:
    """Megatron numbers these layers from 1, and would give them what the model's first have."""
    for name in ("no_rope_freq", "window_attn_skip_freq"):
        frequency: Any = getattr(args, name)
        listed = frequency if isinstance(frequency, list) else [frequency]
        unequal = len(set(map(bool, listed))) > 1 or (listed[0] or 0) > 1
        if unequal:
            yield (
                f"{flag} with --{name.replace('_', '-')}: Megatron does not say which of the "
                "layers' attention these further ones have; leave out one of the two"
            )


def _pipeline(args: Namespace, flag: str) -> Iterator[str]:
    layout = args.pipeline_model_parallel_layout
    if layout is None:
        return
    if isinstance(layout, str):
        try:
            last = PipelineParallelLayerLayout.parse_str_to_list(layout)[-1]
        except AssertionError:  # Megatron's own validation says more
            return
    else:
        last = layout.layout[-1][-1]
    if LayerType.mtp not in last:
        yield (
            f"{flag} with --pipeline-model-parallel-layout: its layers (m) must be on the last "
            "stage, where the loss (L) is: end the layout with as many m as there are, then L"
        )
