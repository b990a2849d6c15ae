"""A tokenizer that puts the anchor of training in front of every text, as inference needs it.

Models trained behind an anchor expect it. Where the tokenizer does not add it (Qwen's adds
nothing), tokenizer.json and the chat templates are rewritten. All is checked by encoding, in
transformers and in ``tokenizers`` alone; attributes such as ``add_bos_token`` say nothing certain.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_anchor.checkpoint import chat_templates, post_processors, pretrained
from megatron_anchor.checkpoint.model_folder import own_code, read_json
from megatron_anchor.checkpoint.tokenizer_files import anchor_id, has_tokenizer
from megatron_anchor.errors import UserError
from megatron_anchor.packing.anchor_token import choose_anchor

RECORD = "megatron_anchor"
"""Key of config.json with what the model was trained behind: ``{"anchor_token_id": id}``."""
OPT_OUT = "--keep-tokenizer"

_TEXTS = ("a", " Hello,  world", "x = 1\n", "")


def trained_anchor(
    args: Namespace, folder: Path | None, config: Mapping[str, Any] | None
) -> int | None:
    """Return the anchor of a run; None where it packed nothing behind an anchor, or has no token.

    Args:
        args: of the run.
        folder: with its tokenizer.
        config: of the original model.
    """
    if not getattr(args, "attention_pattern", None):
        return None
    wanted = getattr(args, "anchor_token", None)
    wanted = None if wanted is None else str(wanted)
    if wanted is not None and wanted.isdecimal():
        return int(wanted)
    if folder is None:
        return None
    known = {kind: anchor_id(folder, config or {}, kinds=(kind,)) for kind in ("bos", "eos")}
    return choose_anchor(wanted, bos=known["bos"], eos=known["eos"])


def recorded_anchor(config: Mapping[str, Any]) -> int | None:
    """Read the anchor that a config.json records; None where it records none.

    Raises:
        UserError: if the record is no token id.
    """
    record = config.get(RECORD)
    if record is None:
        return None
    found = record.get("anchor_token_id") if isinstance(record, dict) else record
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise UserError(f"config.json: {RECORD}.anchor_token_id is {found!r}, expected a token id")
    return found


def add_anchor(folder: Path, anchor: int, *, chats: bool = True) -> list[str]:
    """Rewrite a folder's tokenizer so that texts and chats begin with the anchor exactly once.

    Nothing is written where they do already.

    Args:
        folder: with config.json and copied tokenizer files, which may be changed.
        anchor: token id.
        chats: also rewrite chat templates.

    Returns:
        Notes on what was done.

    Raises:
        UserError: if that cannot be done, with the reason and the remedy.
    """
    if not has_tokenizer(folder):
        return [f"no tokenizer is exported: put token {anchor}, the anchor, in front of every text"]
    try:
        return _add_anchor(folder, anchor, chats=chats)
    except UserError as error:
        raise UserError(
            f"the tokenizer cannot be made to begin with the anchor {anchor}: {error}; {OPT_OUT} "
            "exports it unchanged, and whoever uses the model adds the anchor"
        ) from error


def _add_anchor(folder: Path, anchor: int, *, chats: bool) -> list[str]:
    if name := own_code(folder):
        raise UserError(f"{name} asks for Python code of the folder's own, which is never run here")
    path = folder / "tokenizer.json"
    if not path.is_file():
        if _begins_in_transformers(folder, anchor):
            return [f"the tokenizer begins texts with the anchor {anchor} by itself"]
        raise UserError(
            "there is no tokenizer.json, and without it tokens in front of a text are a matter of "
            "code; save the tokenizer with transformers' save_pretrained, which writes one, and "
            "name that folder with --like"
        )
    notes = []
    if not (_begins_in_tokenizers(path, anchor) and _begins_in_transformers(folder, anchor)):
        _rewrite_post_processor(folder, anchor)
        notes.append(f"tokenizer.json puts the anchor {anchor} in front of every text")
    else:
        notes.append(f"the tokenizer begins texts with the anchor {anchor} by itself")
    return notes + (_anchor_chats(folder, anchor) if chats else [])


def _rewrite_post_processor(folder: Path, anchor: int) -> None:
    path = folder / "tokenizer.json"
    content = read_json(path)
    content["post_processor"] = post_processors.with_anchor(
        content.get("post_processor"), token=_token(path, anchor), token_id=anchor
    )
    _write_json(path, content)
    if not _begins_in_tokenizers(path, anchor):
        raise UserError("with the anchor in its post_processor, tokenizers encodes otherwise")
    if not _begins_in_transformers(folder, anchor):
        _use_generic_class(folder)
    if not _begins_in_transformers(folder, anchor):
        raise UserError("with the anchor in its post_processor, transformers encodes otherwise")


def _use_generic_class(folder: Path) -> None:
    """Name the class that takes tokenizer.json as it is; a family's may make its own processor."""
    path = folder / "tokenizer_config.json"
    config = read_json(path)
    for name in ("add_bos_token", "add_eos_token"):
        config.pop(name, None)
    _write_json(path, {**config, "tokenizer_class": "PreTrainedTokenizerFast"})


