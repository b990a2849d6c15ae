"""Words of commands that are printed, written to a file or run: a value stays one word.

Text from a config, a tracker or a folder's name may hold spaces, quotes, `$(...)` or a line end.
"""

from __future__ import annotations

import re
import shlex

_SPLIT_OR_MATCHED = re.compile(r"[\s*?\[]|[+@!]\(")


def quoted(word: str) -> str:
    """Quote a word for bash; what would move a terminal's cursor is escaped, and passed whole."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = "".join(_escaped(character) for character in word)
    return f"$'{escaped}'"


def path_word(path: str) -> str:
    """Quote a path so that no program reads it as a flag."""
    return quoted(f"./{path}" if path.startswith("-") else path)


def passes_unquoted(word: str) -> bool:
    """Say whether a word comes whole out of an unquoted ``$(cat file)``.

    The shell splits what that gives at white space and matches it with files' names; quotes,
    dollars and semicolons are not looked at again.
    """
    return bool(word) and word.isprintable() and not _SPLIT_OR_MATCHED.search(word)


def is_value(word: str) -> bool:
    """Say whether a parser of flags takes the word for a value: negative numbers are values."""
    return not word.startswith("-") or bool(re.fullmatch(r"-[\d.]+(e[+-]?\d+)?", word))


def _escaped(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    # A lone surrogate stands for a byte of a file's name that is no UTF-8.
    return "".join(f"\\x{byte:02x}" for byte in character.encode(errors="surrogateescape"))
