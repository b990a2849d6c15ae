"""Every message that docs/troubleshooting.md quotes is a message of the source."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
VALUE = "\0"
"""Stands in a template where the source puts a value."""

QUOTED = re.findall(r"^### `` ?(.+?) ?``$|^### `(.+)`$", PAGE.read_text(), re.MULTILINE)
MESSAGES = [one or other for one, other in QUOTED]


@cache
def templates() -> tuple[str, ...]:
    """Every text literal of the package, adjacent ones joined as Python joins them."""
    found = []
    for path in (ROOT / "megatron_anchor").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    part.value if isinstance(part, ast.Constant) else VALUE for part in node.values
                )
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def is_in_the_source(message: str) -> bool:
    """Whether one literal holds the message; `...` in it stands for values, or for an end."""
    parts = [re.escape(part.strip()) for part in message.split("...") if part.strip()]
    pattern = re.compile(rf"\s*{VALUE}[^{VALUE}]{{0,3}}".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in templates())


@pytest.mark.parametrize("message", MESSAGES)
def test_every_quoted_message_is_in_the_source(message):
    assert is_in_the_source(message), message


def test_the_check_tells_other_messages_apart():
    assert is_in_the_source("no corpus at ...: ... not found")
    assert not is_in_the_source("no corpus at ... was found")
    assert not is_in_the_source("no corpus at this place: ... not found")


def test_every_message_has_a_cause_and_a_remedy():
    sections = re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    assert len(sections) == len(MESSAGES) > 30
    for section in sections:
        heading, _, body = section.partition("\n")
        assert "**Cause.**" in body, heading
        assert "**Remedy.**" in body, heading
