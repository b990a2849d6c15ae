"""What travels with a micro-batch from the data loader to every attention layer.

Megatron hands its `PackedSeqParams` to each layer untouched, so a subclass of it carries the
positions to the core attention without a change to any layer.

Legend: B micro-batch, S slots of a sample, s = S / context-parallel size, n documents, F rotary
frequencies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_anchor.attention.rope import RotarySettings, cos_and_sin, inverse_frequencies
from megatron_anchor.attention.router_slots import RouterSlots


@dataclass
class AnchorPackedSeqParams(PackedSeqParams):
    """Packed documents of one micro-batch, with their positions.

    ``qkv_format`` is ``sbhd``: Megatron then leaves q, k and v as [s, B, heads, head_dim], which
    stays right for micro-batches larger than one under pipeline parallelism.
    ``cu_seqlens_q`` == ``cu_seqlens_kv``: [n + 1] int32 over the B x S slots of the micro-batch,
    sample after sample. Lengths are global: they do not shrink under context parallelism.
    """

    position_ids_Bs: Tensor | None = None
    """[B, s] int64: positions of *this* context-parallel rank's slots."""
    document_lengths: tuple[int, ...] = ()
    """The n lengths on the host, so that no layer has to wait for the device."""
    shared_anchor: bool = False
    """The paper's layout: slot 0 of a sample is the only anchor and every document of the sample
    sees it. Only the ``flex`` kernel does it; elsewhere documents carry copies of the anchor."""
    router: RouterSlots | None = None
    """The slots that count as tokens in a router of experts; models without experts need none."""
    _made: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Make something once a micro-batch and not once a layer; recomputation reads it again.

        Args:
            key: hashable name of the thing.
            make: makes it.
        """
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def rotation(self, settings: RotarySettings) -> tuple[Tensor, Tensor]:
        """Give cos and sin for this rank's slots.

        Returns:
            cos and sin, [s, B, F] float32.
        """
        return self.once(settings, lambda: self._rotation(settings))

    def _rotation(self, settings: RotarySettings) -> tuple[Tensor, Tensor]:
        assert self.position_ids_Bs is not None
        inv_freq_F, factor = inverse_frequencies(settings, seq_length=self.tokens_per_sample)
        return cos_and_sin(
            self.position_ids_Bs.t(),
            inv_freq_F.to(self.position_ids_Bs.device),
            attention_factor=factor,
        )


def pack_micro_batch(
    position_ids_Bs: Tensor,
    cu_seqlens_Bn: Tensor,
    *,
    seq_length: int,
    shared_anchor: bool = False,
    router: RouterSlots | None = None,
) -> AnchorPackedSeqParams:
    """Merge the documents of a micro-batch's samples into one list.

    Args:
        position_ids_Bs: [B, s] int64 positions of this rank's slots.
        cu_seqlens_Bn: [B, any] int32 cumulative lengths of each sample, from 0 to ``seq_length``,
            padded at the end by repetition.
        seq_length: S, the slots of a whole sample.
        shared_anchor: see `AnchorPackedSeqParams`.
        router: the same; a model with experts needs it in training.

    Returns:
        Parameters whose documents cover the B x S slots, sample after sample, padding dropped.
    """
    offsets_B1 = torch.arange(len(cu_seqlens_Bn), device=cu_seqlens_Bn.device)[:, None] * seq_length
    ends = (cu_seqlens_Bn[:, 1:] + offsets_B1).flatten()
    starts = (cu_seqlens_Bn[:, :-1] + offsets_B1).flatten()
    ends = ends[ends > starts]
    cu_seqlens = torch.cat((ends.new_zeros(1), ends)).to(torch.int32)
    lengths = tuple(cu_seqlens.diff().tolist())
    return AnchorPackedSeqParams(
        qkv_format="sbhd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        tokens_per_sample=seq_length,
        position_ids_Bs=position_ids_Bs,
        document_lengths=lengths,
        shared_anchor=shared_anchor,
        router=router,
    )
