"""The retrieval task: facts strewn over real text, and questions behind them.

A fact is one token `<name=value>`. A document states a value of every name, all different, each at
a random place of the text, and asks for some of them, `<name?>`; each question is followed by its
answer, `<value>`:

    ... real <n3=v1> text <n0=v5> goes <n1=v2> on ... <n0?> <v5> <n3?> <v1>

In training questions stand anywhere behind a fact. In evaluation all of them are at the end and ask
for names that are drawn independently, so whoever ignores the names can do no better than to guess
one of the values that the document states: CHANCE, for each question anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NAMES, VALUES = 4, 4
QUESTIONS_TO_LEARN, QUESTIONS_TO_SCORE = 8, 2
CHANCE = 1 / NAMES
"""Accuracy of the best strategy that ignores the names."""

FACT_TOKENS = [f"<n{name}=v{value}>" for name in range(NAMES) for value in range(VALUES)]
QUESTION_TOKENS = [f"<n{name}?>" for name in range(NAMES)]
ANSWER_TOKENS = [f"<v{value}>" for value in range(VALUES)]
TOKENS = FACT_TOKENS + QUESTION_TOKENS + ANSWER_TOKENS


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Ids of the task's tokens: those of TOKENS, in this order, from `first` on."""

    first: int

    def fact(self, name: int, value: int) -> int:
        """Id of `<name=value>`."""
        return self.first + name * VALUES + value

    def question(self, name: int) -> int:
        """Id of `<name?>`."""
        return self.first + NAMES * VALUES + name

    def answer(self, value: int) -> int:
        """Id of `<value>`."""
        return self.first + NAMES * VALUES + NAMES + value


@dataclass(frozen=True, kw_only=True)
class RetrievalDocument:
    """One document of the task, without bos and eos."""

    tokens: np.ndarray
    """int64 ids [tokens]."""
    questions: np.ndarray
    """Places [questions] of the questions; the token behind each is the answer."""
    distances: np.ndarray
    """Tokens [questions] from each question back to the nearest place that tells the answer: its
    fact, or an earlier answer to the same question."""


def make_document(
    random: np.random.Generator,
    text: np.ndarray,
    *,
    vocabulary: Vocabulary,
    questions: int,
    scattered: bool,
) -> RetrievalDocument:
    """Strew facts over a text and ask for some of them.

    Args:
        random: draws values, places and questions.
        text: ids [any] of the text.
        vocabulary: ids of the task.
        questions: number of questions.
        scattered: whether they stand anywhere behind a fact, or all at the end.
    """
    values = random.permutation(VALUES)[:NAMES].tolist()
    facts = sorted(
        zip(random.integers(0, len(text) + 1, NAMES).tolist(), range(NAMES), strict=True)
    )
    ends = np.full(questions, len(text))
    if scattered:
        ends = np.sort(random.integers(facts[0][0], len(text) + 1, questions))
    tokens: list[int] = []
    told: dict[int, int] = {}
    """Name to the latest place that tells its value."""
    asked, distances = [], []
    written = 0
    for end in ends.tolist():
        while facts and facts[0][0] <= end:
            place, name = facts.pop(0)
            tokens += text[written:place].tolist()
            written, told[name] = place, len(tokens)
            tokens.append(vocabulary.fact(name, values[name]))
        tokens += text[written:end].tolist()
        written = end
        name = list(told)[int(random.integers(len(told)))]
        asked.append(len(tokens))
        distances.append(len(tokens) - told[name])
        tokens += [vocabulary.question(name), vocabulary.answer(values[name])]
        told[name] = len(tokens) - 1
    for place, name in facts:
        tokens += [*text[written:place].tolist(), vocabulary.fact(name, values[name])]
        written = place
    return RetrievalDocument(
        tokens=np.array(tokens + text[written:].tolist()),
        questions=np.array(asked),
        distances=np.array(distances),
    )


def score_answers(
    documents: Sequence[RetrievalDocument], predicted: Sequence[np.ndarray]
) -> list[tuple[int, bool]]:
    """Judge predictions.

    Args:
        documents: the documents.
        predicted: for each, ids [tokens] that a model expects behind each of its tokens.

    Returns:
        (distance, right) of all questions.
    """
    pairs: list[tuple[int, bool]] = []
    for document, ids in zip(documents, predicted, strict=True):
        right = ids[document.questions] == document.tokens[document.questions + 1]
        pairs += zip(document.distances.tolist(), right.tolist(), strict=True)
    return pairs


def chance_of_as_many(right: int, questions: int, *, chance: float = CHANCE) -> float:
    """Probability that guessing at `chance` has at least so many right answers (binomial tail)."""
    logs = [
        math.lgamma(questions + 1)
        - math.lgamma(k + 1)
        - math.lgamma(questions - k + 1)
        + k * math.log(chance)
        + (questions - k) * math.log1p(-chance)
        for k in range(right, questions + 1)
    ]
    return min(1.0, float(np.sum(np.exp(logs))))
