"""Bytes that a GPU sends in one step, by the group that it sends them in.

Collectives as rings: of a buffer of n bytes a rank sends n (P - 1) / P in an all-gather, a
reduce-scatter or an all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_anchor.checkpoint.model import Model
from megatron_anchor.context_parallel.sizes import Sent, elements_sent
from megatron_anchor.planner.layout import Layout
from megatron_anchor.planner.memory import GRADIENT, WEIGHT, stage_parameters

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
    pipeline: float
    """Activations and their gradients, from stage to stage."""
    data: float
    """Gradients to the optimizer's shards (float32), weights back (bfloat16)."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.tensor + self.heads + self.keys + self.pipeline + self.data


def communication_of(
    model: Model, layout: Layout, *, sequence_length: int, global_batch: int
) -> Communication:
    """Count one GPU of a middle stage."""
    layers, micro_batches = model.layers / layout.pp, layout.micro_batches(global_batch)
    tokens = sequence_length / layout.cp
    stream = 2 * model.hidden * tokens
    passes = TP_FORWARD + TP_BACKWARD
    if layout.recompute == "full":
        passes += TP_FORWARD
    elif layout.recompute == "mlp":
        passes += TP_FORWARD // 2
    context = _context(model, layout, tokens)
    shards, count = layout.optimizer_shards, stage_parameters(model, layout, 0)
    return Communication(
        tensor=micro_batches * layers * passes * stream * _sent(layout.tp),
        heads=micro_batches * layers * context.heads,
        keys=micro_batches * layers * context.keys,
        pipeline=micro_batches * 2 * stream / layout.tp if layout.pp > 1 else 0.0,
        data=(GRADIENT + WEIGHT) * count * _sent(shards),
    )


def _sent(ranks: int) -> float:
    return (ranks - 1) / ranks


def _context(model: Model, layout: Layout, tokens: float) -> Sent:
    """Bytes of one layer and micro-batch, forward and backward (and forward again)."""
    again = layout.recompute == "full"
    heads, groups = model.heads / layout.tp, max(model.groups / layout.tp, 1)
    if layout.rings:
        # Keys and values go round once forward; backward they do so with their gradients.
        ring = 2 * 2 * groups * model.head * tokens * (layout.cp - 1)
        return Sent(heads=0.0, keys=ring * (3 + again))
    forward = elements_sent(
        slots=tokens,
        query_heads=heads,
        kv_heads=groups,
        head_dim=model.head,
        heads_ranks=layout.heads_ranks,
        keys_ranks=layout.keys_ranks,
    )
    # Backward keys and values are gathered again, and their gradients summed in float32.
    return Sent(heads=2 * forward.heads * (2 + again), keys=2 * forward.keys * (4 + again))
