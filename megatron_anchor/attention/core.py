"""The core attention that takes the stock module's place in Megatron's layer spec.

Megatron hands over q, k and v without position embedding; this module rotates them in float32 by
the position ids of the packed sample, communicates under context parallelism, and calls a kernel
that is causal inside every document. Everything else of the layer (QK norm, GQA, MoE,
recomputation) stays Megatron's.

Legend: P context-parallel size, s slots of this rank, S = P x s, B micro-batch, H query heads,
G key/value heads, D and E dims of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import Parameter

from megatron_anchor.attention.backends import Layer, bind_backend
from megatron_anchor.attention.backends.request import TRANSFORMER_ENGINE, ULYSSES
from megatron_anchor.attention.context_parallel import communication
from megatron_anchor.attention.fused_rope import rotate_in_one_pass
from megatron_anchor.attention.layer_window import layer_window
from megatron_anchor.attention.max_logits import WatchedKernel
from megatron_anchor.attention.packed import AnchorPackedSeqParams, require_packed
from megatron_anchor.attention.position_embedding import refuse_own_positions
from megatron_anchor.attention.rope import RotarySettings
from megatron_anchor.attention.sinks import make_sink
from megatron_anchor.context_parallel.sizes import GATHER_LIMIT


class AnchorCoreAttention(MegatronModule):
    """Causal attention inside documents with float32 rotary positions.

    Args:
        config: Megatron's transformer config.
        layer_number: 1-based number of the layer in the whole model.
        attn_mask_type: causal; other kinds are refused.
        attention_type: Megatron's name of the attention kind (``self``).
        cp_comm_type: context-parallel kind of this layer, read by Transformer Engine only.
        softmax_scale: factor of the logits; None means 1 / sqrt(head_dim).
        k_channels: dims of a key, as MLA's layer says; not read, the tensors tell.
        v_channels: dims of a value; the same.
        pg_collection: process groups; its ``cp`` and ``hcp`` are used, and ``tp`` by Transformer
            Engine.
        rotary: settings of the rotation, None where queries and keys come rotated (bound by the
            layer spec).
        backend: name of the kernel (bound by the layer spec).
        precision: ``model``, or ``fp32`` for float32 from the rotation to the output, whatever the
            model's dtype (bound by the layer spec).
        context_parallel: who communicates, one of `request.CONTEXT_PARALLEL` (bound by the layer
            spec).
        gather_memory: bytes that gathered keys and values may take (bound by the layer spec).
        anchor_in_window: whether the anchor stays visible where the layer has a window (bound by
            the layer spec).
        logit_scale: factor of the logits in the place of what the layer gives (bound by the layer
            spec).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        rotary: RotarySettings | None,
        backend: str,
        precision: str = "model",
        context_parallel: str = ULYSSES,
        gather_memory: int = GATHER_LIMIT,
        anchor_in_window: bool = False,
        logit_scale: float | None = None,
    ) -> None:
        super().__init__(config=config)
        refuse_own_positions()
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(f"packed documents need a causal mask, got {attn_mask_type}")
        assert attention_type == "self", attention_type
        for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
            if getattr(config, name):
                raise ValueError(
                    f"TransformerConfig.{name}: no kernel does FP8 attention over packed "
                    "documents; set it to False (the linear layers stay in FP8)"
                )
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "hcp"])
        self.layer_number = max(1, layer_number)
        self.rotary = None if _skips_rope(config, self.layer_number) else rotary
        scale = logit_scale or softmax_scale
        if scale is None:
            assert rotary is not None
            scale = 1.0 / math.sqrt(rotary.head_dim)
        self.scale = scale
        self.communication = communication(
            context_parallel, pg_collection, memory_limit=gather_memory
        )
        own_communication = context_parallel == TRANSFORMER_ENGINE and pg_collection.cp.size() > 1
        self.kernel: Callable[..., Tensor] = bind_backend(
            backend,
            Layer(
                config=config,
                layer_number=self.layer_number,
                scale=self.scale,
                pg_collection=pg_collection,
                cp_comm_type=cp_comm_type if own_communication else None,
            ),
        )
        self.current_max_attn_logits: Tensor | None = None
        """float32 [H], the largest logits since Megatron last looked (`qk_clip.clip_qk`)."""
        if config.qk_clip or config.log_max_attention_logit:
            self.kernel = WatchedKernel(self.kernel, self._note_max_logits)
        assert precision in ("model", "fp32"), precision
        self.precision = precision
        self.window = layer_window(config, self.layer_number, keeps_anchor=anchor_in_window)
        self.tp_group = getattr(pg_collection, "tp", None)
        sink_H = make_sink(config)
        if isinstance(sink_H, Parameter):
            self.softmax_offset = sink_H
        else:
            self.register_buffer("softmax_offset", sink_H, persistent=False)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: AnchorPackedSeqParams | None = None,
    ) -> Tensor:
        """Attend over the packed documents of a micro-batch.

        Args:
            query: [s, B, H, D] without position embedding, or rotated where `rotary` is None.
            key: [s, B, G, D], the same.
            value: [s, B, G, E].
            attention_mask: ignored; the documents say what is visible.
            attn_mask_type: ignored, causal.
            attention_bias: refused.
            packed_seq_params: documents and positions; required.

        Returns:
            [s, B, H x E] in the dtype of ``value``.

        Raises:
            ValueError: without packed documents, or with an attention bias.
        """
        packed_seq_params = require_packed(packed_seq_params)
        if attention_bias is not None:
            raise ValueError("AnchorCoreAttention does not support an attention bias")
        dtype = value.dtype
        if self.precision == "fp32":
            query, key, value = query.float(), key.float(), value.float()
        if self.rotary is not None:
            cos, sin = packed_seq_params.rotation(self.rotary)
            query = rotate_in_one_pass(query, cos, sin, interleaved=self.rotary.interleaved)
            key = rotate_in_one_pass(key, cos, sin, interleaved=self.rotary.interleaved)
        dropout = self.config.attention_dropout if self.training else 0.0
        with self._dropout_rng(dropout):
            out = self.communication.attend(
                query,
                key,
                value,
                kernel=self.kernel,
                packed=packed_seq_params,
                scale=self.scale,
                dropout=dropout,
                window=self.window,
                sink_H=self.softmax_offset,
            )
        return out.flatten(2).to(dtype)

    def _note_max_logits(self, max_h: Tensor) -> None:
        """Keep what this rank's heads had; under Ulysses others' are -inf until Megatron asks."""
        if not self.training:
            return
        group = self.communication.heads_group
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        max_H = max_h.new_full((size, len(max_h)), -torch.inf)
        max_H[rank] = max_h
        known = self.current_max_attn_logits
        self.current_max_attn_logits = (
            max_H.flatten() if known is None else torch.maximum(known, max_H.flatten())
        )

    def _dropout_rng(self, dropout: float) -> Any:
        # Heads differ between tensor-parallel ranks, so their dropout must too. Under sequence
        # parallelism Megatron has already forked the tracker around the layer.
        if not dropout or self.config.sequence_parallel:
            return nullcontext()
        return tensor_parallel.get_cuda_rng_tracker().fork()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """The sinks, sharded as the heads are; nothing else of this module is in a checkpoint."""
        if not isinstance(self.softmax_offset, Parameter):
            return {}
        return make_sharded_tensors_for_checkpoint(
            {"softmax_offset": self.softmax_offset},
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


def _skips_rope(config: TransformerConfig, layer_number: int) -> bool:
    """Megatron's --no-rope-freq: 1 marks a layer without position embedding."""
    return bool(config.no_rope_freq and config.no_rope_freq[layer_number - 1])
