"""Rows that hold conversations: checked, and split where a row packs several.

A conversation is what Hugging Face's chat templates take: `[{"role": "user", "content": "..."},
{"role": "assistant", "content": "..."}, ...]`, perhaps with tools. Megatron's `--sft` files have
the same rows, and may pack several conversations in one: a system message begins the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ASSISTANT = "assistant"
TOOL_ROLES = ("tool", "ipython", "function")
OPENING_ROLES = ("system", "developer")
ROLES = (*OPENING_ROLES, "user", ASSISTANT, *TOOL_ROLES)
_SHARE_GPT = {"from", "value"}


class ConversationError(Exception):
    """A row is no conversation that can be learned from: kind and detail."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


@dataclass(frozen=True)
class Conversation:
    """Messages as a chat template takes them, without entries that are null."""

    messages: tuple[dict[str, Any], ...]
    tools: list[dict[str, Any]] | None
    text_bytes: int
    """UTF-8 bytes of all its strings."""

    @property
    def answers(self) -> list[int]:
        """The places of the assistant's messages."""
        return [at for at, message in enumerate(self.messages) if message["role"] == ASSISTANT]

    def first(self, count: int) -> Conversation:
        """The first `count` messages."""
        return Conversation(self.messages[:count], self.tools, self.text_bytes)


def conversations_of(messages: Any, tools: Any, *, from_table: bool) -> list[Conversation]:
    """The conversations of a row, in order.

    Args:
        messages: the row's list of messages.
        tools: a list of JSON schemas, such a list as JSON text, or None.
        from_table: whether the row comes from a table, where a null may stand for "not there".

    Raises:
        ConversationError: something is missing, unknown or out of order; it names the message.
    """
    if not isinstance(messages, list) or not messages:
        raise ConversationError("not a conversation", f"{_shown(messages)} is no list of messages")
    checked = [
        _message(message, f"message {number}", from_table=from_table)
        for number, message in enumerate(messages, start=1)
    ]
    schemas = _tools(tools, from_table=from_table)
    tool_bytes = sum(map(len, _encoded(schemas, "tools")))
    found, at = [], 0
    for part in _split(checked):
        _require_order(part, first=at + 1)
        at += len(part)
        size = sum(map(len, _encoded(part, f"a message up to number {at}")))
        found.append(Conversation(tuple(part), schemas, size + tool_bytes))
    return found


