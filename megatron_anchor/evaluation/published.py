"""How scores and means stand to those that are published under RULER's name (arXiv 2404.06654)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

RULER_TASKS = (
    *("niah_single_1", "niah_single_2", "niah_single_3"),
    *("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_squad", "qa_hotpot"),
)
"""The tasks of which RULER publishes averages."""

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
    if "qa" in present:  # questions of the user's take the place of one of the two
        missing = [name for name in missing if not name.startswith("qa_")]
        missing.append("one of the two qa tasks")
    of = f"The mean is over {len(tasks)} task{'s' if len(tasks) != 1 else ''}"
    if not missing:
        return f"{of}, which are RULER's {published}, at one length."
    count = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
    return (
        f"{of}; RULER's average is over {published} (missing: {', '.join(missing[:4])}{count}), so "
        "the two are not the same number."
    )


def score_notes(settings: Mapping[str, Any]) -> list[str]:
    """Where scores are not those of the engine, or not those of RULER's prompts."""
    if settings.get("engine") != "lm-eval":
        return ["Prompts are in words of their own: not for comparison with published tables."]
    if not _has_questions(settings["tasks"]):
        return []
    return [
        f"Scores of qa: {QA_SCORE}. lm-eval's own task gives the share of the references that are "
        "found; that is in the samples as `harness_score`."
    ]


def _has_questions(tasks: Sequence[str]) -> bool:
    return any(name.startswith("ruler_qa_") for name in tasks)
