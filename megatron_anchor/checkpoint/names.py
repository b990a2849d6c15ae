"""Long lists of names, written as text."""

from __future__ import annotations


def names(*texts: str) -> frozenset[str]:
    """Give the words of all texts.

    Args:
        texts: names with blanks between them.
    """
    return frozenset(name for text in texts for name in text.split())
