"""Variable tracking: a chain of assignments spread over a haystack (RULER, section 3.2)."""

from __future__ import annotations

import itertools
import random

from megatron_anchor.evaluation.haystack import NOISE
from megatron_anchor.evaluation.material import Draft, Material
from megatron_anchor.evaluation.vocabulary import draw_letters

HOPS = 4
"""Assignments from variable to variable behind the first one."""

_HEAD = "Some variables are set in the text below. Follow which one gets which value.\n"


def draft_tracking(
    material: Material, rng: random.Random, *, length: int, depth: float | None
) -> Draft:
    """Make a prompt with one solved example before it; the chain's links stand in their order."""
    assert depth is None
    haystack = material.noise(length)
    names, value = draw_letters(rng, HOPS + 1, length=5, upper=True), _value(rng)
    links = _chain(names, value)
    depths = sorted(rng.random() for _ in links)
    example = _example(rng)

    def build(pieces: int) -> str:
        needles = [
            (haystack.place(depth, pieces=pieces), link)
            for depth, link in zip(depths, links, strict=True)
        ]
        return f"{example}{_HEAD}{haystack.with_needles(pieces, needles)}{_tail(value)}"

    return Draft(build, haystack.tokens, names)


def _example(rng: random.Random) -> str:
    """A short text with its chain and the answer: shows the form."""
    names, value = draw_letters(rng, HOPS + 1, length=5, upper=True), _value(rng)
    sentences = f"{NOISE} {NOISE}".replace(". ", ".|").split("|")
    for place, link in zip(sorted(rng.sample(range(10), 5)), _chain(names, value), strict=True):
        sentences[place] += f" {link}"
    return f"{_HEAD}{' '.join(sentences)}{_tail(value)} {' '.join(names)}\n\n"


def _chain(names: list[str], value: str) -> list[str]:
    pairs = itertools.pairwise(names)
    return [f"VAR {names[0]} = {value}.", *(f"VAR {new} = VAR {old}." for old, new in pairs)]


def _tail(value: str) -> str:
    return (
        f"\nQuestion: which variables have the value {value} in the text above?\nAnswer: in the "
        f"text above, these {HOPS + 1} variables have the value {value}:"
    )


def _value(rng: random.Random) -> str:
    return str(rng.randrange(10_000, 100_000))
