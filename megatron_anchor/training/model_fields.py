"""Which arguments describe the model, and which of these a later run may change.

The set is derived from the host: every field of its transformer configs is one, and every argument
that its builders read under another name. What only says how or where the same model is computed
is taken out, by name and with the reason. So an argument that a later Megatron adds describes the
model until a row here says otherwise, and a difference in it is refused.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer import MLATransformerConfig

NOT_FIELDS = {
    "read by Megatron's builders": "add_position_embedding group_query_attention "
    "heterogeneous_layers_config_encoded_json hybrid_layer_pattern max_position_embeddings "
    "num_experts position_embedding_type quick_geglu rope_scaling_factor "
    "rotary_seq_len_interpolation_factor seq_length spec squared_relu swiglu "
    "untie_embeddings_and_output_weights use_rope_scaling",
    "precision of the weights": "bf16 fp16",
    "megatron_anchor's own; the rest of these describe samples or the run": "anchor_in_window "
    "anchor_position anchor_token attention_pattern attention_precision rope_angle_dtype "
    "rope_parameters",
}
"""Arguments that describe the model and are no fields of the host's transformer configs."""

NOT_THE_MODEL = {
    "where layers run": "account_for_embedding_in_pipeline_split "
    "account_for_loss_in_pipeline_split cp_comm_type num_layers_in_first_pipeline_stage "
    "num_layers_in_last_pipeline_stage pipeline_model_parallel_layout",
    "initial weights": "embedding_init_method embedding_init_method_std init_method "
    "init_method_std init_model_with_meta_device output_layer_init_method",
    "kernels, fusions and layouts of buffers": "apply_rope_fusion attention_backend "
    "batch_invariant_mode bias_activation_fusion bias_dropout_fusion "
    "clone_scatter_output_in_embedding disable_bf16_reduced_precision_matmul "
    "disable_parameter_transpose_cache dsa_kernel_backend flash_attention_version "
    "fused_residual_rmsnorm fused_single_qkv_rope kitchen_attention_backend "
    "masked_softmax_fusion memory_efficient_layer_norm mla_down_proj_fusion moe_grouped_gemm "
    "moe_permute_fusion moe_router_fusion moe_single_grouped_bias moe_single_grouped_weight "
    "persist_layer_norm symmetric_ar_type transformer_impl use_fused_weighted_squared_relu "
    "use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert use_kitchen "
    "use_kitchen_attention use_mamba_mem_eff_path use_te_activation_func "
    "use_transformer_engine_op_fuser",
    "what is kept for the backward pass": "activation_func_fp8_input_store "
    "activation_offload_fraction delay_offload_until_cuda_graph "
    "delta_offload_bytes_across_pp_ranks distribute_saved_activations "
    "fine_grained_activation_offloading fine_grained_offloading_max_inflight_offloads "
    "min_offloaded_tensor_size mlp_chunks_for_training moe_layer_recompute moe_paged_stash "
    "moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda "
    "moe_paged_stash_page_size offload_modules recompute_granularity recompute_method "
    "recompute_modules recompute_num_layers",
    "how tokens travel to experts": "high_priority_a2a_comm_stream moe_deepep_num_sms "
    "moe_enable_deepep moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms "
    "moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms "
    "moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs "
    "moe_ncclep_static_shape moe_ncclep_zero_copy moe_permute_fusion_into_hybridep "
    "moe_router_padding_for_fp8 moe_router_padding_for_quantization moe_shared_expert_overlap "
    "moe_token_dispatcher_type",
    "CUDA graphs, inference, logs and tests": "cache_mla_latents config_logger_dir "
    "cuda_graph_impl cuda_graph_modules cuda_graph_retain_backward_graph cuda_graph_scope "
    "cuda_graph_use_single_mempool cuda_graph_warmup_steps enable_cuda_graph external_cuda_graph "
    "flash_decode hetereogenous_dist_checkpoint inference_cuda_graph_scope "
    "inference_disable_triton_nvls_kernels inference_fuse_tp_communication "
    "inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels "
    "inference_moe_token_dispatcher_type inference_rng_tracker inference_sampling_seed "
    "log_max_attention_logit mlp_chunks_for_prefill moe_enable_routing_replay "
    "moe_pad_experts_for_cuda_graph_inference moe_per_layer_logging nccl_all_reduce_for_prefill "
    "test_mode use_inference_optimized_layers",
}
"""Reason to fields of the host's transformer configs that leave the model as it is."""

