"""Bytes on the fullest GPU of a layout.

Weights and optimizer: bfloat16 weights (2), float32 gradients (4), and the float32 copy and two
moments of Adam (12), shared by the distributed optimizer over data- and context-parallel ranks; of
routed experts over the ranks of a stage that hold the same experts.
Activations: what a layer of this project keeps for backward in bfloat16 when attention comes from
a fused kernel and dropout is 0; the list is in `kept_by_layer`. Experts are taken to get equally
many tokens. Test: the first part equals
Megatron's own theoretical_memory_usage, the second is compared with its formula part by part.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_anchor.context_parallel.sizes import GATHER_LIMIT
from megatron_anchor.context_parallel.sizes import Memory as GatherMemory
from megatron_anchor.planner.gpus import Gpu
from megatron_anchor.planner.layout import Layout
from megatron_anchor.planner.shapes import Latent, Shape
from megatron_anchor.planner.stages import Stage, stages_of
from megatron_anchor.planner.weights import (
    Weights,
    embedding_weights,
    layer_weights,
    predictor_weights,
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


def kept_by_layer(
    shape: Shape, *, recompute: str, ulysses: int = 1, tp: int = 1, experts: bool = False
) -> float:
    """Bytes that all ranks of a tensor-parallel group keep of one token in one layer.

    Args:
        shape: of the model.
        recompute: one of `work.RECOMPUTE`.
        ulysses: ranks that exchange heads; key/value heads are repeated up to their number.
        tp: tensor-parallel size; key/value heads are repeated up to it.
        experts: whether it is a layer with experts.
    """
    stream = 2 * shape.model.hidden
    if recompute == "full":
        return stream  # the layer's input
    attention = kept_by_attention(shape, ulysses=ulysses, tp=tp)
    mlp: float = (
        2 * stream
    )  # input of the norm, input of gate and up (or of router and shared experts)
    if recompute == "none":
        mlp += _kept_inside(shape, experts=experts)
    return attention + mlp


def kept_by_attention(shape: Shape, *, ulysses: int, tp: int) -> float:
    """The part of `kept_by_layer` up to the attention's output projection."""
    model = shape.model
    groups = max(model.groups, tp * ulysses)
    query, key = 2 * model.heads * shape.query_dim, 2 * groups * shape.query_dim
    value, output = 2 * groups * shape.value_dim, 2 * model.heads * shape.value_dim
    kept = (
        4 * model.hidden  # input of the norm, input of the projections
        + query
        + key
        + value  # inputs of the kernel, rotated
        + output  # which is the output projection's input
        + (output if ulysses > 1 else 0)  # which the exchange copies
        + 4 * model.heads  # the softmax' sums, float32
    )
    if shape.latent is not None:
        return kept + 2 * _latents(shape.latent)
    # Inputs of both norms; their outputs are rotated into new tensors.
    return kept + (2 * query + 2 * key if model.qk_norm else 0)


def _latents(latent: Latent) -> int:
    """Entries of one token: latents before their norms, and after, for the projections up."""
    return 2 * ((latent.q_lora_rank or 0) + latent.kv_lora_rank)


def _kept_inside(shape: Shape, *, experts: bool) -> float:
    """Bytes of one token between the ends of an MLP: gate, up, and their product."""
    if not experts or shape.experts is None:
        return 6 * shape.ffn
    found, hidden = shape.experts, shape.model.hidden
    routed = found.per_token * (2 * hidden + 6 * found.ffn)  # and each expert's input
    return routed + 6 * found.shared_ffn + 8 * found.number  # logits and scores, float32


def memory_of(shape: Shape, layout: Layout, *, sequence_length: int, global_batch: int) -> Memory:
    """Count the fullest GPU; the last stage has the logits, the first most micro-batches."""
    micro_batches = layout.micro_batches(global_batch)
    return max(
        (
            _stage(shape, layout, stage, sequence_length, micro_batches)
            for stage in _unlike(stages_of(shape, layout.pp))
        ),
        key=lambda memory: memory.total,
    )


def _unlike(stages: list[Stage]) -> list[Stage]:
    """Leave out stages that hold what the one before holds, which has more micro-batches."""
    return [
        stage
        for before, stage in zip([None, *stages[:-1]], stages, strict=True)
        if before is None
        or stage.last
        or before.first
        or (stage.dense, stage.sparse) != (before.dense, before.sparse)
    ]


