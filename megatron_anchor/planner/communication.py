"""Bytes that a GPU sends in one step, by the group that it sends them in.

Collectives as rings: of a buffer of n bytes a rank sends n (P - 1) / P in an all-gather, a
reduce-scatter or an all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_anchor.context_parallel.sizes import Sent, elements_sent
from megatron_anchor.planner.layout import Layout
from megatron_anchor.planner.memory import GRADIENT, WEIGHT, on_rank, stage_weights
from megatron_anchor.planner.shapes import Shape
from megatron_anchor.planner.stages import stages_of

TP_FORWARD, TP_BACKWARD = 4, 6
"""Collectives of the whole stream in a layer under sequence parallelism: around attention and MLP a
gather and a scatter each; backward the same, and the gathered inputs once more for the weights'
gradients (arXiv 2205.05198, section 4.2.2)."""


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Bytes that one GPU sends in a step."""

    tensor: float
    """Sequence-parallel gathers and scatters."""
    heads: float
    """All-to-all of Ulysses."""
    keys: float
    """Keys and values, gathered or around a ring, and their gradients."""
    experts: float
    """Tokens to their experts and back, and their gradients."""
    pipeline: float
    """Activations and their gradients, from stage to stage."""
    data: float
    """Gradients to the optimizer's shards (float32), weights back (bfloat16)."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.tensor + self.heads + self.keys + self.experts + self.pipeline + self.data


def communication_of(
    shape: Shape, layout: Layout, *, sequence_length: int, global_batch: int
) -> Communication:
    """Count one GPU of the first stage, as if layers with experts were spread evenly."""
    stages, micro_batches = stages_of(shape, layout.pp), layout.micro_batches(global_batch)
    layers = stages[0].layers
    sparse = layers * (shape.layers - shape.dense_layers) / shape.layers
    tokens = sequence_length / layout.cp
    stream = 2 * shape.model.hidden * tokens
    context = _context(shape, layout, tokens)
    plain, routed = on_rank(stage_weights(shape, stages[0]), layout)
    passes = layers * _stream_passes(layout, mlp=True)
    if shape.experts is not None and not shape.experts.shared_ffn:
        # Tokens go to their experts from where they are.
        passes -= sparse * (_stream_passes(layout, mlp=True) - _stream_passes(layout, mlp=False))
    return Communication(
        tensor=micro_batches * passes * stream * _sent(layout.tp),
        heads=micro_batches * layers * context.heads,
        keys=micro_batches * layers * context.keys,
        experts=micro_batches * sparse * _experts(shape, layout, tokens),
        pipeline=micro_batches * 2 * stream / layout.tp if layout.pp > 1 else 0.0,
        data=(GRADIENT + WEIGHT)
        * (plain * _sent(layout.optimizer_shards) + routed * _sent(layout.expert_shards)),
    )


def _sent(ranks: int) -> float:
    return (ranks - 1) / ranks


def _stream_passes(layout: Layout, *, mlp: bool) -> float:
    """Collectives of the whole stream in a layer, around attention alone or around the MLP too."""
    both = TP_FORWARD + TP_BACKWARD
    if not mlp:
        return both / 2 + (TP_FORWARD / 2 if layout.recompute == "full" else 0)
    return both + {"none": 0, "mlp": TP_FORWARD // 2, "full": TP_FORWARD}[layout.recompute]


def _experts(shape: Shape, layout: Layout, tokens: float) -> float:
    """Bytes of one layer and micro-batch: each token once for every expert that it chose."""
    if shape.experts is None:
        return 0.0
    copies = 2 * shape.model.hidden * shape.experts.per_token * tokens / layout.tp
    there_and_back = 2 * copies * _sent(layout.ep)
    return there_and_back * (2 + (layout.recompute != "none"))


def _context(shape: Shape, layout: Layout, tokens: float) -> Sent:
    """Bytes of one layer and micro-batch, forward and backward (and forward again)."""
    again = layout.recompute == "full"
    heads, groups = shape.model.heads / layout.tp, max(shape.model.groups / layout.tp, 1)
    if layout.rings:
        # Keys and values go round once forward; backward they do so with their gradients.
        both = shape.query_dim + shape.value_dim
        ring = 2 * groups * both * tokens * (layout.cp - 1)
        return Sent(heads=0.0, keys=ring * (3 + again))
    forward = elements_sent(
        slots=tokens,
        query_heads=heads,
        kv_heads=groups,
        head_dim=shape.query_dim,
        value_dim=shape.value_dim,
        heads_ranks=layout.heads_ranks,
        keys_ranks=layout.keys_ranks,
    )
    # Backward keys and values are gathered again, and their gradients summed in float32.
    return Sent(heads=2 * forward.heads * (2 + again), keys=2 * forward.keys * (4 + again))
