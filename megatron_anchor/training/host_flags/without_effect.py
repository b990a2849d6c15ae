"""Megatron's arguments that change nothing here, by the reason.

A run that sets one of them away from its default is told so once, at start.
"""

from __future__ import annotations

_UNREAD = "Megatron 0.19.2 takes it and reads it nowhere"

WITHOUT_EFFECT: dict[str, str] = {
    # What this package does in another way.
    "--attention-pattern and the kernels decide the mask": """
        create_attention_mask_in_dataloader masked_softmax_fusion use_flash_attn
    """,
    "the kernels compute logits and softmax in float32 anyway": """
        attention_softmax_in_fp32 apply_query_key_layer_scaling
    """,
    "the rotation happens in this package's attention": "apply_rope_fusion",
    "rotary positions stay; scaled RoPE is --rope-parameters": """
        add_position_embedding yarn_original_max_position_embeddings yarn_beta_fast
        yarn_beta_slow yarn_correction_range_round_to_int relative_attention_num_buckets
        relative_attention_max_distance mrope_section
    """,
    "the slot behind a document's last token never has a target": "eod_mask_loss",
    "padding is known by its place and not by its token": "allow_ambiguous_pad_tokens",
    "packed datasets read and check their index in their own way": """
        per_dataset_sequences_path dataloader_fast_cache_load dataloader_defer_npy_index_mmap
    """,
    "the block spec used here builds dense MLPs without it": "use_grouped_gemm_for_dense_mlp",
    # Settings of something that is refused, or is not built here.
    "read with --experimental-attention-variant only, which is refused": """
        dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_topk_freq
        dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
        dsa_kernel_backend dsa_indexer_rope_interleaved dsa_indexer_rotate_activation
        dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32
        linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
        linear_num_value_heads
    """,
    "read with --use-kitchen-attention only, which is refused": "kitchen_attention_backend",
    "Megatron reads them with other models only": "mtp_standalone mtp_hybrid_override_pattern",
    "read with --hybrid-context-parallel only, which is refused": "max_seqlen_per_dp_cp_rank",
    "read with --cuda-graph-impl only, which is refused": """
        cuda_graph_modules cuda_graph_scope_deprecated inference_cuda_graph_scope
        delay_offload_until_cuda_graph
    """,
    "read with --moe-use-upcycling only, which is refused": "moe_upcycling_granularity",
    "read with --use-torch-fsdp2 only, which is refused": "torch_fsdp2_reshard_after_forward",
    "read with --inprocess-restart only, which is refused": """
        inprocess_max_iterations inprocess_monitor_thread_interval
        inprocess_monitor_process_interval inprocess_progress_watchdog_interval
        inprocess_heartbeat_interval inprocess_soft_timeout inprocess_hard_timeout
        inprocess_heartbeat_timeout inprocess_barrier_timeout inprocess_completion_timeout
        inprocess_last_call_wait inprocess_termination_grace_time inprocess_granularity
        inprocess_active_world_size inprocess_empty_cuda_cache
    """,
    "read with --logits-save-dir only, which is refused": """
        logits_save_top_k logits_save_top_p logits_save_top_p_min_k logits_save_dtype
    """,
    "read with --logits-load-dir only, which is refused": """
        logits_load_decode_threads logits_load_prefetch_factor logits_load_msc_prefetch_depth
        logits_load_kd_loss_alpha logits_load_ignore_errors
    """,
    "documents that --fim-data rearranges are packed and not padded": "fim_pad_token",
    "read with --sft only, which is refused": "sft_tokenizer_prompt_format",
    "read in hybrid models only, which are refused": """
        mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path
        mamba_training_ssm_states_dtype
    """,
    # Other programs of Megatron share its parser.
    "read in Megatron's reinforcement learning only": """
        rl_prompts_per_eval grpo_prompts_per_step grpo_group_size rl_generation_lag
        rl_submission_granularity rl_consumption_granularity grpo_iterations grpo_clamp_eps_lower
        grpo_clamp_eps_upper grpo_kl_beta grpo_entropy_term_weight
        grpo_filter_groups_with_same_reward langrl_env_config rl_default_temperature
        rl_default_top_p rl_default_top_k rl_offload_optimizer_during_inference
        rl_kv_cache_management_mode rl_persist_cuda_graphs rl_partial_rollouts
        rl_inference_logprobs_is_correction rl_importance_sampling_truncation_coef
        rl_use_sequence_packing rl_sequence_packing_max_sequences_per_bin rl_sequence_packing_algo
        rl_training_cuda_graphs rl_inference_tensor_model_parallel_size
        rl_inference_pipeline_model_parallel_size rl_inference_expert_model_parallel_size
        rl_inference_expert_tensor_model_parallel_size rl_inference_model_unified_memory_level
        rl_offload_inference_model_weights_when_idle refit_method rl_verify_model_weights_swap
        rl_skip_bos_token rl_profile_dir rl_inference_parsers
    """,
    "read at inference only": """
        flash_decode nccl_all_reduce_for_prefill mlp_chunks_for_prefill
        moe_pad_experts_for_cuda_graph_inference inference_fuse_tp_communication
        inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
        inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
        inference_batch_times_seqlen_threshold max_tokens_to_oom use_legacy_static_engine
        inference_max_requests inference_max_seq_length inference_dynamic_batching
        inference_dynamic_batching_buffer_size_gb inference_dynamic_batching_paused_buffer_size_gb
        inference_dynamic_batching_mamba_memory_ratio inference_dynamic_batching_block_size
        inference_dynamic_batching_max_requests inference_dynamic_batching_max_tokens
        inference_dynamic_batching_num_cuda_graphs
        inference_dynamic_batching_track_paused_request_events
        inference_dynamic_batching_track_generated_token_events decode_only_cuda_graphs
        inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens
        inference_dynamic_batching_unified_memory_level enable_chunked_prefill
        num_speculative_tokens inference_dynamic_batching_enable_prefix_caching
        inference_dynamic_batching_prefix_caching_eviction_policy
        inference_dynamic_batching_prefix_caching_coordinator_policy
        inference_dynamic_batching_prefix_caching_routing_alpha
        inference_dynamic_batching_prefix_caching_mamba_gb
        inference_dynamic_batching_cuda_graph_mixed_prefill_count
        inference_dynamic_batching_cuda_graph_sizing_distribution
        inference_dynamic_batching_sampling_backend offset_sampling_seed_by_dp_rank
        inference_dynamic_batching_async_sched_mode inference_dynamic_batching_logprobs_mode
        inference_logging_step_interval inference_text_gen_server_logging inference_wandb_logging
        inference_coordinator_port mamba_inference_conv_states_dtype
        mamba_inference_ssm_states_dtype inference_use_synchronous_zmq_collectives
        inference_disable_ep_consensus inference_shards
    """,
    "read for BERT, T5, retrieval or vision models only": """
        bert_binary_head output_bert_embeddings bert_embedder_type decoder_num_layers sample_rate
        mask_prob short_seq_prob ict_head_size biencoder_projection_dim
        biencoder_shared_query_context_model ict_load bert_load titles_data_path
        query_in_block_prob use_one_sent_docs evidence_data_path retriever_report_topk_accuracies
        retriever_score_scaling block_data_path embedding_path indexer_batch_size
        indexer_log_interval num_classes img_h img_w num_channels patch_dim classes_fraction
        data_per_class_fraction head_lr_mult vision_pretraining_type vision_backbone_type
        swin_backbone_type mask_type mask_factor iter_per_epoch dino_local_img_size
        dino_local_crops_number dino_head_hidden_size dino_bottleneck_size dino_freeze_last_layer
        dino_norm_last_layer dino_warmup_teacher_temp dino_teacher_temp
        dino_warmup_teacher_temp_epochs
    """,
    # What Megatron itself lets pass.
    f"{_UNREAD}; --step-batch-size-schedule takes its place": "rampup_batch_size",
    _UNREAD: """
        apply_residual_connection_post_layernorm openai_gelu onnx_safe vocab_extra_ids
        exit_signal_handler_for_dataloader dist_ckpt_save_pre_mcore_014 deprecated_use_mcore_models
        use_dist_ckpt_deprecated dist_ckpt_format_deprecated ckpt_fully_parallel_save_deprecated
        disable_msc_deprecated
    """,
    "Megatron 0.19.2 reads it for models that are built by a function, and not from a config": """
        create_all_gather_group use_layer_wise_param_layout
    """,
}
"""Reason to the arguments, by their names in Megatron's namespace."""
