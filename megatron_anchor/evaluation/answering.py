"""Question answering: the documents of a question among those of others (RULER, section 3.4)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from megatron_anchor.errors import UserError
from megatron_anchor.evaluation.haystack import measure
from megatron_anchor.evaluation.material import Draft, Material
from megatron_anchor.evaluation.question_files import Question

QUESTION_SETS = ("qa_squad", "qa_hotpot")
"""RULER's two tasks of this kind, each with a file of its own."""

_TASK = "Answer the question from the documents, in a few words and with nothing else."
_FRAME = 120  # about the tokens of the instructions, and of the room for the answer
_TRIES = 200  # questions drawn before one that is too long is taken, and refused
_END = "\u241e"  # between the documents while they are one text; no document holds it


def draft_answering(
    material: Material,
    rng: random.Random,
    *,
    length: int,
    depth: float | None,
    source: str = "qa",
) -> Draft:
    """Make a prompt; where a document does not fit whole, it is cut at a word.

    Args:
        material: with the questions.
        rng: chooses.
        length: tokens of the prompt and of the room for the answer.
        depth: None; the documents are in any order.
        source: the task, which may have questions of its own.

    Raises:
        UserError: if there are no questions.
    """
    assert depth is None
    questions = material.question_sets.get(source) or material.questions
    if not questions:
        raise UserError("task qa needs questions: give --qa-file")
    question = _choose(questions, material, rng, length)
    others = _others(questions, material, rng, question.documents, length)
    haystack = measure(f" {_END} ".join(others), material.tokenizer, length=length)
    marks = np.array([i for i, c in enumerate(haystack.text) if c == _END])
    keys = [rng.random() for _ in range(len(question.documents) + len(others))]

    def build(pieces: int) -> str:
        end = int(haystack.ends[pieces])
        whole = int(np.searchsorted(marks, end))
        start = int(marks[whole - 1]) + 1 if whole else 0
        rest = haystack.text[start:end].strip()
        shown = [*question.documents, *others[:whole], *([rest] if rest else [])]
        order = sorted(range(len(shown)), key=lambda i: keys[i])
        documents = "\n\n".join(f"Document {n}:\n{shown[i]}" for n, i in enumerate(order, 1))
        return f"{_TASK}\n\n{documents}\n\n{_TASK}\n\nQuestion: {question.text}\nAnswer:"

    return Draft(build, haystack.tokens, list(question.answers))


def _choose(
    questions: Sequence[Question], material: Material, rng: random.Random, length: int
) -> Question:
    """A question whose own documents leave room for at least a little of others."""
    chosen = questions[0]
    for _ in range(_TRIES):
        chosen = rng.choice(questions)
        own = [chosen.text, *chosen.documents]
        if sum(map(material.token_count, own)) < length * 0.8 - _FRAME:
            break
    return chosen


def _others(
    questions: Sequence[Question],
    material: Material,
    rng: random.Random,
    own: tuple[str, ...],
    length: int,
) -> list[str]:
    """Other questions' documents, each once, then again and again, until they fill the prompt."""
    pool = dict.fromkeys(d for question in questions for d in question.documents)
    documents = [text.replace(_END, "") for text in pool if text not in own]
    if not documents:
        raise UserError(
            f"--qa-file: no document but those of {own[0][:40]!r} ...; give more questions"
        )
    rng.shuffle(documents)
    found: list[str] = []
    tokens = 0
    for number in range(1 << 30):
        text = documents[number % len(documents)]
        found.append(text)
        tokens += material.token_count(text)
        if tokens > length * 1.1:
            return found
    raise AssertionError("endless documents")
