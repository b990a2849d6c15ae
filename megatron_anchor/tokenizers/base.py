"""What every tokenizer kind offers: facts for the corpus, and recipes for its engines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_anchor.errors import UserError

# Encoded once to characterise a tokenizer: scripts, white space, digits, markup, code.
PROBE_TEXTS = (
    "The quick brown fox, 12345 times!\n\tdef f(x):\n        return  x**2   # two  spaces\r\n",
    "Ünïcödé e\u0301 \u4f60\u597d\u4e16\u754c \u0645\u0631\u062d\u0628\u0627 \U0001f469\u200d"
    "\U0001f52c \u200f\x00\x1b \u00a0",
    "<s>[INST] <|endoftext|> </s> http://a.b/c?d=e&f=%20 " + "a" * 70,
)


class Engine(Protocol):
    """Turns texts into token ids; made in the process that uses it."""

    name: str

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One 1-D unsigned or signed integer array a text, without any added token."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens shown."""
        ...


@dataclass(frozen=True)
class EngineRecipe:
    """How to make an engine in another process: `module:Class` and its keyword arguments."""

    name: str
    factory: str
    arguments: Mapping[str, object]
    shares_threads: bool = False
    """Whether one instance uses all cores by itself (then one process is enough)."""
    packages: tuple[str, ...] = ()
    """The distributions whose code makes the ids."""

    @property
    def versions(self) -> list[str]:
        """`NAME VERSION` of every package, sorted."""
        return sorted(f"{name} {version(name)}" for name in self.packages)

    def make(self, *, threads: int = 1) -> Engine:
        """Build the engine with `threads` threads."""
        module, _, attribute = self.factory.partition(":")
        return getattr(import_module(module), attribute)(**self.arguments, threads=threads)


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """The facts of a tokenizer that a corpus depends on."""

    kind: str
    path: str
    vocab_size: int
    """Above every id; as Megatron counts it, where ids have no gaps. Decides the token dtype."""
    native: EngineRecipe
    """The tokenizer's own library: the truth about ids."""
    native_engine: Engine
    """`native` as made for this process."""
    fast: EngineRecipe | None = None
    """A faster engine whose ids are proven to be those of `native`."""
    fast_unavailable: str = ""
    """Why `fast` is None."""
    eod_id: int | None = None
    bos_id: int | None = None
    prefix: tuple[int, ...] = ()
    """Ids that the library sets before every text (a bos, for some tokenizers)."""
    suffix: tuple[int, ...] = ()
    control_ids: frozenset[int] = frozenset()
    """Ids that no text may produce."""
    digest: str = ""
    """Of everything in the tokenizer's files that decides ids."""
    notes: tuple[str, ...] = field(default=())
    """What the user should know; printed once."""
    markup: EngineRecipe | None = None
    """The library with control tokens read from text, as a chat template writes them; None where
    ids carry no places in the text."""
    named: Mapping[str, str] = field(default_factory=dict)
    """`bos_token`, `eos_token`, ... as the tokenizer's files name them."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """Jinja sources by name; nearly always `default` alone."""

    def with_eod(self, eod_id: int | None, *, flag: str = "--eod-id") -> Tokenizer:
        """The same tokenizer with another end-of-document id, unless that is None."""
        if eod_id is None:
            return self
        if not 0 <= eod_id < self.vocab_size:
            raise UserError(
                f"{flag} {eod_id} is outside the vocabulary of {self.vocab_size} tokens"
            )
        return replace(self, eod_id=eod_id)

    def fingerprint(self) -> str:
        """A digest of all that decides ids: files, control tokens, eod, affixes, behaviour (hex).

        Two corpora with one fingerprint were made by tokenizers that agree; file names do not
        enter. Ids of probe texts do, so that a library that changed its mind is noticed.
        """
        digest = hashlib.sha256(self.digest.encode())
        for ids in self.native_engine.encode_batch(self.probe_texts):
            digest.update(np.ascontiguousarray(ids, dtype="<i8").tobytes() + b"|")
        facts = (self.vocab_size, self.eod_id, self.prefix, self.suffix, sorted(self.control_ids))
        digest.update(repr(facts).encode())
        return digest.hexdigest()[:32]

    @property
    def probe_texts(self) -> tuple[str, ...]:
        """Texts that this tokenizer can encode."""
        return ("0 1 2",) if self.kind == "null" else PROBE_TEXTS


def read_json(path: Path) -> Any:
    """The content of a JSON file; `UserError` where it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from error


def digest_of(*parts: bytes | str) -> str:
    """A hex digest of vocabulary material."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part)
        digest.update(b"\x00")
    return digest.hexdigest()


def affix_note(prefix: Sequence[int], suffix: Sequence[int]) -> str:
    """What to tell of tokens that are set around every text."""
    return (
        f"the tokenizer's own post-processor sets {list(prefix)} before and {list(suffix)} after "
        "every text, as Megatron's tool does; --tokenizer-hf-no-include-special-tokens leaves "
        "them out"
    )
