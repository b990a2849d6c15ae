"""What multi-token prediction reads and predicts, slot by slot.

At depth k (1, 2, ..., D) a slot combines its state with the token k slots further, and predicts the
one behind that. "Further" never leaves the document slice: with x any field of a sample::

    x_k[i] = x[i + k]   where slot i + k is of the slice of slot i, else 0

For the slices ``A 11 12 13 E`` and ``A 21 22`` (of a document that goes on with 23 behind the
sample) that is::

    slot            0  1  2  3  4 |  5  6  7
    tokens          A 11 12 13  E |  A 21 22
    labels         11 12 13  E  . | 21 22 23
    k = 1: tokens  11 12 13  E  . | 21 22  .
           labels  12 13  E  .  . | 22 23  .
    k = 2: tokens  12 13  E  .  . | 22  .  .
           labels  13  E  .  .  . | 23  .  .

So a whole document of n tokens has n - k targets at depth k, and a slice of n tokens whose last
label is behind the sample n + 1 - k. At each cut, the document's k - 1 tokens behind that label are
targets in neither sample: a token behind the sample would be their input. With one depth no token
is lost.

All of it is made from whole samples, before context parallelism cuts them.

Legend: B micro-batch, S slots of a sample, s slots of this context-parallel rank, D depths, n
segments of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megatron_anchor.attention.router_slots import RouterSlots, count_targets, take_slots
from megatron_anchor.attention.runs import move


@dataclass(frozen=True, kw_only=True)
class Depth:
    """One depth, for this context-parallel rank's slots."""

    tokens_Bs: Tensor
    """[B, s] int64, the tokens so many slots further."""
    labels_Bs: Tensor
    """[B, s] int64, the tokens behind these."""
    loss_mask_Bs: Tensor
    """[B, s] float32, how much the label counts."""
    router: RouterSlots | None = None
    """The slots that have a token at this depth: in a layer of multi-token prediction copies of the
    anchor differ, each holds its document's first token, and count as tokens."""


@dataclass(frozen=True, kw_only=True)
class DepthLoss:
    """What came out at one depth."""

    losses_Bs: Tensor
    """[B, s] cross entropy, 0 where there is no target; without a graph."""
    correct: Tensor | None = None
    """Targets that were the most likely token; counted in training only."""


@dataclass(frozen=True, kw_only=True)
class FutureTokens:
    """Multi-token prediction of one micro-batch."""

    depths: tuple[Depth, ...]
    targets: Tensor
    """int64 scalar: targets of the main loss in the whole micro-batch, by weight, of all ranks."""
    found: list[DepthLoss] = field(default_factory=list)
    """A loss per depth, once the model has run (on the last pipeline stage)."""

    def to(self, device: torch.device) -> FutureTokens:
        """Copy to the device without waiting for it."""
        return FutureTokens(
            depths=tuple(
                Depth(
                    tokens_Bs=move(depth.tokens_Bs, device),
                    labels_Bs=move(depth.labels_Bs, device),
                    loss_mask_Bs=move(depth.loss_mask_Bs, device),
                    router=None if depth.router is None else depth.router.to(device),
                )
                for depth in self.depths
            ),
            targets=move(self.targets, device),
        )


def future_tokens(
    sample: dict[str, Tensor],
    *,
    depths: int,
    own_slots: slice | Tensor = slice(None),
    has_experts: bool = False,
) -> FutureTokens:
    """Shift the fields of whole samples, then keep the slots of this context-parallel rank.

    Args:
        sample: collated fields of packed samples: tokens, labels, loss_mask [B, S] and cu_seqlens
            [B, any], in a pattern whose segments are document slices; with experts router_mask.
        depths: D.
        own_slots: a slice of the sequence, or [B, s] int64 numbers of slots.
        has_experts: whether the layers have routers.
    """
    end_BS = segment_ends(sample["cu_seqlens"].cpu().numpy())
    made = []
    for depth in range(1, depths + 1):
        fields = {
            name: shift(sample[name], end_BS, depth) for name in ("tokens", "labels", "loss_mask")
        }
        router = None
        if has_experts:
            counted_BS = shift(sample["router_mask"], end_BS, depth) != 0
            router = RouterSlots(
                counted_Bs=take_slots(counted_BS, own_slots),
                tokens_B=counted_BS.sum(1),
                targets_B=count_targets(sample["loss_mask"], dim=1),
            )
        made.append(
            Depth(
                tokens_Bs=take_slots(fields["tokens"], own_slots),
                labels_Bs=take_slots(fields["labels"], own_slots),
                loss_mask_Bs=take_slots(fields["loss_mask"], own_slots),
                router=router,
            )
        )
    return FutureTokens(depths=tuple(made), targets=count_targets(sample["loss_mask"]))


def segment_ends(cu_seqlens_Bn: np.ndarray) -> Tensor:
    """int64 [B, S]: the slot behind the segment of each slot.

    Args:
        cu_seqlens_Bn: integers from 0 to S, ascending; repeated entries are empty segments.
    """
    rows = [np.repeat(row[1:], np.diff(row)) for row in cu_seqlens_Bn.astype(np.int64)]
    return torch.from_numpy(np.stack(rows))


def shift(x_BS: Tensor, end_BS: Tensor, depth: int) -> Tensor:
    """[B, S]: the value so many slots further in the same segment, 0 where that ends before."""
    further_S = torch.arange(depth, depth + x_BS.shape[1])
    inside_BS = further_S < end_BS
    found_BS = x_BS[:, further_S.clamp(max=x_BS.shape[1] - 1)]
    return torch.where(inside_BS, found_BS, torch.zeros((), dtype=x_BS.dtype))
