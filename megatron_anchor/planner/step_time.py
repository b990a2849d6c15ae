"""Seconds of a training step, from counted work and stated assumptions about efficiency.

    stage  = linear work / (linear efficiency x peak) + attention work / (attention efficiency x
             peak) + bytes sent for tensor, context and expert parallelism / (link efficiency x
             bandwidth), of the stage with most work
    step   = stage x (micro-batches + pipeline stages - 1) x imbalance + what of the gradients'
             exchange is not hidden behind the last micro-batch's computation

Attention work is counted in whole tiles of 128 x 128. A group of ranks that fits in a server uses
NVLink, any other the network. Nothing here was measured on a GPU; ratios of patterns at the same
layout depend on the assumptions much less than days do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_anchor.planner.communication import communication_of
from megatron_anchor.planner.gpus import Gpu
from megatron_anchor.planner.layout import Layout
from megatron_anchor.planner.samples import AttentionWork
from megatron_anchor.planner.shapes import Shape
from megatron_anchor.planner.stages import Stage, stages_of
from megatron_anchor.planner.work import Work, stage_work

SECONDS_A_DAY = 86400

EXPERTS_SHARE = 0.7
"""Efficiency of routed experts over that of other matrix products: an assumption."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Assumptions; shares of the maker's peak, 0 to 1."""

    linear: float
    """Matrix products together with norms, activations, the rotation and the optimizer."""
    attention: float
    """A fused variable-length kernel, forward and backward."""
    link: float = 0.75
    """NVLink and network, of the bandwidth in one direction."""
    experts: float | None = None
    """Matrix products of routed experts, which are small and uneven; None: 0.7 x linear."""

    @property
    def of_experts(self) -> float:
        """What `experts` comes to."""
        return EXPERTS_SHARE * self.linear if self.experts is None else self.experts

    @classmethod
    def of(cls, gpu: Gpu) -> Efficiency:
        """What we assume for a generation: newer tensor cores are harder to keep busy."""
        if gpu.capability < (9, 0):
            return cls(linear=0.60, attention=0.55)
        return cls(linear=0.50, attention=0.50)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step."""

    linear: float
    attention: float
    communication: float
    """What is not hidden behind computation."""
    waiting: float
    """The pipeline's bubble, and the wait for the rank with the most attention work."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.linear + self.attention + self.communication + self.waiting


def days_per_billion(
    time: StepTime, *, sequence_length: int, global_batch: int, filling: float = 0.0
) -> float:
    """Days that 10^9 tokens take, anchors counted as tokens and filling not."""
    tokens = sequence_length * global_batch * (1 - filling)
    return 1e9 / tokens * time.total / SECONDS_A_DAY


def step_time(
    shape: Shape,
    layout: Layout,
    *,
    gpu: Gpu,
    efficiency: Efficiency,
    attention: AttentionWork,
    sequence_length: int,
    global_batch: int,
) -> StepTime:
    """Estimate a step.

    Args:
        shape: of the model.
        layout: how it is shared out.
        gpu: what computes and sends.
        efficiency: assumptions.
        attention: the documents' pairs, for this layout's way to split them.
        sequence_length: S.
        global_batch: samples of a step.
    """
    micro_batches = layout.micro_batches(global_batch)
    linear, kernel = max(
        (
            _seconds(work, layout, gpu, efficiency)
            for work in _works(shape, layout, attention, sequence_length)
        ),
        key=sum,
    )
    sent = communication_of(
        shape, layout, sequence_length=sequence_length, global_batch=global_batch
    )
    bandwidth = _Bandwidth(gpu, layout, efficiency.link)
    tensor = sent.tensor / micro_batches / bandwidth.of(layout.tp)
    keys = sent.keys / micro_batches / bandwidth.of(layout.tp * layout.cp)
    if layout.rings:  # the next keys travel while a chunk is computed
        keys = max(0.0, keys - kernel)
    heads = sent.heads / micro_batches / bandwidth.of(layout.tp * layout.heads_ranks)
    experts = sent.experts / micro_batches / bandwidth.of(layout.ep)
    context = heads + keys + experts
    pipeline = sent.pipeline / micro_batches / bandwidth.of(layout.gpus)
    busy = linear + kernel + tensor + context + pipeline
    exchange = sent.data / bandwidth.of(layout.gpus // layout.pp)
    late = expected_excess(attention, ranks=layout.dp, samples=micro_batches) * kernel
    return StepTime(
        linear=linear * micro_batches,
        attention=kernel * micro_batches,
        communication=(tensor + context + pipeline) * micro_batches + max(0.0, exchange - busy),
        waiting=(layout.pp - 1) * busy + late * micro_batches,
    )


def _works(
    shape: Shape, layout: Layout, attention: AttentionWork, sequence_length: int
) -> Iterator[Work]:
    """The work of each stage that may have most: the first, one without dense layers, the last."""
    stages = stages_of(shape, layout.pp)
    for stage in {stages[0], stages[-1], max(stages[: layout.pp - 1] or stages, key=_sparse)}:
        yield stage_work(
            shape,
            stage,
            sequence_length=sequence_length,
            pairs=attention.tile_pairs,
            recompute=layout.recompute,
        )


def _sparse(stage: Stage) -> int:
    return stage.sparse


def _seconds(work: Work, layout: Layout, gpu: Gpu, efficiency: Efficiency) -> tuple[float, float]:
    """Matrix products and attention of one micro-batch on one GPU of a stage."""
    speed = gpu.tflops * 1e12 * layout.tp * layout.cp
    products = work.linear / efficiency.linear + work.experts / efficiency.of_experts
    return products / speed, work.attention / efficiency.attention / speed


@dataclass(frozen=True)
class _Bandwidth:
    """Bytes a second of one GPU in a group of ranks, numbered as Megatron does: tp-cp-dp-pp."""

    gpu: Gpu
    layout: Layout
    efficiency: float

    def of(self, ranks: int) -> float:
        inside = ranks <= self.gpu.per_node
        return (self.gpu.nvlink if inside else self.gpu.network) * 1e9 * self.efficiency


def expected_excess(attention: AttentionWork, *, ranks: int, samples: int) -> float:
    """How much more attention work the heaviest of all ranks has than their mean, as a share.

    The sums of `samples` samples are taken as normal; the largest of n such is about
    sqrt(2 ln n) standard deviations above the mean.
    """
    if ranks == 1:
        return 0.0
    return float(attention.imbalance / np.sqrt(samples) * np.sqrt(2 * np.log(ranks)))
