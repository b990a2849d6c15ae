"""From the data loader to a micro-batch on every rank.

Every rank reads its own samples: those of one model replica are the same, so nothing is sent, and
what kernels need to know on the host (lengths of documents, runs and their maxima) is there without
waiting for the device. Every pipeline stage needs positions and documents, since its attention
layers do.

Legend: B micro-batch, S slots of a sample, P context-parallel size, s = S / P, n documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_anchor.attention.packed import AnchorPackedSeqParams, pack_micro_batch
from megatron_anchor.attention.runs import move
from megatron_anchor.packing.context_split import CONTIGUOUS, SlotSplit

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
    """[B, 2] int64 on the CPU: dataset and number of each sample."""


def get_batch(
    data_iterator: Iterator[dict[str, Tensor]],
    *,
    split: SlotSplit,
    rank: int,
    device: torch.device,
    figures: tuple[str, ...] = FIGURES,
    pad_documents_to: int | None = None,
) -> MicroBatch:
    """Read the next micro-batch and take this rank's part of it.

    Args:
        data_iterator: yields collated samples of `PackedDataset`, on the CPU.
        split: how slots are spread over context-parallel ranks.
        rank: context-parallel rank.
        device: where the model is.
        figures: names of the samples' figures.
        pad_documents_to: see `AnchorPackedSeqParams`.

    Raises:
        ValueError: if a document cannot be cut into the pieces that Transformer Engine needs, or
            there are more documents than ``pad_documents_to``.
    """
    sample = next(data_iterator)
    cu_seqlens_BL = sample["cu_seqlens"]
    part_of_chunk = (
        [row[row >= 0] for row in sample["part_of_chunk"].numpy()] if split.gathers else []
    )
    piece = _slots_of_rank(sample, split=split, rank=rank)
    own = {name: move(piece[name], device) for name in SLOT_FIELDS}
    numbers = move(torch.stack([sample[name].long() for name in figures]), device)
    return MicroBatch(
        tokens=own["tokens"],
        labels=own["labels"],
        loss_mask=own["loss_mask"],
        packed=pack_micro_batch(
            own["position_ids"],
            cu_seqlens_BL,
            seq_length=sample["tokens"].shape[1],
            part_of_chunk=part_of_chunk,
            pad_documents_to=pad_documents_to,
        ),
        figures=dict(zip(figures, numbers, strict=True)),
        origin_B2=sample.get("origin"),
    )


def _slots_of_rank(sample: dict[str, Tensor], *, split: SlotSplit, rank: int) -> dict[str, Tensor]:
    if split.kind == CONTIGUOUS:
        return {name: sample[name].chunk(split.cp_size, dim=1)[rank] for name in SLOT_FIELDS}
    parts = sample.get("part_of_chunk")
    rows = [
        split.slots(row, None if parts is None else parts[number].numpy(), rank=rank)
        for number, row in enumerate(sample["cu_seqlens"].numpy())
    ]
    slots_Bs = torch.from_numpy(np.stack(rows))
    return {name: sample[name].gather(1, slots_Bs) for name in SLOT_FIELDS}
