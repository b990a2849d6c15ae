"""From the document slices of a sample to its arrays: the layout and the loss law.

With anchor id 1, S = 12 and the documents `11 12 13 E`, `21 22 E`, `31 32 33 34 35 E`:

    tokens                   1 11 12 13 E   1 21 22 E   1 31 32
    labels                  11 12 13  E .  21 22  E .  31 32 33
    loss_mask                1  1  1  1 0   1  1  1 0   1  1  1
    cu_seqlens               0              5           9        12
    anchor                   0  1  2  3 4   0  5  6 7   0  8  9
    intra-document           0  1  2  3 4   5  6  7 8   9 10 11
    intra-document-reset     0  1  2  3 4   0  1  2 3   0  1  2
    anchor-masked            as anchor; its cu_seqlens  0 5 6 9 10 12
    router_mask              1  1  1  1 1   0  1  1 1   0  1  1     (the two anchored patterns)

The law: every token of a document is a target exactly once; anchors and padding never are; no
label crosses a document. All masks follow from the place, never from a token's id.
A router of experts counts the tokens of the form with one anchor, so neither copies of it nor
padding; under the other patterns every document has an anchor of its own, and all of them count.
A sample of 131072 slots takes about half a millisecond; most of it is writing the arrays.

Legend: S slots of the sample, P pieces (document slices), L entries of cu_seqlens.
"""

import numpy as np

from megatron_anchor.packing.compiled import compiled
from megatron_anchor.packing.domains import NO_TAGS, DomainTags
from megatron_anchor.packing.index import Pieces
from megatron_anchor.packing.patterns import ANCHORED, check_attention_pattern


def cu_seqlens_length(sequence_length: int, *, attention_pattern: str = "anchor") -> int:
    """L, entries that hold the segments of any sample of `sequence_length` slots.

    Every document slice takes at least two slots (anchor and token); only the last segment, an
    anchor at the sample's end or padding, can take one. That bounds segments by ceil(S / 2); under
    "anchor-masked", where anchors are segments, by S.
    """
    if attention_pattern == "anchor-masked":
        return sequence_length + 1
    return (sequence_length + 1) // 2 + 1


def segment_borders(document_borders: np.ndarray, *, attention_pattern: str) -> np.ndarray:
    """Where the segments of a masked pattern begin, and the end of the last one.

    Args:
        document_borders: integers [P + 1], slots where the document slices begin, and the end.
        attention_pattern: a masked one (not "full").

    Returns:
        `document_borders` itself, but under "anchor-masked" also the slots behind all anchors but
        the first, without empty segments.
    """
    if attention_pattern != "anchor-masked":
        return document_borders
    behind_anchors = document_borders[1:-1] + 1
    return np.unique(np.concatenate((document_borders, behind_anchors)))


