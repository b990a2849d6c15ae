"""SentencePiece `.model` files, read by `sentencepiece` itself.

transformers 5 reads such files wrongly where two or more spaces meet a word, so it is not asked.
Control pieces (`<s>`, `</s>`) are never matched in a text by the library; user-defined symbols
are, since they are text by SentencePiece's own distinction.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_anchor.errors import UserError
from megatron_anchor.tokenizers.base import EngineRecipe, Tokenizer, affix_note, digest_of

_FACTORY = "megatron_anchor.tokenizers.sentencepiece_model:SentencePieceEngine"
_NOT_FAST = "gigatoken normalises some texts otherwise than sentencepiece does"


class SentencePieceEngine:
    """The `sentencepiece` library."""

    name = "sentencepiece"

    def __init__(self, *, model: bytes, threads: int = 1) -> None:
        from sentencepiece import SentencePieceProcessor

        self.library = SentencePieceProcessor(model_proto=model)
        self._threads = threads

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of every text, int32."""
        rows = self.library.encode(list(texts), out_type=int, num_threads=self._threads)
        return [np.array(row, dtype=np.int32) for row in rows]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; control pieces are shown by name."""
        parts, plain = [], []
        for id_ in [*map(int, ids), -1]:
            if id_ >= 0 and not self.library.is_control(id_):
                plain.append(id_)
                continue
            parts.append(self.library.decode(plain))
            plain = []
            if id_ >= 0:
                parts.append(self.library.id_to_piece(id_))
        return "".join(parts)


def load(path: Path, *, special: bool, affixes: bool = False) -> Tokenizer:
    """A `.model` file; eod is the model's eos. `affixes` sets the model's bos before every text."""
    from sentencepiece import SentencePieceProcessor

    model = path.read_bytes()
    try:
        library = SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise UserError(f"{path} is not a SentencePiece model: {error}") from error
    if special:
        raise UserError(
            "--allow-special-in-text has no meaning for a SentencePiece model: sentencepiece never "
            "matches control pieces in a text; use the tokenizer.json of the model instead"
        )
    size = library.get_piece_size()
    control = frozenset(i for i in range(size) if library.is_control(i))
    bos, eos = library.bos_id(), library.eos_id()
    prefix = (bos,) if affixes and bos >= 0 else ()
    user_defined = _user_defined(library, size)
    recipe = EngineRecipe("sentencepiece", _FACTORY, {"model": model}, packages=("sentencepiece",))
    return Tokenizer(
        kind="sentencepiece",
        path=str(path),
        vocab_size=size,
        native=recipe,
        native_engine=recipe.make(),
        fast_unavailable=_NOT_FAST,
        eod_id=eos if eos >= 0 else None,
        bos_id=bos if bos >= 0 else None,
        prefix=prefix,
        control_ids=control,
        digest=digest_of(model),
        notes=tuple(filter(None, (user_defined, affix_note(prefix, ()) if prefix else ""))),
    )


def _user_defined(library, size: int) -> str:
    """A note on symbols such as `[INST]` that the model's authors declared to be text."""
    markup = [
        piece
        for i in range(size)
        if not (library.is_control(i) or library.is_unknown(i) or library.is_byte(i))
        and (piece := library.id_to_piece(i))[:1] in "<["
        and piece[-1:] in ">]"
        and len(piece) > 3
        and library.encode(f"a{piece}", out_type=int)[-1] == i
    ]
    if not markup:
        return ""
    shown = ", ".join(markup[:5]) + (", ..." if len(markup) > 5 else "")
    return f"the model declares {len(markup)} symbols such as {shown} to be text, and matches them"
