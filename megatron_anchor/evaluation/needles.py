"""Needle retrieval: sentences with a value for a key, hidden in a haystack (RULER, section 3.1)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_anchor.evaluation.haystack import Haystack, measure
from megatron_anchor.evaluation.material import Draft, Material
from megatron_anchor.evaluation.vocabulary import draw, draw_distinct

DEPTHS = 40
"""Depths between the beginning and the end of which random ones are taken, as in RULER."""

_PLURALS = {"number": "numbers", "uuid": "uuids"}


@dataclass(frozen=True)
class NeedleTask:
    """How many needles of which kind; the fields are those of RULER's configurations."""

    haystack: str
    """``noise``, ``essay``, or ``needle``: other needles as far as one can see."""
    value: str = "number"
    key: str = "word"
    keys: int = 1
    values: int = 1
    queries: int = 1

    def draft(
        self, material: Material, rng: random.Random, *, length: int, depth: float | None
    ) -> Draft:
        """Make a prompt.

        Args:
            material: tokenizer and texts.
            rng: decides everything else.
            length: tokens that the haystack must be able to fill.
            depth: where the asked needle stands, as a share of the haystack's tokens; None: all
                needles at random.
        """
        base = "" if self.haystack == "needle" else self._base(material, length).text
        keys = draw_distinct(rng, self.key, self.keys, absent_from=base)
        drawn = draw_distinct(rng, self.value, self.keys * self.values, absent_from=base)
        values = [drawn[i * self.values : (i + 1) * self.values] for i in range(self.keys)]
        asked = sorted(rng.sample(range(self.keys), self.queries))
        needles = [self.needle(keys[i], value) for i in range(self.keys) for value in values[i]]
        depths = [i / (DEPTHS - 1) for i in rng.sample(range(DEPTHS), len(needles))]
        if depth is not None:
            depths[asked[0] * self.values] = depth
        if self.haystack == "needle":
            haystack = self._distractors(material, rng, length, {*keys, *drawn})
        else:
            haystack = self._base(material, length)
        query = _listed([keys[i] for i in asked])
        many = self.queries * self.values > 1
        head, tail = self._frame(query, many)

        def build(pieces: int) -> str:
            placed = [
                (haystack.place(depth, pieces=pieces), needle)
                for depth, needle in zip(depths, needles, strict=True)
            ]
            return f"{head}{haystack.with_needles(pieces, placed)}{tail}"

        return Draft(build, haystack.tokens, [value for i in asked for value in values[i]])

    def needle(self, key: str, value: str) -> str:
        """The sentence that is hidden."""
        return f"Remember: the secret {self.value} for {key} is {value}."

    def _base(self, material: Material, length: int) -> Haystack:
        return material.noise(length) if self.haystack == "noise" else material.essay(length)

    def _frame(self, query: str, many: bool) -> tuple[str, str]:
        kind = _PLURALS[self.value] if many else self.value
        what, are = (f"secret {kind}", "are") if many else (f"secret {kind}", "is")
        head = (
            f"The text below hides {'some ' if many else 'a '}{what}. Read it with care and keep "
            f"{'them' if many else 'it'} in mind: the question comes at its end.\n"
        )
        tail = (
            f"\nQuestion: {'which' if many else 'what'} {are} the {what} for {query} given in the "
            f"text above?\nAnswer: the {what} for {query} {are}"
        )
        return head, tail

    def _distractors(
        self, material: Material, rng: random.Random, length: int, taken: set[str]
    ) -> Haystack:
        """Lines like the needle, with other keys and values."""
        lines: list[str] = []
        tokens_per_line = 0.0
        while len(lines) < 8 or len(lines) * tokens_per_line < length * 1.25:
            key, value = draw(rng, self.key), draw(rng, self.value)
            if not taken.intersection((key, value)):
                lines.append(self.needle(key, value))
            if len(lines) == 8 and not tokens_per_line:
                tokens_per_line = material.tokenizer.counts(["\n".join(lines)])[0] / 8
        text = "\n".join(lines)
        return measure(text, material.tokenizer, length=length, separator="\n")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
