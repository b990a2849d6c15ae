"""The work on one chunk, wherever it runs: rows -> texts -> ids -> arrays ready to be appended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_anchor.corpus.chat_encoding import ChatEncoder, ChatSettings
from megatron_anchor.corpus.conversations import ConversationError
from megatron_anchor.corpus.readers import Chunk
from megatron_anchor.corpus.rejections import Rejection
from megatron_anchor.corpus.row_weights import WeightError, require_length, spread
from megatron_anchor.corpus.rows import Document, RowOptions, parse_chunk
from megatron_anchor.corpus.sentences import SplitterConfig, make_splitter
from megatron_anchor.tokenizers import EngineRecipe


@dataclass(frozen=True, kw_only=True)
class EncodeConfig:
    """Everything a worker needs; small enough to be sent to it once."""

    recipe: EngineRecipe
    rows: RowOptions
    dtype: np.dtype
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    eod_id: int | None = None
    """Appended to every document where it is not None."""
    splitter: SplitterConfig | None = None
    threads: int = 1
    chat: ChatSettings | None = None
    weight_dtype: str | None = None
    """Of the weights that are written; None where there are none."""


@dataclass
class KeyOutput:
    """The documents of one JSON key.

    `tokens` [tokens] of the corpus dtype, `lengths` int32 [sequences], `document_ends` int64
    [documents] in sequences from the chunk's start, `domains` int32 [documents] into the chunk's
    `domain_names`. `empty` documents without any token are left out; `kept` of those that are in
    are empty, since their rows have tokens under another key. `weights` [tokens] is None where the
    corpus has none.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    document_ends: np.ndarray
    domains: np.ndarray
    empty: int = 0
    kept: int = 0
    weights: np.ndarray | None = None


@dataclass
class EncodedChunk:
    """What the writer appends for one chunk."""

    outputs: list[KeyOutput]
    domain_names: list[str]
    rows_read: int
    blank_lines: int
    text_bytes: int
    rejections: list[Rejection] = field(default_factory=list)
    chat: Counter[str] = field(default_factory=Counter)
    """Counts of conversations."""


class ChunkEncoder:
    """Encodes chunks; holds the engine and the sentence splitter."""

    def __init__(self, config: EncodeConfig) -> None:
        self._config = config
        self._engine = config.recipe.make(threads=config.threads)
        self._split = make_splitter(config.splitter) if config.splitter else None
        self._chat = ChatEncoder(config.chat) if config.chat else None

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        """Encode one chunk."""
        config = self._config
        parsed = parse_chunk(chunk, config.rows)
        documents, rejections = parsed.documents, parsed.rejections
        good, chat = parsed.good_rows, Counter[str]()
        if self._split and not config.rows.pretokenized:
            for document in documents:
                document.values = [self._sentences(texts) for texts in document.values]
        if self._chat is not None:
            documents, ids, failed, chat = _encoded_chats(self._chat, documents, chunk.path)
            good, rejections = good - len(failed), rejections + failed
        elif config.rows.pretokenized:
            ids = [array for document in documents for [array] in document.values]
        else:
            texts = [text for doc in documents for value in doc.values for text in value]
            ids, failures = self._encode(texts)
            failures |= _unfitting(documents, ids, config.rows)
            if failures:
                documents, ids, failed = _without_failed(documents, ids, failures, chunk.path)
                good, rejections = good - len(failed), rejections + failed
        names = list(dict.fromkeys(document.domain for document in documents))
        rejections.sort(key=lambda rejection: rejection.row)
        return EncodedChunk(
            outputs=self._assemble(documents, ids, names),
            domain_names=names,
            rows_read=good + len(rejections),
            blank_lines=parsed.blank_lines,
            text_bytes=parsed.text_bytes,
            rejections=rejections,
            chat=chat,
        )

    def _sentences(self, texts: Sequence[str]) -> list[str]:
        assert self._split is not None
        return [sentence for text in texts for sentence in self._split(text)]

    def _encode(self, texts: list[str]) -> tuple[list[np.ndarray], dict[int, tuple[str, str]]]:
        """Ids of every text, and kind and detail for each text that the engine cannot take."""
        try:
            return self._engine.encode_batch(texts), {}
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException:  # engines written in Rust panic with a BaseException
            pass
        ids: list[np.ndarray] = []
        failures: dict[int, tuple[str, str]] = {}
        for number, text in enumerate(texts):
            try:
                ids += self._engine.encode_batch([text])
            except (KeyboardInterrupt, SystemExit, MemoryError):
                raise
            except BaseException as error:
                ids.append(np.empty(0, dtype=np.int32))
                failures[number] = ("tokenizer failed", str(error))
        return ids, failures

    def _assemble(
        self, documents: list[Document], ids: list[np.ndarray], names: list[str]
    ) -> list[KeyOutput]:
        keys = len(self._config.rows.keys)
        builders = [_KeyBuilder(self._config) for _ in range(keys)]
        codes = {name: code for code, name in enumerate(names)}
        at = 0
        for document in documents:
            code, sequences = codes[document.domain], []
            for value in document.values:
                sequences.append([array for array in ids[at : at + len(value)] if len(array)])
                at += len(value)
            keep = any(sequences)  # else the corpora of the keys would no longer have equal rows
            for builder, of_key in zip(builders, sequences, strict=True):
                builder.add(of_key, code, keep_empty=keep, weights=document.weights)
        return [builder.finish() for builder in builders]


