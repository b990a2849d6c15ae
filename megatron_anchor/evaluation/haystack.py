"""Long texts in which needles are hidden: cut at any word, opened at any sentence."""

from __future__ import annotations

import hashlib
import pydoc_data.topics
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_anchor.errors import UserError
from megatron_anchor.evaluation.tokens import PromptTokenizer

NOISE = (
    "The river runs to the sea. The wind is in the trees. The night follows the day. "
    "We walk and we rest. Then it all begins again."
)
"""What is repeated where the haystack says nothing."""

LONGEST_SENTENCE = 40
"""Words after which a needle may be put in even where no sentence ends."""

_PROBE = 4000  # characters that tell how many make a token
_LEAST_WORDS = 200  # of a text that is to serve as essays
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*$")


@dataclass(frozen=True)
class Haystack:
    """A text in pieces (words with the space before them)."""

    text: str
    ends: np.ndarray
    """int [pieces + 1], characters of the first k pieces."""
    tokens: np.ndarray
    """float [pieces + 1], estimated tokens of the first k pieces."""
    borders: np.ndarray
    """int [any], numbers of pieces behind which a sentence ends, 0 included."""
    separator: str = " "
    """What stands before a needle."""

    def place(self, depth: float, *, pieces: int) -> int:
        """Find the sentence border nearest to a share of the first pieces' tokens."""
        inside = self.borders[: np.searchsorted(self.borders, pieces)]
        inside = np.append(inside, pieces)
        distance = np.abs(self.tokens[inside] - depth * self.tokens[pieces])
        return int(inside[np.argmin(distance)])

    def with_needles(self, pieces: int, needles: Sequence[tuple[int, str]]) -> str:
        """Give the first pieces with needles put in.

        Args:
            pieces: how many.
            needles: number of pieces before each needle (at most ``pieces``), and its text.
        """
        parts, done = [], 0
        for place, needle in sorted(needles, key=lambda needle: needle[0]):
            parts += [self.text[done : self.ends[place]], self.separator, needle]
            done = int(self.ends[place])
        if done == 0:  # a text has no space before its first word
            parts.append(self.separator)
        parts.append(self.text[done : self.ends[pieces]])
        return "".join(parts).strip()


def measure(
    text: str, tokenizer: PromptTokenizer, *, length: int, separator: str = " "
) -> Haystack:
    """Cut a text into pieces and estimate their tokens; every distinct word is tokenized once.

    Words of more than 1/200 of ``length`` tokens can be cut at every character, so that a prompt of
    that length can be filled up under any tokenizer.

    Args:
        text: single spaces or newlines between words.
        tokenizer: counts.
        length: tokens of the prompts that it is for.
        separator: what stands before a needle.
    """
    words = re.findall(r"\s*\S+", text)
    distinct = list(dict.fromkeys(words))
    cost = dict(zip(distinct, tokenizer.counts(distinct), strict=True))
    costs = np.array([cost[word] for word in words], dtype=np.float64)
    costs *= _calibration(words[:1000], costs[:1000], tokenizer)
    sizes = np.array([len(word) for word in words])
    borders = _borders(words)
    cut = (costs > max(1.0, length / 200)) & (sizes > 1)
    repeats = np.where(cut, sizes, 1)
    behind = np.concatenate([[0], np.cumsum(repeats)])  # pieces behind each word
    return Haystack(
        text=text,
        ends=np.concatenate([[0], np.cumsum(np.repeat(sizes // repeats, repeats))]),
        tokens=np.concatenate([[0.0], np.cumsum(np.repeat(costs / repeats, repeats))]),
        borders=behind[borders],
        separator=separator,
    )


def filling(text: str, tokenizer: PromptTokenizer, *, length: int, joint: str = " ") -> str:
    """As much of a text, or as many copies of it, as surely fills a prompt."""
    probe = text[:_PROBE]
    per_token = len(probe) / max(1, tokenizer.counts([probe])[0])
    characters = int(per_token * length * 1.5) + _PROBE
    if characters < len(text):
        return text[: text.index(" ", characters)] if " " in text[characters:] else text
    return joint.join([text] * (1 + characters // len(text)))


def _calibration(words: list[str], costs: np.ndarray, tokenizer: PromptTokenizer) -> float:
    """True tokens over the sum of the words' own: words alone may cost more than in a text."""
    return tokenizer.counts(["".join(words)])[0] / max(1.0, costs.sum())


def _borders(words: Sequence[str]) -> np.ndarray:
    borders, last = [0], 0
    for number, word in enumerate(words, 1):
        if _SENTENCE_END.search(word) or number - last >= LONGEST_SENTENCE:
            borders.append(number)
            last = number
    return np.array(borders)


def default_essays() -> str:
    """The prose of Python's language reference, which every Python has (`pydoc_data`).

    Its words differ a little between versions of Python; `digest_of` tells.
    """
    kept = []
    for _, text in sorted(pydoc_data.topics.topics.items()):
        for paragraph in text.split("\n\n"):
            is_prose = paragraph[:1].isalpha() and paragraph.rstrip().endswith(".")
            if is_prose and "\n   " not in paragraph and "***" not in paragraph:
                kept.append(" ".join(paragraph.split()))
    return " ".join(kept)


def read_essays(path: str | Path) -> str:
    """Read a text file to hide needles in; white space becomes single spaces.

    Raises:
        UserError: if it cannot be read or has too little text.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--haystack {path}: {error}") from error
    words = text.split()
    if len(words) < _LEAST_WORDS:
        raise UserError(
            f"--haystack {path} has {len(words)} words; expected {_LEAST_WORDS} or more"
        )
    return " ".join(words)


def digest_of(text: str) -> str:
    """Tell texts apart."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
