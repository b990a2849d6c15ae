"""The paper's own days beside the planner's, for the paper's setting."""

from __future__ import annotations

from megatron_anchor.planner.models import known_shape
from megatron_anchor.planner.plan import Choice, Question, compare_patterns

PAPER_DAYS = {"full": 4.5, "anchor": 2.0}
"""Days for 10^9 tokens, Llama-2-7B at 64K on 8 A100 (arXiv 2411.13476, Figure 6; about)."""

MODEL, GPU, GPUS, LENGTH = "llama-2-7b", "A100-80GB", 8, 65536


def paper_mfu(question: Question, choice: Choice, days: float) -> float:
    """The share of the peak that days of the paper come to, by the work counted here.

    Args:
        question: the paper's setting.
        choice: any layout of it under the pattern that the days are for.
        days: for 10^9 tokens.
    """
    return choice.mfu * choice.days / days


def compare_with_paper(question: Question, best: Choice) -> str:
    """Say what the paper reports and why this is less; empty for another setting."""
    setting = (question.shape, question.gpu.name, question.gpus, question.sequence_length)
    if setting != (known_shape(MODEL), GPU, GPUS, LENGTH):
        return ""
    patterns = compare_patterns(question, best.layout)
    theirs = {name: paper_mfu(question, patterns[name], days) for name, days in PAPER_DAYS.items()}
    low, high = sorted(round(100 * share) for share in theirs.values())
    ours = sorted(round(100 * patterns[name].mfu) for name in PAPER_DAYS)
    ratio = PAPER_DAYS["full"] / PAPER_DAYS["anchor"]
    days = {name: patterns[name].days for name in PAPER_DAYS}
    return (
        f"the paper reports for this setting (arXiv 2411.13476, Figure 6) about "
        f"{PAPER_DAYS['full']:g} days with full attention and {PAPER_DAYS['anchor']:g} with "
        f"anchor; here {days['full']:.1f} and {days['anchor']:.1f} are estimated. By the work "
        f"counted here theirs are {low} to {high}% MFU; {ours[0]} to {ours[1]}% are assumed "
        "(arXiv 2205.05198 reports 54% on A100). The patterns' ratio depends less on that: "
        f"{ratio:.1f} there, {days['full'] / days['anchor']:.1f} here. For a program as fast as "
        "the paper's give --linear-efficiency 0.11 --attention-efficiency 0.1"
    )
