"""The post-processor of a tokenizer.json, rewritten to put the anchor in front of every text.

Only what is fully understood is rewritten: none at all, ``ByteLevel``, ``TemplateProcessing``, and
a ``Sequence`` of these. The anchor takes the place of the tokens that a template puts in front of
the text; tokens behind the text stay.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_anchor.errors import UserError

TEMPLATE = "TemplateProcessing"
UNDERSTOOD = ("ByteLevel", TEMPLATE)

Piece = dict[str, Any]
"""``{"SpecialToken": {"id", "type_id"}}`` or ``{"Sequence": {"id": "A" or "B", "type_id"}}``."""


def with_anchor(given: Mapping[str, Any] | None, *, token: str, token_id: int) -> dict[str, Any]:
    """Return a post-processor that puts one anchor in front of a text, and of a pair of texts.

    Args:
        given: ``post_processor`` of a tokenizer.json; None: it has none.
        token: text of the anchor in the vocabulary.
        token_id: its id.

    Raises:
        UserError: for a kind of post-processor that is not understood.
    """
    kinds = _kinds(given)
    unknown = [kind for kind in kinds if kind not in UNDERSTOOD]
    if unknown or kinds.count(TEMPLATE) > 1:
        raise UserError(
            f"its post_processor is {' + '.join(kinds)}, and an anchor can only be added to none, "
            f"{' or '.join(UNDERSTOOD)} and a Sequence with one {TEMPLATE}"
        )
    parts = _parts(given)
    for place, part in enumerate(parts):
        if part["type"] == TEMPLATE:
            parts[place] = _template(part, token=token, token_id=token_id)
            break
    else:
        parts.append(_template(_plain_template(), token=token, token_id=token_id))
    return parts[0] if len(parts) == 1 else {"type": "Sequence", "processors": parts}


def _kinds(given: Mapping[str, Any] | None) -> list[str]:
    return [str(part.get("type")) for part in _parts(given)]


def _parts(given: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    if given is None:
        return []
    if given.get("type") == "Sequence":
        return [part for inner in given.get("processors", ()) for part in _parts(inner)]
    return [copy.deepcopy(dict(given))]


def _plain_template() -> dict[str, Any]:
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {"type": TEMPLATE, "single": [first], "pair": [first, second], "special_tokens": {}}


def _template(part: Mapping[str, Any], *, token: str, token_id: int) -> dict[str, Any]:
    anchor = {"SpecialToken": {"id": token, "type_id": 0}}
    single, front = _without_front(part["single"])
    pair, _ = _without_front(part["pair"])
    known = {token: {"id": token, "ids": [token_id], "tokens": [token]}}
    return {
        **part,
        "single": [anchor, *single],
        "pair": [anchor, *_without_repeat(pair, front)],
        "special_tokens": {**part["special_tokens"], **known},
    }


def _without_front(pieces: Sequence[Piece]) -> tuple[list[Piece], list[str]]:
    """Split off the tokens in front of the text; return the rest and those tokens."""
    start = next((i for i, piece in enumerate(pieces) if "Sequence" in piece), len(pieces))
    return list(pieces[start:]), [piece["SpecialToken"]["id"] for piece in pieces[:start]]


def _without_repeat(pieces: Sequence[Piece], front: Sequence[str]) -> list[Piece]:
    """Drop the front tokens where they stand between the two texts of a pair once more."""
    return [p for p in pieces if "Sequence" in p or p["SpecialToken"]["id"] not in front]
