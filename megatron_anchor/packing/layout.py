"""From the document slices of a sample to its arrays: the layout and the loss law.

With anchor id 1, S = 12 and the documents `11 12 13 E`, `21 22 E`, `31 32 33 34 35 E`:

    tokens                   1 11 12 13 E   1 21 22 E   1 31 32
    labels                  11 12 13  E .  21 22  E .  31 32 33
    loss_mask                1  1  1  1 0   1  1  1 0   1  1  1
    cu_seqlens               0              5           9        12
    anchor                   0  1  2  3 4   0  5  6 7   0  8  9
    intra-document           0  1  2  3 4   5  6  7 8   9 10 11
    intra-document-reset     0  1  2  3 4   0  1  2 3   0  1  2

The law: every token of a document is a target exactly once; anchors and padding never are; no
label crosses a document. All masks follow from the place, never from a token's id.
A sample of 131072 slots takes about half a millisecond; most of it is writing the arrays.

Legend: S slots of the sample, P pieces (document slices), L entries of cu_seqlens.
"""

import numpy as np

from megatron_anchor.packing.compiled import compiled
from megatron_anchor.packing.index import Pieces
from megatron_anchor.packing.patterns import check_attention_pattern


def cu_seqlens_length(sequence_length: int) -> int:
    """L, entries that hold the segments of any sample of `sequence_length` slots.

    Every document slice takes at least two slots (anchor and token); only the last segment, an
    anchor at the sample's end or padding, can take one. That bounds segments by ceil(S / 2).
    """
    return (sequence_length + 1) // 2 + 1


def lay_out(
    text: np.ndarray,
    pieces: Pieces,
    *,
    sequence_length: int,
    anchor_token_id: int,
    pad_token_id: int,
    attention_pattern: str,
) -> dict[str, np.ndarray]:
    """Build the arrays of one sample.

    Args:
        text: integers [tokens], what `pieces.start` points into: the whole .bin or a copy of
            the slices. Behind a slice with `last_has_target` stands the document's next token.
        pieces: the slices; together they take at most S slots.
        sequence_length: S.
        anchor_token_id: put at the head of each slice.
        pad_token_id: put behind the last slice; such slots have no target and position 0 (under
            "full" positions go on), and make a segment of their own (but not under "full").
        attention_pattern: one of ATTENTION_PATTERNS.

    Returns:
        tokens, labels (0 where masked), position_ids: int64 [S]; loss_mask: float32 [S];
        cu_seqlens: int32 [L], segment borders, then S repeated; max_seqlen, num_documents
        (slices), num_padding (slots): int32 scalars (0-d arrays).
    """
    check_attention_pattern(attention_pattern)
    num_documents = len(pieces.length)
    filled = int(pieces.length.sum()) + num_documents
    assert filled <= sequence_length, f"pieces of {filled} slots in a sample of {sequence_length}"
    ends = pieces.start + pieces.tokens_read
    assert num_documents == 0 or (pieces.start.min() >= 0 and ends.max() <= len(text))
    tokens_S = np.empty(sequence_length, dtype=np.int64)
    labels_S = np.empty(sequence_length, dtype=np.int64)
    loss_mask_S = np.empty(sequence_length, dtype=np.float32)
    _write_tokens(
        text,
        pieces.start,
        pieces.length,
        pieces.anchor_has_target,
        pieces.last_has_target,
        anchor_token_id,
        tokens_S,
        labels_S,
        loss_mask_S,
    )
    tokens_S[filled:] = pad_token_id
    labels_S[filled:] = 0
    loss_mask_S[filled:] = 0.0
    cu_seqlens_L = np.full(cu_seqlens_length(sequence_length), sequence_length, dtype=np.int32)
    cu_seqlens_L[0] = 0
    if attention_pattern == "full":
        position_ids_S = np.arange(sequence_length, dtype=np.int64)
    else:
        np.cumsum(pieces.length + 1, out=cu_seqlens_L[1 : num_documents + 1])
        position_ids_S = positions(
            cu_seqlens_L[: num_documents + 1], sequence_length, attention_pattern=attention_pattern
        )
    return {
        "tokens": tokens_S,
        "labels": labels_S,
        "loss_mask": loss_mask_S,
        "position_ids": position_ids_S,
        "cu_seqlens": cu_seqlens_L,
        "max_seqlen": np.array(np.diff(cu_seqlens_L[: num_documents + 2]).max(), dtype=np.int32),
        "num_documents": np.array(num_documents, dtype=np.int32),
        "num_padding": np.array(sequence_length - filled, dtype=np.int32),
    }


def positions(
    document_borders: np.ndarray, sequence_length: int, *, attention_pattern: str
) -> np.ndarray:
    """int64 [S] position ids of a masked pattern; 0 behind the last document.

    Args:
        document_borders: int32 [P + 1], slots where the document slices begin, and the end.
        sequence_length: S.
        attention_pattern: a masked one (not "full").
    """
    position_ids_S = np.empty(sequence_length, dtype=np.int64)
    _write_positions(
        document_borders,
        attention_pattern == "anchor",
        attention_pattern == "intra-document-reset",
        position_ids_S,
    )
    position_ids_S[document_borders[-1] :] = 0
    return position_ids_S


@compiled
def _write_tokens(
    text: np.ndarray,
    start_P: np.ndarray,
    length_P: np.ndarray,
    anchor_has_target_P: np.ndarray,
    last_has_target_P: np.ndarray,
    anchor_token_id: int,
    tokens_S: np.ndarray,
    labels_S: np.ndarray,
    loss_mask_S: np.ndarray,
) -> None:
    """Write the slots of all pieces: the anchor, then the tokens; each slot's label is the next."""
    head = 0
    for piece in range(len(start_P)):
        start, length = start_P[piece], length_P[piece]
        tail = head + length  # the piece's last slot
        # Plain loops over slices become vector instructions; indices with an offset do not.
        source = text[start : start + length]
        inputs, targets = tokens_S[head + 1 : tail + 1], labels_S[head:tail]
        counted = loss_mask_S[head:tail]
        for i in range(len(source)):
            inputs[i] = source[i]
        for i in range(len(source)):
            targets[i] = source[i]
        for i in range(len(source)):
            counted[i] = 1.0
        tokens_S[head] = anchor_token_id
        if not anchor_has_target_P[piece]:
            labels_S[head] = 0
            loss_mask_S[head] = 0.0
        if last_has_target_P[piece]:
            labels_S[tail] = text[start + length]
            loss_mask_S[tail] = 1.0
        else:
            labels_S[tail] = 0
            loss_mask_S[tail] = 0.0
        head = tail + 1


@compiled
def _write_positions(
    document_borders: np.ndarray,
    anchors_at_zero: bool,
    restart: bool,
    position_ids_S: np.ndarray,
) -> None:
    """Number the slots of all documents.

    The slots count up; `restart` begins anew in each document; with `anchors_at_zero` the anchor
    copies have position 0 and are not counted, so document k (from 0) lags its slots by k.
    """
    for document in range(len(document_borders) - 1):
        begin, end = document_borders[document], document_borders[document + 1]
        slots = position_ids_S[begin:end]
        first = 0 if restart else int(begin)
        if anchors_at_zero:
            first -= document
        for i in range(len(slots)):
            slots[i] = first + i
        if anchors_at_zero:
            slots[0] = 0
