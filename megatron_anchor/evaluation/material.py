"""What prompts are made of, measured once for each length: tokenizer, haystacks, questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_anchor.evaluation.haystack import NOISE, Haystack, filling, measure
from megatron_anchor.evaluation.question_files import Question
from megatron_anchor.evaluation.tokens import PromptTokenizer


@dataclass(frozen=True)
class Draft:
    """A prompt of no length yet."""

    build: Callable[[int], str]
    """The prompt with ``k`` steps of its growing part, up to where the answer begins."""
    estimate: np.ndarray
    """float [steps + 1], about the tokens of the first k steps."""
    answers: list[str]
    fill: Callable[[int, int], str] | None = None
    """The prompt with small change: k steps and so many fillers; for parts of coarse steps."""


@dataclass
class Material:
    """Shared by all samples of an evaluation."""

    tokenizer: PromptTokenizer
    essays: str
    questions: Sequence[Question] = ()
    question_sets: Mapping[str, Sequence[Question]] = field(default_factory=dict)
    """Of tasks that have a file of their own."""
    _measured: dict[tuple[str, int], Haystack] = field(default_factory=dict)
    _counted: dict[str, int] = field(default_factory=dict)

    def noise(self, length: int) -> Haystack:
        """The same few sentences over and over, one round a line."""
        return self._haystack("noise", NOISE, "\n", length)

    def essay(self, length: int) -> Haystack:
        """Running text, repeated where it is shorter than the prompt."""
        return self._haystack("essay", self.essays, " ", length)

    def token_count(self, text: str) -> int:
        """Tokens of a document; counted once."""
        if text not in self._counted:
            self._counted[text] = self.tokenizer.counts([text])[0]
        return self._counted[text]

    def _haystack(self, name: str, text: str, joint: str, length: int) -> Haystack:
        if (name, length) not in self._measured:
            text = filling(text, self.tokenizer, length=length, joint=joint)
            self._measured[name, length] = measure(text, self.tokenizer, length=length)
        return self._measured[name, length]
