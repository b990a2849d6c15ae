"""Common and frequent words: aggregation over the whole prompt (RULER, section 3.3)."""

from __future__ import annotations

import random
import re
from functools import cache

import numpy as np

from megatron_anchor.evaluation.material import Draft, Material
from megatron_anchor.evaluation.vocabulary import (
    ADJECTIVES,
    HEADS,
    NOUNS,
    TAILS,
    draw_letters,
)

COMMON = 10
"""Words to find in the list."""

LONG_LIST = 4096
"""Tokens from which on the common words come 30 times instead of 6."""

ZETA_2 = np.pi**2 / 6
"""Normalizes frequencies that fall with the square of the rank."""

DOTS = "...."
"""Stands for the most frequent word, which is no word."""

_CWE_HEAD = (
    "This is a numbered list of words, some of which come up more often than the others. Keep the "
    "most common ones in mind.\n"
)
_CWE_TAIL = (
    f"\nQuestion: which {COMMON} words come up most often in the list above?\nAnswer: the {COMMON} "
    "most common words of the list are:"
)
_FWE_HEAD = (
    f"The text below is made of code words and of dots. Count how often each code word occurs; the "
    f"dots {DOTS} do not count.\n"
)
_FWE_TAIL = (
    "\nQuestion: which three code words occur most often in the text above?\nAnswer: the three "
    "most frequent code words of the text are:"
)


def draft_common_words(
    material: Material, rng: random.Random, *, length: int, depth: float | None
) -> Draft:
    """Ten words come 30 times, all others 3 times; below 4096 tokens 6 times and once, as in RULER.

    The last of the other words may be rarer: single entries fill the prompt up.
    """
    assert depth is None
    short = length < LONG_LIST
    often, seldom = (6, 1) if short else (30, 3)
    plain = list(_plain_words())
    rng.shuffle(plain)
    common, shown = plain[:COMMON], plain[COMMON : (3 if short else 5) * COMMON]
    others = _others(rng, plain, common)
    example = shown[:COMMON] * (3 if short else 10) + shown[COMMON:] * (1 if short else 3)
    rng.shuffle(example)
    solved = _numbered(example) + _CWE_TAIL + " " + _numbered(shown[:COMMON])
    order = rng.getrandbits(64)

    def build(entries: int, dots: int = 0) -> str:
        rare = [others[entry // seldom] for entry in range(entries)]
        listed = common * often + rare
        random.Random(order).shuffle(listed)
        return f"{_CWE_HEAD}{solved}\n\n{_CWE_HEAD}{_numbered(listed)}{_dots(dots)}{_CWE_TAIL}"

    steps = min(length, len(others) * seldom)
    return Draft(build, _linear(build, material, steps), common, build)


def draft_frequent_words(
    material: Material, rng: random.Random, *, length: int, depth: float | None
) -> Draft:
    """Code words whose frequency falls with the square of their rank (zeta law, alpha 2)."""
    assert depth is None
    coded = draw_letters(rng, max(8, length // 50), length=6)
    order = rng.getrandbits(64)
    ranks = np.arange(2, len(coded) + 2)  # dots have the first

    def build(total: int, dots: int = 0) -> str:
        # A head start makes the three first words differ from the fourth in any prompt.
        total += _LEAST_CODED
        counts = (total / ZETA_2 / ranks**2).astype(int)
        listed = [w for word, n in zip(coded, counts, strict=True) for w in [word] * n]
        listed += [DOTS] * (total - len(listed))
        random.Random(order).shuffle(listed)
        return f"{_FWE_HEAD}{' '.join(listed)}{_dots(dots)}{_FWE_TAIL}"

    return Draft(build, _linear(build, material, length), coded[:3], build)


_LEAST_CODED = 80  # words from which on 1/16 and 1/25 of them / ZETA_2 are different numbers


@cache
def _plain_words() -> tuple[str, ...]:
    """Words of the lists that are in no other one, so that none is found by another's name."""
    words = (*NOUNS, *ADJECTIVES)
    return tuple(w for w in words if sum(w in other for other in words) == 1)


def _others(rng: random.Random, plain: list[str], common: list[str]) -> list[str]:
    """The words that come seldom: plain ones, then compounds, without the common ones inside."""
    compounds = [head + tail for head in HEADS for tail in TAILS if head != tail]
    pairs = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]
    rng.shuffle(compounds)
    rng.shuffle(pairs)
    hides = re.compile("|".join(map(re.escape, common)))
    more = (w for w in dict.fromkeys(compounds + pairs) if not hides.search(w))
    return [*plain[5 * COMMON :], *more]


def _dots(count: int) -> str:
    return f" {DOTS}" * count


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _linear(build, material: Material, steps: int) -> np.ndarray:
    """Tokens of a list from two short ones."""
    few, more = material.tokenizer.counts([build(min(10, steps)), build(min(210, steps))])
    each = max(0.5, (more - few) / max(1, min(210, steps) - min(10, steps)))
    return np.arange(steps + 1) * each
