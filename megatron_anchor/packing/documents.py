"""Where each document's tokens stand in a corpus, and which documents bring their own anchor.

A document is one range of the .idx's document table: one sequence in most corpora, several where
the text was split into sentences. Its tokens stand side by side in the .bin.

The whole table is never held in memory: 10^8 documents are walked in blocks, once per corpus and
anchor token, and leave one byte a document on disk.

Legend: D documents of the corpus, P documents asked for.
"""

from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_anchor.errors import UserError

_BLOCK = 1 << 20
"""documents or sequences handled at a time"""
_BLOCK_BYTES = 1 << 26
"""bytes of the .bin handled at a time"""


class Documents:
    """The document table of an open `IndexedDataset`.

    Args:
        dataset: the corpus; its `index` (the arrays of the .idx), `bin_reader` and `path_prefix`
            are used. It must outlive this object.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        index = dataset.index
        self.itemsize = int(index.dtype_size)
        self.num_documents = len(index.document_indices) - 1
        self.num_tokens = int(index.sequence_pointers[-1]) // self.itemsize + int(
            index.sequence_lengths[-1]
        )

    def boundaries(self, entries: np.ndarray | slice) -> np.ndarray:
        """int64 place (in tokens) where the tokens of the given documents begin.

        Args:
            entries: numbers of documents; `num_documents` gives the end of the last one.
        """
        index = self._dataset.index
        sequences = np.array(index.document_indices[entries])  # aligned, unlike the .idx itself
        last = len(index.sequence_pointers) - 1
        places = index.sequence_pointers[np.minimum(sequences, last)] // self.itemsize
        places[sequences > last] = self.num_tokens
        return places

    def lengths(self, first: int, last: int) -> np.ndarray:
        """int64 tokens of the documents `first` to `last` (exclusive)."""
        return np.diff(self.boundaries(slice(first, last + 1)))

    def check(self) -> None:
        """Check that the whole .idx is consistent (reads all of it).

        Raises:
            UserError: sequences do not stand side by side, the document table steps backwards,
                or a document has 2^31 tokens or more.
        """
        index, path = self._dataset.index, f"{self._dataset.path_prefix}.idx"
        for first in range(0, len(index.sequence_lengths), _BLOCK):
            lengths = index.sequence_lengths[first : first + _BLOCK].astype(np.int64)
            pointers = np.array(index.sequence_pointers[first : first + _BLOCK + 1])
            wrong = lengths < 0
            ends = pointers[: len(lengths)] + lengths * self.itemsize
            followed = len(pointers) - 1  # all but the last of the corpus
            wrong[:followed] |= ends[:followed] != pointers[1:]
            wrong[0] |= first == 0 and pointers[0] != 0
            if wrong.any():
                raise UserError(
                    f"{path} is damaged: sequence {first + int(wrong.argmax())} and the next do "
                    "not stand side by side in the .bin; write the corpus again"
                )
        for first in range(0, self.num_documents, _BLOCK):
            last = min(first + _BLOCK, self.num_documents)
            lengths = self.lengths(first, last)
            wrong = np.flatnonzero((lengths < 0) | (lengths > np.iinfo(np.int32).max))
            if wrong.size:
                raise UserError(
                    f"{path}: document {first + int(wrong[0])} has {lengths[wrong[0]]} tokens, "
                    "expected 0 to 2^31 - 1; write the corpus again"
                )

    def find_own_anchors(self, anchor_token_id: int) -> np.ndarray:
        """bool [D], True where a document's first token is the anchor token.

        The first tokens are gathered in file order, block by block; with a progress bar when it
        takes long.
        """
        own_anchor_D = np.zeros(self.num_documents, dtype=np.bool_)
        with tqdm(
            total=self.num_documents, desc="first tokens", unit="doc", delay=5, disable=None
        ) as progress:
            for first in range(0, self.num_documents, _BLOCK):
                last = min(first + _BLOCK, self.num_documents)
                begin = self.boundaries(slice(first, last + 1))
                filled = np.flatnonzero(np.diff(begin))
                tokens = self._tokens_at(begin[filled])
                own_anchor_D[first + filled] = tokens == anchor_token_id
                progress.update(last - first)
        return own_anchor_D

    def _tokens_at(self, places: np.ndarray) -> np.ndarray:
        """The tokens at ascending places of the .bin, read in blocks of at most _BLOCK_BYTES."""
        index, reader = self._dataset.index, self._dataset.bin_reader
        tokens = np.empty(len(places), dtype=index.dtype)
        first = 0
        while first < len(places):
            start = int(places[first])
            last = int(np.searchsorted(places, start + _BLOCK_BYTES // self.itemsize))
            text = reader.read(
                dtype=index.dtype,
                count=int(places[last - 1]) - start + 1,
                offset=start * self.itemsize,
            )
            tokens[first:last] = text[places[first:last] - start]
            first = last
        return tokens

    def content_lengths(self, own_anchor_D: np.ndarray) -> np.ndarray:
        """int32 [D], tokens of every document behind its anchor."""
        content_D = np.empty(self.num_documents, dtype=np.int32)
        for first in range(0, self.num_documents, _BLOCK):
            last = min(first + _BLOCK, self.num_documents)
            content_D[first:last] = self.lengths(first, last) - own_anchor_D[first:last]
        return content_D
