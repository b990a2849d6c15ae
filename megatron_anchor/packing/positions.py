"""Position ids of a sample whose documents are kept apart.

Legend: S slots of the sample, P document slices.
"""

import numpy as np

from megatron_anchor.packing.compiled import compiled
from megatron_anchor.packing.patterns import AttentionPattern


def positions(
    document_borders: np.ndarray,
    sequence_length: int,
    *,
    pattern: AttentionPattern,
    anchor_position: int = 0,
    order: np.ndarray | None = None,
) -> np.ndarray:
    """int64 [S] position ids; 0 behind the last document.

    Args:
        document_borders: integers [P + 1], slots where the document slices begin, and the end.
        sequence_length: S.
        pattern: one that masks documents.
        anchor_position: position of the anchor's copies where there is one anchor.
        order: int64 [filled slots], the order in which the slots are counted; None = as they are.
    """
    position_ids_S = np.empty(sequence_length, dtype=np.int64)
    filled = int(document_borders[-1])
    if order is None or pattern.restarts_positions:
        _count(document_borders, pattern.one_anchor, pattern.restarts_positions, position_ids_S)
    else:
        counted = np.ones(filled, dtype=np.int64)
        if pattern.one_anchor:
            counted[document_borders[:-1]] = 0
        position_ids_S[order] = np.cumsum(counted[order]) - (not pattern.one_anchor)
    if pattern.one_anchor:
        position_ids_S[document_borders[:-1]] = anchor_position
    position_ids_S[filled:] = 0
    return position_ids_S


@compiled
def _count(
    document_borders: np.ndarray, skip_anchors: bool, restart: bool, position_ids_S: np.ndarray
) -> None:
    """Number the slots of all documents.

    The slots count up; `restart` begins anew in each document; with `skip_anchors` all anchors
    but the first are not counted, so document k (from 0) lags its slots by k.
    """
    for document in range(len(document_borders) - 1):
        begin, end = document_borders[document], document_borders[document + 1]
        slots = position_ids_S[begin:end]
        first = 0 if restart else int(begin)
        if skip_anchors and not restart:
            first -= document
        for i in range(len(slots)):
            slots[i] = first + i
