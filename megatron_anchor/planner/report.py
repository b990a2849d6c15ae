"""A plan for people, and for programs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from typing import Any

from megatron_anchor.planner.gpus import GIB
from megatron_anchor.planner.launch import launch_command, notes
from megatron_anchor.planner.memory import budget
from megatron_anchor.planner.plan import Choice, Plan, Question, compare_patterns
from megatron_anchor.planner.published import compare_with_paper
from megatron_anchor.planner.weights import active_parameters, parameters
from megatron_anchor.planner.work import ATTENTION_BACKWARD, LINEAR_BACKWARD, model_work
from megatron_anchor.terminal import escaped

KINDS = (
    *("heads", "layers", "shape", "experts", "alignment", "batch", "placement", "kernel"),
    "memory",
)


def work_of(question: Question, choice: Choice, pattern: str) -> dict[str, float]:
    """Operations of one token, forward and backward without recomputation, and attention's share.

    Keys: parameter_flops, attention_flops, documents_per_sample, attention_work_share.
    """
    work = question.work(choice.layout, pattern)
    full = question.work(choice.layout, "full")
    length = question.sequence_length
    whole = model_work(question.shape, sequence_length=length, pairs=work.pairs)
    kernel = (1 + ATTENTION_BACKWARD) / (1 + LINEAR_BACKWARD)  # which computes the scores again
    return {
        "parameter_flops": (whole.linear + whole.experts) / length,
        "attention_flops": whole.attention * kernel / length,
        "documents_per_sample": work.documents,
        "attention_work_share": work.pairs / full.pairs,
    }


def as_json(plan: Plan, *, tokens: float) -> dict[str, Any]:
    """Everything, as JSON's types; bytes, seconds, operations."""
    question = plan.question
    answer: dict[str, Any] = {
        "model": question.name,
        "parameters": parameters(question.shape),
        "active_parameters": active_parameters(question.shape),
        "lengths": question.lengths.name,
        "gpu": asdict(question.gpu),
        "gpus": question.gpus,
        "sequence_length": question.sequence_length,
        "global_batch": question.global_batch,
        "pattern": question.pattern,
        "efficiency": asdict(question.assumed),
        "memory_budget": budget(question.gpu),
        "layouts": [_choice(question, choice) for choice in plan.choices],
        "refused": [{"layout": str(r.layout), "reasons": r.reasons} for r in plan.refused],
    }
    if plan.choices:
        best = plan.best
        answer |= {
            "patterns": {
                name: work_of(question, best, name)
                | {
                    "step_seconds": found.time.total,
                    "days_per_billion_tokens": found.days,
                    "days_range": days_range(question, found),
                    "mfu": found.mfu,
                    "tokens_per_second_per_gpu": found.tokens_per_second,
                }
                for name, found in compare_patterns(question, best.layout).items()
            },
            "saving": question.saving(best.layout),
            "command": launch_command(question, best.layout, tokens=tokens),
            "notes": notes(question, best.layout),
        }
    return answer


def days_range(question: Question, choice: Choice) -> tuple[float, float]:
    """Days for 10^9 tokens if the run is as fast and as slow as `Question.spread` allows."""
    fast, slow = question.spread
    return choice.days / fast, choice.days / slow


def _choice(question: Question, choice: Choice) -> dict[str, Any]:
    return {
        "layout": asdict(choice.layout),
        "memory": asdict(choice.memory) | {"total": choice.memory.total},
        "communication": asdict(choice.communication) | {"total": choice.communication.total},
        "seconds": asdict(choice.time) | {"total": choice.time.total},
        "days_per_billion_tokens": choice.days,
        "days_range": days_range(question, choice),
        "mfu": choice.mfu,
        "tokens_per_second_per_gpu": choice.tokens_per_second,
    }


def as_text(plan: Plan, *, tokens: float, most: int) -> str:
    """Tables and the command.

    Args:
        plan: the answer; it must have a layout.
        tokens: to train on.
        most: layouts shown, and refusals of each kind.
    """
    question, best = plan.question, plan.best
    parts = [
        _head(question),
        _patterns(question, best),
        _layouts(plan, most),
        _refused(plan, most),
        compare_with_paper(question, best),
        _assumptions(question),
        "\n".join(f"note: {note}" for note in notes(question, best.layout)),
        launch_command(question, best.layout, tokens=tokens),
    ]
    return "\n\n".join(part for part in parts if part)