def _anchor_chats(folder: Path, anchor: int) -> list[str]:
    found = list(chat_templates.templates(folder))
    if not found:
        return []
    library, token = pretrained.load_tokenizer(folder), _token(folder / "tokenizer.json", anchor)
    if library(token, add_special_tokens=False)["input_ids"] != [anchor]:
        raise UserError(
            f"its chat template cannot write it: the text {token!r} does not encode to {anchor}"
        )

    def begins(text: str) -> bool:
        return _once(library(text, add_special_tokens=False)["input_ids"], anchor)

    def render(template: str, messages: list[dict[str, str]]) -> str:
        return str(
            library.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        )

    changed = []
    for template in found:
        try:
            made = chat_templates.with_anchor(
                template.text, token=token, bos=library.bos_token, begins=begins, render=render
            )
        except UserError as error:
            raise UserError(f"the chat template in {template.place}: {error}") from error
        if made != template.text:
            template.replace(made)
            changed.append(template.place)
    _check_chat(folder, anchor)
    told = f"begin with it now in {', '.join(changed)}" if changed else "begin with it"
    return [
        f"chat templates {told}: encode what they render with add_special_tokens=False, as "
        "apply_chat_template does, or the anchor stands there twice"
    ]


def _check_chat(folder: Path, anchor: int) -> None:
    """Check the default template as transformers reads it from the written files."""
    library = pretrained.load_tokenizer(folder)
    if not isinstance(library.chat_template, str):
        return  # several by name: each was checked
    ids = library.apply_chat_template(
        chat_templates.PROBES[0], tokenize=True, return_dict=True, add_generation_prompt=True
    )["input_ids"]
    if not _once(ids, anchor):
        raise UserError(f"apply_chat_template begins with {ids[:3]}")


def _begins_in_tokenizers(path: Path, anchor: int) -> bool:
    from tokenizers import Tokenizer

    engine = _engine(path)
    assert isinstance(engine, Tokenizer)
    rows = [engine.encode(text).ids for text in _TEXTS]
    rows += [row.ids for row in engine.encode_batch(list(_TEXTS))]
    pairs = [engine.encode(text, "b").ids for text in _TEXTS]
    return all(_once(ids, anchor) for ids in rows) and all(ids.count(anchor) == 1 for ids in pairs)


def _begins_in_transformers(folder: Path, anchor: int) -> bool:
    library = pretrained.load_tokenizer(folder)
    rows = [library(text)["input_ids"] for text in _TEXTS]
    rows += library(list(_TEXTS))["input_ids"]
    pairs = [library(text, "b")["input_ids"] for text in _TEXTS]
    return all(_once(ids, anchor) for ids in rows) and all(ids.count(anchor) == 1 for ids in pairs)


def _once(ids: list[int], anchor: int) -> bool:
    return ids[:1] == [anchor] and ids[1:2] != [anchor]


def _token(path: Path, anchor: int) -> str:
    token = _engine(path).id_to_token(anchor)
    if token is None:
        raise UserError(f"the tokenizer has no token {anchor}")
    return str(token)


def _engine(path: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(f"{path} is no tokenizer: {error}") from error


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
