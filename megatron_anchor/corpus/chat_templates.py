"""Chat templates: rendering a conversation, and where in the text the answers stand.

A template marks what the assistant writes with `{% generation %} ... {% endgeneration %}`, as
transformers has it (`return_assistant_tokens_mask`), and transformers renders. `chat_checks` holds
whether the marks can be trusted.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_anchor.corpus.conversations import ConversationError
from megatron_anchor.errors import UserError
from megatron_anchor.tokenizers import Tokenizer

_TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OURS = {"messages", "tools", "conversations", "chat_template", "strftime_now", "documents"} | {
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
}
_NO_CLOCK = "the clock is not read here"


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the answers in it as (start, end) of characters, in order."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template and the variables it is rendered with. Pickles as text."""

    name: str
    """Where it comes from, for messages."""
    source: str
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> dict[str, str]:
        """Digests of all that decides what it renders."""
        variables = json.dumps(self.variables, sort_keys=True)
        return {"template": _digest(self.source), "variables": _digest(variables)}

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, *, prompt: bool = False
    ) -> Rendered:
        """Render a conversation, with `prompt` also what the template sets before an answer.

        Raises:
            ConversationError: the template refuses it, or its marks overlap.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            found: Any = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=tools,
                chat_template=self.source,
                return_assistant_tokens_mask=True,
                add_generation_prompt=prompt,
                strftime_now=_NO_CLOCK,
                **self.variables,
            )
        except ImportError as error:  # of jinja2, or of a version that is safe
            raise UserError(f"--chat: {error}") from error
        except Exception as error:  # a template can raise anything
            why = f"{type(error).__name__}: {error}"
            if "strftime_now" in self.source and "not callable" in str(error):
                why = (
                    "it asks for today's date, with which no corpus could be made twice; set the "
                    'date, such as --chat-template-kwargs \'{"date_string": "26 Jul 2024"}\''
                )
            raise ConversationError("refused by the chat template", why) from error
        [text], [spans] = found
        ends = [0, *(end for _, end in spans)]
        if any(
            not before <= start <= end <= len(text)
            for before, (start, end) in zip(ends, spans, strict=False)
        ):
            raise ConversationError(
                "generation tags overlap",
                f"the answers would stand at the characters {spans} of {len(text)}",
            )
        return Rendered(text, tuple((start, end) for start, end in spans if start < end))


def load_chat_template(
    tokenizer: Tokenizer, *, file: str | None, kwargs: str | None
) -> ChatTemplate:
    """The template in a file, or else the tokenizer's own.

    Raises:
        UserError: there is none, or it has no generation tags.
    """
    own = tokenizer.chat_templates
    if file is not None:
        try:
            name, source = f"--chat-template {file}", Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--chat-template {file} cannot be read: {error}") from error
    elif not own:
        raise UserError(
            f"--chat: the tokenizer {tokenizer.path} has no chat template; give one with "
            "--chat-template FILE"
        )
    elif len(own) > 1:
        raise UserError(
            f"--chat: the tokenizer {tokenizer.path} has the chat templates {', '.join(own)}; "
            "write the one to use into a file, and give it with --chat-template FILE"
        )
    else:
        [source] = own.values()
        name = f"the chat template of {tokenizer.path}"
    if not _TAGS.search(source):
        raise UserError(
            f"{name} has no {{% generation %}} tags, so it does not say what the assistant writes; "
            "copy it, put {% generation %} before each answer and {% endgeneration %} behind its "
            "end-of-turn token, and give the copy with --chat-template FILE"
        )
    variables = {**tokenizer.named, **_variables(kwargs)}
    return ChatTemplate(name=name, source=source, variables=variables)


def _variables(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"--chat-template-kwargs {text} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"--chat-template-kwargs {text}: expected a JSON object")
    reserved = sorted(_OURS & set(value))
    if reserved:
        raise UserError(f"--chat-template-kwargs {text}: {reserved[0]!r} is set by the command")
    return value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
