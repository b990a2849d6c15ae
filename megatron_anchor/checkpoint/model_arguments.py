"""What becomes of every Megatron argument that reaches the model.

A run's arguments say which function its weights are weights of, and Hugging Face's families can say
only some of it. So each name has a row: carried into config.json, required to have a certain value,
or without effect on what the trained model computes. Names are those of the run's arguments and of
the fields of Megatron's ``TransformerConfig``; both of the host's lists are walked by
tests/unit/test_run_arguments.py. Arguments that never reach the model are in `training_arguments`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_anchor.checkpoint.names import names


@dataclass(frozen=True)
class Required:
    """Values under which a family can represent the model."""

    accepted: tuple[Any, ...]
    meaning: str
    """What another value does to the model."""
    with_experts: bool = False
    """Read only by models with experts."""
    fits: Callable[[Any], bool] | None = None
    """Further values that are fine."""

    def allows(self, value: Any) -> bool:
        """Say whether a value is one of them."""
        return value in self.accepted or bool(self.fits and self.fits(value))


def _balances_by_loss(value: Any) -> bool:
    return isinstance(value, list) and set(value) <= set(_LOSSES)


def _all_ones(value: Any) -> bool:
    return isinstance(value, list) and set(value) == {1}


def _all_zeros(value: Any) -> bool:
    return isinstance(value, list) and not any(value)


_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
_OFF = (None, False)

CARRIED = names(
    "num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention",
    "num_query_groups kv_channels layernorm_epsilon qk_layernorm add_bias_linear add_qkv_bias",
    "untie_embeddings_and_output_weights rotary_base rope_parameters use_rope_scaling",
    "rope_scaling_factor rotary_seq_len_interpolation_factor max_position_embeddings vocab_size",
    "padded_vocab_size num_experts num_moe_experts moe_ffn_hidden_size moe_router_topk",
    "moe_router_pre_softmax moe_aux_loss_coeff bf16 fp16 params_dtype",
)
"""What `megatron_args.model_from_args` reads, and what the tensors' shapes and dtypes say."""

REQUIRED = {
    "swiglu": Required((True,), "another activation than SwiGLU"),
    "squared_relu": Required(_OFF, "squared ReLU as activation"),
    "quick_geglu": Required(_OFF, "quick GELU as activation"),
    "activation_func_clamp_value": Required((None,), "clamped activations"),
    "glu_linear_offset": Required((None, 0.0), "an offset in the gated activation"),
    "normalization": Required(("RMSNorm",), "another norm than RMSNorm"),
    "layernorm_zero_centered_gamma": Required(_OFF, "norm weights stored as their distance to 1"),
    "apply_layernorm_1p": Required(_OFF, "norm weights stored as their distance to 1"),
    "qk_l2_norm": Required(_OFF, "queries and keys of length 1"),
    "position_embedding_type": Required(("rope",), "other positions than RoPE"),
    "rope_type": Required((None, "rope"), "other positions than RoPE"),
    "rotary_percent": Required((1.0,), "a part of each head not rotated"),
    "rotary_interleaved": Required(_OFF, "rotation of neighbouring dimensions"),
    "no_rope_freq": Required(_OFF, "layers without rotation", fits=_all_zeros),
    "softmax_scale": Required((None,), "another scale of attention"),
    "softmax_type": Required(("vanilla",), "a sink in attention"),
    "window_size": Required((None,), "sliding windows"),
    "anchor_in_window": Required((False,), "an anchor that windows keep, as at no inference"),
    "attention_output_gate": Required(_OFF, "a gate behind attention"),
    "multi_latent_attention": Required(_OFF, "multi-latent attention"),
    "experimental_attention_variant": Required((None,), "another attention"),
    "use_mup": Required(_OFF, "scaled embeddings, logits and attention"),
    "mtp_num_layers": Required((None, 0), "layers that predict further tokens"),
    "is_hybrid_model": Required(_OFF, "layers of another kind"),
    "hybrid_layer_pattern": Required((None,), "layers of another kind"),
    "hybrid_override_pattern": Required((None,), "layers of another kind"),
    "heterogeneous_layers_config_path": Required((None,), "layers of different shapes"),
    "heterogeneous_layers_config_encoded_json": Required((None,), "layers of different shapes"),
    "heterogeneous_block_specs": Required(_OFF, "layers of different shapes"),
    "spec": Required((None,), "layers from a module of the user's"),
    "yaml_cfg": Required((None,), "a model described in another file"),
    "modelopt_enabled": Required(_OFF, "layers replaced by ModelOpt"),
    "enable_gpt_oss": Required(_OFF, "gpt-oss' RoPE"),
    "moe_layer_freq": Required((1,), "layers without experts", True, _all_ones),
    "moe_router_score_function": Required(("softmax",), "another score of experts", True),
    "moe_router_topk_scaling_factor": Required((None, 1.0), "scaled outputs of experts", True),
    "moe_router_enable_expert_bias": Required(_OFF, "a bias in the choice of experts", True),
    "moe_router_num_groups": Required((None,), "experts chosen by groups", True),
    "moe_router_topk_limited_devices": Required((None,), "experts chosen by devices", True),
    "moe_router_load_balancing_type": Required(
        _LOSSES, "experts chosen by what balances them", True, _balances_by_loss
    ),
    "moe_router_force_load_balancing": Required(_OFF, "experts chosen at random", True),
    "moe_router_force_biased": Required((None,), "experts chosen at random", True),
    "moe_expert_capacity_factor": Required((None,), "tokens dropped where experts are full", True),
    "moe_expert_rank_capacity_factor": Required((None,), "tokens dropped at full ranks", True),
    "moe_shared_expert_intermediate_size": Required((None, 0), "shared experts", True),
    "moe_latent_size": Required((None, 0), "experts on a projection", True),
    "moe_apply_probs_on_input": Required(_OFF, "experts' inputs scaled, not outputs", True),
    "moe_mlp_glu_interleave_size": Required((None,), "another order of experts' weights", True),
}
"""Name to what a family needs of it."""

