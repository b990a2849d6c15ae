"""Megatron's arguments that do what they do in Megatron's own pretrain_gpt.py, by who reads them.

Some have values that are refused or need Transformer Engine (`refused`), and all are subject to the
rules of `megatron_anchor.training.validation`.
"""

from __future__ import annotations

CARRIED: dict[str, str] = {
    "this package: positions, attention and context parallelism": """
        position_embedding_type use_rotary_position_embeddings rotary_base rotary_percent
        rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor
        no_rope_freq max_position_embeddings kv_channels num_attention_heads group_query_attention
        num_query_groups attention_dropout context_parallel_size cp_comm_type
        hierarchical_context_parallel_sizes attention_backend flash_attention_version
        deterministic_mode window_size window_attn_skip_freq softmax_type log_max_attention_logit
        qk_clip qk_clip_alpha qk_clip_threshold
    """,
    "this package, with --multi-latent-attention": """
        multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
        mla_down_proj_fusion rope_type rotary_scaling_factor mscale mscale_all_dim
    """,
    "this package, with --mtp-num-layers": """
        mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer
    """,
    "this package: packed datasets, through Megatron's dataset builder": """
        data_path split train_data_path valid_data_path test_data_path data_args_path
        per_split_data_args_path data_cache_path mmap_bin_files seq_length encoder_seq_length
        num_dataset_builder_threads mid_level_dataset_surplus multiple_validation_sets
        full_validation phase_transition_iterations iterations_to_skip
        object_storage_cache_path
    """,
    "this package: documents are rearranged before they are packed": """
        fim_data fim_rate fim_spm_rate fim_prefix_token fim_middle_token fim_suffix_token
        fim_eod_token
    """,
    "this package: forward step and loss": """
        micro_batch_size eval_micro_batch_size calculate_per_token_loss
        check_for_nan_in_loss_and_grad check_for_spiky_loss
    """,
    "Megatron: the layers": """
        num_layers encoder_num_layers hidden_size ffn_hidden_size hidden_dropout layernorm_epsilon
        layernorm_zero_centered_gamma normalization qk_layernorm qk_l2_norm attention_output_gate
        add_bias_linear add_qkv_bias swiglu squared_relu quick_geglu glu_linear_offset
        activation_func_clamp_value fp32_residual_connection untie_embeddings_and_output_weights
        make_vocab_size_divisible_by transformer_impl use_te_activation_func
        use_transformer_engine_op_fuser fused_residual_rmsnorm no_persist_layer_norm
        bias_gelu_fusion bias_swiglu_fusion bias_dropout_fusion cross_entropy_loss_fusion
        cross_entropy_fusion_impl fp16_lm_cross_entropy mlp_chunks_for_training
        clone_scatter_output_in_embedding is_hybrid_model test_mode symmetric_ar_type
    """,
    "Megatron: initialization and random numbers": """
        init_method_std embedding_init_method_std perform_initialization use_cpu_initialization
        use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult
        mup_base_head_dim mup_attn_scale_power seed te_rng_tracker inference_rng_tracker
        data_parallel_random_init
    """,
    "Megatron: experts": """
        num_experts moe_layer_freq moe_ffn_hidden_size moe_latent_size
        moe_shared_expert_intermediate_size moe_shared_expert_gate moe_shared_expert_overlap
        use_grouped_gemm_for_shared_expert moe_shared_expert_glu_interleave_size
        moe_mlp_glu_interleave_size moe_grouped_gemm moe_single_grouped_weight
        moe_single_grouped_bias use_fused_weighted_squared_relu moe_router_load_balancing_type
        moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps moe_router_topk
        moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
        moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype
        moe_router_enable_expert_bias moe_router_bias_update_rate
        moe_router_quantile_balancing_ema moe_router_force_load_balancing moe_router_force_biased
        moe_router_fusion moe_enable_routing_replay moe_apply_probs_on_input
        moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_expert_capacity_factor
        moe_pad_expert_input_to_capacity moe_token_drop_policy moe_expert_rank_capacity_factor
        moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend
        moe_flex_dispatcher_num_sms moe_deepep_num_sms moe_hybridep_num_sms
        moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
        moe_hybridep_num_sms_preprocessing moe_permute_fusion moe_permute_fusion_into_hybridep
        moe_hybridep_pad_uneven_dispatch_inputs moe_ncclep_static_shape moe_ncclep_zero_copy
        moe_layer_recompute moe_paged_stash moe_paged_stash_page_size
        moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu
        moe_per_layer_logging overlap_dispatch_backward_with_experts_wgrad
        overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release
        high_priority_a2a_comm_stream
    """,
    "Megatron: the parallel layout": """
        tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel
        expert_model_parallel_size expert_tensor_parallel_size decoder_first_pipeline_num_layers
        decoder_last_pipeline_num_layers pipeline_model_parallel_layout
        num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        microbatch_group_size_per_vp_stage overlap_p2p_comm overlap_p2p_comm_warmup_flush
        pipeline_model_parallel_comm_backend use_ring_exchange_p2p use_tp_pp_dp_mapping
        defer_embedding_wgrad_compute wgrad_deferral_limit tp_comm_overlap tp_comm_overlap_cfg
        tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs tp_comm_bootstrap_backend
    """,
    "Megatron: the distributed processes": """
        distributed_backend distributed_timeout_minutes distributed_timeout_seconds_after_init
        local_rank nccl_communicator_config_path use_gloo_process_groups use_sharp
        sharp_enabled_group high_priority_stream_groups fake_process_group
        flight_recorder_dump_path flight_recorder_trace_buffer_size
        flight_recorder_dump_on_timeout flight_recorder_include_stack_trace
        flight_recorder_include_only_active flight_recorder_extra_dump_on_exec disable_jit_fuser
        enable_experimental
    """,
    "Megatron: gradients and data parallelism": """
        overlap_grad_reduce align_grad_reduce ddp_num_buckets ddp_bucket_size
        ddp_pad_buckets_for_high_nccl_busbw ddp_reduce_scatter_with_fp32_accumulation
        ddp_param_name_patterns_for_fp32_local_accumulation ddp_average_in_collective
        overlap_param_gather overlap_param_gather_with_optimizer_step align_param_gather
        use_distributed_optimizer num_distributed_optimizer_instances nccl_ub
        disable_symmetric_registration gradient_accumulation_fusion grad_reduce_in_bf16
        accumulate_allreduce_grads_in_fp32 check_for_large_grads
    """,
    "Megatron: sharded weights (Megatron-FSDP)": """
        use_megatron_fsdp strict_fsdp_dtensor_load fsdp_manual_registration
        fsdp_double_buffer megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype
        megatron_fsdp_grad_comm_dtype megatron_fsdp_enable_fine_grained_param_gather
        megatron_fsdp_max_pool_double_buffer fsdp_db_use_persist_buf_on_alloc_fail
        data_parallel_sharding_strategy outer_dp_sharding_strategy
        gradient_reduce_div_fusion suggested_communication_unit_size
        keep_fp8_transpose_cache enable_full_sharding_in_hsdp
    """,
    "Megatron: precision": """
        fp16 bf16 loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis
        disable_bf16_reduced_precision_matmul fp8 fp8_recipe fp8_quantizer_factory fp8_margin
        fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_output_proj
        fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag first_last_layers_bf16
        num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp4 fp4_recipe
        fp4_quantizer_factory fp4_param_gather te_precision_config_file
    """,
    "Megatron: activations' memory": """
        recompute_granularity recompute_method recompute_num_layers recompute_modules
        recompute_activations distribute_saved_activations cpu_offloading_num_layers
        cpu_offloading_retain_pinned_cpu_buffers fine_grained_activation_offloading
        offload_modules min_offloaded_tensor_size delta_offload_bytes_across_pp_ranks
        activation_offload_fraction fine_grained_offloading_max_inflight_offloads
        empty_unused_memory_level
    """,
    "Megatron: the optimizer": """
        optimizer lr min_lr decoupled_lr decoupled_min_lr weight_decay apply_wd_to_qk_layernorm
        no_weight_decay_cond_type clip_grad adam_beta1 adam_beta2 adam_eps sgd_momentum
        muon_momentum muon_split_qkv muon_nesterov muon_scale_mode muon_fp32_matmul_prec
        muon_coefficient_type muon_num_ns_steps muon_tp_mode muon_extra_scale_factor
        muon_scalar_optimizer lion_beta1 lion_beta2 optimizer_cpu_offload optimizer_cuda_graph
        cuda_graph_warmup_steps optimizer_offload_fraction use_torch_optimizer_for_cpu_offload
        overlap_cpu_optimizer_d2h_h2d dump_param_to_param_group_map pin_cpu_grads pin_cpu_params
        use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype
        exp_avg_sq_dtype
    """,
    "Megatron: the schedule of learning rate and weight decay": """
        lr_decay_style lr_wsd_decay_style lr_decay_iters lr_decay_samples lr_wsd_decay_iters
        lr_wsd_decay_samples lr_warmup_fraction lr_warmup_iters lr_warmup_samples lr_warmup_init
        override_opt_param_scheduler use_checkpoint_opt_param_scheduler start_weight_decay
        end_weight_decay weight_decay_incr_style
    """,
    "Megatron: the training loop and its data loaders": """
        global_batch_size step_batch_size_schedule decrease_batch_size_if_needed train_iters
        train_samples exit_interval exit_duration_in_mins exit_signal_handler exit_signal
        exit_signal_handler_for_training manual_gc manual_gc_interval manual_gc_eval
        train_sync_interval check_weight_hash_across_dp_replicas_interval gpu_sniff_test_interval
        dataloader_type data_sharding num_workers eval_iters eval_interval start_eval_at_iter
        eval_global_batch_size skip_train validation_set_names adlr_autoresume
        adlr_autoresume_interval enable_msc
    """,
    "Megatron: the tokenizer": """
        vocab_size padded_vocab_size pad_vocab_size vocab_file merge_file tokenizer_type
        tokenizer_model metadata_path special_tokens tiktoken_pattern tiktoken_num_special_tokens
        tokenizer_sentencepiece_legacy tokenizer_sentencepiece_ignore_extra_whitespaces
        tokenizer_hf_no_use_fast tokenizer_hf_no_include_special_tokens trust_remote_code
        null_tokenizer_eod_id null_tokenizer_pad_id chat_template
    """,
    "Megatron: checkpoints": """
        save save_interval save_params_interval save_activations_interval
        save_tokens_per_expert_interval save_wgrads_interval save_dgrads_interval
        save_retain_interval load load_main_params_from_ckpt non_persistent_save_interval
        non_persistent_ckpt_type non_persistent_global_ckpt_dir non_persistent_local_ckpt_dir
        non_persistent_local_ckpt_algo finetune pretrained_checkpoint ckpt_step
        use_checkpoint_args use_mp_args_from_checkpoint_args
        use_tokenizer_model_from_checkpoint_args exit_on_missing_checkpoint ckpt_format
        auto_detect_ckpt_format ckpt_convert_format ckpt_convert_save
        ckpt_convert_update_legacy_dist_opt_format ckpt_fully_parallel_save async_save
        async_strategy use_persistent_ckpt_worker async_ckpt_cpu_priority async_ckpt_io_priority
        async_ckpt_use_cpu_shm ckpt_fully_parallel_load ckpt_fully_parallel_load_exchange_algo
        ckpt_fully_parallel_save_process_group ckpt_fully_parallel_load_process_group
        ckpt_assume_constant_structure ckpt_load_validate_sharding_integrity dist_ckpt_strictness
        dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient
        replication replication_jump replication_factor verify_integrity stream_ckpt_dequant
        no_save_optim no_save_rng no_load_optim no_load_rng override_ckpt_iteration
        dist_ckpt_workers
    """,
    "Megatron: logs": """
        log_interval log_params_norm log_throughput log_progress timing_log_level
        timing_log_option tensorboard_dir tensorboard_log_interval tensorboard_queue_size
        log_timers_to_tensorboard log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard
        log_memory_to_tensorboard log_memory_interval log_device_memory_used
        log_num_zeros_in_grad barrier_with_L1_time log_world_size_to_tensorboard wandb_project
        wandb_exp_name wandb_save_dir wandb_entity logging_level log_energy
        moe_routing_trace_path moe_routing_trace_max_training_iters
        moe_routing_trace_capture_logits moe_routing_trace_capture_hidden_states
        moe_routing_trace_dump_weights enable_one_logger one_logger_project one_logger_run_name
        one_logger_async app_tag_run_name app_tag_run_version
    """,
    "Megatron: profiles and faults": """
        profile profile_step_start profile_step_end use_pytorch_profiler
        pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack
        pytorch_profiler_collect_chakra profile_ranks record_memory_history memory_snapshot_path
        record_shapes nvtx_ranges log_straggler straggler_ctrlr_port straggler_minmax_count
        disable_straggler_on_startup run_workload_inspector_server enable_ft_package
        calc_ft_timeouts ft_num_warmup_iters error_injection_rate error_injection_type rerun_mode
        result_rejected_tracker_filename fault_injector_ranks fault_injector_num_ranks
        fault_injector_fault_types fault_injector_fault_probabilities fault_injector_fault_delay
        fault_injector_delay_start_iteration fault_injector_mtti_seconds
        fault_injector_offset_seconds fault_injector_seed
    """,
}
"""Who reads the arguments, by their names in Megatron's namespace."""

