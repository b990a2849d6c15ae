"""The model of `tests.tiny_moe` in Megatron, at any layout."""

from __future__ import annotations

import torch

from tests import tiny_llama, tiny_moe
from tests.tiny_moe import S

BALANCE_LOSSES = {k: v for k, v in tiny_moe.COEFFICIENTS.items() if k != "z_loss"}


def build_chunks(layout, weights, biases, *, per_token, **changes):
    """Give this rank's chunks of the model, with their weights.

    Args:
        layout: sizes by their short names (tp, sp, pp, vpp, cp, ep), and more settings as "config".
        weights: of the whole model, as `tiny_moe.megatron_weights` names them.
        biases: of the routers.
        per_token: calculate_per_token_loss.
        changes: other arguments of GPTModel.
    """
    from megatron.core import mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    from megatron_anchor.attention.layer_spec import anchor_block_spec
    from megatron_anchor.attention.rope import RotarySettings

    vpp, cp, tp = layout.get("vpp"), layout.get("cp", 1), layout.get("tp", 1)
    config = TransformerConfig(
        num_layers=tiny_moe.LAYERS,
        hidden_size=tiny_moe.HIDDEN,
        num_attention_heads=tiny_moe.HEADS,
        num_query_groups=tiny_moe.KV_HEADS,
        kv_channels=tiny_moe.HEAD_DIM,
        ffn_hidden_size=tiny_moe.FFN,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        transformer_impl="local",
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=per_token,
        tensor_model_parallel_size=tp,
        sequence_parallel=layout.get("sp", False),
        pipeline_model_parallel_size=layout.get("pp", 1),
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        cp_comm_type="a2a" if cp > 1 else None,
        overlap_p2p_comm=vpp is not None,
        batch_p2p_comm=vpp is None,
        expert_model_parallel_size=layout.get("ep", 1),
        expert_tensor_parallel_size=1,
        num_moe_experts=tiny_moe.EXPERTS,
        moe_router_topk=tiny_moe.TOP_K,
        moe_ffn_hidden_size=tiny_moe.EXPERT_FFN,
        moe_shared_expert_intermediate_size=tiny_moe.EXPERT_FFN,
        moe_layer_freq=[int(i in tiny_moe.MOE_LAYERS) for i in range(tiny_moe.LAYERS)],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_num_groups=tiny_moe.GROUPS,
        moe_router_group_topk=tiny_moe.GROUP_TOP_K,
        moe_router_topk_scaling_factor=tiny_moe.SCALING,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type=list(BALANCE_LOSSES),
        moe_aux_loss_coeff=list(BALANCE_LOSSES.values()),
        moe_z_loss_coeff=tiny_moe.COEFFICIENTS["z_loss"],
        moe_token_dispatcher_type="alltoall",
        **layout.get("config", {}),
    )
    rotary = RotarySettings(head_dim=tiny_moe.HEAD_DIM, base=1e4)
    chunks = []
    for vp_stage in range(vpp or 1):
        stage = vp_stage if vpp else None
        model = GPTModel(
            config,
            anchor_block_spec(config, rotary=rotary, backend="sdpa", vp_stage=stage),
            vocab_size=tiny_moe.VOCAB,
            max_sequence_length=S,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=False,
            vp_stage=stage,
            **{"position_embedding_type": "none", **changes},
        )
        load(model, weights, biases)
        chunks.append(model)
    return chunks


def global_name(model, name):
    """Give a module or parameter its name in the unsplit model."""
    from megatron.core import mpu

    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"] and len(parts) > 2:
        parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
    if "local_experts" in parts:
        place = parts.index("local_experts") + 1
        here = model.config.num_moe_experts // mpu.get_expert_model_parallel_world_size()
        parts[place] = str(int(parts[place]) + here * mpu.get_expert_model_parallel_rank())
    return ".".join(parts)


def share(name, full):
    """This rank's part of a full weight; experts and routers are not cut."""
    from megatron.core import mpu

    if "local_experts" in name or "router" in name:
        return full
    rank, size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    return tiny_llama.tensor_parallel_shard(name, full, rank=rank, size=size)


def load(model, weights, biases):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(share(name, weights[global_name(model, name)]))
        for name, module in model.named_modules():
            if name.endswith("mlp.router") and biases:
                module.expert_bias.copy_(biases[global_name(model, name)])