def _head(question: Question) -> str:
    count = f"{parameters(question.shape) / 1e9:.2f} billion parameters"
    if question.shape.experts is not None:
        count += f", {active_parameters(question.shape) / 1e9:.2f} active"
    return (
        f"{escaped(question.name)} ({count}) on {question.gpus} x {question.gpu.name}, "
        f"samples of {question.sequence_length}, global batch {question.global_batch}, "
        f"documents of {escaped(question.lengths.name)} "
        f"(mean {question.lengths.lengths.mean():.0f} tokens)"
    )


def _patterns(question: Question, best: Choice) -> str:
    rows = []
    for name, choice in compare_patterns(question, best.layout).items():
        work = work_of(question, best, name)
        rows.append(
            [
                name,
                f"{work['parameter_flops'] / 1e9:.1f}",
                f"{work['attention_flops'] / 1e9:.1f}",
                f"{work['attention_work_share']:.1%}",
                *_speed(question, choice),
            ]
        )
    head = ["pattern", "parameters", "attention", "of full", *SPEED]
    saved = round(100 * question.saving(best.layout))
    claim = "" if question.pattern == "full" else f"saves about {saved}% of full attention's time "
    return (
        f"{question.pattern} {claim}at {best.layout}; GFLOP per token, and days for 10^9 tokens:\n"
        f"{_table(head, rows)}"
    )


SPEED = ("s per step", "tok/s/GPU", "MFU", "days")


def _speed(question: Question, choice: Choice) -> list[str]:
    """Cells of the columns `SPEED`: two digits, as the assumptions do not carry more."""
    low, high = days_range(question, choice)
    return [
        two_digits(choice.time.total),
        two_digits(choice.tokens_per_second),
        f"{choice.mfu:.0%}",
        f"{two_digits(low)} to {two_digits(high)}",
    ]


def two_digits(value: float) -> str:
    """Write a number above 0 with two digits that count."""
    places = 1 - math.floor(math.log10(value))
    return f"{round(value, places):.{max(places, 0)}f}"


def _layouts(plan: Plan, most: int) -> str:
    rows = [
        [
            str(c.layout),
            c.layout.recompute,
            *(f"{b / GIB:.1f}" for b in (c.memory.total, c.memory.states, c.memory.activations)),
            f"{c.communication.total / 1e9:.0f}",
            *(f"{s / c.time.total:.0%}" for s in (c.time.communication, c.time.waiting)),
            *_speed(plan.question, c),
        ]
        for c in plan.choices[:most]
    ]
    head = ["layout", "recompute", "GiB", "states", "kept", "GB sent"]
    head += ["sending", "waiting", *SPEED]
    return (
        f"fitting in {budget(plan.question.gpu) / GIB:.1f} GiB per GPU: {len(plan.choices)}, "
        f"the fastest first:\n{_table(head, rows)}"
    )


def _refused(plan: Plan, most: int) -> str:
    if not plan.refused:
        return ""
    kinds = Counter(r.reasons[0].split(":")[0] for r in plan.refused)
    counts = ", ".join(f"{kinds[kind]} for {kind}" for kind in KINDS if kinds[kind])
    lines = [f"refused: {len(plan.refused)} ({counts})"]
    for kind in KINDS:
        of_kind = [r for r in plan.refused if r.reasons[0].startswith(f"{kind}:")]
        first = {r.reasons[0]: r for r in reversed(of_kind)}  # of each reason its first layout
        shown = [r for r in of_kind if first[r.reasons[0]] is r][:most]
        lines += [f"  {r.layout}: {r.reasons[0]}" for r in shown]
        if len(of_kind) > len(shown):
            lines.append(f"  ... and {len(of_kind) - len(shown)} more for {kind} (--json has all)")
    return "\n".join(lines)


def _assumptions(question: Question) -> str:
    assumed, gpu = question.assumed, question.gpu
    fast, slow = question.spread
    experts = ""
    if question.shape.experts is not None:
        experts = f" ({assumed.of_experts:.0%} in experts, which get equally many tokens)"
    return (
        f"assumed, not measured: {assumed.linear:.0%} of {gpu.tflops:g} TFLOP/s in matrix products"
        f"{experts}, {assumed.attention:.0%} in attention, {assumed.link:.0%} of "
        f"{gpu.nvlink:g} GB/s inside servers and {gpu.network:g} GB/s between them; "
        f"days from {fast:g} to {slow:g} times that speed (docs/planner.md)"
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        lines.append("  " + "  ".join(cells))
    return "\n".join(lines)
