"""Greedy concat packing: where every sample begins, and which document slices it holds.

The documents are read in a given order and laid end to end, each behind a copy of the anchor; a
document is cut where a sample of S slots is full and goes on, behind another copy of the anchor,
in the next sample. Only the beginnings of the samples are stored (16 bytes a sample); a place in
the stream is the pair

    (position, offset)    position  the document's place in the order
                          offset    how many of its slots earlier samples hold, the anchor counted
                                    once: 0 = not begun, 1 = its anchor only, 1 + n = n tokens

Cutting costs one pass over the documents (about 10 ns each), whatever the number of tokens.

Legend: D documents of the corpus, O documents in reading order (all epochs), N samples, P pieces.
"""

from typing import NamedTuple

import numpy as np

from megatron_anchor.packing.compiled import compiled

GATHERED_AT_ONCE = 1024
"""Lengths fetched together: the loads do not wait for the cutting, nor for each other."""


class Pieces(NamedTuple):
    """The slices of documents that make one sample, in order; every field is an array [P].

    Slots of piece p: one copy of the anchor, then `length[p]` tokens of the document.
    """

    document: np.ndarray
    """int64, the document's number in its corpus."""
    start: np.ndarray
    """int64, place in the .bin (in tokens) of the slice's first token."""
    length: np.ndarray
    """int64, tokens of the slice; 0 where a sample ends right behind a document's anchor."""
    anchor_has_target: np.ndarray
    """bool, False where the slice continues a document: its first token was a target before."""
    last_has_target: np.ndarray
    """bool, True where the document goes on: its next token is the label of the last slot."""

    @property
    def tokens_read(self) -> np.ndarray:
        """int64 [P], tokens needed from `start` on: the slice, and the label behind it if any."""
        return self.length + self.last_has_target


@compiled
def count_slots(document_index_O: np.ndarray, content_lengths_D: np.ndarray) -> int:
    """Slots that the documents take when none is cut: tokens and one anchor each.

    Args:
        document_index_O: int32 numbers of the documents.
        content_lengths_D: int32 tokens of every document behind its anchor; 0 = takes no slots.
    """
    slots = 0
    for position in range(len(document_index_O)):
        content = content_lengths_D[document_index_O[position]]
        if content > 0:
            slots += content + 1
    return slots


@compiled
def _cut(
    document_index_O: np.ndarray,
    content_lengths_D: np.ndarray,
    sequence_length: int,
    sample_index: np.ndarray,
) -> int:
    """Fill `sample_index` (rows: sample, columns: position and offset); return the samples."""
    sample = 0
    filled = 0  # slots of the sample at hand; 0 = its beginning is not recorded yet
    gathered = np.empty(GATHERED_AT_ONCE, dtype=content_lengths_D.dtype)
    for block in range(0, len(document_index_O), GATHERED_AT_ONCE):
        block_size = min(GATHERED_AT_ONCE, len(document_index_O) - block)
        for i in range(block_size):
            gathered[i] = content_lengths_D[document_index_O[block + i]]
        for i in range(block_size):
            content = gathered[i]
            if content <= 0:
                continue
            if filled == 0:
                sample_index[sample, 0] = block + i
                sample_index[sample, 1] = 0
            slots = content + 1  # that the rest of the document needs
            offset = 0
            while filled + slots > sequence_length:
                taken = sequence_length - filled
                offset += taken if offset == 0 else taken - 1  # a repeated anchor counts once
                slots = content + 2 - offset
                sample += 1
                sample_index[sample, 0] = block + i
                sample_index[sample, 1] = offset
                filled = 0
            filled += slots
            if filled == sequence_length:
                sample += 1
                filled = 0
    if filled > 0:
        sample += 1
    sample_index[sample, 0] = len(document_index_O)
    sample_index[sample, 1] = 0
    return sample


def cut_into_samples(
    document_index_O: np.ndarray, content_lengths_D: np.ndarray, *, sequence_length: int, slots: int
) -> np.ndarray:
    """Cut the stream of documents into samples; the last one may be partly filled.

    Args:
        document_index_O: int32 documents in reading order.
        content_lengths_D: int32 tokens of every document behind its anchor; a document with none
            (empty, or nothing but an anchor of its own) takes no slots.
        sequence_length: S, slots of a sample, at least 2.
        slots: `count_slots` of these documents (does not depend on their order).

    Returns:
        int64 [N + 1, 2]: (position, offset) where each sample begins, then the stream's end.
    """
    # Every sample but the last is full, and at most one slot of it repeats an anchor.
    most = -(-slots // (sequence_length - 1))
    sample_index = np.empty((most + 1, 2), dtype=np.int64)
    samples = _cut(document_index_O, content_lengths_D, sequence_length, sample_index)
    return sample_index[: samples + 1]


def pieces_of_documents(
    document_P: np.ndarray,
    begin_P: np.ndarray,
    content_P: np.ndarray,
    *,
    first_offset: int,
    last_offset: int,
) -> Pieces:
    """The slices of one sample that holds the given documents, in order.

    Args:
        document_P: int64 documents from the one where the sample begins to the one where it ends.
        begin_P: int64 place in the .bin (in tokens) of each document's first token behind its
            anchor.
        content_P: int64 tokens of each document behind its anchor.
        first_offset: slots of the first document that earlier samples hold.
        last_offset: slots of the last document that this and earlier samples hold; 0 = all.
    """
    slots_P = content_P + 1
    from_P = np.zeros_like(slots_P)
    from_P[:1] = first_offset
    to_P = slots_P.copy()
    if last_offset:
        to_P[-1] = last_offset
    skipped_P = np.maximum(from_P - 1, 0)
    pieces = Pieces(
        document=document_P,
        start=begin_P + skipped_P,
        length=to_P - 1 - skipped_P,
        anchor_has_target=from_P == 0,
        last_has_target=to_P < slots_P,
    )
    used_P = content_P > 0
    return pieces if used_P.all() else Pieces(*(field[used_P] for field in pieces))
