"""Concat packing: where every sample begins, and which document slices it holds.

The documents are read in a given order and laid end to end, each behind its prefix (a copy of the
anchor, and the domain's tag if there is one); a document is cut where a sample of S slots is full
and goes on, behind another prefix, in the next sample. Where not even a prefix fits the sample is
padded. Only the beginnings of the samples are stored (16 bytes a sample); a place in the stream is
the pair

    (position, offset)    position  the document's place in the order
                          offset    0 = not begun, 1 + n = earlier samples hold its prefix and n of
                                    its tokens

Cutting costs one pass over the documents (about 10 ns each), whatever the number of tokens.

Legend: D documents of the corpus, O documents in reading order (all epochs), N samples, P slices.
"""

from typing import NamedTuple

import numpy as np

from megatron_anchor.packing.compiled import compiled

GATHERED_AT_ONCE = 1024
"""Lengths fetched together: the loads do not wait for the cutting, nor for each other."""

ANCHOR_ALONE = np.ones(1, dtype=np.int32)
"""Heads of documents without tags: one slot, the anchor, for all of them."""


class Slices(NamedTuple):
    """The slices of documents that make one sample, in order; every field is an array [P].

    Slots of slice p: a copy of the anchor, the tag's tokens if any, `length[p]` tokens of the
    document, and `filling[p]` slots that bring the slice to the document alignment.
    """

    document: np.ndarray
    """int64, the document's number in its corpus."""
    start: np.ndarray
    """int64, place in the .bin (in tokens) of the slice's first token."""
    length: np.ndarray
    """int64, tokens of the slice; 0 where a sample ends right behind a document's prefix."""
    anchor_has_target: np.ndarray
    """bool, False where the slice continues a document: its first token was a target before."""
    last_has_target: np.ndarray
    """bool, True where the document goes on: its next token is the label of the last slot."""
    tag: np.ndarray
    """int64, number of the domain's tag; 0 = none."""
    prefix: np.ndarray
    """int64, slots in front of the slice's first token: the anchor and the tag."""
    filling: np.ndarray
    """int64, slots behind the slice that hold nothing."""

    @property
    def slots(self) -> np.ndarray:
        """int64 [P], slots that a slice takes with its prefix and filling."""
        return self.prefix + self.length + self.filling

    @property
    def is_cut(self) -> np.ndarray:
        """bool [P], whether other samples hold parts of the slice's document."""
        return ~self.anchor_has_target | self.last_has_target

    @property
    def tokens_read(self) -> np.ndarray:
        """int64 [P], tokens needed from `start` on: the slice, and the label behind it if any."""
        return self.length + self.last_has_target


class Packed(NamedTuple):
    """Samples made of documents, and what it took."""

    document_index: np.ndarray
    """int32, documents sample by sample."""
    sample_index: np.ndarray
    """int64 [N + 1, 2], where samples begin in it; the second column means what the packing says.
    """
    slices: int
    """document slices in all samples"""
    cut_documents: int
    """documents with more than one slice"""
    occupied: int
    """slots that hold prefixes and tokens"""
    fewest_samples: int
    """lower bound on the samples that any packing of this kind needs"""


@compiled
def aligned(slots: int, alignment: int) -> int:
    """The next multiple of the alignment."""
    return (slots + alignment - 1) // alignment * alignment


@compiled
def count_slots(
    document_index_O: np.ndarray,
    content_lengths_D: np.ndarray,
    prefix_slots_D: np.ndarray = ANCHOR_ALONE,
    alignment: int = 1,
) -> int:
    """Slots that the documents take when none is cut: prefix, tokens and filling.

    Args:
        document_index_O: int32 numbers of the documents.
        content_lengths_D: int32 tokens of every document behind its anchor; 0 = takes no slots.
        prefix_slots_D: int32 slots of every document's prefix, or one number for all of them.
        alignment: each document takes a multiple of it.
    """
    same_prefix = len(prefix_slots_D) == 1
    slots = 0
    for position in range(len(document_index_O)):
        document = document_index_O[position]
        content = content_lengths_D[document]
        if content > 0:
            need = content + int(prefix_slots_D[0] if same_prefix else prefix_slots_D[document])
            slots += aligned(need, alignment) if alignment > 1 else need
    return slots


@compiled
def _cut(
    document_index_O: np.ndarray,
    content_lengths_D: np.ndarray,
    prefix_slots_D: np.ndarray,
    sequence_length: int,
    alignment: int,
    sample_index: np.ndarray,
) -> tuple[int, int, int, int]:
    """Fill `sample_index`; return the samples, slices, cut documents and occupied slots.

    Samples are -1 where `sample_index` is too small.
    """
    sample = 0
    filled = 0  # slots of the sample at hand; 0 = its beginning is not recorded yet
    slices = cut_documents = occupied = 0
    same_prefix = len(prefix_slots_D) == 1
    prefix = int(prefix_slots_D[0])
    gathered = np.empty(GATHERED_AT_ONCE, dtype=content_lengths_D.dtype)
    for block in range(0, len(document_index_O), GATHERED_AT_ONCE):
        block_size = min(GATHERED_AT_ONCE, len(document_index_O) - block)
        for i in range(block_size):
            gathered[i] = content_lengths_D[document_index_O[block + i]]
        for i in range(block_size):
            content = int(gathered[i])
            if content <= 0:
                continue
            if not same_prefix:
                prefix = int(prefix_slots_D[document_index_O[block + i]])
            if filled == 0:
                sample_index[sample, 0] = block + i
                sample_index[sample, 1] = 0
            parts = 1
            need = prefix + content
            if alignment > 1:  # a division is slow
                need = aligned(need, alignment)
            if need > sequence_length - filled:
                rest = content  # tokens that no sample holds yet
                while need > sequence_length - filled:
                    taken = sequence_length - filled - prefix
                    if taken >= 0:
                        rest -= taken
                        parts += 1
                        need = aligned(prefix + rest, alignment)
                    sample += 1
                    if sample + 1 >= len(sample_index):
                        return -1, 0, 0, 0
                    sample_index[sample, 0] = block + i
                    sample_index[sample, 1] = 1 + content - rest if parts > 1 else 0
                    filled = 0
                cut_documents += parts > 1
            filled += need
            slices += parts
            occupied += content + parts * prefix
            if filled == sequence_length:
                sample += 1
                if sample + 1 >= len(sample_index):
                    return -1, 0, 0, 0
                filled = 0
    if filled > 0:
        sample += 1
    sample_index[sample, 0] = len(document_index_O)
    sample_index[sample, 1] = 0
    return sample, slices, cut_documents, occupied


