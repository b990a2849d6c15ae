"""All layouts of a question, the possible ones ranked by time, the others with their reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from megatron_anchor.context_parallel.sizes import largest_heads_ranks
from megatron_anchor.errors import UserError
from megatron_anchor.packing.patterns import attention_pattern, planned_patterns
from megatron_anchor.planner.communication import Communication, communication_of
from megatron_anchor.planner.gpus import GIB, Gpu
from megatron_anchor.planner.layout import Layout
from megatron_anchor.planner.lengths import Lengths
from megatron_anchor.planner.memory import Memory, budget, memory_of
from megatron_anchor.planner.refusals import refusals
from megatron_anchor.planner.samples import AttentionWork, Samples, attention_work, lay_out
from megatron_anchor.planner.shapes import Shape
from megatron_anchor.planner.stages import stage_sizes
from megatron_anchor.planner.step_time import (
    SECONDS_A_DAY,
    Efficiency,
    StepTime,
    days_per_billion,
    step_time,
)
from megatron_anchor.planner.work import RECOMPUTE, model_work

MOST_CP = 64

ASSUMED_SPREAD, EXPERTS_SPREAD, GIVEN_SPREAD = (1.1, 0.6), (1.1, 0.4), (1.1, 0.9)
"""What a run may reach of the efficiencies: tuned, and as it comes. Assumptions, like those: wide
where tokens crowd into few experts, narrow where the user gave the efficiencies."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A layout that can run."""

    layout: Layout
    memory: Memory
    communication: Communication
    time: StepTime
    days: float
    """For 10^9 tokens."""
    mfu: float
    """Model FLOPs utilization (arXiv 2204.02311, appendix B): operations of the model on what the
    mask leaves, nothing computed again, over what the GPUs could do in that time."""
    tokens_per_second: float
    """Of one GPU."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A layout that cannot run."""

    layout: Layout
    reasons: tuple[str, ...]
    """Each begins with its kind: heads, layers, shape, experts, alignment, batch, placement,
    kernel, memory."""


@dataclass(frozen=True)
class Question:
    """What is to be trained on what."""

    name: str
    shape: Shape
    lengths: Lengths
    gpu: Gpu
    gpus: int
    sequence_length: int
    global_batch: int = 8
    pattern: str = "anchor"
    efficiency: Efficiency | None = None
    """None: what is assumed for the GPU's generation."""

    def __post_init__(self) -> None:
        """Check sizes.

        Raises:
            UserError: for numbers below 1, or GPUs that fill no whole servers.
            UserError: for an unknown pattern.
        """
        for flag, value in (
            ("--gpus", self.gpus),
            ("--seq-length", self.sequence_length - 1),
            ("--global-batch-size", self.global_batch),
        ):
            if value < 1:
                least = 2 if flag == "--seq-length" else 1
                raise UserError(f"{flag} {value + least - 1}: expected {least} or more")
        node = self.gpu.per_node
        if self.gpus > node and self.gpus % node:
            raise UserError(
                f"--gpus {self.gpus}: servers hold {node} {self.gpu.name}; give a multiple of "
                f"{node}, such as {self.gpus // node * node}, or --gpus-per-node"
            )
        attention_pattern(self.pattern)

    @property
    def spread(self) -> tuple[float, float]:
        """How much faster and slower it may be, as factors of the efficiencies."""
        if self.efficiency is not None and self.efficiency != Efficiency.of(self.gpu):
            return GIVEN_SPREAD
        return EXPERTS_SPREAD if self.shape.experts is not None else ASSUMED_SPREAD

    @property
    def assumed(self) -> Efficiency:
        """The efficiency that times are estimated with."""
        return self.efficiency or Efficiency.of(self.gpu)

    def work(self, layout: Layout, pattern: str | None = None) -> AttentionWork:
        """Attention work of a sample under a pattern (default: the question's)."""
        split = layout.cp if layout.rings else 1
        return self._work(
            layout.document_alignment, split, layout.keys_ranks, pattern or self.pattern
        )

    @cached_property
    def _lay_out(self) -> Callable[[int], Samples]:
        @cache
        def laid_out(alignment: int) -> Samples:
            return lay_out(self.lengths, sequence_length=self.sequence_length, alignment=alignment)

        return laid_out

    @cached_property
    def _work(self) -> Callable[[int, int, int, str], AttentionWork]:
        @cache
        def counted(alignment: int, split: int, parts: int, pattern: str) -> AttentionWork:
            return attention_work(
                self._lay_out(alignment),
                sequence_length=self.sequence_length,
                pattern=pattern,
                split=split,
                parts=parts,
                windows=self.shape.windows,
            )

        return counted

    def choice(self, layout: Layout, pattern: str | None = None) -> Choice:
        """Count and estimate one layout, whether or not it fits."""
        sizes = {"sequence_length": self.sequence_length, "global_batch": self.global_batch}
        work = self.work(layout, pattern)
        time = step_time(
            self.shape,
            layout,
            gpu=self.gpu,
            efficiency=self.assumed,
            attention=work,
            **sizes,
        )
        days = days_per_billion(time, **sizes, filling=work.filling)
        useful = model_work(
            self.shape, sequence_length=self.sequence_length, pairs=work.pairs
        ).total
        could = time.total * self.gpus * self.gpu.tflops * 1e12
        return Choice(
            layout=layout,
            memory=memory_of(self.shape, layout, **sizes),
            communication=communication_of(self.shape, layout, **sizes),
            time=time,
            days=days,
            mfu=useful * self.global_batch / could,
            tokens_per_second=1e9 / (days * SECONDS_A_DAY) / self.gpus,
        )

    def saving(self, layout: Layout) -> float:
        """Share of the time of full attention that the pattern saves at the same layout."""
        return 1 - self.choice(layout).time.total / self.choice(layout, "full").time.total


