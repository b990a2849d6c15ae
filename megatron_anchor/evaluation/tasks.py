"""The tasks, and their samples: a pure function of seed, task, length, number and tokenizer."""

from __future__ import annotations

import difflib
import functools
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_anchor.errors import UserError
from megatron_anchor.evaluation import scoring
from megatron_anchor.evaluation.answering import QUESTION_SETS, draft_answering
from megatron_anchor.evaluation.fitting import TooShortError, largest_fitting
from megatron_anchor.evaluation.material import Draft, Material
from megatron_anchor.evaluation.needles import NeedleTask
from megatron_anchor.evaluation.tracking import draft_tracking
from megatron_anchor.evaluation.word_lists import draft_common_words, draft_frequent_words

ALL = "ruler"
"""All tasks that need no file of the user's."""

_COARSE = 1 / 200  # share of the length that may be missing without small change


class MakeDraft(Protocol):
    """Makes a prompt that has no length yet."""

    def __call__(
        self, material: Material, rng: random.Random, *, length: int, depth: float | None
    ) -> Draft: ...


@dataclass(frozen=True)
class Task:
    """A kind of question."""

    draft: MakeDraft
    new_tokens: int
    """Tokens that may be generated, as in RULER; the prompt leaves room for them."""
    score: Callable[[str, Sequence[str]], float] = scoring.share_found
    has_depth: bool = False
    """One needle is asked for, and its depth can be chosen."""


def _needles(haystack: str, **more) -> Task:
    kind = NeedleTask(haystack, **more)
    return Task(kind.draft, 128, has_depth=kind.queries * kind.values == 1)


TASKS: dict[str, Task] = {
    "niah_single_1": _needles("noise"),
    "niah_single_2": _needles("essay"),
    "niah_single_3": _needles("essay", value="uuid"),
    "niah_multikey_1": _needles("essay", keys=4),
    "niah_multikey_2": _needles("needle"),
    "niah_multikey_3": _needles("needle", key="uuid", value="uuid"),
    "niah_multivalue": _needles("essay", values=4),
    "niah_multiquery": _needles("essay", keys=4, queries=4),
    "vt": Task(draft_tracking, 30),
    "cwe": Task(draft_common_words, 120),
    "fwe": Task(draft_frequent_words, 50),
    "qa": Task(draft_answering, 32, score=scoring.any_found),
    **{
        name: Task(functools.partial(draft_answering, source=name), 32, score=scoring.any_found)
        for name in QUESTION_SETS
    },
}


@dataclass(frozen=True)
class Sample:
    """One prompt."""

    task: str
    length: int
    """Tokens asked for: of the prompt and of the answer's room."""
    index: int
    depth: float | None
    """Where the asked needle was put; None: not chosen."""
    prompt: str
    ids: list[int]
    answers: list[str]

    @property
    def new_tokens(self) -> int:
        """Tokens that may be generated."""
        return TASKS[self.task].new_tokens

    @property
    def total_tokens(self) -> int:
        """Prompt and room; at most `length`."""
        return len(self.ids) + self.new_tokens


def choose_tasks(
    names: Sequence[str], *, has_questions: bool, sets: Collection[str] = ()
) -> list[str]:
    """Resolve ``--tasks``; names may be joined by commas.

    Args:
        names: as given.
        has_questions: whether there is a file for ``qa``.
        sets: those of `QUESTION_SETS` that there is a file for.

    Raises:
        UserError: for an unknown name, with the nearest one.
    """
    found: dict[str, None] = {}
    for name in [part.strip() for word in names for part in word.split(",") if part.strip()]:
        if name == ALL:
            missing = {*QUESTION_SETS} - {*sets} | (set() if has_questions else {"qa"})
            found.update(dict.fromkeys(t for t in TASKS if t not in missing))
        elif name in TASKS:
            found[name] = None
        else:
            near = difflib.get_close_matches(name, [*TASKS, ALL], 1, 0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"--tasks {name}: {hint}there are {ALL} (all), {', '.join(TASKS)}")
    if not found:
        raise UserError(f"--tasks names none; there are {ALL} (all), {', '.join(TASKS)}")
    if "qa" in found and not has_questions:
        raise UserError("--tasks qa needs questions: give --qa-file")
    for name in QUESTION_SETS:
        if name in found and name not in sets:
            raise UserError(f"--tasks {name} needs questions: give --{name.replace('_', '-')} FILE")
    return list(found)


def make_sample(
    material: Material,
    name: str,
    *,
    length: int,
    index: int,
    seed: int,
    depths: Sequence[float] = (),
) -> Sample:
    """Make one sample; which others are made, and in which order, has no influence on it.

    Args:
        material: tokenizer and texts.
        name: of the task.
        length: tokens of the prompt and of the room for the answer.
        index: number of the sample.
        seed: of the evaluation.
        depths: of the asked needle, taken in turn; none: at random. Other tasks ignore them.

    Raises:
        UserError: if the task cannot be that short; it says how long it must be.
    """
    task = TASKS[name]
    draft, depth = _draft(material, name, length, index, seed, depths)
    target = length - task.new_tokens
    try:
        steps, prompt, ids = _fitted(material, draft.build, draft.estimate, target)
    except TooShortError as error:
        raise _too_short(name, length, error.least + task.new_tokens) from error
    if draft.fill and len(ids) < target * (1 - _COARSE):
        fill = functools.partial(draft.fill, steps)
        change = np.arange(1.0 + target - len(ids))
        _, prompt, ids = _fitted(material, fill, change, target)
    return Sample(name, length, index, depth, prompt, ids, draft.answers)


def _fitted(
    material: Material, build: Callable[[int], str], estimate: np.ndarray, target: int
) -> tuple[int, str, list[int]]:
    """The steps that fit, the prompt with them, and its ids."""
    found: dict[int, tuple[str, list[int]]] = {}

    def count(steps: int) -> int:
        prompt = build(steps)
        ids = material.tokenizer.encode(prompt)
        found[steps] = prompt, ids
        return len(ids)

    steps, _ = largest_fitting(count, estimate, target=target)
    return steps, *found[steps]


def check_length(material: Material, name: str, *, length: int, samples: int, seed: int) -> None:
    """Check that all samples of a task can be so short, before a model is loaded.

    Raises:
        UserError: saying the least length.
    """
    least = 0
    for index in range(samples):
        draft, _ = _draft(material, name, length, index, seed, ())
        least = max(least, len(material.tokenizer.encode(draft.build(0))))
    if least + TASKS[name].new_tokens > length:
        raise _too_short(name, length, least + TASKS[name].new_tokens)


def _draft(
    material: Material, name: str, length: int, index: int, seed: int, depths: Sequence[float]
) -> tuple[Draft, float | None]:
    rng = random.Random(f"{seed}/{name}/{length}/{index}")
    task = TASKS[name]
    depth = depths[index % len(depths)] if depths and task.has_depth else None
    return task.draft(material, rng, length=length, depth=depth), depth


def _too_short(name: str, length: int, least: int) -> UserError:
    return UserError(
        f"--seq-lengths {length}: {name} needs at least {least} tokens with this tokenizer, its "
        f"{TASKS[name].new_tokens} tokens for the answer included"
    )
