"""tiktoken-style ranks: `.tiktoken` and Llama-3 files, Mistral's tekken and Megatron's JSON list.

A rank file holds no split pattern and no special tokens (tekken does): known files are recognised
by their number of ranks, others need `--tiktoken-pattern`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_anchor.errors import UserError
from megatron_anchor.tokenizers import gigatoken_engine
from megatron_anchor.tokenizers.base import EngineRecipe, Tokenizer, digest_of, read_json

_FACTORY = "megatron_anchor.tokenizers.tiktoken_ranks:TiktokenEngine"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
# Split patterns as published with each vocabulary; v1 and v2 are Megatron's TikTokenizer. cl100k is
# that of tiktoken 0.14 (tiktoken_ext/openai_public.py): white space at a text's end stays whole.
PATTERNS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "llama3": _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    + _TAIL,
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL,
    "o200k": _CASED % ((_CONTRACTIONS + "?",) * 2)
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    + _TAIL,
    "qwen35": _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    + _TAIL,
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": _CASED % ("", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL,
}
_GIGATOKEN_SCHEMES = {
    "gpt2": "gpt2",
    "cl100k": "gpt4",
    "llama3": "olmo3",
    "qwen2": "qwen2",
    "qwen35": "qwen35",
    "o200k": "o200k",
}
_MEGATRON_SPECIALS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")


@dataclass(frozen=True)
class _Known:
    pattern: str
    specials: Mapping[str, int]
    eos: str
    bos: str | None = None
    vocab_size: int = 0


# Ranks in the file -> what its publisher says in code.
_KNOWN = {
    50256: _Known("gpt2", {"<|endoftext|>": 50256}, "<|endoftext|>"),
    100256: _Known(
        "cl100k",
        {
            "<|endoftext|>": 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
        "<|endoftext|>",
    ),
    199998: _Known("o200k", {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}, "<|endoftext|>"),
    128000: _Known(
        "llama3",
        {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|eot_id|>": 128009},
        "<|end_of_text|>",
        "<|begin_of_text|>",
        128256,
    ),
    248044: _Known(
        "qwen35",
        {"<|endoftext|>": 248044, "<|im_start|>": 248045, "<|im_end|>": 248046},
        "<|endoftext|>",
    ),
    151643: _Known(
        "qwen2",
        {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645},
        "<|endoftext|>",
    ),
}


class TiktokenEngine:
    """The `tiktoken` library."""

    name = "tiktoken"

    def __init__(
        self,
        *,
        ranks: Mapping[bytes, int],
        pattern: str,
        specials: Mapping[str, int],
        plain_text: bool,
        threads: int = 1,
    ) -> None:
        import tiktoken

        self.library = tiktoken.Encoding(
            "corpus", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens=dict(specials)
        )
        self._plain_text = plain_text
        self._threads = threads

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of every text, uint32."""
        if self._threads > 1 and self._plain_text:
            rows = self.library.encode_ordinary_batch(list(texts), num_threads=self._threads)
        elif self._plain_text:
            rows = [self.library.encode_ordinary(text) for text in texts]
        else:
            rows = [self.library.encode(text, allowed_special="all") for text in texts]
        return [np.array(row, dtype=np.uint32) for row in rows]

    def unassigned(self, characters: str) -> str:
        """Those of the characters that the library's Unicode tables do not know."""
        import tiktoken

        ranks = {bytes([byte]): byte for byte in range(256)}
        only = tiktoken.Encoding(
            "unassigned", pat_str=r"\p{Cn}", mergeable_ranks=ranks, special_tokens={}
        )
        return bytes(only.encode_ordinary(characters)).decode("utf-8")

    def normalized(self, text: str) -> str:
        """The text itself: ranks have no normaliser."""
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; ids without an entry are shown as `<id N>`."""
        parts = []
        for id_ in map(int, ids):
            try:
                parts.append(self.library.decode_single_token_bytes(id_))
            except KeyError:
                parts.append(f"<id {id_}>".encode())
        return b"".join(parts).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class _Ranks:
    ranks: dict[bytes, int]
    pattern: str | None = None
    specials: Mapping[str, int] | None = None
    eos: str | None = None
    bos: str | None = None
    vocab_size: int = 0


def load(
    path: Path,
    *,
    special: bool,
    pattern: str | None = None,
    special_tokens: Sequence[str] = (),
    num_special_tokens: int = 1000,
    vocab_size: int | None = None,
    eod_token: str | None = None,
) -> Tokenizer:
    """Ranks from `path`.

    `pattern` is a name of `PATTERNS` or a regular expression. `special_tokens` follow the ranks in
    a plain file; in Megatron's JSON form they come first and shift all ranks by
    `num_special_tokens`, and only the first `vocab_size` ids are used (default 131072).
    """
    if path.suffix == ".json":
        found = _read_json_ranks(
            path, special_tokens or _MEGATRON_SPECIALS, num_special_tokens, vocab_size or 1 << 17
        )
    else:
        found = _read_plain(path, special_tokens)
    wanted = pattern or found.pattern
    if wanted is None:
        raise UserError(
            f"{path} holds {len(found.ranks)} ranks, which is no vocabulary known here; name its "
            f"split pattern with --tiktoken-pattern, one of {sorted(PATTERNS)}, or a regex"
        )
    specials = dict(found.specials or {})
    eos = eod_token or found.eos
    if eos is not None and eos not in specials:
        raise UserError(
            f"the end-of-document token {eos!r} is not among the special tokens of {path} "
            f"({', '.join(sorted(specials)[:8]) or 'none'}); name it with "
            "--tokenizer-special-tokens, or give its number with --eod-id"
        )
    expression = PATTERNS.get(str(wanted), wanted)
    arguments = {
        "ranks": found.ranks,
        "pattern": expression,
        "specials": specials,
        "plain_text": not special,
    }
    recipe = EngineRecipe("tiktoken", _FACTORY, arguments, packages=("tiktoken",))
    try:
        engine = recipe.make()
        engine.encode_batch(["a"])
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(
            f"{path}: tiktoken does not take these ranks with the pattern {expression!r}: {error}"
        ) from error
    fast, reason = None, "gigatoken would not match special strings"
    if not special:
        fast, reason = gigatoken_engine.recipe_from_ranks(
            found.ranks, scheme=_GIGATOKEN_SCHEMES.get(wanted), native=recipe
        )
    top = max([*found.ranks.values(), *specials.values()]) + 1
    return Tokenizer(
        kind="tiktoken",
        path=str(path),
        vocab_size=max(top, found.vocab_size),
        native=recipe,
        native_engine=engine,
        fast=fast,
        fast_unavailable=reason,
        eod_id=specials[eos] if eos is not None else None,
        bos_id=specials.get(found.bos) if found.bos else None,
        control_ids=frozenset() if special else frozenset(specials.values()),
        digest=digest_of(
            expression,
            repr(sorted(specials.items())),
            *(b"%d " % rank + piece for piece, rank in sorted(found.ranks.items())),
        ),
    )


def looks_like_ranks(head: bytes) -> bool:
    """Whether a file begins with a base64 word and a number."""
    fields = head.split(b"\n", 1)[0].split()
    try:
        return len(fields) == 2 and fields[1].isdigit() and bool(base64.b64decode(fields[0]))
    except binascii.Error:
        return False


def _read_plain(path: Path, special_tokens: Sequence[str]) -> _Ranks:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            piece, rank = line.split()
            ranks[base64.b64decode(piece, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise UserError(
                f"{path}:{number}: expected a base64 word and its rank, got {line[:60]!r}"
            ) from error
    if not ranks:
        raise UserError(f"{path} holds no ranks")
    known = _KNOWN.get(len(ranks))
    if special_tokens:
        start = max(ranks.values()) + 1
        specials = {token: start + i for i, token in enumerate(special_tokens)}
        eos = next((token for token in specials if "endoftext" in token or token == "</s>"), None)
        return _Ranks(ranks, known.pattern if known else None, specials, eos)
    if known is None:
        return _Ranks(ranks)
    return _Ranks(ranks, known.pattern, known.specials, known.eos, known.bos, known.vocab_size)


def _read_json_ranks(
    path: Path, special_tokens: Sequence[str], num_special: int, vocab_size: int
) -> _Ranks:
    """Megatron's list of {rank, token_bytes, token_str}, or Mistral's tekken around the same."""
    content, pattern = read_json(path), "v2"
    try:
        if isinstance(content, dict):
            config, listed = content.get("config", {}), content.get("special_tokens")
            pattern = config.get("pattern")
            num_special = int(config.get("default_num_special_tokens", num_special))
            vocab_size = int(config.get("default_vocab_size", vocab_size))
            special_tokens = [token["token_str"] for token in listed or ()]
            special_tokens = special_tokens or ("<unk>", "<s>", "</s>")
            content = content["vocab"]
        ranks = {
            base64.b64decode(entry["token_bytes"]): int(entry["rank"]) + num_special
            for entry in content[: vocab_size - num_special]
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"{path} is no list of ranks with token_bytes, Megatron's or tekken's "
            f"({type(error).__name__}: {error})"
        ) from error
    if not ranks:
        raise UserError(f"{path} holds no ranks")
    specials = {token: i for i, token in enumerate(special_tokens)}
    eos = "</s>" if "</s>" in specials else None
    return _Ranks(ranks, pattern, specials, eos, "<s>" if "<s>" in specials else None)
