"""Hugging Face tokenizers: a folder, a hub name, a `tokenizer.json`, or GPT-2's two files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_anchor.errors import UserError
from megatron_anchor.tokenizers import gigatoken_engine, hub, plain_text
from megatron_anchor.tokenizers.base import (
    EngineRecipe,
    Tokenizer,
    affix_note,
    digest_of,
    read_json,
)
from megatron_anchor.tokenizers.plain_text import HIDING

_FACTORY = "megatron_anchor.tokenizers.huggingface:TokenizersEngine"
_EOS_NAMES = (
    "</s>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<eos>",
    "<|eot_id|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)


class TokenizersEngine:
    """The `tokenizers` library. `plain_text` keeps special strings of a text as text."""

    name = "tokenizers"

    def __init__(self, *, config: str, plain_text: bool, threads: int = 1) -> None:
        import os

        if threads == 1:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one engine a worker process
        else:
            os.environ["RAYON_NUM_THREADS"] = str(threads)
        from tokenizers import Tokenizer as Library

        self.library = Library.from_str(config)
        self.library.no_truncation()
        self.library.no_padding()
        self.library.encode_special_tokens = plain_text
        self._hides = json.dumps(HIDING)[:-1] in config

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of every text, uint32, without the post-processor's tokens."""
        encodings = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode_with_places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a text, int64 [tokens], and their (start, end) characters, int64 [tokens, 2]."""
        encoding = self.library.encode(text, add_special_tokens=False)
        places = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return np.array(encoding.ids, dtype=np.int64), places

    def unassigned(self, characters: str) -> str:
        """Those of the characters that the library's Unicode tables do not know."""
        from tokenizers import Regex
        from tokenizers.pre_tokenizers import Split

        known = Split(Regex(r"\P{Cn}+"), "removed")
        return "".join(part for part, _ in known.pre_tokenize_str(characters))

    def normalized(self, text: str) -> str:
        """The text as the tokenizer's normaliser leaves it."""
        normalizer = self.library.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens shown."""
        text = self.library.decode(list(ids), skip_special_tokens=False)
        return text.replace(HIDING, "") if self._hides else text


def load_file(path: Path, *, special: bool, affixes: bool, eod_token: str | None) -> Tokenizer:
    """A lone `tokenizer.json`; eos comes from the files beside it or from well-known names.

    `special`: special strings in a text become control tokens. `affixes`: every text gets what the
    library's post-processor adds (a bos, for some tokenizers).
    """
    config = _read_json(path)
    if not isinstance(config.get("model"), dict):
        raise UserError(f"{path} is not a tokenizer.json: it has no 'model' entry")
    named = _named_tokens(path.parent)
    written = _as_the_library_writes_it(config, path=str(path))
    contents = {token["content"] for token in written["added_tokens"]}
    eos = named.get("eos_token") or next((name for name in _EOS_NAMES if name in contents), None)
    return _describe(
        written,
        path=str(path),
        eos=eod_token or eos,
        named={"bos_token": named.get("bos_token"), **named},
        special=special,
        affixes=affixes,
        templates=_templates_beside(path.parent),
    )


def load_folder(
    path: str, *, special: bool, affixes: bool, eod_token: str | None, trust_remote_code: bool
) -> Tokenizer:
    """What `AutoTokenizer.from_pretrained(path)` gives for a folder or a hub name."""
    folder = Path(path)
    offline = not folder.exists() and not hub.is_reachable()
    if offline and not hub.is_cached(path):
        raise UserError(
            f"--tokenizer-model {path}: there is no such folder here, no copy in the cache of the "
            "Hugging Face hub, and the hub cannot be reached; give a folder, or load the model "
            "once where there is a network"
        )
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        library = AutoTokenizer.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=offline
        )
    except (OSError, ValueError, KeyError) as error:
        if not (folder / "tokenizer.json").is_file():
            raise UserError(f"no tokenizer could be loaded from {path!r}: {error}") from error
        return load_file(
            folder / "tokenizer.json", special=special, affixes=affixes, eod_token=eod_token
        )
    if not isinstance(library, PreTrainedTokenizerFast):
        raise UserError(
            f"{path!r} gives a {type(library).__name__}, which has no fast tokenizer.json; convert "
            "it (AutoTokenizer with use_fast=True, then save_pretrained) and give the new folder"
        )
    named = {
        name: str(value)
        for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
        if (value := getattr(library, name, None)) is not None
    }
    return _describe(
        json.loads(library.backend_tokenizer.to_str()),
        path=path,
        eos=eod_token or named.get("eos_token") or named.get("sep_token"),
        named=named,
        special=special,
        affixes=affixes,
        templates=_by_name(getattr(library, "chat_template", None)),
    )


def load_gpt2(vocab_file: Path, merge_file: Path, *, special: bool) -> Tokenizer:
    """GPT-2's `vocab.json` and `merges.txt` (Megatron's GPT2BPETokenizer)."""
    from tokenizers import ByteLevelBPETokenizer

    library = ByteLevelBPETokenizer(str(vocab_file), str(merge_file))
    library.add_special_tokens(["<|endoftext|>"])
    return _describe(
        json.loads(library.to_str()),
        path=str(vocab_file),
        eos="<|endoftext|>",
        named={},
        special=special,
        affixes=False,
    )


def _describe(
    config: Mapping[str, Any],
    *,
    path: str,
    eos: str | None,
    named: Mapping[str, str | None],
    special: bool,
    affixes: bool,
    templates: Mapping[str, str] | None = None,
) -> Tokenizer:
    config = _as_the_library_writes_it(config, path=path)
    try:
        found = _described(
            config, path=path, eos=eos, named=named, special=special, affixes=affixes
        )
        return replace(found, chat_templates=templates or {})
    except Exception as error:
        if type(error) is not Exception:  # the one that tokenizers raises
            raise
        raise UserError(f"{path} is no tokenizer that can be used: {error}") from error


def _described(
    config: Mapping[str, Any],
    *,
    path: str,
    eos: str | None,
    named: Mapping[str, str | None],
    special: bool,
    affixes: bool,
) -> Tokenizer:
    own_unknown = plain_text.unknown_token(config)
    markup = {"config": json.dumps(config), "plain_text": False}
    control: dict[str, int] = {}
    if not special:
        control = plain_text.control_tokens(config, named=filter(None, named.values()))
        config = plain_text.flagged_special(config, control)
    encoded = json.dumps(config)
    engine = TokenizersEngine(config=encoded, plain_text=False)
    vocabulary = engine.library.get_vocab(with_added_tokens=True)
    if eos is not None and eos not in vocabulary:
        raise UserError(
            f"the end-of-document token {eos!r} is not in the vocabulary of {path}; "
            "name another with --eod-token, or give its number with --eod-id"
        )
    prefix, suffix = _affixes(engine, path=path) if affixes else ((), ())
    if not special:
        engine.library.encode_special_tokens = True
        control.pop(own_unknown or "", None)  # any unknown character may give it
        config, encoded, engine = _guarded(config, encoded, engine, control, path=path)
    bos = named.get("bos_token")
    written = json.loads(engine.library.to_str())  # with the ids that the library itself gives
    stripped = written if special else plain_text.without_special(written)
    arguments = {"config": encoded, "plain_text": not special}
    recipe = EngineRecipe("tokenizers", _FACTORY, arguments, packages=("tokenizers",))
    fast, reason = gigatoken_engine.recipe_from_json(stripped, native=recipe)
    return Tokenizer(
        kind="huggingface",
        path=path,
        vocab_size=max(len(vocabulary), max(vocabulary.values()) + 1),
        native=recipe,
        native_engine=engine,
        fast=fast,
        fast_unavailable=reason,
        eod_id=vocabulary[eos] if eos is not None else None,
        bos_id=vocabulary.get(bos) if bos else None,
        prefix=prefix,
        suffix=suffix,
        control_ids=frozenset(control.values()),
        digest=digest_of(json.dumps(_deciding(written), sort_keys=True)),
        notes=(affix_note(prefix, suffix),) if prefix or suffix else (),
        markup=EngineRecipe("tokenizers", _FACTORY, markup, packages=("tokenizers",)),
        named={name: value for name, value in named.items() if value is not None},
    )


def _as_the_library_writes_it(config: Mapping[str, Any], *, path: str) -> dict[str, Any]:
    """The config with every entry there, with the ids that count, and without truncation.

    Raises:
        UserError: it is no tokenizer.
    """
    from tokenizers import Tokenizer as Library

    try:
        written = Library.from_str(json.dumps(config)).to_str()
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(f"{path} is no tokenizer that can be read: {error}") from error
    return {**json.loads(written), "truncation": None, "padding": None}


def _deciding(config: Mapping[str, Any]) -> Any:
    """What of a tokenizer, as the library writes it, decides ids.

    Entries that are empty or off are left out: a later version of the library may write more.
    """
    return _without_empty(
        {name: config[name] for name in ("normalizer", "pre_tokenizer", "model", "added_tokens")}
    )


def _without_empty(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_empty(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {name: _without_empty(item) for name, item in value.items()}
    return {name: item for name, item in kept.items() if item is not None and item is not False}


def _guarded(
    config: Mapping[str, Any],
    encoded: str,
    engine: TokenizersEngine,
    control: Mapping[str, int],
    *,
    path: str,
) -> tuple[Mapping[str, Any], str, TokenizersEngine]:
    """Config, its JSON and its engine in which no control string can be spelled.

    Proved by encoding each of them; where the model's own vocabulary spells one, it is hidden.
    """
    reachable = _reachable(engine, control)
    if not reachable:
        return config, encoded, engine
    config = plain_text.hidden_in_model(config, reachable)
    encoded = json.dumps(config)
    engine = TokenizersEngine(config=encoded, plain_text=True)
    left = _reachable(engine, control)
    if left:
        raise UserError(
            f"the tokenizer {path} turns the literal text {left[0]!r} into its control token even "
            "with added tokens off; use --allow-special-in-text if that is wanted"
        )
    return config, encoded, engine


def _reachable(engine: TokenizersEngine, control: Mapping[str, int]) -> list[str]:
    contents, ids = list(control), set(control.values())
    texts = [text for content in contents for text in (content, f"a{content} b")]
    found = [bool(ids.intersection(row.tolist())) for row in engine.encode_batch(texts)]
    return [content for i, content in enumerate(contents) if found[2 * i] or found[2 * i + 1]]


def _affixes(engine: TokenizersEngine, *, path: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor sets before and after a text."""
    library, found = engine.library, set()
    for text in ("a", "Hello, world", "x = 1\n"):
        bare = library.encode(text, add_special_tokens=False).ids
        full = library.encode(text, add_special_tokens=True).ids
        extra = len(full) - len(bare)
        starts = [n for n in range(extra + 1) if full[n : n + len(bare)] == bare]
        if not starts:
            raise UserError(
                f"the post-processor of {path} does more than to add tokens before and after a "
                "text; leave it out with --tokenizer-hf-no-include-special-tokens"
            )
        found.add((tuple(full[: starts[0]]), tuple(full[starts[0] + len(bare) :])))
    if len(found) != 1:
        raise UserError(
            f"the post-processor of {path} adds other tokens to other texts ({sorted(found)}); "
            "leave it out with --tokenizer-hf-no-include-special-tokens"
        )
    return found.pop()


def _named_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token, ... from the small JSON files beside a tokenizer.json."""
    named: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        for key, value in _read_json(folder / name).items():
            content = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(content, str):
                named[key] = content
    return named


def _templates_beside(folder: Path) -> dict[str, str]:
    """The chat templates that lie beside a tokenizer.json."""
    alone, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if alone.is_file():
        return _by_name(alone.read_text(encoding="utf-8"))
    return _by_name(_read_json(settings).get("chat_template")) if settings.is_file() else {}


def _by_name(templates: Any) -> dict[str, str]:
    """Chat templates as transformers has them: one text, texts by name, or a list of entries."""
    if isinstance(templates, str):
        return {"default": templates}
    if isinstance(templates, list):
        return {entry["name"]: entry["template"] for entry in templates}
    return dict(templates or {})


def _read_json(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value
