"""The optional `gigatoken` engine: many times faster where it gives the same ids.

It is used for byte-level BPE only, and for the texts of which `byte_level` proves that its ids are
those of the tokenizer's own library; that library encodes the others. It matches added tokens
always, so it is given tokenizers without the control ones. Its caches grow with new words, so the
engine is made anew whenever the process has grown by `_MOST_GROWTH`.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil

from megatron_anchor.tokenizers.base import EngineRecipe
from megatron_anchor.tokenizers.byte_level import (
    NativeEngine,
    TextProof,
    normalizes,
    unproven,
)

_FACTORY = "megatron_anchor.tokenizers.gigatoken_engine:GigatokenEngine"
_MOST_GROWTH = 1 << 30  # bytes
_UNPROVEN = "gigatoken's ids are not known to be the same for this kind of tokenizer"
_NOT_INSTALLED = (
    "gigatoken is not installed (pip install gigatoken orjson, the extra `fast`, makes this many "
    "times faster)"
)


class GigatokenEngine:
    """The `gigatoken` library; one instance uses all its threads.

    `native` makes the tokenizer's own library. `config` is a `tokenizer.json`; without it, `ranks`
    and gigatoken's name of their split pattern are needed.
    """

    name = "gigatoken"

    def __init__(
        self,
        *,
        native: EngineRecipe,
        config: str | None = None,
        normalized: bool = False,
        ranks: Mapping[bytes, int] | None = None,
        scheme: str | None = None,
        threads: int = 1,
    ) -> None:
        import os

        os.environ["RAYON_NUM_THREADS"] = str(threads)
        self._parts = (config, ranks, scheme)
        self._parallel = threads > 1
        self._lock = threading.Lock()
        self.native = native.make(threads=threads)
        self._is_proven = TextProof(cast(NativeEngine, self.native), normalizes=normalized)
        self.library = self._make()
        self._process = psutil.Process()
        self._floor = self._process.memory_info().rss

    def _make(self):
        import gigatoken

        config, ranks, scheme = self._parts
        if config is not None:
            return gigatoken.Tokenizer.from_json(config)
        assert ranks is not None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ranks.tiktoken"
            path.write_bytes(_rank_lines(ranks))
            return gigatoken.Tokenizer.from_tiktoken(path, scheme, {})

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of every text, uint32; one caller at a time."""
        with self._lock:
            proven = [self._is_proven(text) for text in texts]
            fast = iter(self._encode(list(itertools.compress(texts, proven))))
            others = [text for text, is_proven in zip(texts, proven, strict=True) if not is_proven]
            slow = iter(self.native.encode_batch(others) if others else ())
        return [next(fast if is_proven else slow) for is_proven in proven]

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        if self._process.memory_info().rss > self._floor + _MOST_GROWTH:
            self.library = self._make()
            self._floor = self._process.memory_info().rss
        found = self.library.encode_batch(texts, parallel=self._parallel)
        if isinstance(found, list):  # without awkward installed
            return found
        layout = found.layout
        flat, bounds = np.asarray(layout.content.data), np.asarray(layout.offsets.data).tolist()
        return [flat[start:end] for start, end in itertools.pairwise(bounds)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""
        return self.library.decode(list(ids)).decode("utf-8", errors="replace")


def _rank_lines(ranks: Mapping[bytes, int]) -> bytes:
    import base64

    rows = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(base64.b64encode(piece) + b" %d\n" % rank for piece, rank in rows)


def recipe_from_json(
    config: Mapping[str, Any], *, native: EngineRecipe
) -> tuple[EngineRecipe | None, str]:
    """A recipe for the content of a `tokenizer.json`, or None and the reason."""
    if importlib.util.find_spec("gigatoken") is None:
        return None, _NOT_INSTALLED
    if reason := unproven(config):
        return None, f"{_UNPROVEN}: {reason}"
    arguments = {
        "config": json.dumps({**config, "normalizer": None}),
        "normalized": normalizes(config),
        "native": native,
    }
    return _recipe(arguments, native), ""


def recipe_from_ranks(
    ranks: Mapping[bytes, int], *, scheme: str | None, native: EngineRecipe
) -> tuple[EngineRecipe | None, str]:
    """A recipe for tiktoken ranks, or None and the reason."""
    if importlib.util.find_spec("gigatoken") is None:
        return None, _NOT_INSTALLED
    if scheme is None:
        return None, "gigatoken has no split pattern of this kind"
    if sorted(ranks.values()) != list(range(len(ranks))):
        return None, "gigatoken needs ranks that start at 0 without gaps"
    if any(bytes([byte]) not in ranks for byte in range(256)):
        return None, f"{_UNPROVEN}: there are bytes without a rank"
    return _recipe({"ranks": dict(ranks), "scheme": scheme, "native": native}, native), ""


def _recipe(arguments: Mapping[str, object], native: EngineRecipe) -> EngineRecipe:
    packages = ("gigatoken", *native.packages)
    return EngineRecipe("gigatoken", _FACTORY, arguments, shares_threads=True, packages=packages)
