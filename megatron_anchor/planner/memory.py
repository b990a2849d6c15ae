"""Bytes on the fullest GPU of a layout.

Weights and optimizer: bfloat16 weights (2), float32 gradients (4), and the float32 copy and two
moments of Adam (12), shared by the distributed optimizer over data- and context-parallel ranks.
Activations: what a layer of this project keeps for backward in bfloat16 when attention comes from
a fused kernel and dropout is 0; the list is in `kept_by_layer`. Test: the first part equals
Megatron's own theoretical_memory_usage, the second is compared with its formula part by part.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_anchor.checkpoint.model import Model
from megatron_anchor.context_parallel.sizes import GATHER_LIMIT
from megatron_anchor.context_parallel.sizes import Memory as GatherMemory
from megatron_anchor.planner.gpus import Gpu
from megatron_anchor.planner.layout import Layout
from megatron_anchor.planner.work import (
    embedding_weights,
    linear_weights,
    replicated_vectors,
    sharded_vectors,
)

WEIGHT, GRADIENT, OPTIMIZER = 2, 4, 12
"""Bytes a parameter."""

LOGIT = 8
"""Bytes a logit: bfloat16 from the output layer, float32 softmax, bfloat16 gradient."""

RESERVED = 3 * (1 << 30)
"""Bytes for the CUDA context, NCCL's buffers and kernels' workspaces: an assumption."""

USABLE = 0.94
"""Share of a GPU's memory that is not lost to fragmentation: an assumption."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Kept between forward and backward, of all micro-batches in flight."""
    working: float
    """One layer at work: what is computed again, gradients, buffers of exchanges."""
    logits: float
    reserved: float = RESERVED

    @property
    def states(self) -> float:
        """Weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """The peak: a layer works while the logits are there no more, or the other way round."""
        return self.states + self.activations + max(self.working, self.logits) + self.reserved


def budget(gpu: Gpu) -> float:
    """Bytes that a plan may fill."""
    return gpu.memory_bytes * USABLE


def kept_by_layer(model: Model, *, recompute: str, ulysses: int = 1, tp: int = 1) -> float:
    """Bytes that all ranks of a tensor-parallel group keep of one token in one layer.

    Args:
        model: its shape.
        recompute: one of `work.RECOMPUTE`.
        ulysses: ranks that exchange heads; key/value heads are repeated up to their number.
        tp: tensor-parallel size; key/value heads are repeated up to it.
    """
    stream = 2 * model.hidden
    if recompute == "full":
        return stream  # the layer's input
    groups = max(model.groups, tp * ulysses)
    query, key = 2 * model.heads * model.head, 2 * groups * model.head
    attention = (
        2 * stream  # input of the norm, input of the query, key and value projections
        + query
        + 2 * key  # inputs of the kernel, rotated
        + query  # its output, which is the output projection's input
        + (query if ulysses > 1 else 0)  # which the exchange copies
        + 4 * model.heads  # the softmax' sums, float32
        + (2 * query + 2 * key if model.qk_norm else 0)  # inputs of both norms, and their outputs
    )
    mlp = 2 * stream  # input of the norm, input of gate and up
    if recompute == "none":
        mlp += 6 * model.ffn  # gate, up, and their product, which is down's input
    return attention + mlp


def memory_of(model: Model, layout: Layout, *, sequence_length: int, global_batch: int) -> Memory:
    """Count the fullest GPU: of the first pipeline stage, or of the last, which has the logits."""
    stages = {0, layout.pp - 1}
    return max(
        (
            _stage(model, layout, stage, sequence_length, layout.micro_batches(global_batch))
            for stage in stages
        ),
        key=lambda memory: memory.total,
    )


def stage_parameters(model: Model, layout: Layout, stage: int) -> float:
    """Parameters on one GPU of a pipeline stage (0 is the first)."""
    layers = model.layers / layout.pp
    shared = layers * (linear_weights(model) + sharded_vectors(model))
    whole = layers * replicated_vectors(model)
    first, last = stage == 0, stage == layout.pp - 1
    # Tied weights are stored twice where the first stage is not the last.
    shared += (first + last - (first and last and model.tied)) * embedding_weights(model)
    return shared / layout.tp + whole + last * model.hidden


def gathered(model: Model, layout: Layout, sequence_length: int) -> float:
    """Bytes of gathered keys and values by the default of --kv-gather-memory-mib."""
    if layout.keys_ranks == 1:
        return 0.0
    memory = GatherMemory(
        slots=sequence_length, longest=sequence_length, width=2 * model.head, itemsize=2
    )
    heads = max(model.groups // (layout.tp * layout.heads_ranks), 1)
    every = memory.of_buffers(heads) + memory.longest * memory.of_keys(heads)
    return min(every, max(GATHER_LIMIT, memory.least()))


def _stage(
    model: Model, layout: Layout, stage: int, sequence_length: int, micro_batches: int
) -> Memory:
    count = stage_parameters(model, layout, stage)
    tokens = sequence_length / layout.cp
    kept, everything = (
        kept_by_layer(model, recompute=recompute, ulysses=layout.heads_ranks, tp=layout.tp)
        for recompute in (layout.recompute, "none")
    )
    in_flight = min(micro_batches, layout.pp - stage)
    stream = 2 * model.hidden
    activations = in_flight * kept * model.layers / layout.pp
    if stage == layout.pp - 1:
        activations += 2 * stream  # inputs of the last norm and of the output layer
    if stage == 0:
        activations += in_flight * 8 * layout.tp  # token and position ids, not shared by ranks
    # Gradients of the widest step (gate and up), of the stream, and the input that sequence
    # parallelism gathers whole on every rank.
    gradients = 4 * model.ffn + 2 * stream + (stream * layout.tp if layout.tp > 1 else 0)
    again = everything - kept if layout.recompute != "none" else 0.0
    logits = LOGIT * model.padded_rows if stage == layout.pp - 1 else 0.0
    share = tokens / layout.tp
    return Memory(
        weights=WEIGHT * count,
        gradients=GRADIENT * count,
        optimizer=OPTIMIZER * count / layout.optimizer_shards,
        activations=activations * share,
        working=(again + gradients) * share + gathered(model, layout, sequence_length),
        logits=logits * share,
    )
