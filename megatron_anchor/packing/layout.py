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
    router_mask              1  1  1  1 1   0  1  1 1   0  1  1     (where there is one anchor)

The law: every token of a document is a target exactly once; anchors and padding never are; no
label crosses a document. All masks follow from the place, never from a token's id.
A router of experts counts the tokens of the form with one anchor, so neither copies of it nor
padding; under the other patterns every document has an anchor of its own, and all of them count.
A sample of 131072 slots takes about half a millisecond; most of it is writing the arrays.

Legend: S slots of the sample, P document slices, L entries of cu_seqlens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_anchor.packing.compiled import compiled
from megatron_anchor.packing.domains import NO_TAGS, DomainTags
from megatron_anchor.packing.index import Slices
from megatron_anchor.packing.patterns import AttentionPattern
from megatron_anchor.packing.positions import positions
from megatron_anchor.packing.target_weights import SliceWeights, uniform_weights


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What all samples of a dataset share."""

    sequence_length: int
    """S."""
    pattern: AttentionPattern
    """Segments and position ids."""
    anchor_token_id: int
    """Put at the head of each slice."""
    pad_token_id: int
    """Put where a slice is filled and behind the last one; such slots have no target."""
    anchor_position: int = 0
    """Position id of the anchor's copies where there is one anchor."""
    first_token_loss: bool = True
    """Whether the first token of a document is a target, predicted by its head."""
    tags: DomainTags = NO_TAGS
    """What stands between the anchor and the first token where `slices.tag` says so; such tokens
    are never targets."""


class Slots(NamedTuple):
    """The arrays of a sample that have an entry for each slot, [S]."""

    tokens: np.ndarray
    """int64."""
    labels: np.ndarray
    """int64, 0 where masked."""
    loss_mask: np.ndarray
    """float32: how much the label counts, 1 where nothing says otherwise; 0 = it is no target."""
    position_ids: np.ndarray
    """int64, 0 in padding."""
    router_mask: np.ndarray
    """bool, slots that count as tokens in a router of experts."""


def lay_out(
    text: np.ndarray,
    slices: Slices,
    layout: Layout,
    *,
    order: np.ndarray | None = None,
    weights: SliceWeights | None = None,
) -> dict[str, np.ndarray]:
    """Build the arrays of one sample.

    Args:
        text: integers [tokens], what `slices.start` points into: the whole .bin or a copy of
            the slices. Behind a slice with `last_has_target` stands the document's next token.
        slices: the slices; together they take at most S slots.
        layout: what all samples share. Where documents are kept apart, padding behind the last
            slice is a segment of its own. Else there is one segment, all padding is at its end (it
            would be visible elsewhere), and positions go on.
        order: int64 [filled slots], the order in which `interleave` puts the slots (without any
            padding); None = as they are. Patterns that keep documents apart take only the
            positions from it, the others move the slots with their labels.
        weights: of the targets; None = all count alike.

    Returns:
        The fields of `Slots`; cu_seqlens: int32 [L], segment borders, then S repeated;
        max_seqlen, num_documents (slices), num_cut (slices of documents that are cut), num_padding
        (slots): int32 scalars (0-d arrays).
    """
    length = layout.sequence_length
    _check(text, slices, length)
    borders = np.concatenate(([0], np.cumsum(slices.prefix + slices.length)))
    filled = int(borders[-1])
    slots = _write(text, slices, layout, filled, weights)
    if layout.pattern.masks_documents:
        segments = _keep_apart(slots, borders, slices, layout, order)
    else:
        segments = np.array([0, length])
        _join(slots, filled, order)
    cu_seqlens_L = np.full(layout.pattern.max_segments(length) + 1, length, dtype=np.int32)
    cu_seqlens_L[: len(segments)] = segments
    numbers = {
        "max_seqlen": np.diff(cu_seqlens_L).max(),
        "num_documents": len(slices.length),
        "num_cut": slices.is_cut.sum(),
        "num_padding": length - filled,
    }
    scalars = {name: np.array(number, dtype=np.int32) for name, number in numbers.items()}
    return {**slots._asdict(), "cu_seqlens": cu_seqlens_L, **scalars}


def _check(text: np.ndarray, slices: Slices, sequence_length: int) -> None:
    taken = int(slices.slots.sum())
    assert taken <= sequence_length, f"slices of {taken} slots in a sample of {sequence_length}"
    ends = slices.start + slices.tokens_read
    assert len(ends) == 0 or (slices.start.min() >= 0 and ends.max() <= len(text))