LAYOUT = names(
    "tensor_model_parallel_size tensor_parallel_num_weight_shards gtp_weight_remat_size",
    "pipeline_model_parallel_comm_backend pipeline_model_parallel_size sequence_parallel",
    "virtual_pipeline_model_parallel_size context_parallel_size cp_comm_type",
    "hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank hybrid_context_parallel",
    "expert_model_parallel_size expert_tensor_parallel_size expert_gtp_weight_remat_size",
    "expert_tensor_parallel_num_weight_shards num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers mtp_standalone",
    "microbatch_group_size_per_vp_stage variable_seq_lengths anchor_context_parallel",
    "kv_gather_memory_mib pad_documents_to",
    "make_vocab_size_divisible_by",
)
EXECUTION = names(
    # kernels
    "transformer_impl attention_backend flash_attention_version anchor_attention_backend",
    "bias_gelu_fusion bias_swiglu_fusion bias_activation_fusion masked_softmax_fusion",
    "persist_layer_norm no_persist_layer_norm memory_efficient_layer_norm bias_dropout_fusion",
    "apply_rope_fusion fused_single_qkv_rope use_fused_weighted_squared_relu",
    "fused_residual_rmsnorm use_transformer_engine_op_fuser use_te_activation_func",
    "use_grouped_gemm_for_dense_mlp",
    "use_grouped_gemm_for_shared_expert moe_grouped_gemm moe_single_grouped_weight",
    "moe_single_grouped_bias moe_permute_fusion moe_router_fusion gradient_accumulation_fusion",
    "use_mamba_mem_eff_path dsa_kernel_backend moe_router_padding_for_quantization",
    "moe_router_padding_for_fp8 moe_pad_experts_for_cuda_graph_inference mlp_chunks_for_prefill",
    "mlp_chunks_for_training enable_cuda_graph external_cuda_graph cuda_graph_impl",
    "cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps",
    "cuda_graph_modules cuda_graph_scope inference_cuda_graph_scope use_te_rng_tracker",
    # memory
    "recompute_granularity recompute_method recompute_num_layers recompute_modules",
    "distribute_saved_activations moe_layer_recompute cpu_offloading cpu_offloading_num_layers",
    "_cpu_offloading_context cpu_offloading_activations cpu_offloading_weights",
    "cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers",
    "activation_func_fp8_input_store fine_grained_activation_offloading offload_modules",
    "min_offloaded_tensor_size delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks",
    "activation_offload_fraction fine_grained_offloading_max_inflight_offloads moe_paged_stash",
    "moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda",
    "moe_paged_stash_buffer_size_factor_cpu disable_parameter_transpose_cache",
    "num_microbatches_with_partial_activation_checkpoints deallocate_pipeline_outputs",
    "clone_scatter_output_in_embedding init_model_with_meta_device hetereogenous_dist_checkpoint",
    # communication
    "tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs",
    "tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs",
    "tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1",
    "tp_comm_bootstrap_backend overlap_moe_expert_parallel_comm delay_wgrad_compute",
    "overlap_dispatch_backward_with_experts_wgrad ep_overlap_early_attn_memory_release",
    "overlap_p2p_comm batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p",
    "defer_embedding_wgrad_compute wgrad_deferral_limit overlap_p2p_comm_warmup_flush",
    "barrier_with_L1_time high_priority_a2a_comm_stream moe_shared_expert_overlap",
    "moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend",
    "moe_permute_fusion_into_hybridep moe_hybridep_pad_uneven_dispatch_inputs",
    "moe_flex_dispatcher_num_sms moe_deepep_num_sms moe_hybridep_num_sms",
    "moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute",
    "moe_hybridep_num_sms_preprocessing moe_ncclep_static_shape moe_ncclep_zero_copy",
    "symmetric_ar_type nccl_all_reduce_for_prefill",
)
PRECISION = names(
    "enable_autocast autocast_dtype pipeline_dtype fp32_residual_connection",
    "apply_query_key_layer_scaling attention_softmax_in_fp32 batch_invariant_mode",
    "disable_bf16_reduced_precision_matmul deterministic_mode moe_router_dtype rope_angle_dtype",
    "attention_precision fp8 fp8_recipe fp8_param fp8_param_gather fp8_quantizer_factory",
    "fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad",
    "fp8_output_proj fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red",
    "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 use_kitchen",
    "use_kitchen_attention kitchen_attention_backend kitchen_config_file kitchen_recipe_number",
    "fp4 fp4_recipe fp4_param fp4_param_gather fp4_quantizer_factory quant_recipe",
    "te_precision_config_file",
)
TRAINING = names(
    "hidden_dropout attention_dropout moe_input_jitter_eps perform_initialization",
    "use_cpu_initialization init_method output_layer_init_method init_method_std",
    "embedding_init_method embedding_init_method_std init_method_xavier_uniform timers",
    "finalize_model_grads_func grad_scale_func moe_grad_scale_func mtp_grad_scale_func",
    "no_sync_func grad_sync_func param_sync_func calculate_per_token_loss fp16_lm_cross_entropy",
    "cross_entropy_loss_fusion cross_entropy_fusion_impl moe_z_loss_coeff",
    "moe_router_bias_update_rate moe_enable_routing_replay moe_per_layer_logging",
    "log_max_attention_logit qk_clip qk_clip_alpha qk_clip_threshold test_mode config_logger_dir",
)
INFERENCE = names(
    "flash_decode seed inference_rng_tracker inference_sampling_seed",
    "use_inference_optimized_layers inference_fuse_tp_communication",
    "inference_disable_triton_nvls_kernels",
    "inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels",
    "inference_moe_token_dispatcher_type",
)
SPELT_OTHERWISE = names(
    "use_rotary_position_embeddings add_position_embedding openai_gelu onnx_safe",
    "encoder_num_layers decoder_num_layers activation_func gated_linear_unit",
    "apply_residual_connection_post_layernorm moe_token_dropping",
)
DEPENDENT = {
    "window_size": names("window_attn_skip_freq"),
    "position_embedding_type": names(
        "mrope_section yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow",
        "yarn_correction_range_round_to_int rotary_scaling_factor mscale mscale_all_dim",
        "relative_attention_num_buckets relative_attention_max_distance",
    ),
    "multi_latent_attention": names(
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim cache_mla_latents",
        "mla_down_proj_fusion",
    ),
    "experimental_attention_variant": names(
        "experimental_attention_variant_loss_scale_func dsa_indexer_n_heads dsa_indexer_head_dim",
        "dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_skip_topk_offset",
        "dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dsa_indexer_rope_interleaved",
        "dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon",
        "dsa_indexer_k_norm_fp32 linear_attention_freq linear_conv_kernel_dim linear_key_head_dim",
        "linear_value_head_dim linear_num_key_heads linear_num_value_heads",
    ),
    "use_mup": names(
        "mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult",
        "mup_base_head_dim mup_attn_scale_power",
    ),
    "mtp_num_layers": names(
        "mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads",
        "mtp_hybrid_override_pattern",
    ),
    "is_hybrid_model": names(
        "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads",
        "mamba_training_ssm_states_dtype",
    ),
    "moe_shared_expert_intermediate_size": names(
        "moe_shared_expert_gate moe_shared_expert_glu_interleave_size"
    ),
    "moe_router_num_groups": names("moe_router_group_topk"),
    "moe_router_load_balancing_type": names("moe_router_quantile_balancing_ema"),
    "moe_expert_capacity_factor": names("moe_pad_expert_input_to_capacity moe_token_drop_policy"),
    "modelopt_enabled": names(
        "export_model_type export_legacy_megatron export_te_mcore_model export_default_te_spec",
        "export_force_local_attention export_kv_cache_quant export_real_quant_cfg export_quant_cfg",
        "export_kd_teacher_load export_kd_teacher_model_config export_kd_teacher_ckpt_format",
        "export_kd_cfg finetune_hf_dataset finetune_data_split qad_train_target",
        "freeze_base_for_mtp export_qk_l2_norm export_moe_apply_probs_on_input",
        "export_offline_model",
    ),
}
"""Required argument to those that are read only when it has another value."""

WITHOUT_EFFECT = {
    "how ranks share the model": LAYOUT,
    "how the same mathematics is executed": EXECUTION,
    "how precisely the same mathematics is computed": PRECISION,
    "how weights are trained, not what they compute": TRAINING,
    "how Megatron's own engine generates text": INFERENCE,
    "said by another argument as well, or read by no layer": SPELT_OTHERWISE,
    **{f"read only where {name} is another": dependent for name, dependent in DEPENDENT.items()},
}
"""Reason to names."""
