"""Texts to measure on: files of any kind that the corpus tools read, or what every Python has."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_anchor.checkpoint.tokenizer_files import VOCABULARIES, has_tokenizer
from megatron_anchor.corpus.readers import ReadOptions, read_span
from megatron_anchor.corpus.rows import RowOptions, parse_chunk
from megatron_anchor.corpus.sources import plan, resolve
from megatron_anchor.errors import UserError
from megatron_anchor.tokenizers import Tokenizer, load_tokenizer
from megatron_anchor.tokenizers.choose import TokenizerConfig

CHARACTERS_A_TOKEN = 12
"""A text is cut there before it is tokenized; more is read where that was too little."""
PIECE = 1 << 18
"""Characters of the joined reference pages that make one text."""


@dataclass(frozen=True)
class Text:
    """A name and token ids, int64 [S]."""

    name: str
    tokens_S: Tensor


def texts_of_files(paths: Sequence[str], *, key: str = "text") -> Iterator[tuple[str, str]]:
    """Read documents with their places, FILE:ROW.

    Raises:
        UserError: for a file that is missing or of an unknown kind, and a row that is no text.
    """
    sources = resolve(paths).sources
    rows = RowOptions(keys=(key,))
    for span in plan(sources):
        name = Path(sources[span.source].path).stem
        for chunk in read_span(
            sources, span, ReadOptions(columns=(key,)), offset=0, row=0, domain=name
        ):
            parsed = parse_chunk(chunk, rows)
            for bad in parsed.rejections:
                raise UserError(f"--texts {bad.place}: {bad.reason}; mend it or leave it out")
            for document in parsed.documents:
                yield f"{chunk.path}:{document.row}", "\n\n".join(document.values[0])


def default_texts() -> Iterator[tuple[str, str]]:
    """Prose and code by turns: Python's reference pages, joined, and its standard library."""
    prose, code = _prose(), _code()
    for page in prose:
        yield page
        yield from _next(code)
    yield from code


def _next(texts: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    found = next(texts, None)
    if found is not None:
        yield found


def _prose() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    joined = "\n\n".join(topics[name] for name in sorted(topics))
    joined = re.sub(r"[*`]{1,3}", "", joined)  # markup, which is no prose
    for number, begin in enumerate(range(0, len(joined), PIECE)):
        yield f"pydoc_data.topics, part {number}", joined[begin : begin + PIECE]


def _code() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.glob("*.py"), key=lambda path: (-path.stat().st_size, path.name)):
        yield f"standard library, {path.name}", path.read_text(encoding="utf-8", errors="replace")


def open_tokenizer(folder: str | Path) -> Tokenizer:
    """Load a folder's tokenizer.

    Raises:
        UserError: for a folder without one.
    """
    if not has_tokenizer(folder):
        raise UserError(
            f"{folder} has no tokenizer ({', '.join(VOCABULARIES)}); name one with --tokenizer DIR"
        )
    return load_tokenizer(TokenizerConfig(tokenizer_model=str(folder)))


def choose_texts(
    texts: Iterable[tuple[str, str]],
    tokenizer: Tokenizer,
    *,
    length: int,
    count: int,
    add_bos: bool = False,
    vocabulary: int | None = None,
) -> list[Text]:
    """Take the first texts that are long enough, each cut to `length` tokens.

    Args:
        texts: names and texts.
        tokenizer: of the model.
        length: tokens of each.
        count: how many.
        add_bos: put the tokenizer's bos first.
        vocabulary: ids must be below it.

    Raises:
        UserError: where fewer are long enough, or ids are not the model's.
    """
    if add_bos and tokenizer.bos_id is None:
        raise UserError("--add-bos: the tokenizer has no bos token")
    chosen: list[Text] = []
    read = longest = 0
    for name, text in texts:
        ids = _encode(text, tokenizer, length=length, add_bos=add_bos)
        read, longest = read + 1, max(longest, len(ids))
        if len(ids) < length:
            continue
        tokens_S = torch.tensor(ids[:length], dtype=torch.int64)
        if vocabulary is not None and int(tokens_S.max()) >= vocabulary:
            raise UserError(
                f"{name}: token id {int(tokens_S.max())}, but the model has {vocabulary}; give "
                "the model's own tokenizer"
            )
        chosen.append(Text(name, tokens_S))
        if len(chosen) == count:
            return chosen
    raise UserError(
        f"only {len(chosen)} of {read} texts have {length} tokens (the longest has {longest}), but "
        f"{count} are needed; give longer or more --texts, or a smaller --length, --lengths or "
        "--num-texts"
    )


def _encode(text: str, tokenizer: Tokenizer, *, length: int, add_bos: bool) -> list[int]:
    """At least the first `length` ids, where the text has them."""
    head = text[: CHARACTERS_A_TOKEN * length]
    ids = tokenizer.native_engine.encode_batch([head])[0].tolist()
    if len(ids) < length and len(head) < len(text):
        ids = tokenizer.native_engine.encode_batch([text])[0].tolist()
    if add_bos and ids[:1] != [tokenizer.bos_id]:
        assert tokenizer.bos_id is not None
        ids = [tokenizer.bos_id, *ids]
    return ids