READ_WITH: dict[str, str] = {
    "qk_clip": "qk_clip_alpha qk_clip_threshold",
    "fim_data": "fim_rate fim_spm_rate fim_prefix_token fim_middle_token fim_suffix_token "
    "fim_eod_token",
    "multi_latent_attention": "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim "
    "mla_down_proj_fusion rope_type rotary_scaling_factor mscale mscale_all_dim",
    "mtp_num_layers": "mtp_loss_scaling_factor mtp_use_repeated_layer",
    "use_megatron_fsdp": "strict_fsdp_dtensor_load fsdp_manual_registration fsdp_double_buffer "
    "megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype "
    "megatron_fsdp_grad_comm_dtype megatron_fsdp_enable_fine_grained_param_gather "
    "megatron_fsdp_max_pool_double_buffer fsdp_db_use_persist_buf_on_alloc_fail "
    "data_parallel_sharding_strategy outer_dp_sharding_strategy "
    "gradient_reduce_div_fusion suggested_communication_unit_size "
    "keep_fp8_transpose_cache enable_full_sharding_in_hsdp",
    "overlap_moe_expert_parallel_comm": "ep_overlap_early_attn_memory_release "
    "high_priority_a2a_comm_stream",
}
"""Switch to the arguments that nothing reads without it."""
