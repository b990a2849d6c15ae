"""A byte-level BPE tokenizer, trained on the documents at hand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path


def train_tokenizer(
    folder: Path, files: list[Path], *, vocab_size: int, special_tokens: Sequence[str] = ()
) -> None:
    """Train on every 8th document and save in Hugging Face's form.

    Args:
        folder: where to save.
        files: JSON lines with a "text".
        vocab_size: all tokens together.
        special_tokens: tokens that stand for no text, besides the bos `<s>` (id 0) and the eos
            `</s>` (1); their ids follow these.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    def every_eighth() -> Iterator[str]:
        for path in files:
            with path.open(encoding="utf-8") as rows:
                yield from (json.loads(row)["text"] for n, row in enumerate(rows) if n % 8 == 0)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>", *special_tokens],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(every_eighth(), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
