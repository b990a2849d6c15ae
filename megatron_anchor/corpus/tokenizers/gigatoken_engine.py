"""The optional `gigatoken` engine: many times faster where it gives the same ids.

It matches added tokens always, so it is given tokenizers without the control ones. Its caches grow
with the text, so the engine is made anew after every `_RENEW_AFTER` bytes.
"""

from __future__ import annotations

import importlib.util
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from megatron_anchor.corpus.tokenizers.base import EngineRecipe

_FACTORY = "megatron_anchor.corpus.tokenizers.gigatoken_engine:GigatokenEngine"
_RENEW_AFTER = 4 << 30
_NOT_INSTALLED = "gigatoken is not installed (pip install gigatoken makes this many times faster)"


class GigatokenEngine:
    """The `gigatoken` library; one instance uses all its threads."""

    name = "gigatoken"

    def __init__(
        self,
        *,
        config: str | None = None,
        ranks: Mapping[bytes, int] | None = None,
        scheme: str | None = None,
        threads: int = 1,
    ) -> None:
        import os

        os.environ["RAYON_NUM_THREADS"] = str(threads)
        self._parts = (config, ranks, scheme)
        self._parallel = threads > 1
        self._seen = 0
        self._library = self._make()

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
        """Ids of every text, uint32."""
        flat, offsets = self._flat(list(texts), sum(map(len, texts)))
        bounds = offsets.tolist()
        return [flat[a:b] for a, b in itertools.pairwise(bounds)]

    def encode_utf8(self, utf8: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Texts as one uint8 buffer with int64 offsets -> (ids uint32 [tokens], offsets int64)."""
        import awkward as ak

        characters = ak.contents.NumpyArray(utf8, parameters={"__array__": "char"})
        strings = ak.contents.ListOffsetArray(
            ak.index.Index64(offsets), characters, parameters={"__array__": "string"}
        )
        return self._flat(ak.Array(strings), utf8.size)

    def _flat(self, texts: object, size: int) -> tuple[np.ndarray, np.ndarray]:
        if self._seen > _RENEW_AFTER:
            self._library, self._seen = self._make(), 0
        self._seen += size
        layout = self._library.encode_batch(texts, parallel=self._parallel).layout
        return np.asarray(layout.content.data), np.asarray(layout.offsets.data)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""
        return self._library.decode(list(ids)).decode("utf-8", errors="replace")


def _rank_lines(ranks: Mapping[bytes, int]) -> bytes:
    import base64

    rows = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(base64.b64encode(piece) + b" %d\n" % rank for piece, rank in rows)


def recipe_from_json(config: str) -> tuple[EngineRecipe | None, str]:
    """A recipe for a `tokenizer.json` text, or None and the reason."""
    if importlib.util.find_spec("gigatoken") is None:
        return None, _NOT_INSTALLED
    return EngineRecipe("gigatoken", _FACTORY, {"config": config}, shares_threads=True), ""


def recipe_from_ranks(
    ranks: Mapping[bytes, int], *, scheme: str | None
) -> tuple[EngineRecipe | None, str]:
    """A recipe for tiktoken ranks, or None and the reason."""
    if importlib.util.find_spec("gigatoken") is None:
        return None, _NOT_INSTALLED
    if scheme is None:
        return None, "gigatoken has no split pattern of this kind"
    if sorted(ranks.values()) != list(range(len(ranks))):
        return None, "gigatoken needs ranks that start at 0 without gaps"
    arguments = {"ranks": dict(ranks), "scheme": scheme}
    return EngineRecipe("gigatoken", _FACTORY, arguments, shares_threads=True), ""


def recipe_from_sentencepiece(model: bytes) -> tuple[EngineRecipe | None, str]:
    """A recipe for a SentencePiece model (BPE with byte fallback), or None and the reason."""
    if importlib.util.find_spec("gigatoken") is None:
        return None, _NOT_INSTALLED
    import json

    import gigatoken

    from megatron_anchor.corpus.tokenizers import plain_text

    try:
        converted = getattr(gigatoken.Tokenizer.from_sentencepiece(model), "_hf_json", None)
    except (ValueError, RuntimeError) as error:
        return None, f"gigatoken does not take this model: {error}"
    if converted is None:
        return None, "this gigatoken version keeps no tokenizer.json of a SentencePiece model"
    config = json.loads(converted)
    control = {t["content"]: t["id"] for t in config["added_tokens"] if t["special"]}
    return recipe_from_json(json.dumps(plain_text.without_control(config, control)))
