"""One predicate says what a token may see; every other form of the mask is derived from it.

Three documents of 3, 2 and 2 slots, each headed by its copy of the anchor (`x`: visible)::

             a 1 2 | a 3 | a 4          the paper's shared form, one anchor:
        a    x                                    a 1 2 3 4
        1    x x                             a    x
        2    x x x                           1    x x
        a          | x                       2    x x x
        3          | x x                     3    x     x
        a                | x                 4    x       x
        4                | x x

Both forms give every document token the same keys with the same positions (DESIGN: the anchor
attends only to itself, so its copies hold the same states). Training uses the left one: it is
plain causal attention inside each entry of ``cu_seqlens``, which every variable-length kernel can
do. The dense forms exist for the tests and for pictures; they cost S x S bytes.

Legend: S slots of a sample, n documents.
"""

from __future__ import annotations

import numpy as np

NO_ANCHOR = -1


def is_visible(
    query_S1: np.ndarray,
    key_1S: np.ndarray,
    *,
    document_of_query_S1: np.ndarray,
    document_of_key_1S: np.ndarray,
    anchor_index: int = NO_ANCHOR,
) -> np.ndarray:
    """Say whether key slots are visible to query slots: THE definition of the mask.

    A key is visible if it is not later than the query and belongs to the query's document or is
    the shared anchor (arXiv 2411.13476, section 3.2).

    Args:
        query_S1: integer slot indices of queries, any shape that broadcasts with ``key_1S``.
        key_1S: integer slot indices of keys.
        document_of_query_S1: document number of each query.
        document_of_key_1S: document number of each key.
        anchor_index: slot of the one anchor in the shared form, `NO_ANCHOR` when every document
            carries its own copy.

    Returns:
        Boolean array of the broadcast shape.
    """
    same_document = document_of_query_S1 == document_of_key_1S
    return (key_1S <= query_S1) & (same_document | (key_1S == anchor_index))


def document_of_slot(cu_seqlens: np.ndarray) -> np.ndarray:
    """Number the document of every slot.

    Args:
        cu_seqlens: [n + 1] cumulative document lengths that begin with 0; repeated entries
            (padding of the array to a fixed length) are documents without slots.

    Returns:
        [S] int64 with S = ``cu_seqlens[-1]``.
    """
    cu_seqlens = np.asarray(cu_seqlens)
    return np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))


def dense_mask(cu_seqlens: np.ndarray, *, anchor_index: int = NO_ANCHOR) -> np.ndarray:
    """Draw the mask of one sample in full.

    Args:
        cu_seqlens: [n + 1] cumulative document lengths.
        anchor_index: see `is_visible`.

    Returns:
        [S, S] bool, True where the row's token sees the column's.
    """
    document_S = document_of_slot(cu_seqlens)
    slot_S = np.arange(len(document_S))
    return is_visible(
        slot_S[:, None],
        slot_S[None, :],
        document_of_query_S1=document_S[:, None],
        document_of_key_1S=document_S[None, :],
        anchor_index=anchor_index,
    )
