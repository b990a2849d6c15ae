"""The chat templates of a model folder, rewritten to begin what they render with the anchor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_anchor.checkpoint.model_folder import read_json
from megatron_anchor.errors import UserError

_USER = {"role": "user", "content": "Hello"}
_ANSWER = {"role": "assistant", "content": "Hi"}
_SYSTEM = {"role": "system", "content": "Be brief"}
PROBES = ([_USER], [_USER, _ANSWER, _USER], [_SYSTEM, _USER])
"""Conversations that are rendered; a template may refuse some of them, but not all."""

_LEADING_BOS = re.compile(r"\A\s*\{\{-?\s*bos_token\s*-?\}\}")


@dataclass(frozen=True)
class Template:
    """One template and where it stands."""

    place: str
    text: str
    replace: Callable[[str], None]
    """Write another text to its place."""


def templates(folder: Path) -> Iterator[Template]:
    """Yield every chat template of a folder, in whichever file it stands."""
    for path in (
        folder / "chat_template.jinja",
        *sorted((folder / "additional_chat_templates").glob("*.jinja")),
    ):
        if path.is_file():
            text = path.read_bytes().decode("utf-8")
            yield Template(str(path.relative_to(folder)), text, _file_writer(path))
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = read_json(folder / name).get("chat_template")
        if isinstance(found, str):
            yield Template(name, found, _json_writer(folder / name, None))
        elif isinstance(found, list):
            for number, entry in enumerate(found):
                where = f"{name} ({entry['name']})"
                yield Template(where, entry["template"], _json_writer(folder / name, number))


def with_anchor(
    text: str,
    *,
    token: str,
    bos: str | None,
    begins: Callable[[str], bool],
    render: Callable[..., str],
) -> str:
    """Return the template that begins with the anchor once; the same one if it does already.

    Args:
        text: the template.
        token: the anchor's text.
        bos: the text of the tokenizer's bos, which the anchor takes the place of.
        begins: says whether a rendered text encodes to exactly one anchor at its head.
        render: renders a template, given its text and a conversation.

    Raises:
        UserError: if no conversation can be rendered, or the anchor cannot be put in front.
    """
    if _all_begin(text, begins, render):
        return text
    literal = "{{ " + json.dumps(token, ensure_ascii=False) + " }}"
    made = literal + _LEADING_BOS.sub("", text)
    rendered = _rendered(text, render)
    bare = _rendered(_LEADING_BOS.sub("", text), render)
    if any(shown.startswith(token) for shown in bare):
        raise UserError(
            "it begins with the anchor in some conversations only, or more than once; write "
            f"{literal} at its head and nowhere else"
        )
    if bos and any(shown.startswith(bos) for shown in bare):
        raise UserError(
            f"it writes {bos!r} first, which the model was not trained behind; write {literal} in "
            "its place"
        )
    if not _all_begin(made, begins, render):
        raise UserError(
            f"with {literal} at its head it gives {_rendered(made, render)[0][:60]!r} for "
            f"{rendered[0][:60]!r}, which does not encode to one anchor and the text"
        )
    return made


def _all_begin(text: str, begins: Callable[[str], bool], render: Callable[..., str]) -> bool:
    return all(begins(shown) for shown in _rendered(text, render))


def _rendered(text: str, render: Callable[..., str]) -> list[str]:
    shown, problems = [], []
    for messages in PROBES:
        try:
            shown.append(render(text, messages))
        except Exception as error:  # a template raises what it likes
            problems.append(" ".join(str(error).split()))
    if not shown:
        raise UserError(f"it renders no conversation ({problems[0]})")
    return shown


def _file_writer(path: Path) -> Callable[[str], None]:
    return lambda text: _write(path, text.encode("utf-8"))


def _json_writer(path: Path, number: int | None) -> Callable[[str], None]:
    def replace(text: str) -> None:
        content: dict[str, Any] = read_json(path)
        if number is None:
            content["chat_template"] = text
        else:
            content["chat_template"][number]["template"] = text
        told = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        _write(path, told.encode("utf-8"))

    return replace


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
