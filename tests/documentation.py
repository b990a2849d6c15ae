"""README and docs as data: their fenced blocks, and the commands in these."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
RUNNABLE = "<!-- runnable -->"
"""Stands on the line before a fence whose commands a test runs."""

_FENCE = re.compile(rf"^({RUNNABLE}\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SEPARATORS = {"&&", "||", ";", "|", "do", "done", "then", "for"}
_SHELL = ("bash", "sh", "console")


class Fence(NamedTuple):
    """One fenced block."""

    language: str
    text: str
    runnable: bool


def page_id(page: Path) -> str:
    """The page's path, for test names."""
    return str(page.relative_to(ROOT))


def fences(page: Path) -> Iterator[Fence]:
    """The fenced blocks of a page."""
    for mark, language, text in _FENCE.findall(page.read_text(encoding="utf-8")):
        yield Fence(language, text, bool(mark))


def shell_commands(page: Path) -> Iterator[list[str]]:
    """The words of every command in the page's shell blocks; here-documents are left out."""
    for fence in fences(page):
        if fence.language in _SHELL:
            yield from commands(fence.text)


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command in a shell text."""
    text = re.sub(r"<<'?(\w+)'?\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    for line in text.replace("\\\n", " ").splitlines():
        words: list[str] = []
        lexer = shlex.shlex(re.sub(r"\$\(.*?\)", "SUBSTITUTED", line), punctuation_chars=";|&")
        lexer.whitespace_split, lexer.commenters = True, "#"
        for word in lexer:
            if word in _SEPARATORS:
                if words:
                    yield words
                words = []
            else:
                words.append(word.strip("'\""))
        if words:
            yield words


def flags(words: list[str]) -> list[str]:
    """The long flags among words, without their values."""
    return [word.split("=")[0] for word in words if re.match(r"--[a-z]", word)]
