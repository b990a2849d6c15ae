"""Tokenizers without a vocabulary file, for tests, timings and dry runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_anchor.errors import UserError
from megatron_anchor.tokenizers.base import EngineRecipe, Tokenizer

_MODULE = "megatron_anchor.tokenizers.bytes_and_numbers"


class BytesEngine:
    """UTF-8 bytes as ids 0 to 255."""

    name = "bytes"

    def __init__(self, *, threads: int = 1) -> None:
        del threads  # nothing to share

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The bytes of every text, uint8."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; ids above 255 are shown as `<id N>`."""
        raw = b"".join(
            bytes([id_]) if id_ < 256 else f"<id {id_}>".encode() for id_ in map(int, ids)
        )
        return raw.decode("utf-8", errors="replace")


class NumbersEngine:
    """Texts of numbers with single spaces between them (Megatron's NullTokenizer)."""

    name = "numbers"

    def __init__(self, *, vocab_size: int, threads: int = 1) -> None:
        del threads
        self._vocab_size = vocab_size

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The numbers of every text, int64; `UserError` for one outside the vocabulary."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> np.ndarray:
        words = text.split(" ") if text else []
        try:
            ids = np.array([int(word) for word in words], dtype=np.int64)
        except (ValueError, OverflowError) as error:
            raise UserError(f"the NullTokenizer reads numbers, got {text[:40]!r}") from error
        if ids.size and not (ids.min() >= 0 and ids.max() < self._vocab_size):
            raise UserError(
                f"a number between {ids.min()} and {ids.max()} is outside --vocab-size "
                f"{self._vocab_size}"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The numbers again."""
        return " ".join(str(int(id_)) for id_ in ids)


def load_bytes(*, vocab_size: int | None, eod_id: int | None) -> Tokenizer:
    """Ids 0 to 255 are bytes; eod is the last id of the vocabulary (256 by default)."""
    size = vocab_size or 257
    if size < 257:
        raise UserError(f"--vocab-size {size} is too small: 256 bytes and an eod need 257")
    return Tokenizer(
        kind="bytes",
        path="",
        vocab_size=size,
        native=EngineRecipe("bytes", f"{_MODULE}:BytesEngine", {}),
        native_engine=BytesEngine(),
        eod_id=size - 1,
        control_ids=frozenset(range(256, size)),
        digest="bytes",
    ).with_eod(eod_id, flag="--null-tokenizer-eod-id")


def load_numbers(*, vocab_size: int | None, eod_id: int | None) -> Tokenizer:
    """Numbers below `vocab_size`; eod is the last of them, as in Megatron."""
    if vocab_size is None:
        raise UserError("the NullTokenizer needs --vocab-size")
    return Tokenizer(
        kind="null",
        path="",
        vocab_size=vocab_size,
        native=EngineRecipe("numbers", f"{_MODULE}:NumbersEngine", {"vocab_size": vocab_size}),
        native_engine=NumbersEngine(vocab_size=vocab_size),
        eod_id=vocab_size - 1,
        digest="numbers",
    ).with_eod(eod_id, flag="--null-tokenizer-eod-id")
