"""JSON objects that give a key twice: parsers keep one of the values, and lose the other."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

_ESCAPED_ASCII = tuple(b"\\u00%d" % digit for digit in range(2, 8))
"""A character that needs no escape: a key that is spelled so is not found as it is."""


class DuplicateKeyError(Exception):
    """An object has a key twice; the argument is the key."""


def may_have_duplicates(raw: bytes, keys: tuple[str, ...]) -> bool:
    """Say whether a row may name one of the keys (dotted paths) twice; quick, and never wrongly no.

    Args:
        raw: JSON.
        keys: that are read of the row.
    """
    if any(sum(map(raw.count, forms)) > 1 for forms in _forms(keys)):
        return True
    return b"\\u00" in raw and any(start in raw for start in _ESCAPED_ASCII)


@lru_cache
def _forms(keys: tuple[str, ...]) -> list[set[bytes]]:
    """How each name of the keys may be written."""
    return [
        {json.dumps(name, ensure_ascii=ascii).encode(errors="replace") for ascii in (True, False)}
        for name in _names(keys)
    ]


def _names(keys: Iterable[str]) -> set[str]:
    return {name for key in keys for name in (key, *key.split("."))}


def strict_loads(text: str, keys: tuple[str, ...]) -> Any:
    """Parse JSON; raise `DuplicateKeyError` where an object has a name of the keys twice."""
    names = _names(keys)

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen and name in names:
                    raise DuplicateKeyError(name)
                seen.add(name)
        return found

    return json.loads(text, object_pairs_hook=made)