def stage_weights(shape: Shape, stage: Stage) -> Weights:
    """Parameters of a pipeline stage."""
    found = layer_weights(shape, experts=False).times(stage.dense)
    if stage.sparse:
        found += layer_weights(shape, experts=True).times(stage.sparse)
    if stage.predictors:
        found += predictor_weights(shape).times(stage.predictors)
    # Tied weights are stored twice where the first stage is not the last; so is the embedding that
    # multi-token prediction reads.
    reads = stage.first or stage.predictors > 0
    shared = reads + stage.last - (reads and stage.last and shape.model.tied)
    return found + Weights(
        sharded=shared * embedding_weights(shape), whole=stage.last * shape.model.hidden
    )


def on_rank(weights: Weights, layout: Layout) -> tuple[float, float]:
    """Parameters on one GPU: those outside of routed experts, and those inside."""
    return weights.sharded / layout.tp + weights.whole, weights.routed / layout.ep


def gathered(shape: Shape, layout: Layout, sequence_length: int) -> float:
    """Bytes of gathered keys and values by the default of --kv-gather-memory-mib."""
    if layout.keys_ranks == 1:
        return 0.0
    memory = GatherMemory(
        slots=sequence_length,
        longest=sequence_length,
        width=shape.query_dim + shape.value_dim,
        itemsize=2,
    )
    heads = max(shape.model.groups // (layout.tp * layout.heads_ranks), 1)
    every = memory.of_buffers(heads) + memory.longest * memory.of_keys(heads)
    return min(every, max(GATHER_LIMIT, memory.least()))


def _stage(
    shape: Shape, layout: Layout, stage: Stage, sequence_length: int, micro_batches: int
) -> Memory:
    plain, routed = on_rank(stage_weights(shape, stage), layout)
    share = sequence_length / layout.cp / layout.tp
    in_flight = min(micro_batches, layout.pp - stage.number)
    stream = 2 * shape.model.hidden
    activations = in_flight * _kept_by_stage(shape, layout, stage)
    if stage.last:
        activations += 2 * stream  # inputs of the last norm and of the output layer
    if stage.first:
        activations += in_flight * 8 * layout.tp  # token and position ids, not shared by ranks
    logits = LOGIT * shape.model.padded_rows * (1 + stage.predictors) if stage.last else 0.0
    working = share * _at_work(shape, layout, stage) + gathered(shape, layout, sequence_length)
    return Memory(
        weights=WEIGHT * (plain + routed),
        gradients=GRADIENT * (plain + routed),
        optimizer=OPTIMIZER * (plain / layout.optimizer_shards + routed / layout.expert_shards),
        activations=activations * share,
        working=working,
        logits=logits * share,
    )


def _kept_by_stage(shape: Shape, layout: Layout, stage: Stage) -> float:
    """Bytes of one token of one micro-batch."""
    dense, sparse = (_kept(shape, layout, layout.recompute, experts=e) for e in (False, True))
    predictor = (sparse if shape.experts else dense) + 4 * 2 * shape.model.hidden  # inputs, normed
    return stage.dense * dense + stage.sparse * sparse + stage.predictors * predictor


def _kept(shape: Shape, layout: Layout, recompute: str, *, experts: bool) -> float:
    return kept_by_layer(
        shape, recompute=recompute, ulysses=layout.heads_ranks, tp=layout.tp, experts=experts
    )


def _at_work(shape: Shape, layout: Layout, stage: Stage) -> float:
    """Bytes of one token in the layer that is at work, the widest of the stage."""
    stream, most = 2 * shape.model.hidden, 0.0
    for experts, there in ((False, stage.dense), (True, stage.sparse)):
        if not there:
            continue
        again = _kept(shape, layout, "none", experts=experts)
        again -= _kept(shape, layout, layout.recompute, experts=experts)
        # Gradients of the widest step (gate and up), of the stream, and the input that sequence
        # parallelism gathers whole on every rank.
        gradients = 4 * _width(shape, experts=experts) + 2 * stream
        gradients += stream * layout.tp if layout.tp > 1 else 0
        if experts and shape.experts is not None:
            gradients += shape.experts.per_token * stream  # of what is sent back
        most = max(most, again + gradients)
    return most


def _width(shape: Shape, *, experts: bool) -> int:
    """Width of all MLPs that a token passes in a layer."""
    if not experts or shape.experts is None:
        return shape.ffn
    return shape.experts.per_token * shape.experts.ffn + shape.experts.shared_ffn
