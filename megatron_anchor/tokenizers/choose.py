"""From the command line's tokenizer arguments to a tokenizer, and to the engine that serves it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_anchor.errors import UserError
from megatron_anchor.tokenizers import (
    bytes_and_numbers,
    hub,
    huggingface,
    sentencepiece_model,
    tiktoken_ranks,
)
from megatron_anchor.tokenizers.base import EngineRecipe, Tokenizer, read_json

_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
TOKENIZER_TYPES = (
    "HuggingFaceTokenizer",
    *_SENTENCEPIECE,
    "TikTokenizer",
    "GPT2BPETokenizer",
    "ByteLevelTokenizer",
    "NullTokenizer",
)
ENGINES = ("auto", "native", "gigatoken")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer arguments, named as Megatron names them."""

    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = 1000
    tokenizer_special_tokens: tuple[str, ...] = ()
    tokenizer_hf_no_include_special_tokens: bool = False
    trust_remote_code: bool = False
    null_tokenizer_eod_id: int | None = None
    eod_token: str | None = None
    eod_id: int | None = None
    allow_special_in_text: bool = False
    engine: str = "auto"


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that `config` names; `UserError` with the remedy where there is none."""
    kind = config.tokenizer_type or _guess_type(config.tokenizer_model)
    if kind not in TOKENIZER_TYPES:
        raise UserError(
            f"--tokenizer-type {kind} cannot prepare a GPT corpus; choose one of "
            f"{', '.join(TOKENIZER_TYPES)}"
        )
    return _load(kind, config).with_eod(config.eod_id)


def _load(kind: str, config: TokenizerConfig) -> Tokenizer:
    special = config.allow_special_in_text
    if kind == "ByteLevelTokenizer":
        return bytes_and_numbers.load_bytes(
            vocab_size=config.vocab_size, eod_id=config.null_tokenizer_eod_id
        )
    if kind == "NullTokenizer":
        return bytes_and_numbers.load_numbers(
            vocab_size=config.vocab_size, eod_id=config.null_tokenizer_eod_id
        )
    if kind == "GPT2BPETokenizer":
        vocab, merges = (
            _file(config.vocab_file, "--vocab-file"),
            _file(config.merge_file, "--merge-file"),
        )
        return huggingface.load_gpt2(vocab, merges, special=special)
    if kind == "HuggingFaceTokenizer":
        return _load_huggingface(config)
    path = _file(config.tokenizer_model, "--tokenizer-model")
    if kind in _SENTENCEPIECE:
        return sentencepiece_model.load(path, special=special)
    return tiktoken_ranks.load(
        path,
        special=special,
        pattern=config.tiktoken_pattern,
        special_tokens=config.tokenizer_special_tokens,
        num_special_tokens=config.tiktoken_num_special_tokens,
        vocab_size=config.vocab_size,
        eod_token=config.eod_token,
    )


def _load_huggingface(config: TokenizerConfig) -> Tokenizer:
    if config.tokenizer_model is None:
        raise UserError("HuggingFaceTokenizer needs --tokenizer-model (a folder or a hub name)")
    path = Path(config.tokenizer_model)
    if not path.exists():
        hub.require_name(config.tokenizer_model, flag="--tokenizer-model")
    special, affixes = (
        config.allow_special_in_text,
        not config.tokenizer_hf_no_include_special_tokens,
    )
    if path.is_file():
        return huggingface.load_file(
            path, special=special, affixes=affixes, eod_token=config.eod_token
        )
    model = path / "tokenizer.model"
    if model.is_file() and not (path / "tokenizer.json").is_file():
        if tiktoken_ranks.looks_like_ranks(_head(model)):
            return tiktoken_ranks.load(model, special=special, eod_token=config.eod_token)
        settings = path / "tokenizer_config.json"
        found = read_json(settings) if settings.is_file() else {}
        adds_bos = found.get("add_bos_token", True) if isinstance(found, dict) else True
        return sentencepiece_model.load(model, special=special, affixes=affixes and adds_bos)
    return huggingface.load_folder(
        config.tokenizer_model,
        special=special,
        affixes=affixes,
        eod_token=config.eod_token,
        trust_remote_code=config.trust_remote_code,
    )


def _guess_type(model: str | None) -> str:
    """The type of a tokenizer by its file, for users who gave no --tokenizer-type."""
    if model is None:
        raise UserError(
            "give --tokenizer-model (a folder or a file) and, if needed, --tokenizer-type"
        )
    path = Path(model)
    if not path.exists():
        hub.require_name(model, flag="--tokenizer-model")
    if not path.is_file():
        return "HuggingFaceTokenizer"
    if tiktoken_ranks.looks_like_ranks(_head(path)):
        return "TikTokenizer"
    if path.suffix == ".json":
        content = read_json(path)
        is_ranks = isinstance(content, list) or (isinstance(content, dict) and "vocab" in content)
        return "TikTokenizer" if is_ranks else "HuggingFaceTokenizer"
    return "SentencePieceTokenizer"


def _file(path: str | None, flag: str) -> Path:
    if path is None:
        raise UserError(f"this tokenizer type needs {flag}")
    if not Path(path).is_file():
        raise UserError(f"{flag} {path}: expected a file; there is none of this name")
    return Path(path)


def _head(path: Path) -> bytes:
    with open(path, "rb") as stream:
        return stream.read(4096)


def choose_engine(
    tokenizer: Tokenizer, *, wanted: str, sample: Sequence[str], threads: int
) -> tuple[EngineRecipe, str]:
    """The engine to use and a sentence on why.

    `auto` takes the fast engine where the tokenizer has one: where it is installed, and its ids
    follow from the tokenizer's kind. Whether it does as it should is tried nevertheless, on the
    probe texts, on every control string and on `sample`, texts of the corpus itself.
    """
    if wanted == "native":
        return tokenizer.native, f"engine {tokenizer.native.name}, as asked"
    if tokenizer.fast is None:
        if wanted == "gigatoken":
            reason = tokenizer.fast_unavailable or "it does not serve this tokenizer"
            raise UserError(f"--engine gigatoken: {reason}")
        reason = f"; {tokenizer.fast_unavailable}" if tokenizer.fast_unavailable else ""
        return tokenizer.native, f"engine {tokenizer.native.name}{reason}"
    difference = _difference(tokenizer, sample, threads=threads)
    if not difference:
        return (
            tokenizer.fast,
            f"engine {tokenizer.fast.name}, for texts of which its ids are known to be those of "
            f"{tokenizer.native.name}",
        )
    if wanted == "gigatoken":
        raise UserError(f"--engine gigatoken: {difference}; use --engine native")
    return tokenizer.native, f"engine {tokenizer.native.name}, since {difference}"


def _difference(tokenizer: Tokenizer, sample: Sequence[str], *, threads: int) -> str:
    """Where the fast engine gives other ids than the native one; empty where nowhere."""
    assert tokenizer.fast is not None
    native = tokenizer.native_engine
    control = [native.decode([id_]) for id_ in sorted(tokenizer.control_ids)]
    texts = [*tokenizer.probe_texts, *control, *sample]
    try:
        with _stderr_aside():
            theirs = tokenizer.fast.make(threads=threads).encode_batch(texts)
    except (KeyboardInterrupt, SystemExit):
        raise
    except ImportError as error:
        return f"{tokenizer.fast.name} needs the package {error.name}, which is not installed"
    except BaseException as error:  # Rust panics are no Exception
        why = " ".join(str(error).split())[:200] or type(error).__name__
        return f"{tokenizer.fast.name} does not take this tokenizer ({why})"
    for text, expected, got in zip(texts, native.encode_batch(texts), theirs, strict=True):
        if not np.array_equal(expected, got):
            return f"{tokenizer.fast.name} gives other ids for {text[:40]!r}"
    return ""


@contextlib.contextmanager
def _stderr_aside() -> Iterator[None]:
    """Keep off the terminal what a Rust library prints before its panic is raised as an error."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # there is no stderr
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
