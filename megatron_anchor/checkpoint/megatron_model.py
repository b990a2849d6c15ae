"""A Megatron model from a checkpoint alone: what a run would build and load.

The model is the one that is trained: Megatron's GPTModel with the anchor core attention. Loading
goes through Megatron's own ``dist_checkpointing``, so it checks what was written.

Legend: S tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_anchor.checkpoint.model import Model


def gpt_model(model: Model, *, dtype: torch.dtype, vp_stage: int | None = None) -> Any:
    """Build this rank's part of the model; Megatron's groups must be initialized.

    Args:
        model: its shape.
        dtype: of the weights.
        vp_stage: virtual pipeline stage.
    """
    from megatron.core import mpu
    from megatron.core.models.gpt import GPTModel

    from megatron_anchor.attention.layer_spec import anchor_block_spec
    from megatron_anchor.attention.rope import RotarySettings

    config = transformer_config(model, dtype=dtype)
    rotary = RotarySettings(
        head_dim=model.head,
        base=model.rotary_base,
        scaling=dict(model.scaling),
        max_position_embeddings=model.positions,
    )
    return GPTModel(
        config,
        anchor_block_spec(config, rotary=rotary, backend="sdpa", vp_stage=vp_stage),
        vocab_size=model.padded_rows,
        max_sequence_length=model.positions,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type="none",
        vp_stage=vp_stage,
    )


def transformer_config(model: Model, *, dtype: torch.dtype) -> Any:
    """Give Megatron's config of the model under the groups that are initialized."""
    from megatron.core import mpu
    from megatron.core.transformer import TransformerConfig

    tp = mpu.get_tensor_model_parallel_world_size()
    pp = mpu.get_pipeline_model_parallel_world_size()
    vpp = mpu.get_virtual_pipeline_model_parallel_world_size()
    moe = {
        "num_moe_experts": model.experts,
        "moe_router_topk": model.experts_per_token,
        "moe_router_pre_softmax": not model.normalized_router,
        "moe_ffn_hidden_size": model.ffn,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": mpu.get_expert_model_parallel_world_size(),
    }
    return TransformerConfig(
        **(moe if model.experts else {}),
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn,
        num_attention_heads=model.heads,
        num_query_groups=model.groups,
        kv_channels=model.head,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=model.linear_bias,
        add_qkv_bias=model.qkv_bias and not model.linear_bias,
        qk_layernorm=model.qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=model.epsilon,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        transformer_impl="local",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        # As Megatron's own arguments set them for an interleaved pipeline.
        overlap_p2p_comm=vpp is not None,
        batch_p2p_comm=vpp is None,
    )


def load_weights(
    model: Any, folder: str | Path, *, stored_names: Mapping[str, str] | None = None
) -> None:
    """Fill a model, or a list of its virtual stages, from the folder of an iteration.

    Args:
        model: as `gpt_model` builds it.
        folder: of the iteration.
        stored_names: what tensors are called there, where the model calls them otherwise.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    chunks = model if isinstance(model, list) else [model]
    names = [f"model{i}" for i in range(len(chunks))]
    sharded = {name: chunk.sharded_state_dict() for name, chunk in zip(names, chunks, strict=True)}
    for value in nested_values(sharded):
        if isinstance(value, ShardedTensor):
            value.key = (stored_names or {}).get(value.key, value.key)
    loaded = dist_checkpointing.load(sharded, str(folder))
    for name, chunk in zip(names, chunks, strict=True):
        chunk.load_state_dict(loaded[name])


def logits(
    model: Model,
    folder: str | Path,
    tokens_S: Tensor,
    *,
    dtype: torch.dtype,
    stored_names: Mapping[str, str] | None = None,
) -> Tensor:
    """Compute a checkpoint's logits of one document in this process, without a GPU.

    Args:
        model: its shape.
        folder: of the iteration.
        tokens_S: token ids.
        dtype: of weights and arithmetic.
        stored_names: see `load_weights`.

    Returns:
        [S, V] float32; the vocabulary's filling is cut.
    """
    import torch.distributed as dist
    from megatron.core import mpu
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_anchor.attention.packed import pack_micro_batch

    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mpu.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        gpt = gpt_model(model, dtype=dtype).eval()
        load_weights(gpt, folder, stored_names=stored_names)
        length = len(tokens_S)
        positions_BS = torch.arange(length)[None]
        packed = pack_micro_batch(
            positions_BS, torch.tensor([[0, length]], dtype=torch.int32), seq_length=length
        )
        with torch.no_grad():
            found_BSV = gpt(tokens_S[None], positions_BS, None, packed_seq_params=packed)
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
    return found_BSV[0, :, : model.vocabulary].float()