MAY_CHANGE = {
    "the context's length": "max_position_embeddings seq_length",
    "rotary positions": "rope_angle_dtype rope_parameters rope_scaling_factor rotary_base "
    "rotary_seq_len_interpolation_factor use_rope_scaling",
    "yarn of multi-latent attention": "beta_fast beta_slow mscale mscale_all_dim "
    "original_max_position_embeddings rope_type rotary_scaling_factor",
    "what a token sees": "anchor_in_window anchor_position anchor_token attention_pattern",
    "dropout": "attention_dropout hidden_dropout",
    "precision": "apply_query_key_layer_scaling attention_precision attention_softmax_in_fp32 bf16 "
    "first_last_layers_bf16 fp16 fp32_residual_connection fp4 fp4_param fp4_quantizer_factory "
    "fp4_recipe fp8 fp8_amax_compute_algo fp8_amax_history_len fp8_dot_product_attention "
    "fp8_interval fp8_margin fp8_multi_head_attention fp8_output_proj fp8_param "
    "fp8_quantizer_factory fp8_recipe fp8_wgrad mamba_training_ssm_states_dtype moe_router_dtype "
    "num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 quant_recipe tp_only_amax_red",
    "the loss": "calculate_per_token_loss dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss "
    "experimental_attention_variant_loss_scale_func moe_aux_loss_coeff "
    "moe_router_load_balancing_type moe_z_loss_coeff mtp_detach_heads mtp_loss_scaling_factor",
    "training of the router": "moe_expert_capacity_factor moe_expert_rank_capacity_factor "
    "moe_input_jitter_eps moe_pad_expert_input_to_capacity moe_router_bias_update_rate "
    "moe_router_force_biased moe_router_force_load_balancing moe_router_quantile_balancing_ema "
    "moe_token_drop_policy moe_token_dropping",
    "clipping of attention logits": "qk_clip qk_clip_alpha qk_clip_threshold",
}
"""What it is about to arguments that a run may change on purpose: such a change is said."""

ONLY_WITH = {
    "num_query_groups": "group_query_attention",
    "rope_scaling_factor": "use_rope_scaling",
    "moe_": "num_experts",
    "mup_": "use_mup",
    "mtp_": "mtp_num_layers",
    "qk_clip_": "qk_clip",
    "dsa_": "experimental_attention_variant",
    "linear_": "experimental_attention_variant",
    "mamba_": "hybrid_layer_pattern",
    "fp8_": "fp8",
    "fp4_": "fp4",
    "window_attn_skip_freq": "window_size",
    "anchor_in_window": "window_size",
    "kv_lora_rank": "multi_latent_attention",
    "mscale": "multi_latent_attention",
    "q_lora_rank": "multi_latent_attention",
    "qk_head_dim": "multi_latent_attention",
    "qk_pos_emb_head_dim": "multi_latent_attention",
    "rope_type": "multi_latent_attention",
    "rotary_scaling_factor": "multi_latent_attention",
    "v_head_dim": "multi_latent_attention",
}
"""Argument, or the beginning of several, to the switch without which they mean nothing."""


@cache
def model_fields() -> frozenset[str]:
    """Give the names of all arguments that describe the model, as they stand in the namespace."""
    host = {f.name for f in fields(MLATransformerConfig)}
    host -= {f.name for f in fields(ModelParallelConfig)}
    return frozenset((host | names_in(NOT_FIELDS)) - names_in(NOT_THE_MODEL))


def may_change(name: str) -> bool:
    """Say whether a run may change this argument of its checkpoint's model."""
    return name in names_in(MAY_CHANGE)


def switch_of(name: str) -> str | None:
    """Give the argument without which this one has no meaning, None if it always has one."""
    found = (switch for start, switch in ONLY_WITH.items() if name.startswith(start))
    return next((switch for switch in found if switch != name), None)


def names_in(table: dict[str, str]) -> frozenset[str]:
    """Give all names of a table."""
    return frozenset(name for names in table.values() for name in names.split())