@dataclass(frozen=True)
class Plan:
    """The answer."""

    question: Question
    choices: tuple[Choice, ...]
    """The fastest first; of the layouts that differ in recomputation alone, the fastest that fits.
    """
    refused: tuple[Refusal, ...]

    @property
    def best(self) -> Choice:
        """The fastest.

        Raises:
            UserError: nothing can run.
        """
        if self.choices:
            return self.choices[0]
        raise UserError(self.why_nothing())

    def why_nothing(self) -> str:
        """Say what came nearest, and what would help."""
        question, space = self.question, budget(self.question.gpu)
        head = (
            f"--gpus {question.gpus}: no layout can train {question.name} at --seq-length "
            f"{question.sequence_length} on {question.gpu.name}"
        )
        short = [r for r in self.refused if r.reasons[0].startswith("memory")]
        if not short:
            kinds = sorted({r.reasons[0] for r in self.refused})
            return f"{head}: {'; '.join(kinds[:3])}"
        needs = {r.layout: question.choice(r.layout).memory.total for r in short}
        nearest = min(needs, key=lambda layout: needs[layout])
        return (
            f"{head}: {nearest} comes nearest and needs {needs[nearest] / GIB:.1f} GiB of the "
            f"{space / GIB:.1f} that may be filled; give more GPUs, a GPU with more memory, or a "
            "shorter --seq-length"
        )


def make_plan(question: Question, *, only: Layout | None = None) -> Plan:
    """Look at every layout.

    Args:
        question: the sizes.
        only: look at this layout (its recomputation is chosen) and at no other.
    """
    choices: list[Choice] = []
    refused: list[Refusal] = []
    for layout in [only] if only else layouts(question):
        reasons = refusals(
            question.shape,
            layout,
            gpu=question.gpu,
            sequence_length=question.sequence_length,
            global_batch=question.global_batch,
        )
        if reasons:
            refused.append(Refusal(layout=layout, reasons=tuple(reasons)))
            continue
        found = _fitting(question, layout)
        if isinstance(found, Choice):
            choices.append(found)
        else:
            refused.append(found)
    return Plan(question, tuple(sorted(choices, key=lambda c: c.days)), tuple(refused))


def _fitting(question: Question, layout: Layout) -> Choice | Refusal:
    space = budget(question.gpu)
    found = [question.choice(dataclasses.replace(layout, recompute=r)) for r in RECOMPUTE]
    fitting = [choice for choice in found if choice.memory.total <= space]
    if fitting:
        return min(fitting, key=lambda choice: choice.days)
    least = min(found, key=lambda choice: choice.memory.total)
    reason = (
        f"memory: needs {least.memory.total / GIB:.1f} GiB (states {least.memory.states / GIB:.1f},"
        f" activations {least.memory.activations / GIB:.1f}) even with --recompute-granularity "
        f"{least.layout.recompute}, {space / GIB:.1f} may be filled; raise TP, PP"
        f"{', CP or EP' if question.shape.experts else ' or CP'}"
    )
    return Refusal(layout=least.layout, reasons=(reason,))


def layouts(question: Question) -> Iterator[Layout]:
    """All ways to share the GPUs out, the hopeless ones among them for their reasons.

    Besides Ulysses and the ring the kind is looked at that --cp-comm-type auto would take, where
    that is another.
    """
    gpus, shape = question.gpus, question.shape
    node = min(question.gpu.per_node, gpus)
    for tp in _powers(2 * node):
        for pp in _pipelines(shape.layers):
            for cp in _powers(MOST_CP):
                if gpus % (tp * pp * cp):
                    continue
                for ep in _expert_ranks(shape, gpus // pp):
                    layout = Layout(tp=tp, pp=pp, cp=cp, dp=gpus // (tp * pp * cp), ep=ep)
                    yield from _kinds(layout, question)


def _kinds(layout: Layout, question: Question) -> Iterator[Layout]:
    yield layout
    if layout.cp > 1:
        yield dataclasses.replace(layout, cp_comm="p2p")
        auto = automatic(layout, question.shape, question.gpu)
        if auto != layout:
            yield auto


def _pipelines(layers: int) -> list[int]:
    """Sizes that share the layers evenly; powers of two besides, where no even one does."""
    even = [pp for pp in range(1, layers + 1) if layers % pp == 0]
    if layers % 2:
        even += [pp for pp in _powers(layers) if pp > 1 and stage_sizes(layers, pp)]
    return sorted(set(even))


def _expert_ranks(shape: Shape, ranks: int) -> list[int]:
    """Sizes of expert parallelism to look at."""
    if shape.experts is None:
        return [1]
    most = min(shape.experts.number, ranks)
    return [ep for ep in _powers(most) if ranks % ep == 0]


def automatic(layout: Layout, shape: Shape, gpu: Gpu) -> Layout:
    """The layout with what --cp-comm-type auto comes to (`training.context_parallel`)."""
    model = shape.model
    A = largest_heads_ranks(
        cp_size=layout.cp,
        query_heads=max(1, model.heads // layout.tp),
        kv_heads=max(1, model.groups // layout.tp),
        ranks_per_node=max(1, gpu.per_node // layout.tp),
    )
    kind = "a2a" if layout.cp == A else "gather" if A == 1 else "a2a+gather"
    return dataclasses.replace(layout, cp_comm=kind, cp_heads=A if kind == "a2a+gather" else 0)


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length()) if 1 << n <= most]


def compare_patterns(question: Question, layout: Layout) -> dict[str, Choice]:
    """Estimate every pattern at one layout."""
    return {pattern: question.choice(layout, pattern) for pattern in planned_patterns()}
