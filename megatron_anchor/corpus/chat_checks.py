"""Whether a chat template can be learned from: on a plain conversation, and on every row.

A template is right where every answer stands inside its tags with the token that ends the turn,
where nothing of a row is left out, and where earlier turns read the same whatever follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from megatron_anchor.corpus.chat_templates import ChatTemplate, Rendered
from megatron_anchor.corpus.conversations import ASSISTANT, Conversation, ConversationError
from megatron_anchor.errors import UserError

_QUESTIONS = ("First question?", "Second question?")
_ANSWERS = ("First answer.", "Second answer.")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_SHOWN = 40  # characters on either side in messages


def _plain_conversation() -> list[dict[str, str]]:
    return [
        {"role": role, "content": content}
        for turn in zip(_QUESTIONS, _ANSWERS, strict=True)
        for role, content in zip(("user", ASSISTANT), turn, strict=True)
    ]


def require_whole_answers(template: ChatTemplate, *, control: re.Pattern[str]) -> None:
    """Try a template on a plain conversation: answers inside the tags, with their stop token.

    Args:
        template: to try.
        control: finds the tokenizer's control tokens in text.

    Raises:
        UserError: an answer stands outside the tags, a question inside, or the token that ends a
            turn is left out.
    """
    try:
        rendered = template.render(_plain_conversation(), None)
    except ConversationError as error:
        raise UserError(f"{template.name} fails on a plain conversation: {error.detail}") from error
    text = rendered.text
    for content in (*_QUESTIONS, *_ANSWERS):
        at = text.find(content)
        if at < 0:
            raise UserError(f"{template.name} leaves out the content of a message: {content!r}")
        inside = any(start <= at and at + len(content) <= end for start, end in rendered.spans)
        if inside != (content in _ANSWERS):
            place = "inside" if inside else "outside"
            raise UserError(
                f"{template.name} has the content {content!r} {place} its generation tags; put "
                "{% generation %} before each answer and {% endgeneration %} behind its "
                "end-of-turn token"
            )
    for answer, until in zip(_ANSWERS, (_QUESTIONS[1], None), strict=True):
        begin = text.find(answer) + len(answer)
        end = len(text) if until is None else text.find(until)
        learned = [text[max(a, begin) : min(b, end)] for a, b in rendered.spans]
        if not any(control.search(part) for part in learned):
            follows = text[begin:end]
            raise UserError(
                f"{template.name} closes its generation tags after {answer!r} and before "
                f"{follows[:_SHOWN]!r}, so the model would not learn to stop; move "
                "{% endgeneration %} behind the token that ends the turn"
            )


def prompt_note(template: ChatTemplate) -> str:
    """A note where answers follow something else in the corpus than when they are asked for."""
    messages = _plain_conversation()
    whole = template.render(messages, None)
    try:
        prompt = template.render(messages[:1], None, prompt=True).text
    except ConversationError as error:
        return f"{template.name} fails with add_generation_prompt: {error.detail}"
    before = whole.text[: whole.spans[0][0]]
    if before == prompt:
        return ""
    return (
        f"{template.name} asks for an answer with ...{prompt[-_SHOWN:]!r}, but in the corpus "
        f"answers follow ...{before[-_SHOWN:]!r}; at inference the model sees the former"
    )


def require_nothing_left_out(
    template: ChatTemplate, conversation: Conversation, rendered: Rendered
) -> None:
    """Refuse a conversation of which the template leaves out a part.

    Raises:
        ConversationError: it does not use tools, tool calls or reasoning that are there, or the
            text of a message that is no answer is not in the rendering.
    """
    missing = ""
    if conversation.tools and "tools" not in template.source:
        missing = "tools"
    for number, message in enumerate(conversation.messages, start=1):
        place, content = f"message {number} ({message['role']})", message.get("content", "")
        if message.get("tool_calls") and "tool_calls" not in template.source:
            missing = f"the tool_calls of {place}"
        held = [name for name in _REASONING if message.get(name)]
        if held and not any(name in template.source for name in _REASONING):
            missing = f"the {held[0]} of {place}"
        # some templates write a tool's result as JSON
        spelled = json.dumps(content, ensure_ascii=False)[1:-1]
        is_there = content.strip() in rendered.text or spelled in rendered.text
        if message["role"] != ASSISTANT and not is_there:
            missing = f"the content of {place}"
    if missing:
        raise ConversationError(
            "left out by the chat template",
            f"the template does not write {missing}; take it out of the row, or give a template "
            "that writes it with --chat-template",
        )


def turn_ends(template: ChatTemplate, conversation: Conversation, rendered: Rendered) -> list[int]:
    """Where in the text each answer's turn ends, in characters.

    A conversation up to an answer must render to the beginning of the whole: what a model sees
    before a later answer is then what it saw and wrote in the earlier turns.

    Raises:
        ConversationError: the template rewrites earlier turns.
    """
    ends = []
    for at in conversation.answers:
        if at + 1 == len(conversation.messages):
            ends.append(len(rendered.text))
            continue
        part = template.render(conversation.messages[: at + 1], conversation.tools).text
        if not rendered.text.startswith(part):
            raise ConversationError(
                "history is rewritten", _difference(part, rendered.text, count=at + 1)
            )
        ends.append(len(part))
    return ends


def _difference(part: str, whole: str, *, count: int) -> str:
    same = next(
        (at for at, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b),
        min(len(part), len(whole)),
    )
    return (
        f"the template renders messages 1 to {count} alone with {part[same : same + _SHOWN]!r} "
        f"where, with the later messages, it has {whole[same : same + _SHOWN]!r}; use a template "
        "that keeps earlier turns as they are, or end the row with that answer"
    )


def spans_of_turns(
    rendered: Rendered, ends: Sequence[int], *, control: re.Pattern[str]
) -> list[list[tuple[int, int]]]:
    """The spans of every answer's turn.

    Raises:
        ConversationError: a turn has none, or does not learn the token that ends it.
    """
    turns, begin = [], 0
    for number, end in enumerate(ends, start=1):
        spans = [span for span in rendered.spans if begin <= span[0] < end]
        if not spans:
            raise ConversationError(
                "answer without tags", f"answer {number} has no generation tags around it"
            )
        last = rendered.text[slice(*spans[-1])].rstrip()
        if not any(match.end() == len(last) for match in control.finditer(last)):
            raise ConversationError(
                "stop token is not learned",
                f"answer {number} ends with {last[-_SHOWN:]!r} inside the generation tags, and "
                f"goes on with {rendered.text[spans[-1][1] :][:_SHOWN]!r}; expected a stop token",
            )
        turns.append(spans)
        begin = end
    return turns
