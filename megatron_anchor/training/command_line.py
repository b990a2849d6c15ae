"""What stands on the command line: which arguments were given, and how a value is written there."""

from __future__ import annotations

import shlex
from argparse import Action, ArgumentParser, Namespace, _StoreFalseAction, _StoreTrueAction
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

_NOT_GIVEN = object()
_LONGEST = 200


class CommandLine:
    """The words that a program was started with, read by its parser."""

    def __init__(self, parser: ArgumentParser, words: Sequence[str]) -> None:
        self._actions: dict[str, Action] = {}
        for action in parser._actions:
            self._actions.setdefault(action.dest, action)
        # A parser gives its defaults only to what a namespace does not have yet.
        namespace = Namespace(**dict.fromkeys(self._actions, _NOT_GIVEN))
        parser.parse_known_args(list(words), namespace)
        self.given = frozenset(n for n, value in vars(namespace).items() if value is not _NOT_GIVEN)
        """Names, as in the namespace, of the arguments on the command line."""

    def default(self, name: str) -> Any:
        """Give an argument's default, None for a name that is no argument."""
        action = self._actions.get(name)
        return None if action is None else action.default

    def named(self, flags: Iterable[str]) -> dict[str, str]:
        """Translate flags, with dashes or without, to names; unknown ones are left out."""
        known = {o.strip("-"): name for name, a in self._actions.items() for o in a.option_strings}
        known |= {name: name for name in self._actions}
        return {flag: known[flag.lstrip("-")] for flag in flags if flag.lstrip("-") in known}

    def flag(self, name: str) -> str:
        """Give an argument's flag."""
        action = self._actions.get(name)
        return action.option_strings[0] if action and action.option_strings else name

    def write(self, name: str, value: Any) -> str:
        """Write a value as on the command line, for people to read: '--norm-epsilon 1e-06'.

        The value may come from a stranger's file: it is quoted and escaped.
        """
        flag, action = self.flag(name), self._actions.get(name)
        if isinstance(action, (_StoreTrueAction, _StoreFalseAction)):
            return flag if bool(value) == isinstance(action, _StoreTrueAction) else f"no {flag}"
        if value is None or value is False:
            return f"no {flag}"
        if value is True:
            return flag
        parts = value if isinstance(value, (list, tuple)) else [value]
        return f"{flag} {' '.join(_word(part) for part in parts)}"


def _word(value: Any) -> str:
    text = value.name if isinstance(value, Enum) else str(value)
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return shlex.quote(text) if text.isprintable() else ascii(text)
