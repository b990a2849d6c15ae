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
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from megatron_anchor.attention.future_tokens import future_tokens
from megatron_anchor.attention.packed import AnchorPackedSeqParams, pack_micro_batch
from megatron_anchor.attention.router_slots import router_slots, take_slots
from megatron_anchor.attention.runs import move
from megatron_anchor.context_parallel.split import CONTIGUOUS, SlotSplit
from megatron_anchor.errors import UserError

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
    """[B, s] float32, how much the label counts, in units; 0 or 1 where nothing is weighed."""
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
    has_experts: bool = False,
    prediction_depths: int = 0,
    figures: tuple[str, ...] = FIGURES,
    units: float = 1.0,
    pad_documents_to: int | None = None,
) -> MicroBatch:
    """Read the next micro-batch and take this rank's part of it.

    Args:
        data_iterator: yields collated samples of `PackedDataset`, on the CPU.
        split: how slots are spread over context-parallel ranks.
        rank: context-parallel rank.
        device: where the model is.
        has_experts: whether the model has routers, which must know the slots that count.
        prediction_depths: of multi-token prediction, where this rank has its layers.
        figures: names of the samples' figures.
        units: in which a weight of 1 is given, see `target_units`.
        pad_documents_to: see `AnchorPackedSeqParams`.

    Raises:
        UserError: if a sample lacks a field, a document cannot be cut into the pieces that
            Transformer Engine needs, or there are more documents than ``pad_documents_to``.
    """
    sample = next(data_iterator)
    if sample["tokens"].dim() == 3:  # items were whole micro-batches (`full_validation`)
        sample = {name: field.flatten(0, 1) for name, field in sample.items()}
    needed = [*SLOT_FIELDS, "cu_seqlens", *figures]
    needed += ["router_mask"] * has_experts + ["part_of_chunk"] * split.gathers
    if missing := [name for name in needed if name not in sample]:
        raise UserError(
            f"the data loader's samples have no {', '.join(missing)}: a dataset of your own must "
            "yield the fields of PackedDataset (docs/packing.md)"
        )
    if units != 1:
        sample = sample | {"loss_mask": sample["loss_mask"] * units}
    own_slots = _own_slots(sample, split=split, rank=rank)
    own = {name: move(take_slots(sample[name], own_slots), device) for name in SLOT_FIELDS}
    router = None
    if has_experts:
        slots = router_slots(sample["router_mask"], sample["loss_mask"], own_slots=own_slots)
        router = slots.to(device)
    future = None
    if prediction_depths:
        future = future_tokens(
            sample, depths=prediction_depths, own_slots=own_slots, has_experts=has_experts
        ).to(device)
    chunks = sample["part_of_chunk"].numpy() if split.gathers else ()
    numbers = [move(sample[name].long(), device) for name in figures]
    return MicroBatch(
        tokens=own["tokens"],
        labels=own["labels"],
        loss_mask=own["loss_mask"],
        packed=pack_micro_batch(
            own["position_ids"],
            sample["cu_seqlens"],
            seq_length=sample["tokens"].shape[1],
            part_of_chunk=[row[row >= 0] for row in chunks],
            pad_documents_to=pad_documents_to,
            router=router,
            future=future,
        ),
        figures=dict(zip(figures, numbers, strict=True)),
        origin_B2=sample.get("origin"),
    )


def _own_slots(sample: dict[str, Tensor], *, split: SlotSplit, rank: int) -> slice | Tensor:
    """What this context-parallel rank holds of the sequence: a piece, or [B, s] slots."""
    if split.kind == CONTIGUOUS:
        s = sample["tokens"].shape[1] // split.cp_size
        return slice(rank * s, (rank + 1) * s)
    chunks = sample["part_of_chunk"].numpy() if split.gathers else repeat(None)
    rows = [
        split.slots(borders, part_of_chunk, rank=rank)
        for borders, part_of_chunk in zip(sample["cu_seqlens"].numpy(), chunks, strict=False)
    ]
    return torch.from_numpy(np.stack(rows))
