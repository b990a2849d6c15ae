"""Layers and loss of multi-token prediction (arXiv 2412.19437, section 2.2) over packed documents.

Megatron's layer and block are used as they are, but for what they read and predict: Megatron shifts
tokens and labels where the layers run, which is right for a micro-batch of one sample without
context parallelism only, and weighs the loss by counts of the rank that depend on how documents are
packed. Here both come with the micro-batch (`future_tokens`), and the loss is DeepSeek's,

    main loss + lambda / D x sum over the depths k of (sum of the losses at depth k) / T

with T the targets of the main loss, as everywhere: of the global batch with
--calculate-per-token-loss, else of the micro-batch.

Inside these layers the copies of the anchor differ, as they must: each holds its own document's
next token. Every document is what it would be alone.

Legend: s slots of this rank, B micro-batch, D depths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MultiTokenPredictionLayer,
    _compute_mtp_acceptance_counts,
)
from torch import Tensor

from megatron_anchor.attention.future_tokens import DepthLoss, FutureTokens
from megatron_anchor.attention.packed import AnchorPackedSeqParams, require_packed
from megatron_anchor.patches import MEGATRON, Patch


class AnchorMultiTokenLayer(MultiTokenPredictionLayer):
    """Megatron's layer, which reads the tokens of its depth from the packed documents."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """As Megatron's.

        Raises:
            ValueError: if the packed documents come without the tokens of the depths.
        """
        packed = require_packed(kwargs.get("packed_seq_params"))
        tokens = [depth.tokens_Bs for depth in require_future(packed).depths]
        # What the layer before returned: a repeated layer cannot know its depth by itself.
        done = (n for n, own in enumerate(tokens, 1) if own is kwargs["input_ids"])
        depth = next(done, 0) + 1
        return super().forward(*args, **{**kwargs, "packed_seq_params": packed.at_depth(depth)})

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Callable[..., Tensor],
        hidden_states: Tensor,
        packed_seq_params: AnchorPackedSeqParams,
        padding_mask: Tensor | None = None,
    ) -> tuple[Any, ...]:
        """Embed the tokens of this depth; the other steps are Megatron's."""
        tokens = require_future(packed_seq_params).depths[packed_seq_params.depth - 1].tokens_Bs

        def embed(**_: Any) -> Tensor:
            return embedding(input_ids=tokens, position_ids=position_ids)

        *_, embedded, hidden = super()._get_embeddings(None, None, embed, hidden_states)
        return tokens, position_ids, padding_mask, embedded, hidden


def require_future(packed: AnchorPackedSeqParams) -> FutureTokens:
    """Give what multi-token prediction reads.

    Raises:
        ValueError: the packed documents came without it.
    """
    if packed.future is None:
        raise ValueError(
            "a model with multi-token prediction needs to know the tokens of its depths: pass "
            "pack_micro_batch(..., future=future_tokens(sample, depths=...)) of "
            "megatron_anchor.attention"
        )
    return packed.future


def attach_multi_token_loss(
    hidden_states: Tensor,
    labels: Tensor | None,
    *,
    packed: AnchorPackedSeqParams,
    output_layer: Callable[..., tuple[Tensor, Any]],
    output_weight: Tensor | None,
    runtime_gather_output: bool | None,
    is_training: bool,
    compute_language_model_loss: Callable[[Tensor, Tensor], Tensor],
    config: Any,
    cp_group: Any,
    tp_group: Any,
    scale_logits_fn: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute the losses of all depths and let the backward pass of the main loss begin them too.

    Args:
        hidden_states: [(1 + D) s, B, hidden size], the model's last states, then those of the
            depths.
        labels: those of the main loss; None where logits are wanted, and no loss.
        packed: with the labels of the depths, which also takes the losses found.
        output_layer: as Megatron passes it; the others too.

    Returns:
        [s, B, hidden size], the model's last states.
    """
    hidden, *deeper = hidden_states.chunk(1 + config.mtp_num_layers)
    if labels is None:
        return hidden
    future = require_future(packed)
    weight = _weight(future, config, cp_group)
    future.found.clear()
    for depth, states in zip(future.depths, deeper, strict=True):
        logits, _ = output_layer(
            states, weight=output_weight, runtime_gather_output=runtime_gather_output
        )
        if scale_logits_fn is not None:
            logits = scale_logits_fn(logits)
        losses = compute_language_model_loss(depth.labels_Bs, logits) * depth.loss_mask_Bs
        hidden = MTPLossAutoScaler.apply(hidden, losses * weight)
        correct = None
        if is_training:
            correct, _ = _compute_mtp_acceptance_counts(
                *(logits, depth.labels_Bs, depth.loss_mask_Bs),
                *(output_layer, runtime_gather_output, tp_group),
            )
        future.found.append(DepthLoss(losses_Bs=losses.detach(), correct=correct))
    return hidden


def _weight(future: FutureTokens, config: Any, cp_group: Any) -> float | Tensor:
    """What a slot's loss is multiplied by, so that Megatron's own scaling makes the above of it.

    Per token all gradients are divided by T later. Else they are averaged over data- and
    context-parallel ranks and micro-batches, and T is that of the micro-batch.
    """
    weight: float = config.mtp_loss_scaling_factor / config.mtp_num_layers
    if config.calculate_per_token_loss:
        return weight
    return weight * cp_group.size() / future.targets.clamp(min=1).to(torch.float32)


def for_packed_documents(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Attach this loss to micro-batches of packed documents, and Megatron's to others."""

    @functools.wraps(original)
    def process_mtp_loss(
        hidden_states: Tensor,
        labels: Tensor | None,
        loss_mask: Tensor | None = None,
        *,
        packed_seq_params: Any = None,
        input_ids: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        if isinstance(packed_seq_params, AnchorPackedSeqParams):
            return attach_multi_token_loss(
                hidden_states, labels, packed=packed_seq_params, **others
            )
        rest = {"packed_seq_params": packed_seq_params, "input_ids": input_ids, **others}
        return original(hidden_states, labels, loss_mask, **rest)

    return process_mtp_loss


LOSS_PATCH = Patch(
    target="megatron.core.models.gpt.gpt_model:process_mtp_loss",
    replacement=for_packed_documents,
    reason="multi-token prediction predicts inside documents, and is weighed by all targets",
    lost="--mtp-num-layers",
    parameters=("hidden_states", "labels", "loss_mask"),
    host=MEGATRON,
)


def from_the_spec(original: Callable[..., Any]) -> Callable[..., Any]:
    """Take the layers of multi-token prediction from a block spec that has some (``spec.mtp``)."""

    @functools.wraps(original)
    def mtp_block_spec(config: Any, transformer_layer_spec: Any, vp_stage: Any = None) -> Any:
        if hasattr(transformer_layer_spec, "mtp"):
            return transformer_layer_spec.mtp
        return original(config, transformer_layer_spec, vp_stage=vp_stage)

    return mtp_block_spec


LAYERS_PATCH = Patch(
    target="megatron.training.models.gpt:mtp_block_spec",
    replacement=from_the_spec,
    reason="Megatron makes stock layers for multi-token prediction, whatever the others are",
    lost="--mtp-num-layers",
    parameters=("config", "transformer_layer_spec", "vp_stage"),
    host=MEGATRON,
)
