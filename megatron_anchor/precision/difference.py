"""The difference of attention between position shifts, by blocks of rows.

The paper's equations 4 and 5 (arXiv 2411.13476, section 2.2), for a text of S tokens whose position
ids are all moved by a shift, with A the attention weights and z the scaled logits of a layer l and
head h, over the rows i that see key j:

    D       = sum_l sum_h sum_j  1 / rows(j)  sum_i | A[l,h,i,j](shift1) - A[l,h,i,j](shift2) |
    D_logit = sum_l sum_h        1 / rows(0)  sum_i | z[l,h,i,0](shift1) - z[l,h,i,0](shift2) |

rows(j) is S - j for full causal attention. Under a sliding window of W it is min(S - j, W).

No S x S matrix of all heads is ever held: a block of rows at most `BLOCK_LOGITS` logits large is
computed for all shifts side by side, compared, multiplied with the values and dropped. Memory is
linear in S.

Legend: B shifts (the reference first), C = B - 1 compared ones, b = B or 1 batches that go on to
the next layer, H heads, S tokens, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_anchor.precision.arms import Arm

BLOCK_LOGITS = 1 << 21


@dataclass(frozen=True)
class LayerDifference:
    """What one layer adds."""

    by_key_CHS: Tensor
    """float64: absolute differences of weights, each key's mean over the rows that see it."""
    first_logit_CHS: Tensor
    """float64: absolute difference of the first key's logit in every row; 0 where it is hidden."""
    first_weight_H: Tensor
    """float64: mean weight of the first key under the reference shift, over the rows seeing it."""
    context_bSHD: Tensor
    """Attention's output, in the values' dtype."""


def compare_layer(
    q_BHSD: Tensor,
    k_BHSD: Tensor,
    v_bHSD: Tensor,
    *,
    arm: Arm,
    scale: float,
    window: int | None = None,
    block_logits: int = BLOCK_LOGITS,
) -> LayerDifference:
    """Attend for all shifts and compare each with the first.

    Args:
        q_BHSD: rotated queries, of the reference shift first.
        k_BHSD: rotated keys, repeated for every query head.
        v_bHSD: values; as many as sequences go on.
        arm: says what is rounded.
        scale: of logits, 1 / sqrt(D) as a rule.
        window: keys that a row sees at most; None: all before it.
        block_logits: size of a block.
    """
    batch, heads, length, _ = q_BHSD.shape
    going_on = len(v_bHSD)
    k_BHSD, v_float_bHSD = k_BHSD.float(), v_bHSD.float()
    device = q_BHSD.device
    window = min(window or length, length)
    by_key = torch.zeros(batch - 1, heads, length, dtype=torch.float64, device=device)
    first = torch.zeros_like(by_key)
    first_weight = torch.zeros(heads, dtype=torch.float64, device=device)
    context = v_bHSD.new_empty(going_on, length, heads, v_bHSD.shape[-1])
    rows = max(1, block_logits // (batch * heads * length))
    for begin in range(0, length, rows):
        end = min(begin + rows, length)
        low = max(0, begin - window + 1)
        q_rows = q_BHSD[:, :, begin:end].float()
        logits = arm.rounded(q_rows @ k_BHSD[:, :, low:end].transpose(-1, -2))
        logits = arm.rounded(logits.mul_(scale))
        if begin < window:
            seeing = min(end, window)
            of_first = logits[:, :, : seeing - begin, 0]
            first[:, :, begin:seeing] = (of_first[1:] - of_first[:1]).abs_()
        row, key = torch.arange(begin, end, device=device), torch.arange(low, end, device=device)
        distance = row[:, None] - key
        logits.masked_fill_((distance < 0) | (distance >= window), -torch.inf)
        weights = arm.rounded(logits.softmax(-1))
        by_key[:, :, low:end] += (weights[1:] - weights[:1]).abs_().sum(-2)
        if low == 0:
            first_weight += weights[0, :, :, 0].sum(-1)
        mixed = weights[:going_on] @ v_float_bHSD[:, :, low:end]
        context[:, begin:end] = mixed.transpose(1, 2).to(context.dtype)
    seeing_S = seeing_rows(length, window=window).to(device)
    return LayerDifference(by_key / seeing_S, first, first_weight / seeing_S[0], context)


def seeing_rows(length: int, *, window: int | None = None) -> Tensor:
    """Count the rows that see each key, float64 [S]."""
    rows_S = length - torch.arange(length, dtype=torch.float64)
    return rows_S.clamp(max=window) if window else rows_S
