"""Where another engine's ids are known to be those of the tokenizer's own library.

Agreement on sample texts proves nothing about the next text. For byte-level BPE it follows from the
tokenizer's kind: the text is split by a regular expression, and every piece is merged byte by byte;
nothing is normalised and nothing can be unknown. `unproven` decides that from a `tokenizer.json`.

Two things still hang on the text, and `TextProof` looks at both. A regular expression asks what
kind of character it sees, and two libraries agree on that only for characters that the Unicode
tables of both know. And a tokenizer may bring texts into the normal form NFC first.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

_CODES = 0x40000  # all letters and digits; texts with rarer characters are not proven
_MARKS = ("single_word", "lstrip", "rstrip")


class NativeEngine(Protocol):
    """The tokenizer's own library, as far as it is asked here."""

    def unassigned(self, characters: str) -> str:
        """Those of the characters that its Unicode tables do not know."""
        ...

    def normalized(self, text: str) -> str:
        """The text as its normaliser leaves it."""
        ...


def unproven(config: Mapping[str, Any]) -> str:
    """Why a `tokenizer.json` is not one whose ids any exact byte-level BPE gives; empty if it is.

    `config` holds the added tokens that texts may match, and no others. NFC is allowed here, since
    `TextProof` passes only texts that it leaves alone.
    """
    checks = (
        _model_problem(config["model"]),
        _normalizer_problem(config),
        _split_problem(config.get("pre_tokenizer")),
        _added_problem(config.get("added_tokens") or ()),
    )
    return next(filter(None, checks), "")


def normalizes(config: Mapping[str, Any]) -> bool:
    """Whether the tokenizer has a normaliser."""
    return bool(_normalizers(config.get("normalizer")))


def _model_problem(model: Mapping[str, Any]) -> str:
    from tokenizers.pre_tokenizers import ByteLevel

    if model.get("type") != "BPE":
        return f"its model is {model.get('type')}, not BPE"
    for name in ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            return f"its model has {name} {model[name]}"
    missing = [letter for letter in ByteLevel.alphabet() if letter not in model["vocab"]]
    return f"its vocabulary lacks {len(missing)} of the 256 bytes" if missing else ""


def _normalizer_problem(config: Mapping[str, Any]) -> str:
    kinds = _normalizers(config.get("normalizer"))
    if not kinds:
        return ""
    if set(kinds) != {"NFC"}:
        return f"it normalises texts by {', '.join(kinds)}"
    contents = [token["content"] for token in config.get("added_tokens") or ()]
    changed = [text for text in contents if not unicodedata.is_normalized("NFC", text)]
    return f"its added token {changed[0]!r} is not in the form NFC" if changed else ""


def _normalizers(step: Mapping[str, Any] | None) -> list[str]:
    """The kinds of all normalisers, one after another."""
    if step is None:
        return []
    if step.get("type") == "Sequence":
        return [kind for inner in step["normalizers"] for kind in _normalizers(inner)]
    return [str(step.get("type"))]


def _split_problem(step: Mapping[str, Any] | None) -> str:
    steps = step["pretokenizers"] if step and step.get("type") == "Sequence" else [step]
    *splits, last = [found or {} for found in steps] or [{}]
    if last.get("type") != "ByteLevel":
        return "it does not split texts into bytes at the end (pre-tokenizer ByteLevel)"
    if last.get("add_prefix_space", True):
        return "it sets a space before every text"
    if bool(splits) == bool(last.get("use_regex", True)):
        return "it does not split texts by exactly one regular expression"
    for split in splits:
        is_plain = split.get("type") == "Split" and "Regex" in split.get("pattern", {})
        if not is_plain or split.get("behavior") != "Isolated" or split.get("invert"):
            return f"it splits texts by {split.get('type')} in a way of its own"
    return ""


def _added_problem(tokens: Sequence[Mapping[str, Any]]) -> str:
    for token in tokens:
        marks = [mark for mark in _MARKS if token.get(mark)]
        if marks:
            return f"its added token {token['content']!r} is matched with {marks[0]}"
    before, after = (
        {letter for t in tokens if bool(t.get("normalized")) is late for letter in t["content"]}
        for late in (False, True)
    )
    if before & after:  # a token of the first pass could take a part of one of the second
        return "some of its added tokens are matched before its normaliser and some after it"
    return ""


class TextProof:
    """Whether the ids of one text follow from the tokenizer's kind."""

    def __init__(self, native: NativeEngine, *, normalizes: bool) -> None:
        self._native, self._normalizes = native, normalizes

    def __call__(self, text: str) -> bool:
        """True where any exact engine gives the native ids for this text."""
        if text.isascii():
            return True
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        if self._unknown[np.minimum(codes, _CODES)].any():
            return False
        return not self._normalizes or self._native.normalized(text) == text

    @functools.cached_property
    def _unknown(self) -> np.ndarray:
        """Bool [codes + 1] by code point: a table of Python or of the native library lacks it.

        Only an engine with tables older than both could read such a text in another way.
        """
        known = "".join(
            character
            for code in range(_CODES)
            if unicodedata.category(character := chr(code)) not in ("Cn", "Cs")
        )
        unknown = np.ones(_CODES + 1, dtype=bool)
        unknown[np.frombuffer(known.encode("utf-32-le"), dtype="<u4")] = False
        native = self._native.unassigned(known)
        unknown[np.frombuffer(native.encode("utf-32-le"), dtype="<u4")] = True
        return unknown
