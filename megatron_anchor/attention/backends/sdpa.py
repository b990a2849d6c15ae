"""PyTorch's scaled_dot_product_attention, document by document: runs everywhere.

Work is the sum of squared document lengths. Documents of up to `SHORT` slots of like length share
one padded call (8192 slots in documents of 4: 0.30 s instead of 0.90 s forward and backward; from
24 slots on a call each is the faster); causality hides the padding behind them from every real
slot. The pieces are taken with ``torch.split``: slicing would write a full-size gradient per
document.

Legend: T slots of the micro-batch, H query heads, G key/value heads, D head dim, L padded length,
n documents of one call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_anchor.attention.backends.request import AttentionRequest, needs_ulysses
from megatron_anchor.attention.heads import repeat_heads

if TYPE_CHECKING:
    from megatron_anchor.attention.packed import AnchorPackedSeqParams

SHORT = 16


def why_not(request: AttentionRequest) -> str | None:
    """Refuse the context-parallel kinds that need a kernel with its own communication."""
    return needs_ulysses(request)


def attend(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    *,
    packed: AnchorPackedSeqParams,
    scale: float,
    dropout: float,
) -> Tensor:
    """Attend causally inside every document.

    Args:
        q_THD: [T, H, D] rotated queries.
        k_TGD: [T, G, D] rotated keys; G divides H.
        v_TGD: [T, G, D] values.
        packed: documents of the micro-batch; their lengths add up to T.
        scale: factor of the logits.
        dropout: probability of dropping an attention weight.

    Returns:
        [T, H, D] in the dtype of ``q_THD``.
    """
    copies = q_THD.shape[1] // k_TGD.shape[1]
    k_THD, v_THD = repeat_heads(k_TGD, copies=copies), repeat_heads(v_TGD, copies=copies)
    calls = _calls(packed.document_lengths)
    ordered = [calls.in_order(x) for x in (q_THD, k_THD, v_THD)]
    pieces = zip(*(x.split(calls.sizes) for x in ordered), strict=True)
    outputs = [
        _causal_attention(q, k, v, documents=documents, scale=scale, dropout=dropout)
        for (q, k, v), documents in zip(pieces, calls.documents, strict=True)
    ]
    return calls.back(torch.cat(outputs))


def _causal_attention(
    q_tHD: Tensor, k_tHD: Tensor, v_tHD: Tensor, *, documents: int, scale: float, dropout: float
) -> Tensor:
    """One SDPA call over ``documents`` stretches of equal length."""
    q_nHLD, k_nHLD, v_nHLD = (
        x.unflatten(0, (documents, -1)).transpose(1, 2) for x in (q_tHD, k_tHD, v_tHD)
    )
    out_nHLD = F.scaled_dot_product_attention(
        q_nHLD, k_nHLD, v_nHLD, dropout_p=dropout, is_causal=True, scale=scale
    )
    return out_nHLD.transpose(1, 2).flatten(0, 1)


class _Calls:
    """How the slots are brought in order for the SDPA calls, and back.

    ``sizes`` are the slots of each call and ``documents`` its number of equal stretches. Without
    short documents nothing moves.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._gather: Tensor | None = None
        self.sizes = list(lengths)
        self.documents = [1] * len(lengths)
        if sum(length <= SHORT for length in lengths) > 1:
            self._batch_short(lengths)

    def _batch_short(self, lengths: Sequence[int]) -> None:
        classes: dict[int, list[int]] = defaultdict(list)
        for number, length in enumerate(lengths):
            padded = 1 << (length - 1).bit_length() if length <= SHORT else -number
            classes[padded].append(number)
        length_n = torch.tensor(lengths)
        start_n = length_n.cumsum(0) - length_n
        rows: list[Tensor] = []
        self.sizes, self.documents = [], []
        self._scatter = torch.empty(int(length_n.sum()), dtype=torch.int64)
        done = 0
        for padded, numbers in classes.items():
            starts, sizes = start_n[numbers], length_n[numbers]
            L = padded if padded > 0 else int(sizes[0])
            slot_nL = torch.arange(L).expand(len(numbers), L)
            real_nL = slot_nL < sizes[:, None]
            # Padding repeats the document's last slot; its output is dropped.
            rows_nL = starts[:, None] + torch.minimum(slot_nL, sizes[:, None] - 1)
            places_nL = done + torch.arange(len(numbers) * L).view(len(numbers), L)
            self._scatter[rows_nL[real_nL]] = places_nL[real_nL]
            rows.append(rows_nL.flatten())
            self.sizes.append(len(numbers) * L)
            self.documents.append(len(numbers))
            done += len(numbers) * L
        self._gather = torch.cat(rows)

    def in_order(self, x_THD: Tensor) -> Tensor:
        return x_THD if self._gather is None else _rows(x_THD, self._gather)

    def back(self, x_tHD: Tensor) -> Tensor:
        return x_tHD if self._gather is None else _rows(x_tHD, self._scatter)


def _rows(x_THD: Tensor, index: Tensor) -> Tensor:
    # index_select's backward is index_add; that of advanced indexing is several times slower.
    return x_THD.index_select(0, index.to(x_THD.device))


@lru_cache(maxsize=16)
def _calls(lengths: tuple[int, ...]) -> _Calls:
    """Plan once a micro-batch, not once a layer."""
    return _Calls(lengths)