def lay_out(
    text: np.ndarray,
    pieces: Pieces,
    *,
    sequence_length: int,
    anchor_token_id: int,
    pad_token_id: int,
    attention_pattern: str,
    tags: DomainTags = NO_TAGS,
    anchor_position: int = 0,
    first_token_loss: bool = True,
    order: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Build the arrays of one sample.

    Args:
        text: integers [tokens], what `pieces.start` points into: the whole .bin or a copy of
            the slices. Behind a slice with `last_has_target` stands the document's next token.
        pieces: the slices; together they take at most S slots.
        sequence_length: S.
        anchor_token_id: put at the head of each slice.
        pad_token_id: put where a slice is filled and behind the last one; such slots have no
            target and position 0. What is behind the last slice is a segment of its own. Under
            "full" all padding is at the sample's end (it would be visible elsewhere), positions
            go on and there is one segment.
        attention_pattern: one of ATTENTION_PATTERNS.
        tags: what stands between the anchor and the first token where `pieces.tag` says so;
            such tokens are never targets.
        anchor_position: position id of the anchor's copies under the ANCHORED patterns.
        first_token_loss: whether the first token of a document is a target, predicted by its head.
        order: int64 [filled slots], the order in which `interleave` puts the slots (without any
            padding); None = as they are. Masked patterns take only the positions from it, "full"
            moves the slots with their labels.

    Returns:
        tokens, labels (0 where masked), position_ids: int64 [S]; loss_mask: float32 [S];
        router_mask: bool [S], slots that count as tokens in a router of experts; cu_seqlens: int32
        [L], segment borders, then S repeated; max_seqlen, num_documents (slices), num_cut (slices
        of documents that are cut), num_padding (slots): int32 scalars (0-d arrays).
    """
    check_attention_pattern(attention_pattern)
    slots_P = pieces.head + pieces.length
    num_documents, filled = len(slots_P), int(slots_P.sum())
    taken = filled + int(pieces.filling.sum())
    assert taken <= sequence_length, f"pieces of {taken} slots in a sample of {sequence_length}"
    ends = pieces.start + pieces.tokens_read
    assert num_documents == 0 or (pieces.start.min() >= 0 and ends.max() <= len(text))
    tokens_S = np.empty(sequence_length, dtype=np.int64)
    labels_S = np.empty(sequence_length, dtype=np.int64)
    loss_mask_S = np.empty(sequence_length, dtype=np.float32)
    _write_tokens(
        text,
        pieces.start,
        pieces.length,
        pieces.anchor_has_target & first_token_loss,
        pieces.last_has_target & (first_token_loss | (pieces.length > 0)),
        anchor_token_id,
        tags.tokens,
        tags.begins[pieces.tag],
        tags.lengths[pieces.tag],
        tokens_S,
        labels_S,
        loss_mask_S,
    )
    tokens_S[filled:] = pad_token_id
    labels_S[filled:] = 0
    loss_mask_S[filled:] = 0.0
    router_mask_S = np.arange(sequence_length) < filled
    entries = cu_seqlens_length(sequence_length, attention_pattern=attention_pattern)
    cu_seqlens_L = np.full(entries, sequence_length, dtype=np.int32)
    cu_seqlens_L[0] = 0
    if attention_pattern == "full":
        position_ids_S = np.arange(sequence_length, dtype=np.int64)
        if order is not None:
            for array_S in (tokens_S, labels_S, loss_mask_S):
                array_S[:filled] = array_S[order]
    else:
        borders = np.concatenate(([0], np.cumsum(slots_P)))
        if attention_pattern in ANCHORED:
            router_mask_S[borders[1:-1]] = False
        position_ids_S = positions(
            borders,
            sequence_length,
            attention_pattern=attention_pattern,
            anchor_position=anchor_position,
            order=order,
        )
        filled_borders = np.concatenate(([0], np.cumsum(slots_P + pieces.filling)))
        segments = segment_borders(filled_borders, attention_pattern=attention_pattern)
        cu_seqlens_L[: len(segments)] = segments
        if taken > filled:
            _spread(
                borders,
                filled_borders,
                pad_token_id,
                tokens_S,
                labels_S,
                loss_mask_S,
                position_ids_S,
                router_mask_S,
            )
    return {
        "tokens": tokens_S,
        "labels": labels_S,
        "loss_mask": loss_mask_S,
        "position_ids": position_ids_S,
        "router_mask": router_mask_S,
        "cu_seqlens": cu_seqlens_L,
        "max_seqlen": np.array(np.diff(cu_seqlens_L).max(), dtype=np.int32),
        "num_documents": np.array(num_documents, dtype=np.int32),
        "num_cut": np.array(pieces.is_cut.sum(), dtype=np.int32),
        "num_padding": np.array(sequence_length - filled, dtype=np.int32),
    }


def positions(
    document_borders: np.ndarray,
    sequence_length: int,
    *,
    attention_pattern: str,
    anchor_position: int = 0,
    order: np.ndarray | None = None,
) -> np.ndarray:
    """int64 [S] position ids of a masked pattern; 0 behind the last document.

    Args:
        document_borders: integers [P + 1], slots where the document slices begin, and the end.
        sequence_length: S.
        attention_pattern: a masked one (not "full").
        anchor_position: position of the anchor's copies under the ANCHORED patterns.
        order: as in `lay_out`.
    """
    position_ids_S = np.empty(sequence_length, dtype=np.int64)
    filled = int(document_borders[-1])
    anchored = attention_pattern in ANCHORED
    if order is None or attention_pattern == "intra-document-reset":
        _write_positions(
            document_borders,
            anchored,
            attention_pattern == "intra-document-reset",
            position_ids_S,
        )
    else:
        counted = np.ones(filled, dtype=np.int64)
        if anchored:
            counted[document_borders[:-1]] = 0
        position_ids_S[order] = np.cumsum(counted[order]) - (not anchored)
    if anchored:
        position_ids_S[document_borders[:-1]] = anchor_position
    position_ids_S[filled:] = 0
    return position_ids_S


@compiled
def _spread(
    borders: np.ndarray,
    filled_borders: np.ndarray,
    pad_token_id: int,
    tokens_S: np.ndarray,
    labels_S: np.ndarray,
    loss_mask_S: np.ndarray,
    position_ids_S: np.ndarray,
    router_mask_S: np.ndarray,
) -> None:
    """Move each slice from `borders` to `filled_borders`, the last one first; pad the gaps."""
    for piece in range(len(borders) - 2, -1, -1):
        slots = borders[piece + 1] - borders[piece]
        old, new = borders[piece], filled_borders[piece]
        for i in range(slots - 1, -1, -1):
            tokens_S[new + i] = tokens_S[old + i]
            labels_S[new + i] = labels_S[old + i]
            loss_mask_S[new + i] = loss_mask_S[old + i]
            position_ids_S[new + i] = position_ids_S[old + i]
            router_mask_S[new + i] = router_mask_S[old + i]
        for slot in range(new + slots, filled_borders[piece + 1]):
            tokens_S[slot] = pad_token_id
            labels_S[slot] = 0
            loss_mask_S[slot] = 0.0
            position_ids_S[slot] = 0
            router_mask_S[slot] = False


@compiled
def _write_tokens(
    text: np.ndarray,
    start_P: np.ndarray,
    length_P: np.ndarray,
    head_has_target_P: np.ndarray,
    last_has_target_P: np.ndarray,
    anchor_token_id: int,
    tag_tokens: np.ndarray,
    tag_begin_P: np.ndarray,
    tag_length_P: np.ndarray,
    tokens_S: np.ndarray,
    labels_S: np.ndarray,
    loss_mask_S: np.ndarray,
) -> None:
    """Write the slots of all pieces: anchor, tag, then the tokens; a slot's label is the next."""
    slot = 0
    for piece in range(len(start_P)):
        start, length = start_P[piece], length_P[piece]
        tokens_S[slot] = anchor_token_id
        for i in range(tag_length_P[piece]):
            labels_S[slot] = 0
            loss_mask_S[slot] = 0.0
            slot += 1
            tokens_S[slot] = tag_tokens[tag_begin_P[piece] + i]
        head = slot  # the last slot before the document's first token
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
        if not head_has_target_P[piece]:
            labels_S[head] = 0
            loss_mask_S[head] = 0.0
        if last_has_target_P[piece]:
            labels_S[tail] = text[start + length]
            loss_mask_S[tail] = 1.0
        else:
            labels_S[tail] = 0
            loss_mask_S[tail] = 0.0
        slot = tail + 1


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
