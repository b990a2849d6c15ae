"""A model's tokenizer, as prompts are counted, fed and read back with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from megatron_anchor.checkpoint import tokenizer_files
from megatron_anchor.checkpoint.pretrained import load_tokenizer
from megatron_anchor.evaluation.errors import EvaluationError

PROBES = ("a", "Hello, world", "x = 1\n")


class PromptTokenizer:
    """Text to ids and back; a prompt's ids begin with the first token that was asked for."""

    def __init__(self, folder: str | Path, *, first_token: str = "auto") -> None:
        """Load a folder's tokenizer.

        Args:
            folder: Hugging Face folder.
            first_token: ``auto`` (what the tokenizer itself puts first), ``none``, ``bos``, ``eos``
                or a token id.

        Raises:
            EvaluationError: if there is no tokenizer, or not that token.
            CheckpointError: if it does not load.
        """
        if not tokenizer_files.has_tokenizer(folder):
            raise EvaluationError(
                f"{folder} has no tokenizer ({', '.join(tokenizer_files.VOCABULARIES)}); name a "
                "folder that has it with --tokenizer"
            )
        self.library = load_tokenizer(folder)
        self.library.model_max_length = 1 << 60  # lengths are our business
        self.first = self._first(first_token)
        self.digest = self._digest()

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt as the model gets it."""
        return [*self.first, *self._plain([text])[0]]

    def encode_text(self, text: str) -> list[int]:
        """Ids without a first token."""
        return self._plain([text])[0]

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each text, without a first token."""
        return [len(ids) for ids in self._plain(list(texts))] if texts else []

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated ids, without special tokens."""
        return str(self.library.decode(list(ids), skip_special_tokens=True))

    @property
    def pad_id(self) -> int:
        """Fills prompts up on the left, where nothing sees it."""
        for found in (self.library.pad_token_id, self.library.eos_token_id):
            if found is not None:
                return found
        return 0

    def _plain(self, texts: list[str]) -> list[list[int]]:
        return self.library(
            texts,
            add_special_tokens=False,
            split_special_tokens=True,  # "<s>" in a text is text
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]

    def _first(self, wanted: str) -> list[int]:
        if wanted == "none":
            return []
        if wanted == "auto":
            return self._own_first()
        if wanted.isdecimal():
            if int(wanted) >= len(self.library):
                raise EvaluationError(
                    f"--first-token {wanted}: the tokenizer has {len(self.library)} tokens"
                )
            return [int(wanted)]
        if wanted not in ("bos", "eos"):
            raise EvaluationError(
                f"--first-token {wanted}: expected auto, none, bos, eos or a token id"
            )
        found = getattr(self.library, f"{wanted}_token_id")
        if found is None:
            raise EvaluationError(
                f"--first-token {wanted}: {self.library.name_or_path} has no {wanted} token; give "
                "its id, or `none`"
            )
        return [found]

    def _own_first(self) -> list[int]:
        bare = self._plain([PROBES[0]])[0]
        full = self.library(PROBES[0], verbose=False)["input_ids"]
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start]
        return []

    def _digest(self) -> str:
        """Of ids of probes and of the vocabulary: tokenizers that agree make the same prompts."""
        vocabulary = sorted(self.library.get_vocab().items())
        parts = [vocabulary, self.first, self._plain(list(PROBES))]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
