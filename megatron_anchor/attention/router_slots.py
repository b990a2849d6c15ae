"""Which slots a router of experts counts as tokens, and how the router comes to know.

A packed sample holds copies of the anchor and padding. The experts compute them like any slot, but
the router's statistics (auxiliary losses, z-loss, expert bias) count the tokens of the form with
one anchor and no padding. Which slots these are travels with the packed documents to every layer,
which hands it to its router in the place of Megatron's padding mask.

Legend: B micro-batch, S slots of a sample, s slots of this rank, n_B and T_B counted slots and
targets of each whole sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_anchor.attention.runs import move


@dataclass(frozen=True, kw_only=True)
class RouterSlots:
    """The counted slots of one micro-batch."""

    counted_Bs: Tensor
    """[B, s] bool: the slots of this context-parallel rank that count as tokens."""
    tokens_B: Tensor
    """[B] int64: counted slots of each whole sample."""
    targets_B: Tensor
    """[B] int64: targets of each whole sample, by weight in units; the auxiliary losses' weight per
    token loss."""

    def to(self, device: torch.device) -> RouterSlots:
        """Copy to the device without waiting for it."""
        return RouterSlots(
            counted_Bs=move(self.counted_Bs, device),
            tokens_B=move(self.tokens_B, device),
            targets_B=move(self.targets_B, device),
        )

    def share(self, *, rank: int, size: int) -> RouterMask:
        """Give the piece of one sequence-parallel rank to Megatron's MoE layer.

        Args:
            rank: sequence-parallel rank.
            size: number of such ranks; divides s.
        """
        s = self.counted_Bs.shape[1] // size
        counted_Bs = self.counted_Bs[:, rank * s : (rank + 1) * s].long()
        return RouterMask(
            torch.cat((counted_Bs, self.tokens_B[:, None], self.targets_B[:, None]), 1)
        )


def router_slots(
    router_mask_BS: Tensor, loss_mask_BS: Tensor, *, own_slots: slice | Tensor = slice(None)
) -> RouterSlots:
    """Count the slots of whole samples, then keep those of this context-parallel rank.

    Args:
        router_mask_BS: [B, S] any dtype; nonzero where a slot counts (a field of packed samples).
        loss_mask_BS: [B, S] any dtype; weights of the targets in units, 0 where there is none.
        own_slots: what this rank holds of the sequence: a slice, or [B, s] int64 numbers of slots.

    Raises:
        ValueError: if the two masks differ in shape.
    """
    if router_mask_BS.shape != loss_mask_BS.shape:
        raise ValueError(
            f"router_mask has the shape {tuple(router_mask_BS.shape)}, loss_mask "
            f"{tuple(loss_mask_BS.shape)}: give both of whole samples, [micro-batch, --seq-length]"
        )
    counted_BS = router_mask_BS != 0
    return RouterSlots(
        counted_Bs=take_slots(counted_BS, own_slots),
        tokens_B=counted_BS.sum(1),
        targets_B=count_targets(loss_mask_BS, dim=1),
    )


def count_targets(loss_mask_BS: Tensor, *, dim: int | None = None) -> Tensor:
    """int64, the targets of whole samples by weight: the whole number of units nearest to the sum.

    Args:
        loss_mask_BS: [B, S] weights in units; 1 each where nothing is weighed.
        dim: summed over; None = all.
    """
    return loss_mask_BS.to(torch.float64).sum(dim).round().long()


def take_slots(x_BS: Tensor, own_slots: slice | Tensor) -> Tensor:
    """[B, s]: the slots of a context-parallel rank, given as in `router_slots`."""
    if isinstance(own_slots, slice):
        return x_BS[:, own_slots]
    return x_BS.gather(1, own_slots)


class RouterMask:
    """Stands in for the boolean [B, s] mask that Megatron's MoE layer passes on to its router.

    The layer transposes the mask and makes it boolean. Here that gives an int64 table [s + 2, B]: a
    row per slot (1 = counts), then n_B and T_B. As a tensor it survives recomputation, which runs
    the router again when another micro-batch is current.
    """

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def transpose(self, *dims: int) -> RouterMask:
        """As `Tensor.transpose`."""
        return RouterMask(self._table.transpose(*dims))

    def bool(self) -> Tensor:
        """Give the table; it would be of no use as booleans."""
        return self._table
