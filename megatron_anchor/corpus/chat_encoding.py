"""Conversations as token ids and weights: 1 for what the assistant writes, 0 for all else.

Control tokens come from the template alone. What a row holds is text: where it spells a control
token (`<|im_end|>`), the spelling is marked, the marked row is rendered, and the text between the
template's own control tokens is encoded without any. One exception: an answer may spell control
tokens that are not flagged special (`<think>`, `<tool_call>`), since the model writes them itself.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from megatron_anchor.corpus.chat_checks import (
    require_nothing_left_out,
    spans_of_turns,
    turn_ends,
)
from megatron_anchor.corpus.chat_templates import ChatTemplate, Rendered
from megatron_anchor.corpus.conversations import ASSISTANT, Conversation, ConversationError
from megatron_anchor.errors import UserError
from megatron_anchor.tokenizers import EngineRecipe, Tokenizer
from megatron_anchor.tokenizers.plain_text import control_tokens, unknown_token

TOO_LONG = ("drop-turns", "reject")
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # noncharacters: no text needs them


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """All that decides what a conversation becomes; small enough to be sent to a worker once."""

    template: ChatTemplate
    markup: EngineRecipe
    """Reads control tokens from text."""
    plain: EngineRecipe
    """Never gives one."""
    control: Mapping[str, int]
    """Control tokens and their ids."""
    special: frozenset[str]
    """Those that no row may spell; the others an answer may."""
    text_is_text: bool
    eod_id: int | None = None
    """Ends every document; not doubled where the template ended it so."""
    max_tokens: int | None = None
    too_long: str = TOO_LONG[0]

    @property
    def versions(self) -> list[str]:
        """`NAME VERSION` of every package that decides ids."""
        return sorted({*self.markup.versions, f"transformers {version('transformers')}"})


@dataclass(frozen=True)
class EncodedConversation:
    """`ids` int64 [tokens], `weights` uint8 [tokens], and counts for the summary."""

    ids: np.ndarray
    weights: np.ndarray
    counts: Counter[str]


def chat_settings(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    append_eod: bool,
    max_tokens: int | None,
    too_long: str,
    text_is_text: bool,
) -> ChatSettings:
    """Settings for a tokenizer.

    Raises:
        UserError: the tokenizer does not say where in a text its tokens stand.
    """
    if tokenizer.markup is None:
        raise UserError(
            f"--chat needs a Hugging Face tokenizer (a folder or a tokenizer.json); "
            f"{tokenizer.path or tokenizer.kind} is of the kind {tokenizer.kind}, which does not "
            "say where in a text its tokens stand"
        )
    config = json.loads(str(tokenizer.markup.arguments["config"]))
    control = control_tokens(config, named=tokenizer.named.values())
    control.pop(unknown_token(config) or "", None)  # any unknown character may give it
    flagged = {token["content"] for token in config["added_tokens"] if token["special"]}
    return ChatSettings(
        template=template,
        markup=tokenizer.markup,
        plain=tokenizer.native,
        control=control,
        special=frozenset(set(control) & (flagged | set(tokenizer.named.values()))),
        text_is_text=text_is_text,
        eod_id=tokenizer.eod_id if append_eod else None,
        max_tokens=max_tokens,
        too_long=too_long,
    )


def pattern_of(contents: Collection[str]) -> re.Pattern[str]:
    """Finds any of the texts, the longest first."""
    longest_first = sorted(contents, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


class ChatEncoder:
    """Encodes conversations; holds both engines."""

    def __init__(self, settings: ChatSettings) -> None:
        self._settings = settings
        self._markup: Any = settings.markup.make()
        self._plain: Any = settings.plain.make()
        self._control = pattern_of(settings.control)
        self._special = pattern_of(settings.special)
        self._control_ids = np.array(sorted(settings.control.values()), dtype=np.int64)

    def __call__(self, conversation: Conversation) -> EncodedConversation:
        """Encode one conversation.

        Raises:
            ConversationError: it cannot be learned from, or is too long.
        """
        rendered = self._settings.template.render(conversation.messages, conversation.tools)
        ends = turn_ends(self._settings.template, conversation, rendered)
        ids, places = self._ids(conversation, rendered)
        require_nothing_left_out(self._settings.template, conversation, rendered)
        fitting, dropped = self._fitting(conversation, ends, ids, places)
        if dropped:
            shorter = self(conversation.first(fitting))
            before = shorter.counts["dropped_messages"]
            counts = shorter.counts | Counter(shortened=1, dropped_messages=before + dropped)
            return EncodedConversation(shorter.ids, shorter.weights, counts)
        weights = self._weights(conversation, rendered, ends, places)
        if not weights.any():
            raise ConversationError("no assistant turn", "all its answers have the weight 0")
        ids, weights = self._ended(rendered, ids, weights, places)
        counts = Counter({"conversations": 1, "answers": len(ends)})
        return EncodedConversation(ids, weights, counts)

    def _weights(
        self,
        conversation: Conversation,
        rendered: Rendered,
        ends: list[int],
        places: np.ndarray,
    ) -> np.ndarray:
        """uint8 [tokens]: 1 where a token has a character of an answer."""
        turns = spans_of_turns(rendered, ends, control=self._special)
        weights = np.zeros(len(places), dtype=np.uint8)
        for at, spans in zip(conversation.answers, turns, strict=True):
            if conversation.messages[at].get("weight", 1):
                for start, end in spans:
                    weights[(places[:, 0] < end) & (places[:, 1] > start)] = 1
        return weights

    def _fitting(
        self, conversation: Conversation, ends: list[int], ids: np.ndarray, places: np.ndarray
    ) -> tuple[int, int]:
        """Messages to keep, and how many are dropped: the end of the last answer that fits."""
        most, whole = self._settings.max_tokens, len(conversation.messages)
        eod = self._settings.eod_id
        spare = int(eod is not None and not (len(ids) and ids[-1] == eod))
        if most is None or len(ids) + spare <= most:
            return whole, 0
        what = f"{len(ids) + spare} tokens, over --max-conversation-tokens {most}"
        if self._settings.too_long == "reject":
            raise ConversationError("conversation too long", what)
        sizes = [int((places[:, 0] < end).sum()) + spare for end in ends]
        kept = [
            at + 1
            for at, size in zip(conversation.answers, sizes, strict=True)
            if size <= most and at + 1 < whole
        ]
        if not kept:
            raise ConversationError(
                "conversation too long", f"{what}, and its first answer ends at token {sizes[0]}"
            )
        return kept[-1], whole - kept[-1]

    def _ended(
        self, rendered: Rendered, ids: np.ndarray, weights: np.ndarray, places: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """With eod at the end, where that is asked for and the template did not set it."""
        eod = self._settings.eod_id
        if eod is None:
            return ids, weights
        [found] = np.nonzero(ids == eod)
        if len(found):
            last = int(found[-1])
            if not rendered.text[places[last, 1] :].strip():  # such as the newline of ChatML
                return ids[: last + 1], weights[: last + 1]
        return np.append(ids, eod), np.append(weights, np.uint8(0))

    def _ids(self, conversation: Conversation, rendered: Rendered) -> tuple[np.ndarray, np.ndarray]:
        """Ids and their places in the rendered text."""
        if self._settings.text_is_text:
            marked = self._marked(conversation, rendered)
            if marked is not None:
                return self._around_controls(rendered, *marked)
        ids, places = self._markup.encode_with_places(rendered.text)
        written = sum(1 for _ in self._control.finditer(rendered.text))
        if self._settings.text_is_text and written != np.isin(ids, self._control_ids).sum():
            raise ConversationError(
                "control token in text",
                f"the template writes {written} control tokens, the tokenizer reads "
                f"{np.isin(ids, self._control_ids).sum()}; --allow-special-in-text takes it so",
            )
        return ids, places

    def _marked(self, conversation: Conversation, rendered: Rendered) -> tuple[str, str] | None:
        """The text with a mark inside every control token that the row spells, and the mark.

        None where the row spells none.
        """
        mark = next((mark for mark in _MARKS if mark not in rendered.text), None)
        if mark is None:
            raise ConversationError("control token in text", "the row has all 32 noncharacters")
        messages = [
            _with_marks(
                message, self._special if message["role"] == ASSISTANT else self._control, mark
            )
            for message in conversation.messages
        ]
        tools = _with_marks(conversation.tools, self._control, mark)
        if messages == list(conversation.messages) and tools == conversation.tools:
            return None
        marked = self._settings.template.render(messages, tools)
        if marked.text.replace(mark, "") != rendered.text:
            raise ConversationError(
                "control token in text",
                "the row spells a control token that the template acts on; take it out",
            )
        return marked.text, mark

    def _around_controls(
        self, rendered: Rendered, text: str, mark: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encode the text between control tokens by itself, without the marks."""
        whole, _ = self._markup.encode_with_places(text)
        if not np.array_equal(whole, self._pieces(text)[0]):
            raise ConversationError(
                "control token in text",
                "the row spells a control token, and this tokenizer cannot encode the text around "
                "the template's own by itself; take it out, or use --allow-special-in-text",
            )
        ids, places = self._pieces(text, without=mark)
        assert not len(places) or places[-1, 1] <= len(rendered.text)
        return ids, places

    def _pieces(self, text: str, *, without: str = "") -> tuple[np.ndarray, np.ndarray]:
        ids: list[np.ndarray] = []
        places: list[np.ndarray] = []
        begin, at = 0, 0  # in `text`, and in the text without marks
        for match in (*self._control.finditer(text), None):
            piece = text[begin : match.start() if match else len(text)]
            piece = piece.replace(without, "") if without else piece
            found, offsets = self._plain.encode_with_places(piece)
            ids.append(found)
            places.append(offsets + at)
            at += len(piece)
            if match:
                ids.append(np.array([self._settings.control[match.group()]], dtype=np.int64))
                places.append(np.array([[at, at + len(match.group())]], dtype=np.int64))
                at, begin = at + len(match.group()), match.end()
        return np.concatenate(ids), np.concatenate(places)


def _with_marks(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    """The value with a mark behind the first character of every match in its strings."""
    if isinstance(value, str):
        while found := pattern.search(value):  # one may stand inside another
            if len(found.group()) == 1:
                raise ConversationError(
                    "control token in text",
                    f"the row holds {found.group()!r}, a control token of one character, which "
                    "cannot be told from the template's; --allow-special-in-text takes it as one",
                )
            value = pattern.sub(lambda m: f"{m.group()[0]}{mark}{m.group()[1:]}", value)
        return value
    if isinstance(value, Mapping):
        return {
            _with_marks(key, pattern, mark): _with_marks(item, pattern, mark)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_with_marks(item, pattern, mark) for item in value]
    return value
