"""All that this package shows on a terminal, without a single control character of others.

Names of files, domains, keys, tensors and texts come from whoever made them. Printed as they are,
they could move the cursor, rename the window, forge a line that looks like ours, or turn the order
of what is read. So everything is printed from here, and all but printable characters is spelled as
in Python: `\\x1b`, `\\n`, `\\u202e`.
"""

from __future__ import annotations

import json
import logging
from typing import IO


def escaped(value: object, *, keep: str = "") -> str:
    """The text of a value with everything spelled out that a terminal would not just show.

    Args:
        value: text, or something with one, such as an error.
        keep: characters that stay as they are.

    Returns:
        Printable characters (`str.isprintable`: no control, format or separator characters but the
        space, and no lone surrogates) and those of `keep`.
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _spelled(c) for c in text)


def _spelled(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def say(*lines: object, file: IO[str] | None = None) -> None:
    """Print lines, each of them as one line, whatever is in it."""
    print("\n".join(map(escaped, lines)), file=file, flush=True)


def say_block(text: object, *, file: IO[str] | None = None) -> None:
    """Print text with its own line breaks and tabs: a document, or a table of escaped cells."""
    print(escaped(text, keep="\n\t"), file=file)


def say_json(value: object) -> None:
    """Print a value as one line of JSON in printable ASCII."""
    say(json.dumps(value).replace("\x7f", "\\u007f"))  # the one control that json leaves alone


def logger_of(name: str) -> logging.Logger:
    """A module's logger, whose messages are escaped, too."""
    logger = logging.getLogger(name)
    if not any(isinstance(found, _Escaping) for found in logger.filters):
        logger.addFilter(_Escaping())
    return logger


class _Escaping(logging.Filter):
    """Puts the escaped message in the place of what was to be formatted."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Escape; every record passes."""
        record.msg, record.args = escaped(record.getMessage()), None
        return True