def _encoded_chats(
    encode: ChatEncoder, documents: list[Document], path: str
) -> tuple[list[Document], list[np.ndarray], list[Rejection], Counter[str]]:
    """Encode conversations; a row with a bad one gives none."""
    bad: dict[int, Rejection] = {}
    good: dict[int, list[tuple[Document, np.ndarray]]] = {}
    counts: dict[int, Counter[str]] = {}
    for document in documents:
        row, [[conversation]] = document.row, document.values
        if row in bad:
            continue
        try:
            encoded = encode(conversation)
        except ConversationError as error:
            bad[row] = Rejection(path, row, error.kind, error.detail, document.raw)
            continue
        document.weights = encoded.weights
        good.setdefault(row, []).append((document, encoded.ids))
        counts[row] = counts.get(row, Counter()) + encoded.counts
    kept = [pair for row, pairs in good.items() if row not in bad for pair in pairs]
    total = sum((count for row, count in counts.items() if row not in bad), Counter[str]())
    total["rows_of_several"] = sum(len(good[row]) > 1 for row in good if row not in bad)
    return [document for document, _ in kept], [ids for _, ids in kept], list(bad.values()), +total


def _unfitting(
    documents: list[Document], ids: list[np.ndarray], options: RowOptions
) -> dict[int, tuple[str, str]]:
    """Why a document's weights do not fit its tokens, by the number of its first text."""
    failures: dict[int, tuple[str, str]] = {}
    at = 0
    if options.weight_key is None:
        return failures
    for document in documents:
        number = at
        for value in document.values:
            try:
                if value:
                    require_length(document.weights, [len(ids[at + i]) for i in range(len(value))])
            except WeightError as bad:
                failures[number] = ("not a weight", f"{options.weight_key!r} {bad}")
            at += len(value)
    return failures


def _without_failed(
    documents: list[Document],
    ids: list[np.ndarray],
    failures: dict[int, tuple[str, str]],
    path: str,
) -> tuple[list[Document], list[np.ndarray], list[Rejection]]:
    """Take out whole documents with a text that could not be encoded, or does not fit."""
    good, kept, rejected, at = [], [], [], 0
    for document in documents:
        end = at + sum(map(len, document.values))
        errors = [failures[number] for number in range(at, end) if number in failures]
        if errors:
            rejected.append(Rejection(path, document.row, *errors[0], document.raw))
        else:
            good.append(document)
            kept += ids[at:end]
        at = end
    return good, kept, rejected


class _KeyBuilder:
    """Gathers the documents of one key; a document's sequences stay apart."""

    def __init__(self, config: EncodeConfig) -> None:
        self._dtype = config.dtype
        self._prefix = np.array(config.prefix, dtype=config.dtype) if config.prefix else None
        self._suffix = np.array(config.suffix, dtype=config.dtype) if config.suffix else None
        self._affix = len(config.prefix) + len(config.suffix)
        self._before = len(config.prefix)
        self._weights: list[np.ndarray] = []
        self._weight_dtype = config.weight_dtype
        eod, append = config.eod_id, config.eod_id is not None
        self._eod = np.array([eod], dtype=config.dtype) if append else None
        # others' documents may end with eod already
        self._known_end = eod if append and config.rows.pretokenized else None
        self._parts: list[np.ndarray] = []
        self._lengths: list[int] = []
        self._ends: list[int] = []
        self._domains: list[int] = []
        self._empty = self._kept = 0

    def add(
        self,
        sequences: Sequence[np.ndarray],
        domain: int,
        *,
        keep_empty: bool,
        weights: np.ndarray | None,
    ) -> None:
        """Append one document; one without sequences is only counted, unless it is to be kept."""
        parts, lengths = self._parts, self._lengths
        if not sequences and not keep_empty:
            self._empty += 1
            return
        for ids in sequences:
            if self._prefix is not None:
                parts.append(self._prefix)
            parts.append(ids)
            if self._suffix is not None:
                parts.append(self._suffix)
            lengths.append(len(ids) + self._affix)
        if not sequences:
            self._kept += 1
        elif self._eod is not None and parts[-1][-1] != self._known_end:
            parts.append(self._eod)
            lengths[-1] += 1
        if weights is not None and sequences:
            tokens = sum(map(len, sequences))
            after = sum(lengths[-len(sequences) :]) - tokens - self._before
            self._weights.append(spread(weights, before=self._before, tokens=tokens, after=after))
        self._ends.append(len(lengths))
        self._domains.append(domain)

    def finish(self) -> KeyOutput:
        """The arrays of all documents added."""
        tokens = np.empty(0, dtype=self._dtype)
        if self._parts:
            tokens = np.concatenate(self._parts, dtype=self._dtype, casting="unsafe")
        weights = None
        if self._weight_dtype is not None:
            kind = np.dtype(self._weight_dtype).newbyteorder("<")
            weights = np.concatenate([np.empty(0, dtype=kind), *self._weights], dtype=kind)
            assert len(weights) == len(tokens)
        return KeyOutput(
            tokens=tokens,
            weights=weights,
            lengths=np.array(self._lengths, dtype=np.int32),
            document_ends=np.array(self._ends, dtype=np.int64),
            domains=np.array(self._domains, dtype=np.int32),
            empty=self._empty,
            kept=self._kept,
        )
