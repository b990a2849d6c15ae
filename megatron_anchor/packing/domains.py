"""Domain tags: the name of a document's domain behind its anchor (arXiv 2411.13476, 3.3.1).

The domains of a corpus are what `tools/preprocess_data.py` writes beside it: `PREFIX.domains.npy`,
one int32 a document, and their names in `PREFIX.manifest.json`.

Legend: K domains of the corpus, D documents, P documents asked for.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_anchor.errors import UserError
from megatron_anchor.indexed.fingerprint import fingerprint
from megatron_anchor.indexed.manifest import domains_path, read_domains

NO_DOMAIN = ("", "default", "unknown")
"""Names that say nothing; "default" is what the corpus tools write where no domain was given."""

_BLOCK = 1 << 20
"""documents handled at a time"""


class DomainTags:
    """The tag of every document of one corpus. Tag 0 is no tag; tag k + 1 is that of domain k.

    Args:
        tags: tokens of each domain's tag; empty = none.
        path: .npy of integers [D] in [0, K), the domain of each document. None = none is known.
    """

    def __init__(self, tags: Sequence[Sequence[int]], path: Path | None) -> None:
        self.lengths = np.array([0, *map(len, tags)], dtype=np.int64)
        self.tokens = np.array([token for tag in tags for token in tag], dtype=np.int64)
        self.begins = np.cumsum(self.lengths) - self.lengths
        self._path = path
        self._open: np.ndarray | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest tag."""
        return int(self.lengths.max())

    def of(self, documents: np.ndarray) -> np.ndarray:
        """int64 [P], the tags of some documents."""
        if self._path is None:
            return np.zeros(len(documents), dtype=np.int64)
        if self._open is None:
            self._open = np.asarray(np.load(self._path, mmap_mode="r", allow_pickle=False))
        return self._open[documents].astype(np.int64) + 1

    def prefix_slots(self, num_documents: int) -> np.ndarray:
        """int32 slots of every document's prefix, [D], or [1] where they are all the same."""
        if self._path is None:
            return np.ones(1, dtype=np.int32)
        head_D = np.empty(num_documents, dtype=np.int32)
        for first in range(0, num_documents, _BLOCK):
            documents = np.arange(first, min(first + _BLOCK, num_documents))
            head_D[documents] = 1 + self.lengths[self.of(documents)]
        return head_D

    def __getstate__(self) -> dict[str, Any]:
        """Pickle as a path, not as contents."""
        return {**self.__dict__, "_open": None}


NO_TAGS = DomainTags([], None)


def check_format(text: str) -> str:
    """Return a format such as "{domain}: ".

    Raises:
        UserError: it does not hold {domain} and nothing else in braces.
    """
    try:
        if "\0" in text.format(domain="\0"):
            return text
    except (KeyError, IndexError, ValueError, AttributeError):
        pass
    raise UserError(
        f"got --domain-tag-format {text!r}, expected a text with {{domain}} in it, such as "
        "'{domain}: '"
    )


def open_tags(
    prefix: str,
    *,
    tag_format: str,
    tokenize: Callable[[str], Sequence[int]],
    vocab_size: int | None = None,
) -> tuple[DomainTags, dict[str, Any]]:
    """(DomainTags, what they depend on as JSON values) of a corpus.

    A corpus without recorded domains has no tags, nor have domains with a name of NO_DOMAIN.

    Args:
        prefix: path of the corpus.
        tag_format: text of a tag, with {domain} in it.
        tokenize: turns a text into token ids.
        vocab_size: ids in [0, vocab_size) are accepted; None = all that are not negative.

    Raises:
        UserError: the domains do not belong to the corpus (see `read_domains`), or a tag has a
            token outside the vocabulary.
    """
    found = read_domains(prefix)
    if found is None:
        return NO_TAGS, {"tags": None}
    names, _ = found
    tags = [
        [] if name in NO_DOMAIN else [int(t) for t in tokenize(tag_format.format(domain=name))]
        for name in names
    ]
    for name, tag in zip(names, tags, strict=True):
        _require_inside(prefix, name, tag, tag_format=tag_format, vocab_size=vocab_size)
    path = domains_path(prefix)
    return DomainTags(tags, path), {"tags": tags, **fingerprint(path)}


def _require_inside(
    prefix: str, name: str, tag: Sequence[int], *, tag_format: str, vocab_size: int | None
) -> None:
    outside = [t for t in tag if t < 0 or (vocab_size is not None and t >= vocab_size)]
    if outside:
        size = "any size" if vocab_size is None else vocab_size
        raise UserError(
            f"the tag {tag_format.format(domain=name)!r} of the domain {name!r} (corpus {prefix}) "
            f"has the token id {outside[0]}, which is outside the vocabulary of {size}: this "
            "tokenizer has more ids than the model; set --tokenizer-model (--vocab-size) to the "
            "model's own, choose another --domain-tag-format, or leave out --domain-tags"
        )


def tag_tokenizer(tokenizer: Any) -> Callable[[str], list[int]]:
    """A tokenizer's `tokenize` without the special tokens that it puts around every text.

    Those are what it makes of an empty text; the same tokens inside a tag are its own.
    """
    around = list(tokenizer.tokenize(""))

    def tokenize(text: str) -> list[int]:
        tokens = list(tokenizer.tokenize(text))
        for front in range(len(around), -1, -1):
            back = len(tokens) - (len(around) - front)
            if tokens[:front] == around[:front] and tokens[back:] == around[front:]:
                return tokens[front:back]
        return tokens

    return tokenize
