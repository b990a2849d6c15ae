"""How scores and means stand to those that are published under RULER's name (arXiv 2404.06654)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_anchor.evaluation.answering import QUESTION_SETS

RULER_TASKS = (
    *("niah_single_1", "niah_single_2", "niah_single_3"),
    *("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_squad", "qa_hotpot"),
)
"""The tasks of which RULER publishes averages."""

RULER_SETTINGS: dict[str, Any] = {
    "seq_lengths": [4096, 8192, 16384, 32768, 65536, 131072],
    "num_samples": 500,
    "seed": 42,
}
"""What published tables are made with."""

HARNESS_DIFFERS = (
    "Every model is given the answer's first words and none a chat template, as RULER does with "
    "base models; lm-eval counts these words beyond the length. RULER's own code left them out "
    "from 2025-01 to 2026-07: a table of that time is another test."
)
"""What remains to be known of the harness' prompts."""

QA_SCORE = "1 where any reference is found, as RULER has it"
"""How answers of `qa` are scored under both engines."""


def mean_name(*numbers: int) -> str:
    """What the mean is called in tables and pictures, of one or several numbers of tasks."""
    if len(set(numbers)) != 1:
        return "mean of each one's tasks"
    return f"mean of {numbers[0]} task{'s' if numbers[0] != 1 else ''}"


def mean_note(settings: Mapping[str, Any]) -> str:
    """What the mean is of, beside RULER's average over its 13 tasks."""
    tasks, published = settings["tasks"], len(RULER_TASKS)
    present = {name.removeprefix("ruler_") for name in tasks}
    missing = [name for name in RULER_TASKS if name not in present]
    if "qa" in present and {*QUESTION_SETS} <= {*missing}:
        # questions of the user's take the place of one of the two
        missing = [name for name in missing if name not in QUESTION_SETS]
        missing.append("one of the two qa tasks")
    of = f"The mean is over {len(tasks)} task{'s' if len(tasks) != 1 else ''}"
    if not missing and len(tasks) == published:
        return f"{of}, which are RULER's {published}, at one length."
    if not missing:
        return f"{of}; RULER's average is over {published}, without qa, so the two differ."
    count = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
    return (
        f"{of}; RULER's average is over {published} (missing: {', '.join(missing[:4])}{count}), so "
        "the two are not the same number."
    )


def averages(means: Mapping[str, Mapping[str, Any]]) -> dict[str, float] | None:
    """RULER's averages over lengths, None for less than two of them.

    Args:
        means: length to a cell with the ``mean`` over tasks.

    Returns:
        ``avg``; ``wavg_inc``, with weights 1, 2, ... from the shortest length on; ``wavg_dec``,
        with them from the longest on (RULER, table 3).
    """
    values = [means[length]["mean"] for length in sorted(means, key=int)]
    if len(values) < 2:
        return None
    rising = range(1, len(values) + 1)
    total = sum(rising)
    return {
        "avg": sum(values) / len(values),
        "wavg_inc": sum(w * v for w, v in zip(rising, values, strict=True)) / total,
        "wavg_dec": sum(w * v for w, v in zip(reversed(rising), values, strict=True)) / total,
    }


def comparability(settings: Mapping[str, Any]) -> str:
    """Whether scores may stand beside published ones, and why not.

    Prompts and scores must be RULER's, and so must be tasks, lengths, seed and counts.
    """
    reasons = []
    if settings.get("engine") != "lm-eval":
        reasons.append(
            "prompts, word lists and haystacks are this project's (take --engine lm-eval)"
        )
    present = {name.removeprefix("ruler_") for name in settings["tasks"]}
    missing = [name for name in RULER_TASKS if name not in present]
    if present - {*RULER_TASKS}:
        reasons.append("the mean has tasks that RULER's has not")
    if missing:
        reasons.append(f"{len(missing)} of the {len(RULER_TASKS)} tasks are missing")
    for name, wanted in RULER_SETTINGS.items():
        found = settings.get(name)
        if found != wanted:
            told = " ".join(map(str, found)) if isinstance(found, list) else found
            asked = " ".join(map(str, wanted)) if isinstance(wanted, list) else wanted
            reasons.append(f"--{name.replace('_', '-')} is {told}, RULER's is {asked}")
    if settings.get("depths"):
        reasons.append("--depths puts the needle where RULER has it at random")
    if reasons:
        return f"Comparable with published tables: no, because {'; '.join(reasons)}."
    return f"Comparable with published tables: yes. {HARNESS_DIFFERS}"


def score_notes(settings: Mapping[str, Any]) -> list[str]:
    """Where scores are not those of the engine."""
    if settings.get("engine") != "lm-eval" or not has_questions(settings["tasks"]):
        return []
    return [
        f"Scores of qa: {QA_SCORE}. lm-eval's own task gives the share of the references that are "
        "found; that is in the samples as `harness_score`."
    ]


def has_questions(tasks: Sequence[str]) -> bool:
    """Whether some of the harness' tasks have answers that are scored again."""
    return any(name.startswith("ruler_qa_") for name in tasks)
