"""A model's tokenizer, as prompts are counted, fed and read back with it.

It is the one that corpora are made with, so that a model is asked in the ids that it was trained
on: text is text, and a folder with only a `tokenizer.model` is read by `sentencepiece` itself.
Transformers gives other ids there where a text begins with a space or has two of them in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_anchor.checkpoint import pretrained, tokenizer_files
from megatron_anchor.checkpoint.model_folder import own_code
from megatron_anchor.errors import UserError
from megatron_anchor.tokenizers import Tokenizer, TokenizerConfig, load_tokenizer

_PROBES = ("a", " a", "Hello,  world", "x = 1\n    y\n\n", "\n The  end. ")


class PromptTokenizer:
    """Text to ids and back; a prompt's ids begin with the first token that was asked for."""

    def __init__(
        self, folder: str | Path, *, first_token: str = "auto", recorded: int | None = None
    ) -> None:
        """Load a folder's tokenizer.

        Args:
            folder: Hugging Face folder.
            first_token: ``auto`` (the recorded anchor, else what the tokenizer itself puts first),
                ``none``, ``bos``, ``eos`` or a token id.
            recorded: anchor that the model's config.json records; None: none.

        Raises:
            UserError: if there is no tokenizer, or not that token.
            UserError: if it does not load.
        """
        if not tokenizer_files.has_tokenizer(folder):
            raise UserError(
                f"{folder} has no tokenizer ({', '.join(tokenizer_files.VOCABULARIES)}); name a "
                "folder that has it with --tokenizer"
            )
        self.folder = Path(folder)
        self._facts = _loaded(self.folder, affixes=first_token == "auto")
        self._engine = self._facts.native_engine
        self.note: str | None = None
        """Says where the tokenizer and the recorded anchor differ."""
        self.first = self._first(first_token, recorded)
        self.digest = self._facts.fingerprint()[:16]

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt as the model gets it."""
        return [*self.first, *self.encode_text(text)]

    def encode_text(self, text: str) -> list[int]:
        """Ids without a first token."""
        return self._engine.encode_batch([text])[0].tolist()

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each text, without a first token."""
        return [len(ids) for ids in self._engine.encode_batch(list(texts))] if texts else []

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated ids, without control tokens and without ids that are no tokens."""
        facts = self._facts
        ends = {facts.eod_id, facts.bos_id}
        control = facts.control_ids | ends
        return self._engine.decode([i for i in ids if i < facts.vocab_size and i not in control])

    @property
    def eos_id(self) -> int | None:
        """Ends an answer."""
        return self._facts.eod_id

    @property
    def bos_id(self) -> int | None:
        """Begins a text, in models that have it."""
        return self._facts.bos_id

    @property
    def pad_id(self) -> int:
        """Fills prompts up on the left, where nothing sees it."""
        return self.eos_id or 0

    def require_same_in_transformers(self) -> None:
        """Refuse a tokenizer that transformers, and with it lm-eval, reads in another way.

        Raises:
            UserError: it does not load there, gives other ids, or brings code of its own.
        """
        if own_code(self.folder):
            raise UserError(
                f"{self.folder}: the tokenizer names code of its own (auto_map), which lm-eval's "
                "tasks would run; take --engine hf, which runs none"
            )
        remedy = "take --engine hf, or name a folder with its tokenizer.json with --tokenizer"
        try:
            library = pretrained.load_tokenizer(self.folder)
        except Exception as error:  # tokenizers raises bare Exception
            raise UserError(
                f"{self.folder}: its tokenizer does not load in transformers, which lm-eval uses "
                f"({error}); {remedy}"
            ) from error
        for text in _PROBES:
            theirs = library(text, add_special_tokens=False)["input_ids"]
            if theirs != self.encode_text(text):
                raise UserError(
                    f"{self.folder}: transformers, which lm-eval uses, gives {text!r} the ids "
                    f"{theirs}, and corpora are made with {self.encode_text(text)}; {remedy}"
                )

    def _first(self, wanted: str, recorded: int | None) -> list[int]:
        if wanted == "none":
            return []
        if wanted == "auto":
            return self._own_first(recorded)
        if wanted.isdecimal():
            if int(wanted) >= self._facts.vocab_size:
                raise UserError(
                    f"--first-token {wanted}: the tokenizer has {self._facts.vocab_size} tokens"
                )
            return [int(wanted)]
        if wanted not in ("bos", "eos"):
            raise UserError(f"--first-token {wanted}: expected auto, none, bos, eos or a token id")
        found = self.bos_id if wanted == "bos" else self.eos_id
        if found is None:
            raise UserError(
                f"--first-token {wanted}: {self.folder} has no {wanted} token; give its id, or "
                "`none`"
            )
        return [found]

    def _own_first(self, recorded: int | None) -> list[int]:
        own = list(self._facts.prefix)
        if recorded is None or own == [recorded]:
            return own
        if recorded >= self._facts.vocab_size:
            raise UserError(
                f"config.json records the anchor {recorded}, but the tokenizer of {self.folder} "
                f"has {self._facts.vocab_size} tokens; give --first-token, or the model's "
                "own tokenizer"
            )
        self.note = (
            f"{self.folder}: the tokenizer begins texts with {own or 'nothing'}, and the model was "
            f"trained behind the anchor {recorded} (config.json), which prompts begin with here; "
            "elsewhere they do only if whoever asks puts it there"
        )
        return [recorded]


def _loaded(folder: Path, *, affixes: bool) -> Tokenizer:
    config = TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=str(folder),
        tokenizer_hf_no_include_special_tokens=not affixes,
    )
    try:
        return load_tokenizer(config)
    except UserError as error:
        remedy = "; --first-token none, bos, eos or an id does without it" if affixes else ""
        raise UserError(f"{folder}: its tokenizer cannot be used ({error}){remedy}") from error
