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
from megatron_anchor.precision.difference import compare_layer, seeing_rows
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
    """Sum over layers and heads of |difference of the first key's logit|, by row."""
    window: int | None = None

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
        rows = float(seeing_rows(length, window=self.window)[0])
        return self.first_logit_CS[:, :length].sum(1) / rows


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
    shape = model.source.model
    length, window = len(texts_S[0]), model.source.window
    compared, layers, heads = len(shifts), len(model), shape.heads
    by_text = np.zeros((len(texts_S), compared))
    by_head = np.zeros((compared, layers, heads))
    first_key, by_key = np.zeros_like(by_head), np.zeros((compared, length))
    first_logit = np.zeros_like(by_key)
    first_weight = np.zeros((layers, heads))
    inv_freq_F, factor = model.source.inverse_frequencies(angle_dtype=arm.angle_dtype)
    inv_freq_F = inv_freq_F.to(model.device)
    all_shifts = torch.tensor([reference_shift, *shifts], device=model.device)
    positions_BS = torch.arange(length, device=model.device) + all_shifts[:, None]
    batch = 1 if states == "shared" else len(all_shifts)

    for text, tokens_S in enumerate(texts_S):
        with torch.no_grad(), Float32Products():
            hidden_BSE = model.embed(tokens_S.expand(batch, -1))
            for index in range(layers):

                def attend(
                    q_bHSD: Tensor,
                    k_bGSD: Tensor,
                    v_bGSD: Tensor,
                    scale: float,
                    window: int | None,
                    *,
                    index: int = index,
                    text: int = text,
                ) -> Tensor:
                    if probe is not None:
                        probe.add(q_bHSD[0], k_bGSD[0], scale=scale)
                    q, k = (
                        arm.rotated(x, positions_BS, inv_freq_F, attention_factor=factor)
                        for x in (q_bHSD, k_bGSD)
                    )
                    repeats = heads // k.shape[1]
                    found = compare_layer(
                        q,
                        k.repeat_interleave(repeats, dim=1),
                        v_bGSD.repeat_interleave(repeats, dim=1),
                        arm=arm,
                        scale=scale,
                        window=window,
                    )
                    keys = found.by_key_CHS.cpu().numpy()
                    by_text[text] += keys.sum((1, 2))
                    by_head[:, index] += keys.sum(2)
                    first_key[:, index] += keys[:, :, 0]
                    by_key[:] += keys.sum(1)
                    first_logit[:] += found.first_logit_CHS.sum(1).cpu().numpy()
                    first_weight[index] += found.first_weight_H.cpu().numpy()
                    return found.context_bSHD

                hidden_BSE = model.layer(index, hidden_BSE, attend)
                done()
    count = len(texts_S)
    return Drift(
        arm.name,
        states,
        tuple(shifts),
        reference_shift,
        by_text,
        by_head / count,
        first_key / count,
        first_weight / count,
        by_key / count,
        first_logit / count,
        window,
    )