def _split(messages: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """A system message begins a conversation."""
    current: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "system" and current:
            yield current
            current = []
        current.append(message)
    yield current


def _message(value: Any, place: str, *, from_table: bool) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConversationError("not a conversation", f"{place} is no object: {_shown(value)}")
    message = {key: _plain(item, place) for key, item in value.items() if item is not None}
    if "role" not in message and set(message) >= _SHARE_GPT:
        raise ConversationError(
            "not a conversation",
            f"{place} has 'from' and 'value'; rename them to 'role' and 'content', and the roles "
            "to user and assistant",
        )
    role = message.get("role")
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise ConversationError("broken roles", f"{place} has the role {role!r}, expected {known}")
    place = f"{place} ({role})"
    calls = message.get("tool_calls")
    if not calls:
        message.pop("tool_calls", None)
    elif role != ASSISTANT:
        raise ConversationError("broken roles", f"{place} has tool_calls; only an assistant calls")
    else:
        message["tool_calls"] = _calls(calls, place, from_table=from_table)
    if "content" in message:
        message["content"] = _content(message["content"], place)
    elif "tool_calls" not in message:
        raise ConversationError("not a conversation", f"{place} has no content")
    _require_weight(message, place)
    return message


def _require_weight(message: Mapping[str, Any], place: str) -> None:
    """A message may say whether it is learned, as in OpenAI's files: `"weight": 0`."""
    weight = message.get("weight", 1)
    if weight not in (0, 1) or isinstance(weight, bool):
        raise ConversationError("not a weight", f"{place} has the weight {weight!r}, expected 0, 1")
    if "weight" in message and message["role"] != ASSISTANT:
        raise ConversationError("not a weight", f"{place} has a weight; only answers are learned")


def _content(content: Any, place: str) -> str:
    """The text of a message; parts of text are joined, others are refused."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConversationError("not a string", f"{place} has the content {_shown(content)}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or part.get("type", "text") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else _shown(part)
            raise ConversationError(
                "not a string", f"{place} has a part of the type {kind!r}; only text is learned"
            )
        texts.append(text)
    return "".join(texts)


def _calls(calls: Any, place: str, *, from_table: bool) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, which is what templates expect."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ConversationError("not a conversation", f"{place}: tool_calls are {_shown(calls)}")
    found = []
    for call in calls:
        call = {key: value for key, value in call.items() if value is not None}
        inner = call.get("function", call)
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise ConversationError(
                "not a conversation", f"{place} calls a tool without a name: {_shown(call)}"
            )
        arguments = inner.get("arguments")
        if isinstance(arguments, str):
            arguments = _object_in(arguments)
        elif from_table and _has_null(arguments):
            raise ConversationError(
                "not a conversation",
                f"{place} has a null in the arguments of {inner['name']!r}; a table fills in nulls "
                "where rows differ, so write arguments as JSON text",
            )
        inner = {key: value for key, value in inner.items() if value is not None}
        inner |= {} if arguments is None else {"arguments": arguments}
        found.append({**call, "function": inner} if "function" in call else inner)
    return found


def _object_in(text: str) -> Any:
    """The object that a JSON text holds, or the text itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _tools(tools: Any, *, from_table: bool) -> list[dict[str, Any]] | None:
    is_text = isinstance(tools, str)
    if is_text and tools:
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise ConversationError("not tools", f"the text is no JSON: {error}") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ConversationError("not tools", f"{_shown(tools)} is no list of JSON schemas")
    if from_table and not is_text and _has_null(tools):
        raise ConversationError(
            "not tools",
            "there is a null in them; a table fills in nulls where rows differ, so write tools as "
            "JSON text",
        )
    return [_plain(tool, "tools") for tool in tools]


def _require_order(messages: Sequence[Mapping[str, Any]], *, first: int) -> None:
    """Refuse roles that do not follow one another; `first` is the number of the first message."""
    before: Mapping[str, Any] = {"role": None}
    for number, message in enumerate(messages, start=first):
        role, last = message["role"], before["role"]
        after_call = last in TOOL_ROLES or "tool_calls" in before
        wrong = ""
        if role in OPENING_ROLES and last not in (None, "system"):
            wrong = f"comes after {last}, expected at the beginning"
        elif role in TOOL_ROLES and not after_call:
            wrong = f"follows {last}, expected an assistant with tool_calls before it"
        elif role == last and role not in TOOL_ROLES:
            wrong = "follows another of the same role; join the two"
        if wrong:
            raise ConversationError("broken roles", f"message {number} ({role}) {wrong}")
        before = message
    if not any(message["role"] == ASSISTANT for message in messages):
        last_number = first + len(messages) - 1
        raise ConversationError(
            "no assistant turn", f"messages {first} to {last_number} have no answer to learn"
        )


def _has_null(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_null, value.values()))
    if isinstance(value, list):
        return any(map(_has_null, value))
    return value is None


def _plain(value: Any, place: str) -> Any:
    """The value with text where a table has bytes."""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConversationError(
                "invalid UTF-8", f"{place} has byte {value[error.start]:#04x} at {error.start}"
            ) from None
    if isinstance(value, Mapping):
        return {key: _plain(item, place) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, place) for item in value]
    return value


def _encoded(value: Any, place: str) -> Iterator[bytes]:
    """All strings in a value as UTF-8.

    Raises:
        ConversationError: one holds half a surrogate pair.
    """
    if isinstance(value, str):
        try:
            yield value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConversationError(
                "lone surrogate", f"{place} has {value[error.start]!r}, no Unicode text"
            ) from None
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _encoded(key, place)
            yield from _encoded(item, place)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _encoded(item, place)


def _shown(value: Any) -> str:
    return repr(value)[:60]
