"""What travels with a micro-batch from the data loader to every attention layer.

Megatron hands its `PackedSeqParams` to each layer untouched, so a subclass of it carries the
positions and documents to the core attention without a change to any layer.

Legend: B micro-batch, S slots of a sample, s = S / context-parallel size, n documents, F rotary
frequencies.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_anchor.attention.future_tokens import FutureTokens
from megatron_anchor.attention.gather import GatherPlan, plan_gather
from megatron_anchor.attention.rope import RotarySettings, cos_and_sin, inverse_frequencies
from megatron_anchor.attention.router_slots import RouterSlots
from megatron_anchor.attention.runs import Runs, document_runs
from megatron_anchor.windows import Window


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
    borders: tuple[np.ndarray, ...] = ()
    """Cumulative document lengths of each sample, 0 to S, on the host."""
    part_of_chunk: tuple[np.ndarray, ...] = ()
    """Where keys and values are gathered: the part that holds each chunk of each sample
    (`megatron_anchor.context_parallel.split`)."""
    pad_documents_to: int | None = None
    """Documents that ``cu_seqlens`` has room for, so that its shape does not change."""
    router: RouterSlots | None = None
    """The slots that count as tokens in a router of experts; models without experts need none."""
    future: FutureTokens | None = None
    """What the layers of multi-token prediction read and predict; other models need none."""
    depth: int = 0
    """Which of these layers it is handed to, from 1; 0 for the model's own."""
    _made: dict[Hashable, Any] = field(default_factory=dict)

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Make something once a micro-batch and not once a layer; recomputation reads it again.

        Args:
            key: hashable name of the thing.
            make: makes it.
        """
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def at_depth(self, depth: int) -> AnchorPackedSeqParams:
        """The same documents for a layer of multi-token prediction, with what it counts."""
        assert self.future is not None
        return replace(self, depth=depth, router=self.future.depths[depth - 1].router)

    @property
    def document_lengths(self) -> np.ndarray:
        """int64 [n], slots of each document, on the host."""
        return np.concatenate([np.diff(borders) for borders in self.borders])

    def runs(self, window: Window | None = None) -> Runs:
        """Whole documents as runs, for a rank that sees all slots of the heads that it computes."""
        return self.cached(("runs", window), lambda: self._document_runs(window))

    def gather_plan(self, part: int, window: Window | None = None) -> GatherPlan:
        """The runs of one part where keys and values are gathered."""
        return self.cached(
            ("gather", part, window),
            lambda: plan_gather(
                self.borders, self.part_of_chunk, part=part, window=window, device=self.device
            ),
        )

    @property
    def device(self) -> torch.device:
        """Where attention runs."""
        assert self.position_ids_Bs is not None
        return self.position_ids_Bs.device

    def rotation(self, settings: RotarySettings) -> tuple[Tensor, Tensor]:
        """Give cos and sin for this rank's slots.

        Returns:
            cos and sin, [s, B, F] float32.
        """
        return self.cached(settings, lambda: self._rotation(settings))

    def _document_runs(self, window: Window | None) -> Runs:
        return document_runs(
            self.document_lengths,
            device=self.device,
            window=window,
            padded_to=self.pad_documents_to,
        )

    def _rotation(self, settings: RotarySettings) -> tuple[Tensor, Tensor]:
        assert self.position_ids_Bs is not None
        inv_freq_F, factor = inverse_frequencies(settings, seq_length=self.tokens_per_sample)
        return cos_and_sin(
            self.position_ids_Bs.t(),
            inv_freq_F.to(self.position_ids_Bs.device),
            attention_factor=factor,
        )


def require_packed(packed: Any) -> AnchorPackedSeqParams:
    """Give what a layer was called with, if it is what the layers need.

    Raises:
        ValueError: it is anything else.
    """
    if not isinstance(packed, AnchorPackedSeqParams):
        raise ValueError(
            "the attention of megatron_anchor needs packed_seq_params of type "
            f"AnchorPackedSeqParams, got {type(packed).__name__}; build them with "
            "megatron_anchor.attention.packed.pack_micro_batch"
        )
    return packed


def pack_micro_batch(
    position_ids_Bs: Tensor,
    cu_seqlens_Bn: Tensor,
    *,
    seq_length: int,
    part_of_chunk: Sequence[np.ndarray] = (),
    pad_documents_to: int | None = None,
    router: RouterSlots | None = None,
    future: FutureTokens | None = None,
) -> AnchorPackedSeqParams:
    """Merge the documents of a micro-batch's samples into one list.

    Args:
        position_ids_Bs: [B, s] int64 positions of this rank's slots, where attention runs.
        cu_seqlens_Bn: [B, any] int32 cumulative lengths of each sample, from 0 to ``seq_length``,
            padded at the end by repetition. Leave it on the CPU, as data loaders give it: from a
            device it is copied to the host, which waits for the device.
        seq_length: S, the slots of a whole sample.
        part_of_chunk: see `AnchorPackedSeqParams`.
        pad_documents_to: see `AnchorPackedSeqParams`.
        router: the same; a model with experts needs it in training.
        future: the same; a model with multi-token prediction needs it.

    Returns:
        Parameters whose documents cover the B x S slots, sample after sample, padding dropped.

    Raises:
        ValueError: there are more documents than ``pad_documents_to``.
    """
    borders = tuple(np.unique(row).astype(np.int64) for row in cu_seqlens_Bn.cpu().numpy())
    packed = AnchorPackedSeqParams(
        qkv_format="sbhd",
        tokens_per_sample=seq_length,
        position_ids_Bs=position_ids_Bs,
        borders=borders,
        part_of_chunk=tuple(part_of_chunk),
        pad_documents_to=pad_documents_to,
        router=router,
        future=future,
    )
    runs = packed.runs()
    packed.cu_seqlens_q = packed.cu_seqlens_kv = runs.cu_q
    packed.max_seqlen_q = packed.max_seqlen_kv = runs.max_q
    return packed
