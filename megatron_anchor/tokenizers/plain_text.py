"""Editing a `tokenizer.json` so that text stays text.

A fast tokenizer turns literal special strings of a document (`</s>`, `<|im_end|>`) into control
tokens. Which added tokens are *control* and which are ordinary vocabulary:

- flagged `special`, or named as bos, eos, pad, ...: control;
- appended after the model's own vocabulary and written as markup (first character punctuation,
  with a letter or digit inside, such as `<think>` or `<|fim|>`): control;
- all others (runs of spaces, added words, pieces that are also in the model's vocabulary): text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

HIDING = "\uffff"  # no text holds this noncharacter


def model_vocabulary(config: Mapping[str, Any]) -> set[str]:
    """The strings of the model's own vocabulary (BPE, WordPiece, WordLevel or Unigram)."""
    vocab = config["model"]["vocab"]
    return {piece for piece, _ in vocab} if isinstance(vocab, list) else set(vocab)


def control_tokens(config: Mapping[str, Any], *, named: Iterable[str] = ()) -> dict[str, int]:
    """Content -> id of the added tokens that a text must never produce."""
    own, named = model_vocabulary(config), set(named)
    return {
        token["content"]: token["id"]
        for token in config.get("added_tokens") or ()
        if token["special"]
        or token["content"] in named
        or (token["content"] not in own and _is_markup(token["content"]))
    }


def unknown_token(config: Mapping[str, Any]) -> str | None:
    """What the model gives for characters it does not know; any text may produce it."""
    model = config["model"]
    if isinstance(model["vocab"], list):
        number = model.get("unk_id")
        return None if number is None else model["vocab"][number][0]
    return model.get("unk_token")


def _is_markup(content: str) -> bool:
    first = unicodedata.category(content[0]) if content else ""
    return first[:1] in ("P", "S") and any(character.isalnum() for character in content)


def flagged_special(config: Mapping[str, Any], control: Mapping[str, int]) -> dict[str, Any]:
    """The config with every control token flagged special (one switch turns these off)."""
    tokens = [{**token, "special": token["content"] in control} for token in config["added_tokens"]]
    return {**config, "added_tokens": tokens}


def without_special(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without the tokens flagged special, for engines that have no such switch."""
    return {**config, "added_tokens": [t for t in config["added_tokens"] if not t["special"]]}


def hidden_in_model(config: Mapping[str, Any], contents: Iterable[str]) -> dict[str, Any]:
    """The config whose model can no longer spell `contents`.

    Unigram models match any piece of their vocabulary, `<s>` included, and a merge may build one:
    the pieces get names that no text holds, and merges that build or use them are dropped.
    """
    model = dict(config["model"])
    rename = {text: f"{HIDING}{text}{HIDING}" for text in contents}
    if isinstance(model["vocab"], list):
        model["vocab"] = [[rename.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {rename.get(piece, piece): id_ for piece, id_ in model["vocab"].items()}
    if model.get("unk_token") in rename:
        model["unk_token"] = rename[model["unk_token"]]
    if model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if not _touches(merge, rename)]
    # the added tokens are renamed too: by their content they keep their ids
    added = config.get("added_tokens") or ()
    tokens = [{**t, "content": rename.get(t["content"], t["content"])} for t in added]
    return {**config, "model": model, "added_tokens": tokens}


def _touches(merge: str | list[str], names: Mapping[str, str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left + right in names or left in names or right in names