def _write(
    text: np.ndarray, slices: Slices, layout: Layout, filled: int, weights: SliceWeights | None
) -> Slots:
    """All slots side by side, with padding at the end; without positions."""
    length, tags, first = layout.sequence_length, layout.tags, layout.first_token_loss
    slots = Slots(
        tokens=np.empty(length, dtype=np.int64),
        labels=np.empty(length, dtype=np.int64),
        loss_mask=np.empty(length, dtype=np.float32),
        position_ids=np.empty(length, dtype=np.int64),
        router_mask=np.arange(length) < filled,
    )
    _write_tokens(
        text,
        slices.start,
        slices.length,
        slices.anchor_has_target & first,
        slices.last_has_target & (first | (slices.length > 0)),
        layout.anchor_token_id,
        weights or uniform_weights(slices),
        tags.tokens,
        tags.begins[slices.tag],
        tags.lengths[slices.tag],
        slots,
    )
    slots.tokens[filled:] = layout.pad_token_id
    slots.labels[filled:] = 0
    slots.loss_mask[filled:] = 0.0
    return slots


def _keep_apart(
    slots: Slots, borders: np.ndarray, slices: Slices, layout: Layout, order: np.ndarray | None
) -> np.ndarray:
    """Give the slots of masked documents their positions and filling; return segment borders."""
    pattern = layout.pattern
    slots.position_ids[:] = positions(
        borders,
        layout.sequence_length,
        pattern=pattern,
        anchor_position=layout.anchor_position,
        order=order,
    )
    if pattern.one_anchor:
        slots.router_mask[borders[1:-1]] = False
    filled_borders = borders + np.concatenate(([0], np.cumsum(slices.filling)))
    if filled_borders[-1] > borders[-1]:
        _spread(borders, filled_borders, layout.pad_token_id, slots)
    return pattern.segments(filled_borders)


def _join(slots: Slots, filled: int, order: np.ndarray | None) -> None:
    """Number the slots of documents that see each other, after putting them in `order`."""
    slots.position_ids[:] = np.arange(len(slots.position_ids))
    if order is not None:
        for array in (slots.tokens, slots.labels, slots.loss_mask):
            array[:filled] = array[order]


@compiled
def _spread(
    borders: np.ndarray, filled_borders: np.ndarray, pad_token_id: int, slots: Slots
) -> None:
    """Move each slice from `borders` to `filled_borders`, the last one first; pad the gaps."""
    for p in range(len(borders) - 2, -1, -1):
        length = borders[p + 1] - borders[p]
        old, new = borders[p], filled_borders[p]
        for i in range(length - 1, -1, -1):
            slots.tokens[new + i] = slots.tokens[old + i]
            slots.labels[new + i] = slots.labels[old + i]
            slots.loss_mask[new + i] = slots.loss_mask[old + i]
            slots.position_ids[new + i] = slots.position_ids[old + i]
            slots.router_mask[new + i] = slots.router_mask[old + i]
        for slot in range(new + length, filled_borders[p + 1]):
            slots.tokens[slot] = pad_token_id
            slots.labels[slot] = 0
            slots.loss_mask[slot] = 0.0
            slots.position_ids[slot] = 0
            slots.router_mask[slot] = False


@compiled
def _write_tokens(
    text: np.ndarray,
    start_P: np.ndarray,
    length_P: np.ndarray,
    head_has_target_P: np.ndarray,
    last_has_target_P: np.ndarray,
    anchor_token_id: int,
    weights: SliceWeights,
    tag_tokens: np.ndarray,
    tag_begin_P: np.ndarray,
    tag_length_P: np.ndarray,
    slots: Slots,
) -> None:
    """Write the slots of all slices: anchor, tag, then the tokens; a slot's label is the next."""
    tokens_S, labels_S, loss_mask_S = slots.tokens, slots.labels, slots.loss_mask
    slot = 0
    for p in range(len(start_P)):
        start, length = start_P[p], length_P[p]
        tokens_S[slot] = anchor_token_id
        for i in range(tag_length_P[p]):
            labels_S[slot] = 0
            loss_mask_S[slot] = 0.0
            slot += 1
            tokens_S[slot] = tag_tokens[tag_begin_P[p] + i]
        head = slot  # the last slot before the document's first token
        tail = head + length  # the slice's last slot
        # Plain loops over slices become vector instructions; indices with an offset do not.
        source = text[start : start + length]
        inputs, targets = tokens_S[head + 1 : tail + 1], labels_S[head:tail]
        counted = loss_mask_S[head:tail]
        for i in range(len(source)):
            inputs[i] = source[i]
        for i in range(len(source)):
            targets[i] = source[i]
        factor = weights.factor_P[p]
        for i in range(len(source)):
            counted[i] = factor
        if len(weights.tokens):
            first = weights.start_P[p]
            own = weights.tokens[first : first + length]
            for i in range(len(own)):
                counted[i] *= own[i]
        if not head_has_target_P[p]:
            labels_S[head] = 0
            loss_mask_S[head] = 0.0
        if last_has_target_P[p]:
            labels_S[tail] = text[start + length]
            loss_mask_S[tail] = factor
            if len(weights.tokens):
                loss_mask_S[tail] *= weights.tokens[weights.start_P[p] + length]
        else:
            labels_S[tail] = 0
            loss_mask_S[tail] = 0.0
        slot = tail + 1
