"""Runs a model under several position shifts side by side and adds up what differs.

Layer by layer: of all shifts, only the hidden states between two layers are held, and of attention
a block of rows (see `difference`), so memory is linear in the length of a text.

Two questions, two ways (`STATES`): ``end-to-end`` runs every shift by itself, as the paper does, so
that from the second layer on queries and keys differ, too; ``shared`` feeds every layer's hidden
states under the reference shift to all shifts, so that what differs is the attention of this layer
alone.

Legend: T texts, C compared shifts, L layers, H heads, S tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_anchor.precision.arms import Arm
from megatron_anchor.precision.difference import LayerDifference, compare_layer
from megatron_anchor.precision.far import FirstTokenProbe
from megatron_anchor.precision.models import LayeredModel
from megatron_anchor.precision.products import Float32Products

STATES = ("end-to-end", "shared")


@dataclass(frozen=True)
class Drift:
    """D and D_logit of one arm in all the ways to look at them, means over texts.

    Every array is float64. Sums over heads and layers, or over keys, of `by_head_CLH` and
    `by_key_CS` give D.
    """

    arm: str
    states: str
    shifts: tuple[int, ...]
    reference_shift: int
    by_text_TC: np.ndarray
    """D of every text."""
    by_head_CLH: np.ndarray
    first_key_CLH: np.ndarray
    """The first key's part of `by_head_CLH`."""
    first_weight_LH: np.ndarray
    """Mean weight of the first key under the reference shift."""
    by_key_CS: np.ndarray
    first_logit_CS: np.ndarray
    """D_logit of the texts' first 1, 2, ... S tokens."""

    @property
    def totals(self) -> np.ndarray:
        """D (equation 4), for every shift."""
        return self.by_text_TC.mean(0)

    @property
    def logits(self) -> int:
        """Layers times heads: the terms of the sums over them."""
        return self.by_head_CLH.shape[1] * self.by_head_CLH.shape[2]

    def first_logit_up_to(self, length: int) -> np.ndarray:
        """Give D_logit (equation 5) of the texts' first `length` tokens, [C].

        No row depends on a later one, so this is what the shorter text itself would give.
        """
        return self.first_logit_CS[:, length - 1]


class _Sums:
    """What `Drift` holds, while it is added up."""

    def __init__(self, *, texts: int, compared: int, layers: int, heads: int, length: int) -> None:
        self.by_text_TC = np.zeros((texts, compared))
        self.by_head_CLH = np.zeros((compared, layers, heads))
        self.first_key_CLH = np.zeros_like(self.by_head_CLH)
        self.first_weight_LH = np.zeros((layers, heads))
        self.by_key_CS = np.zeros((compared, length))
        self.first_logit_CS = np.zeros_like(self.by_key_CS)

    def add(
        self, found: LayerDifference, *, text: int, layer: int, window: int | None = None
    ) -> None:
        """Add one layer of one text; layers of one model may have different windows."""
        by_key_CHS = found.by_key_CHS.cpu().numpy()
        self.by_text_TC[text] += by_key_CHS.sum((1, 2))
        self.by_head_CLH[:, layer] += by_key_CHS.sum(2)
        self.first_key_CLH[:, layer] += by_key_CHS[:, :, 0]
        self.first_weight_LH[layer] += found.first_weight_H.cpu().numpy()
        self.by_key_CS += by_key_CHS.sum(1)
        rows = by_key_CHS.shape[2]
        seeing_S = np.minimum(np.arange(1, rows + 1), window or rows)
        self.first_logit_CS += found.first_logit_CHS.sum(1).cumsum(-1).cpu().numpy() / seeing_S

    def means(self) -> dict[str, np.ndarray]:
        """Give the fields of `Drift`: means over texts, but for D of each."""
        texts = len(self.by_text_TC)
        fields = vars(self).items()
        return {name: sums if name == "by_text_TC" else sums / texts for name, sums in fields}


def measure(
    model: LayeredModel,
    arm: Arm,
    texts_S: Sequence[Tensor],
    *,
    shifts: Sequence[int],
    reference_shift: int,
    states: str,
    probe: FirstTokenProbe | None = None,
    done: Callable[[], object] = lambda: None,
) -> Drift:
    """Measure one arm on texts of equal length.

    Args:
        model: loaded for this arm.
        arm: how attention is computed.
        texts_S: token ids, each int64 [S].
        shifts: shift1 of the equations, one or more.
        reference_shift: shift2.
        states: one of `STATES`.
        probe: also receives queries and keys of every layer under the reference shift.
        done: called after every layer of every text.
    """
    length, heads = len(texts_S[0]), model.source.model.heads
    all_shifts = torch.tensor([reference_shift, *shifts], device=model.device)
    positions_BS = torch.arange(length, device=model.device) + all_shifts[:, None]
    inv_freq_F, factor = model.source.inverse_frequencies(angle_dtype=arm.angle_dtype)
    inv_freq_F = inv_freq_F.to(model.device)

    def compare(
        q_bHSD: Tensor, k_bGSD: Tensor, v_bGSD: Tensor, scale: float, window: int | None
    ) -> LayerDifference:
        q_BHSD, k_BGSD = (
            arm.rotated(x, positions_BS, inv_freq_F, attention_factor=factor)
            for x in (q_bHSD, k_bGSD)
        )
        repeats = heads // k_bGSD.shape[1]
        k_BHSD, v_bHSD = (x.repeat_interleave(repeats, dim=1) for x in (k_BGSD, v_bGSD))
        return compare_layer(q_BHSD, k_BHSD, v_bHSD, arm=arm, scale=scale, window=window)

    sums = _Sums(
        texts=len(texts_S), compared=len(shifts), layers=len(model), heads=heads, length=length
    )
    batch = 1 if states == "shared" else len(all_shifts)
    for text, tokens_S in enumerate(texts_S):
        with torch.no_grad(), Float32Products():
            hidden_BSE = model.embed(tokens_S.expand(batch, -1))
            for layer in range(len(model)):

                def attend(
                    q: Tensor,
                    k: Tensor,
                    v: Tensor,
                    scale: float,
                    window: int | None,
                    *,
                    text: int = text,
                    layer: int = layer,
                ) -> Tensor:
                    if probe is not None:
                        probe.add(q[0], k[0], scale=scale)
                    found = compare(q, k, v, scale, window)
                    sums.add(found, text=text, layer=layer, window=window)
                    return found.context_bSHD

                hidden_BSE = model.layer(layer, hidden_BSE, attend)
                done()
    return Drift(
        arm=arm.name,
        states=states,
        shifts=tuple(shifts),
        reference_shift=reference_shift,
        **sums.means(),
    )