def concatenate(
    document_index_O: np.ndarray,
    content_lengths_D: np.ndarray,
    *,
    sequence_length: int,
    slots: int,
    prefix_slots_D: np.ndarray = ANCHOR_ALONE,
    alignment: int = 1,
) -> Packed:
    """Cut the stream of documents into samples; the last one may be partly filled.

    Args:
        document_index_O: int32 documents in reading order.
        content_lengths_D: int32 tokens of every document behind its anchor; a document with none
            (empty, or nothing but an anchor of its own) takes no slots.
        sequence_length: S, slots of a sample, a multiple of `alignment`, above any prefix.
        slots: `count_slots` of these documents (does not depend on their order).
        prefix_slots_D: int32 slots of every document's prefix, or one number for all of them.
        alignment: each slice takes a multiple of it.

    Returns:
        Samples; the rows of `sample_index` are (position, offset) where each sample begins, then
        the stream's end. `document_index` is `document_index_O` itself.
    """
    # Without tags and alignment every sample but the last is full, and at most one slot of it
    # repeats an anchor. Else samples lose more, seldom much; then once again with more room.
    most = -(-slots // (sequence_length - 1)) + 2
    while True:
        sample_index = np.empty((most + 1, 2), dtype=np.int64)
        samples, slices, cut, occupied = _cut(
            document_index_O,
            content_lengths_D,
            prefix_slots_D,
            sequence_length,
            alignment,
            sample_index,
        )
        if samples >= 0:
            break
        most *= 2
    return Packed(
        document_index=document_index_O,
        sample_index=sample_index[: samples + 1],
        slices=slices,
        cut_documents=cut,
        occupied=occupied,
        fewest_samples=-(-slots // sequence_length),
    )


def concatenated_slices(
    document_P: np.ndarray,
    begin_P: np.ndarray,
    content_P: np.ndarray,
    *,
    first_offset: int,
    last_offset: int,
    tag_P: np.ndarray | None = None,
    prefix_P: np.ndarray | None = None,
    alignment: int = 1,
) -> Slices:
    """The slices of one sample of `concatenate` that holds the given documents, in order.

    Args:
        document_P: int64 documents from the one where the sample begins to the one where it ends.
        begin_P: int64 place in the .bin (in tokens) of each document's first token behind its
            anchor.
        content_P: int64 tokens of each document behind its anchor.
        first_offset: of the first document, what earlier samples hold (see above).
        last_offset: of the last document, what this and earlier samples hold; 0 = all.
        tag_P: int64 number of each document's tag; None = none has one.
        prefix_P: int64 slots of each document's prefix; None = the anchor.
        alignment: each slice takes a multiple of it.
    """
    skipped_P = np.zeros_like(content_P)
    skipped_P[:1] = max(first_offset - 1, 0)
    end_P = content_P.copy()
    if last_offset:
        end_P[-1] = last_offset - 1
    begun_P = np.zeros(len(content_P), dtype=np.bool_)
    begun_P[:1] = first_offset > 0
    return make_slices(
        document_P,
        begin_P,
        content_P,
        skipped_P=skipped_P,
        length_P=end_P - skipped_P,
        begun_P=begun_P,
        tag_P=tag_P,
        prefix_P=prefix_P,
        alignment=alignment,
    )


def make_slices(
    document_P: np.ndarray,
    begin_P: np.ndarray,
    content_P: np.ndarray,
    *,
    skipped_P: np.ndarray,
    length_P: np.ndarray,
    begun_P: np.ndarray,
    tag_P: np.ndarray | None,
    prefix_P: np.ndarray | None,
    alignment: int,
) -> Slices:
    """Slices of `length_P` tokens behind the first `skipped_P` of each document.

    Args:
        begun_P: bool, whether another sample holds the document's prefix and beginning.

    The other arguments are those of `concatenated_slices`. Documents without content are left out.
    """
    if prefix_P is None:
        prefix_P = np.ones_like(content_P)
    if tag_P is None:
        tag_P = np.zeros_like(content_P)
    slices = Slices(
        document=document_P,
        start=begin_P + skipped_P,
        length=length_P,
        anchor_has_target=~begun_P,
        last_has_target=skipped_P + length_P < content_P,
        tag=tag_P,
        prefix=prefix_P,
        filling=-(prefix_P + length_P) % alignment,
    )
    used_P = content_P > 0
    return slices if used_P.all() else Slices(*(field[used_P] for field in slices))
