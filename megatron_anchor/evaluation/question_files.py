"""Questions with documents from a user's file: SQuAD or HotpotQA JSON, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_anchor.errors import UserError

FORMS = (
    "expected SQuAD's JSON ({\"data\": [...]}), HotpotQA's (a list of objects with question, "
    'answer and context), or a JSON object a line: {"question": ..., "answers": [...], '
    '"documents": [...]}'
)


@dataclass(frozen=True)
class Question:
    """A question and the documents that answer it."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]


def read_questions(path: str | Path) -> list[Question]:
    """Read a file.

    Raises:
        UserError: naming the place in the file.
    """
    path = Path(path)
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--qa-file {path}: {error}") from error
    try:
        whole = json.loads(content)
    except ValueError:
        found = list(_lines(path, content))
    else:
        found = list(_whole(path, whole))
    if len(found) < 2 or len({d for question in found for d in question.documents}) < 2:
        raise UserError(
            f"--qa-file {path}: {len(found)} question(s) with an answer; at least two with "
            f"different documents are needed, since those of the others are the haystack; {FORMS}"
        )
    return found


def _whole(path: Path, whole: Any) -> Iterator[Question]:
    try:
        if isinstance(whole, dict) and "data" in whole:
            yield from _squad(whole, path)
        elif isinstance(whole, list):
            for number, entry in enumerate(whole):
                yield _hotpot(entry, f"{path}, entry {number}")
        else:  # a file of one line
            yield _entry(whole, f"{path}, line 1")
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--qa-file {path}: {type(error).__name__} {error}; {FORMS}") from error


def _squad(whole: dict[str, Any], path: Path) -> Iterator[Question]:
    for article in whole["data"]:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                if asked["answers"] and not asked.get("is_impossible"):
                    entry = {
                        "question": asked["question"],
                        "answers": list(dict.fromkeys(a["text"] for a in asked["answers"])),
                        "documents": paragraph["context"],
                    }
                    yield _entry(entry, f"{path}, question {asked.get('id', asked['question'])!r}")


def _hotpot(entry: dict[str, Any], place: str) -> Question:
    if isinstance(entry, dict) and "context" not in entry:
        return _entry(entry, place)
    documents = [f"{title}: {''.join(told)}" for title, told in entry["context"]]
    return _entry({**entry, "documents": documents}, place)


def _lines(path: Path, content: str) -> Iterator[Question]:
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise UserError(f"--qa-file {place}: no JSON ({error}); {FORMS}") from error
        yield _entry(entry, place)


def _entry(entry: Any, place: str) -> Question:
    if not isinstance(entry, dict):
        raise UserError(f"--qa-file {place}: {type(entry).__name__}, not an object; {FORMS}")
    question = _texts(entry, place, "question")[0]
    answers = _texts(entry, place, "answers", "answer")
    documents = _texts(entry, place, "documents", "context")
    return Question(question, tuple(answers), tuple(map(_line, documents)))


def _texts(entry: dict[str, Any], place: str, *names: str) -> list[str]:
    """A text, or a list of them, under one of the names; an empty answer would be in any answer."""
    name = next((name for name in names if name in entry), names[0])
    given = entry.get(name)
    values: Any = [given] if isinstance(given, str) else given
    texts = isinstance(values, list) and values and all(isinstance(v, str) for v in values)
    if not texts or not all(value.strip() for value in values):
        raise UserError(f"--qa-file {place}: {name} is {given!r}, expected text; {FORMS}")
    return values


def _line(text: str) -> str:
    """White space as single spaces, so that no document stands out by it."""
    return " ".join(text.split())
