"""RULER's scores: is the answer in what was generated?"""

from __future__ import annotations

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def share_found(prediction: str, answers: Sequence[str]) -> float:
    """Share of the answers that occur, whatever their case (RULER's ``string_match_all``)."""
    text = _CONTROL.sub("\n", prediction.strip()).strip().lower()
    return sum(answer.lower() in text for answer in answers) / len(answers)


def any_found(prediction: str, answers: Sequence[str]) -> float:
    """1 if one of the answers occurs, whatever its case (RULER's ``string_match_part``)."""
    return float(share_found(prediction, answers) > 0)
