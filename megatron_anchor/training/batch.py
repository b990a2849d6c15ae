"""From the data loader to a micro-batch on every rank.

Tensor-parallel rank 0 of every pipeline stage reads the sample; the others get it by one broadcast
of one int32 tensor. Every stage needs the positions and documents, since its attention layers do.

Legend: B micro-batch, S slots of a sample, P context-parallel size, s = S / P, n documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.training import get_args
from torch import Tensor

from megatron_anchor.attention.packed import AnchorPackedSeqParams, pack_micro_batch
from megatron_anchor.attention.zigzag import slots_of_rank
from megatron_anchor.packing.layout import cu_seqlens_length
from megatron_anchor.training.arguments import splits_documents

SLOT_FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
FIGURES = ("num_documents", "num_cut", "num_padding")
"""Numbers that come with every sample, for the log."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One micro-batch as this rank sees it."""

    tokens: Tensor
    """[B, s] int64."""
    labels: Tensor
    """[B, s] int64, 0 where the loss is masked."""
    loss_mask: Tensor
    """[B, s] float32, 1 where the label counts."""
    packed: AnchorPackedSeqParams
    """Documents and positions for the attention layers."""
    figures: dict[str, Tensor]
    """[B] int64 each: what the samples are made of, see FIGURES."""
    origin_B2: Tensor | None = None
    """[B, 2] int64 on the CPU: dataset and number of each sample, on the ranks that read them."""


def get_batch(
    data_iterator: Iterator[dict[str, Tensor]] | None,
    *,
    micro_batch_size: int,
    seq_length: int,
    figures: tuple[str, ...] = FIGURES,
) -> MicroBatch:
    """Read the next micro-batch and give this rank its part.

    Args:
        data_iterator: yields collated samples of `PackedDataset`; None on other ranks than
            tensor-parallel rank 0.
        micro_batch_size: B.
        seq_length: S.
        figures: names of the samples' figures, the same on every rank.

    Returns:
        The micro-batch on the current device. Under context parallelism a contiguous piece of the
        sequence, or zigzag pieces of every document where Transformer Engine communicates.

    Raises:
        ValueError: if a document cannot be cut into the pieces that Transformer Engine needs.
    """
    columns = {name: seq_length for name in SLOT_FIELDS}
    origin_B2 = None
    pattern = get_args().attention_pattern
    columns["cu_seqlens"] = cu_seqlens_length(seq_length, attention_pattern=pattern)
    columns |= dict.fromkeys(figures, 1)
    if mpu.get_tensor_model_parallel_rank() == 0:
        assert data_iterator is not None
        sample = next(data_iterator)
        if "origin" in sample:  # also where an item is a whole micro-batch
            origin_B2 = sample["origin"].view(-1, 2)
        rows = [sample[name].view(micro_batch_size, -1).to(torch.int32) for name in columns]
        table = torch.cat(rows, dim=1).cuda(non_blocking=True)
    else:
        table = torch.empty(
            micro_batch_size, sum(columns.values()), dtype=torch.int32, device="cuda"
        )
    if mpu.get_tensor_model_parallel_world_size() > 1:
        dist.broadcast(
            table,
            mpu.get_tensor_model_parallel_src_rank(),
            group=mpu.get_tensor_model_parallel_group(),
        )
    field = dict(zip(columns, table.split(list(columns.values()), dim=1), strict=True))
    return _on_this_context_parallel_rank(field, seq_length, figures, origin_B2)


def _on_this_context_parallel_rank(
    field: dict[str, Tensor],
    seq_length: int,
    figures: tuple[str, ...],
    origin_B2: Tensor | None,
) -> MicroBatch:
    P, r = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    if splits_documents(get_args()):
        slots_Bs = slots_of_rank(field["cu_seqlens"], cp_size=P, rank=r)
        piece = {name: field[name].gather(1, slots_Bs).long() for name in SLOT_FIELDS}
    else:
        s = seq_length // P
        piece = {name: field[name][:, r * s : (r + 1) * s].long() for name in SLOT_FIELDS}
    return MicroBatch(
        tokens=piece["tokens"],
        labels=piece["labels"],
        loss_mask=piece["loss_mask"].float(),
        packed=pack_micro_batch(piece["position_ids"], field["cu_seqlens"], seq_length=seq_length),
        figures={name: field[name].squeeze(1).long() for name in figures},
        origin_B2=origin_B2,
    )
