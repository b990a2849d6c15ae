"""Multi-latent attention (MLA, arXiv 2405.04434, section 2.1) over packed documents.

A head's queries and keys are two parts side by side: N dims without positions, projected up from
latents of low rank, and R rotated ones. The rotated part of the keys is one vector for all heads.
Values come from the keys' latent and have a width of their own::

    hidden - q_down - norm - q_up ----------+- q: N | R
                                            |         rotated
           - kv_down -+- norm - kv_up ------+- k: N | R
                      |                     +- v
                      +- R, one for all heads

Projections, norms and weights are Megatron's. Its own layer rotates by the slot and in the model's
dtype, and takes packed documents in a single sample only; here the rotation is that of all other
models: float32, by the documents' position ids. Neighbouring dims are pairs, as in DeepSeek's
weights. Queries and keys reach the core attention rotated.

Legend: s slots of this context-parallel rank, t = s / tensor-parallel size under sequence
parallelism (else s), B micro-batch, H heads of this rank, N and R dims of a query, E of a value,
C rank of the keys' latent.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import (
    FusedMLASelfAttention,
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from torch import Tensor

from megatron_anchor.attention.fused_rope import rotate_in_one_pass
from megatron_anchor.attention.packed import require_packed
from megatron_anchor.attention.rope import RotarySettings


class AnchorLatentAttention(MLASelfAttention):
    """Megatron's multi-latent attention, rotated in float32 by the packed documents' positions.

    Args:
        args: as Megatron's.
        rotary: rotation of the R dims (bound by the layer spec).
        precision: ``model``, or ``fp32`` to hand rotated queries and keys on in float32 (bound by
            the layer spec).
        kwargs: as Megatron's.
    """

    def __init__(
        self, *args: Any, rotary: RotarySettings, precision: str = "model", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.rotary, self.precision = rotary, precision
        self.rotary_pos_emb = None  # Megatron's, which must not be called

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """As Megatron's; without low rank, queries are projected from the hidden states as such.

        Megatron refuses the norm of the keys' latent there, or (Transformer Engine) puts a second
        norm in front of the query projection. DeepSeek-V2-Lite has the one norm.
        """
        if self.config.q_lora_rank is not None:
            resolved: dict[str, Any] = super()._resolve_qk_norm_config(submodules)
            return resolved
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_q_up_proj": IdentityOp,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": IdentityOp,
            "kv_layernorm": submodules.kv_layernorm,
        }

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, ...]:
        """Project and rotate.

        Args:
            hidden_states: [t, B, hidden size].
            key_value_states: refused.
            position_ids: not read.
            packed_seq_params: documents and positions; required.
            inference_context: refused.
            inference_params: refused.

        Returns:
            Rotated queries [s, B, H, N + R], rotated keys of the same shape, values [s, B, H, E],
            and the latents of queries and keys [t, B, ...] behind their norms.

        Raises:
            ValueError: without packed documents.
        """
        assert key_value_states is inference_context is inference_params is None
        cos, sin = require_packed(packed_seq_params).rotation(self.rotary)
        q_latent, kv_latent, k_rotated = self._latents(hidden_states)
        inputs = q_latent, kv_latent, k_rotated, cos, sin
        if self.recompute_up_proj:
            quantized = self.config.fp8 or self.config.fp4
            self.qkv_up_checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=quantized)
            q, k, v = self.qkv_up_checkpoint.checkpoint(self._project_up, *inputs)
        else:
            q, k, v = self._project_up(*inputs)
        return q, k, v, q_latent, kv_latent

    def _latents(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Latents of queries and keys [t, B, ...], and the keys' shared part [s, B, R]."""
        config, group = self.config, self.tp_group
        widths = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        q_latent, kv = self._qkv_down_projection(hidden)
        is_cut = kv.shape[-1] != sum(widths)  # by a column-parallel projection
        if is_cut:
            kv = gather_from_tensor_model_parallel_region(kv, group=group)
        kv_latent, k_shared = kv.split(widths, dim=-1)
        if is_cut:
            # Each rank's heads give a part of its gradient. Megatron's layer does not sum them.
            k_shared = copy_to_tensor_model_parallel_region(k_shared, group=group)
        if config.sequence_parallel and is_cut:
            kv_latent = scatter_to_sequence_parallel_region(kv_latent, group=group)
        elif config.sequence_parallel and group.size() > 1:
            k_shared = gather_from_sequence_parallel_region(k_shared, group=group)
        if config.q_lora_rank is not None:
            q_latent = self.q_layernorm(q_latent)
        return q_latent, self.kv_layernorm(kv_latent), k_shared

    def _project_up(
        self, q_latent: Tensor, kv_latent: Tensor, k_shared: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this rank's heads; what --recompute-modules mla_up_proj runs
        again."""
        config, heads = self.config, self.num_attention_heads_per_partition
        low_rank = config.q_lora_rank is not None
        q, _ = (self.linear_q_up_proj if low_rank else self.linear_q_proj)(q_latent)
        kv, _ = self.linear_kv_up_proj(kv_latent)
        q, kv = (x.unflatten(-1, (heads, -1)) for x in (q, kv))
        q_plain, q_turned = q.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        k_plain, v = kv.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        q_turned = self._rotate(q_turned, cos, sin)
        k_turned = self._rotate(k_shared.unsqueeze(-2), cos, sin)
        k_turned = k_turned.expand(*k_plain.shape[:-1], -1)
        return (
            torch.cat((q_plain.to(q_turned.dtype), q_turned), dim=-1),
            torch.cat((k_plain.to(k_turned.dtype), k_turned), dim=-1),
            v.contiguous(),
        )

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.precision == "fp32":
            x = x.float()
        return rotate_in_one_pass(x, cos, sin, interleaved=self.rotary.interleaved)


class AnchorFusedLatentAttention(AnchorLatentAttention, FusedMLASelfAttention):
    """The same with one projection to both latents (--mla-down-proj-fusion)."""


LATENT_ATTENTION = {
    MLASelfAttention: AnchorLatentAttention,
    FusedMLASelfAttention: AnchorFusedLatentAttention,
}
"""Megatron's layer to the one that takes its place."""
