"""Real text and the retrieval task in one corpus, and the documents that training never sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from byte_pairs import train_tokenizer
from documents import write_documents
from task import (
    NAMES,
    QUESTIONS_TO_LEARN,
    QUESTIONS_TO_SCORE,
    TOKENS,
    RetrievalDocument,
    Vocabulary,
    make_document,
)

from megatron_anchor.whole_files import atomic_write

VOCAB_SIZE, EOS = 512, 1
VOCABULARY = Vocabulary(first=2)  # behind bos and eos
DOMAINS = ("docstrings", "python-reference")
SHORTEST, LONGEST_TEXT = 4, 48
"""Tokens of text in a document of the training corpus, the retrieval task's included; drawn so that
every doubling is as frequent."""

RETRIEVAL_SHARE = 0.9
"""Share of the training documents that are of the task."""

HELD_OUT = 8
"""Every so many-th text document is held out."""


def make_corpus(folder: Path, *, documents: int, seed: int = 0) -> None:
    """Write tokenizer/, corpus.bin/.idx with so many documents, and held_out.npz.

    Args:
        folder: where to write.
        documents: of the training corpus.
        seed: of all that is drawn.
    """
    texts = write_documents(folder / "text", most_each=20)
    files = [texts[domain][0] for domain in DOMAINS]
    train_tokenizer(folder / "tokenizer", files, vocab_size=VOCAB_SIZE, special_tokens=TOKENS)
    encoded = list(encode(folder / "tokenizer", files))
    held_out = [ids for number, ids in enumerate(encoded) if number % HELD_OUT == 0]
    seen = [ids for number, ids in enumerate(encoded) if number % HELD_OUT]
    random = np.random.default_rng(seed)
    write_corpus(folder / "corpus", training_documents(random, seen, documents))
    lengths = np.array([len(ids) for ids in held_out])
    with atomic_write(folder / "held_out.npz") as stream:
        np.savez(stream, text=np.concatenate(held_out), lengths=lengths)


def encode(tokenizer: Path, files: list[Path]) -> Iterator[np.ndarray]:
    """Token ids of every document of some tokens; text is text, also where it looks special."""
    from tokenizers import Tokenizer

    engine = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    engine.encode_special_tokens = True
    for path in files:
        with path.open(encoding="utf-8") as rows:
            texts = [json.loads(row)["text"] for row in rows]
        for encoding in engine.encode_batch(texts, add_special_tokens=False):
            if len(encoding.ids) >= SHORTEST:
                yield np.array(encoding.ids, dtype=np.int64)


def training_documents(
    random: np.random.Generator, texts: list[np.ndarray], count: int
) -> Iterator[np.ndarray]:
    """Yield ids of documents that end with eos: plain text, and text with facts and questions."""
    for _ in range(count):
        length = int(np.exp(random.uniform(np.log(SHORTEST), np.log(LONGEST_TEXT))))
        text = stretch(random, texts, length)
        if random.random() < RETRIEVAL_SHARE:
            text = make_document(
                random, text, vocabulary=VOCABULARY, questions=QUESTIONS_TO_LEARN, scattered=True
            ).tokens
        yield np.append(text, EOS)


def stretch(random: np.random.Generator, texts: list[np.ndarray], length: int) -> np.ndarray:
    """A stretch of a random document, as long as asked for or as there is."""
    text = texts[int(random.integers(len(texts)))]
    begin = int(random.integers(max(1, len(text) - length + 1)))
    return text[begin : begin + length]


def write_corpus(prefix: Path, documents: Iterator[np.ndarray]) -> None:
    """Write .bin and .idx, the latter last."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for ids in documents:
        builder.add_document(torch.from_numpy(ids), [len(ids)])
    builder.finalize(f"{prefix}.idx")


def held_out_documents(
    folder: Path, *, length: int, count: int, seed: int = 1
) -> tuple[list[RetrievalDocument], list[np.ndarray]]:
    """Documents of exactly `length` tokens from texts that training never saw.

    Args:
        folder: that `make_corpus` wrote.
        length: tokens, without bos; texts are joined where one is not enough.
        count: of either kind.
        seed: of what is drawn.

    Returns:
        Documents of the task, and plain texts.
    """
    text = np.load(folder / "held_out.npz")["text"]
    random = np.random.default_rng([seed, length])
    tasks, plain = [], []
    for _ in range(count):
        begin = int(random.integers(len(text) - length))
        tasks.append(
            make_document(
                random,
                text[begin : begin + length - NAMES - 2 * QUESTIONS_TO_SCORE],
                vocabulary=VOCABULARY,
                questions=QUESTIONS_TO_SCORE,
                scattered=False,
            )
        )
        begin = int(random.integers(len(text) - length))
        plain.append(text[begin : begin + length])
    return tasks, plain
