"""Rows that are no conversation are refused with the message, its value, and what to do."""

from __future__ import annotations

import pytest

from megatron_anchor.corpus.conversations import ConversationError, conversations_of
from tests.chat_fixtures import talk

U, A = talk("q", "a")
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": None}}}]}
T = {"role": "tool", "content": "r"}
S = {"role": "system", "content": "s"}
BAD = {
    "no list": ("text", "not a conversation", "'text' is no list"),
    "empty": ([], "not a conversation", "no list of messages"),
    "no object": ([U, 3], "not a conversation", "message 2 is no object: 3"),
    "no role": ([{"content": "x"}], "broken roles", "message 1 has the role None"),
    "unknown role": ([{"role": "bot", "content": "x"}], "broken roles", "'bot', expected system"),
    "ShareGPT": ([{"from": "human", "value": "x"}], "not a conversation", "rename them"),
    "no assistant": ([U], "no assistant turn", "messages 1 to 1 have no answer"),
    "second has none": ([U, A, S, U], "no assistant turn", "messages 3 to 4"),
    "user twice": ([U, U, A], "broken roles", r"message 2 \(user\) follows another"),
    "assistant twice": ([U, A, A], "broken roles", r"message 3 \(assistant\) follows another"),
    "result without call": ([U, A, T], "broken roles", r"message 3 \(tool\) follows assistant"),
    "late developer": ([U, A, {"role": "developer", "content": "d"}], "broken roles", "beginning"),
    "no content": (
        [{"role": "user"}, A],
        "not a conversation",
        r"message 1 \(user\) has no content",
    ),
    "null content": ([{"role": "user", "content": None}, A], "not a conversation", "no content"),
    "number": ([{"role": "user", "content": 7}, A], "not a string", "the content 7"),
    "image": (
        [{"role": "user", "content": [{"type": "image", "url": "x"}]}, A],
        "not a string",
        "a part of the type 'image'",
    ),
    "user calls": ([{**U, "tool_calls": [{"name": "f"}]}, A], "broken roles", "only an assistant"),
    "nameless call": ([U, {**A, "tool_calls": [{"x": 1}]}], "not a conversation", "without a name"),
    "weight": ([U, {**A, "weight": 0.5}], "not a weight", "the weight 0.5, expected 0, 1"),
    "weighted user": ([{**U, "weight": 0}, A], "not a weight", "only answers are learned"),
    "surrogate": ([{"role": "user", "content": "\ud800"}, A], "lone surrogate", "no Unicode"),
    "bytes": ([{"role": "user", "content": b"\xff"}, A], "invalid UTF-8", "byte 0xff at 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_named(case):
    messages, kind, detail = BAD[case]
    with pytest.raises(ConversationError, match=detail) as caught:
        conversations_of(messages, None, from_table=False)
    assert caught.value.kind == kind


@pytest.mark.parametrize("tools", ["{", 7, ["x"], {"name": "f"}])
def test_bad_tools_are_named(tools):
    with pytest.raises(ConversationError, match="JSON") as caught:
        conversations_of([U, A], tools, from_table=False)
    assert caught.value.kind == "not tools"


@pytest.mark.parametrize(
    "messages",
    [[U, A], [S, U, A], [A, U, A], [U, CALL, T, T, A], [U, CALL, T, U, A], [S, A, U]],
    ids=str,
)
def test_conversations_pass(messages):
    [found] = conversations_of(messages, None, from_table=False)
    assert len(found.messages) == len(messages)


def test_a_system_message_begins_the_next_conversation_as_in_megatron():
    found = conversations_of([U, A, S, U, A, U, A, S, U, A], None, from_table=False)
    assert [len(one.messages) for one in found] == [2, 5, 3]


def test_nulls_are_left_out_and_texts_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts, "name": None}, {**A, "tool_calls": None}]
    [found] = conversations_of(messages, "[]", from_table=True)
    assert found.messages == ({"role": "user", "content": "ab"}, A)
    assert found.tools is None


def test_nulls_in_arguments_and_tools_are_refused_from_tables_alone():
    assert conversations_of([U, CALL], None, from_table=False)
    tools = [{"name": "f", "parameters": None}]
    assert conversations_of([U, A], tools, from_table=False)
    assert conversations_of([U, A], '[{"name": "f", "parameters": null}]', from_table=True)
    with pytest.raises(ConversationError, match=r"a null in them.*tools as JSON text"):
        conversations_of([U, A], tools, from_table=True)
    with pytest.raises(ConversationError, match=r"null in the arguments of 'f'.*as JSON text"):
        conversations_of([U, CALL], None, from_table=True)
