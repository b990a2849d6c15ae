"""The models of `tests.tiny_latent` in Megatron, at any layout."""

from __future__ import annotations

import torch

from tests import tiny_latent, tiny_moe
from tests.tiny_latent import Case
from tests.tiny_moe import S
from tests.tiny_moe_megatron import global_name, load


def config_of(case: Case, layout, *, per_token):
    """Megatron's config; `layout` as in `tiny_moe_megatron.build_chunks`, with "keys" for CP."""
    from megatron.core.transformer import MLATransformerConfig

    vpp, cp, tp = layout.get("vpp"), layout.get("cp", 1), layout.get("tp", 1)
    settings = {
        "num_layers": tiny_latent.LAYERS,
        "hidden_size": tiny_latent.HIDDEN,
        "num_attention_heads": tiny_latent.HEADS,
        "ffn_hidden_size": tiny_latent.FFN,
        "q_lora_rank": tiny_latent.Q_RANK if case.low_rank_queries else None,
        "kv_lora_rank": tiny_latent.KV_RANK,
        "qk_head_dim": tiny_latent.PLAIN,
        "qk_pos_emb_head_dim": tiny_latent.ROTATED,
        "v_head_dim": tiny_latent.VALUE,
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "transformer_impl": "local",
        "pipeline_dtype": torch.float32,
        "calculate_per_token_loss": per_token,
        "tensor_model_parallel_size": tp,
        "sequence_parallel": layout.get("sp", False),
        "pipeline_model_parallel_size": layout.get("pp", 1),
        "virtual_pipeline_model_parallel_size": vpp,
        "context_parallel_size": cp,
        "cp_comm_type": "a2a" if cp > 1 else None,
        "overlap_p2p_comm": vpp is not None,
        "batch_p2p_comm": vpp is None,
        **_experts(case, layout),
        **layout.get("config", {}),
    }
    if case.depths:
        settings |= {
            "mtp_num_layers": case.depths,
            "mtp_use_repeated_layer": case.repeated,
            "mtp_loss_scaling_factor": tiny_latent.SHARE,
        }
    return MLATransformerConfig(**settings)


def _experts(case, layout):
    if case.experts is None:
        return {}
    settings = {
        "expert_model_parallel_size": layout.get("ep", 1),
        "expert_tensor_parallel_size": 1,
        "num_moe_experts": tiny_moe.EXPERTS,
        "moe_router_topk": tiny_moe.TOP_K,
        "moe_router_topk_scaling_factor": tiny_moe.SCALING,
        "moe_ffn_hidden_size": tiny_moe.EXPERT_FFN,
        "moe_shared_expert_intermediate_size": tiny_moe.EXPERT_FFN,
        "moe_layer_freq": [int(i in case.moe_layers) for i in range(tiny_latent.LAYERS)],
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": tiny_latent.COEFFICIENTS["aux_loss"],
        "moe_z_loss_coeff": tiny_latent.COEFFICIENTS["z_loss"],
        "moe_token_dispatcher_type": "alltoall",
    }
    if case.experts == "v2":
        return settings | {"moe_router_pre_softmax": True}
    return settings | {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": tiny_moe.GROUPS,
        "moe_router_group_topk": tiny_moe.GROUP_TOP_K,
    }


def rotary_of(case: Case):
    """The rotation of a case."""
    from megatron_anchor.attention.rope import RotarySettings

    return RotarySettings(
        head_dim=tiny_latent.ROTATED,
        base=1e4,
        interleaved=True,
        scaling=case.rope_parameters if case.yarn else {},
        max_position_embeddings=1280,
    )


def build_chunks(case: Case, layout, weights, biases, *, per_token=True, kind="ulysses", **spec):
    """Give this rank's chunks of the model, with their weights."""
    from megatron.core import mpu
    from megatron.core.models.gpt import GPTModel

    from megatron_anchor.attention.layer_spec import anchor_block_spec

    config = config_of(case, layout, per_token=per_token)
    vpp, chunks = layout.get("vpp"), []
    for vp_stage in range(vpp or 1):
        stage = vp_stage if vpp else None
        block = anchor_block_spec(
            config,
            **{"rotary": rotary_of(case), **spec},
            backend="sdpa",
            context_parallel=kind,
            vp_stage=stage,
        )
        model = GPTModel(
            config,
            block,
            mtp_block_spec=block.mtp,
            vocab_size=tiny_moe.VOCAB,
            max_sequence_length=S,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=False,
            position_embedding_type="none",
            vp_stage=stage,
        )
        load(model, weights, biases)
        if layout.get("whole_down_projections"):
            _make_down_projections_whole(model, weights)
        chunks.append(model)
    return chunks


DOWN = ("linear_q_down_proj", "linear_kv_down_proj")


class WholeProjection(torch.nn.Module):
    """What Transformer Engine's layers have there: all of the weight on every rank."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone())
        self.weight.sequence_parallel = True  # each rank's slots give a part of its gradient

    def forward(self, hidden):
        return torch.nn.functional.linear(hidden, self.weight), None


def _make_down_projections_whole(model, weights):
    for name, module in list(model.named_modules()):
        for own in DOWN:
            if hasattr(module, own):
                weight = weights[global_name(model, f"{name}.{own}.weight")]
                setattr(module, own, WholeProjection(weight))
