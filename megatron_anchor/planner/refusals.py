"""Why a layout cannot run, before its memory is counted.

The rules are those of megatron_anchor.training.validation, which needs torch, and of Megatron's
layers; a test holds both against each other.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_anchor.planner.gpus import Gpu
from megatron_anchor.planner.layout import Layout
from megatron_anchor.planner.shapes import Shape
from megatron_anchor.planner.stages import stage_sizes


def refusals(
    shape: Shape, layout: Layout, *, gpu: Gpu, sequence_length: int, global_batch: int
) -> list[str]:
    """All reasons, each as `kind: what, and the remedy`; empty when all is well."""
    return [
        *_heads(shape, layout),
        *_shapes(shape, layout),
        *_experts(shape, layout),
        *_alignment(layout, sequence_length),
        *_batch(layout, global_batch),
        *_placement(layout, gpu),
        *_kernel(shape, layout, gpu),
    ]


def _heads(shape: Shape, layout: Layout) -> Iterator[str]:
    model, tp, cp = shape.model, layout.tp, layout.cp
    if model.heads % tp:
        yield f"heads: {model.heads} query heads cannot be shared by TP {tp}; use a divisor of them"
        return
    if model.groups % tp and tp % model.groups:
        yield (
            f"heads: {model.groups} key/value heads and TP {tp}: one must be a multiple of the "
            "other; use another TP"
        )
        return
    A = layout.heads_ranks
    if cp == 1 or A == 1:
        return
    heads, groups = model.heads // tp, max(1, model.groups // tp)
    if heads % A:
        yield (
            f"heads: {heads} query heads per TP rank cannot be shared by {A} ranks under Ulysses; "
            "use a smaller CP or TP, or --cp-comm-type gather"
        )
    elif groups % A and A % groups:
        yield (
            f"heads: {groups} key/value heads per TP rank and {A} ranks under Ulysses: one must be "
            "a multiple of the other; use another CP, or --cp-comm-type gather"
        )


def _shapes(shape: Shape, layout: Layout) -> Iterator[str]:
    model = shape.model
    if stage_sizes(model.layers, layout.pp) is None:
        yield (
            f"layers: {model.layers} layers leave none for the last of PP {layout.pp} stages; use "
            "a divisor"
        )
    sizes = [("the padded vocabulary", model.padded_rows)]
    if shape.dense_layers:
        sizes.insert(0, ("the MLP's width", shape.ffn))
    if shape.experts is not None and shape.experts.shared_ffn:
        sizes.append(("the shared experts' width", shape.experts.shared_ffn))
    for what, size in sizes:
        if size % layout.tp:
            yield f"shape: {what} {size} cannot be shared by TP {layout.tp}; use another TP"


def _experts(shape: Shape, layout: Layout) -> Iterator[str]:
    ep = layout.ep
    if shape.experts is None:
        if ep > 1:
            yield f"experts: EP {ep} is for models with experts; use EP 1"
        return
    if shape.experts.number % ep:
        yield (
            f"experts: {shape.experts.number} experts cannot be shared by EP {ep}; use a divisor "
            "of them"
        )
    if layout.expert_ranks % ep:
        yield (
            f"experts: EP {ep} does not divide TP x CP x DP = {layout.expert_ranks}; use a divisor "
            "of that"
        )


def _alignment(layout: Layout, sequence_length: int) -> Iterator[str]:
    pieces = layout.cp * layout.tp
    unit = 2 * pieces if layout.cp > 1 else pieces
    if sequence_length % unit:
        lower = sequence_length // unit * unit
        yield (
            f"alignment: --seq-length {sequence_length} is no multiple of {unit} (CP {layout.cp}"
            + (" x 2" if layout.cp > 1 else "")
            + f" x TP {layout.tp}); "
            + (f"the next lower one is {lower}" if lower else "use fewer ranks")
        )


def _batch(layout: Layout, global_batch: int) -> Iterator[str]:
    if global_batch % layout.dp:
        yield (
            f"batch: a global batch of {global_batch} cannot be shared by {layout.dp} "
            "data-parallel ranks; raise TP, PP or CP, or set --global-batch-size to a multiple of "
            f"{layout.dp}"
        )


def _placement(layout: Layout, gpu: Gpu) -> Iterator[str]:
    if layout.tp > gpu.per_node:
        yield (
            f"placement: TP {layout.tp} would reach beyond a server of {gpu.per_node} GPUs, where "
            "its traffic is too slow; use TP up to that, and PP or CP"
        )


def _kernel(shape: Shape, layout: Layout, gpu: Gpu) -> Iterator[str]:
    """Transformer Engine's kernels (training/validation asks attention/backends/te_rules)."""
    if not layout.rings:
        return
    for what, there in (
        ("multi-latent attention", shape.latent is not None),
        ("sliding windows", shape.window is not None and any(shape.windowed)),
        ("attention sinks", shape.sinks),
    ):
        if there:
            yield (
                f"kernel: --cp-comm-type p2p is not for {what}; use a2a (Ulysses), gather or "
                "a2a+gather"
            )
            return
    model = shape.model
    largest = 256 if gpu.capability < (10, 0) else 128
    if model.head > largest or model.head % 8:
        yield (
            f"kernel: --cp-comm-type p2p on {gpu.name} takes head dimensions up to {largest} that "
            f"are multiples of 8, got {model.head}; use Ulysses (--cp-comm-type a2a)"
        )
