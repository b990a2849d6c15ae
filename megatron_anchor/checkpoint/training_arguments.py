"""Arguments of a training run that never reach the model, and so say nothing about its weights.

They are listed by name and not by pattern: a name that neither this list nor `model_arguments` has
is refused where it is not at its default, as long as nobody has looked what it does.
"""

from __future__ import annotations

NOT_OF_THE_MODEL: dict[str, frozenset[str]] = {
    reason: frozenset(names.split())
    for reason, names in {
        "the optimizer's steps and number formats": """
            weight_decay apply_wd_to_qk_layernorm clip_grad adam_beta1 adam_beta2 adam_eps
            sgd_momentum muon_momentum muon_split_qkv muon_nesterov muon_scale_mode
            muon_fp32_matmul_prec muon_coefficient_type muon_num_ns_steps muon_tp_mode
            muon_extra_scale_factor muon_scalar_optimizer lion_beta1 lion_beta2
            no_weight_decay_cond_type lr_decay_style lr_wsd_decay_style lr_decay_iters
            lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples lr_warmup_fraction
            lr_warmup_iters lr_warmup_samples lr_warmup_init override_opt_param_scheduler
            use_checkpoint_opt_param_scheduler start_weight_decay end_weight_decay
            weight_decay_incr_style lr warmup min_lr decoupled_lr decoupled_min_lr
            freeze_all_layers grad_reduce_in_bf16 loss_scale initial_loss_scale min_loss_scale
            loss_scale_window hysteresis accumulate_allreduce_grads_in_fp32
            reuse_grad_buf_for_mxfp8_param_ag enable_experimental use_precision_aware_optimizer
            main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype
            megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype
            megatron_fsdp_grad_comm_dtype megatron_fsdp_enable_fine_grained_param_gather
            megatron_fsdp_max_pool_double_buffer fsdp_db_use_persist_buf_on_alloc_fail optimizer
            optimizer_cpu_offload optimizer_cuda_graph optimizer_offload_fraction
            use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads
            pin_cpu_params dump_param_to_param_group_map
        """,
        "how long, in which batches and from which weights it trains": """
            micro_batch_size global_batch_size rampup_batch_size step_batch_size_schedule
            decrease_batch_size_if_needed check_weight_hash_across_dp_replicas_interval
            gpu_sniff_test_interval train_sync_interval train_iters train_samples exit_interval
            exit_duration_in_mins exit_signal_handler exit_signal
            exit_signal_handler_for_dataloader exit_signal_handler_for_training
            iterations_to_skip batch_size check_for_nan_in_loss_and_grad check_for_large_grads
            result_rejected_tracker_filename dataloader_type data_parallel_random_init
            eval_iters eval_interval start_eval_at_iter eval_global_batch_size
            eval_micro_batch_size skip_train full_validation multiple_validation_sets
            validation_set_names moe_use_upcycling moe_upcycling_granularity
        """,
        "the loss: distillation, reinforcement learning": """
            perform_rl_step rl_prompts_per_eval grpo_prompts_per_step grpo_group_size
            rl_generation_lag rl_submission_granularity rl_consumption_granularity
            grpo_iterations grpo_clamp_eps_lower grpo_clamp_eps_upper grpo_kl_beta
            grpo_entropy_term_weight grpo_filter_groups_with_same_reward langrl_env_config
            rl_default_temperature rl_default_top_p rl_default_top_k
            rl_offload_optimizer_during_inference rl_kv_cache_management_mode
            rl_persist_cuda_graphs rl_partial_rollouts rl_inference_logprobs_is_correction
            rl_importance_sampling_truncation_coef rl_use_sequence_packing
            rl_sequence_packing_max_sequences_per_bin rl_sequence_packing_algo
            rl_training_cuda_graphs rl_inference_tensor_model_parallel_size
            rl_inference_pipeline_model_parallel_size rl_inference_expert_model_parallel_size
            rl_inference_expert_tensor_model_parallel_size
            rl_inference_model_unified_memory_level rl_offload_inference_model_weights_when_idle
            refit_method rl_verify_model_weights_swap rl_skip_bos_token rl_profile
            rl_profile_dir rl_inference_parsers logits_save_top_k logits_save_top_p
            logits_save_top_p_min_k logits_save_dir logits_save_dtype logits_load_dir
            logits_load_decode_threads logits_load_prefetch_factor
            logits_load_msc_prefetch_depth logits_load_kd_loss_alpha logits_load_ignore_errors
        """,
        "the documents and their tokenizer": """
            data_path phase_transition_iterations split train_data_path valid_data_path
            test_data_path data_args_path per_split_data_args_path per_dataset_sequences_path
            dataloader_fast_cache_load dataloader_defer_npy_index_mmap data_cache_path
            mmap_bin_files mock_data seq_length encoder_seq_length decoder_seq_length
            sample_rate mask_prob short_seq_prob num_workers reset_position_ids
            reset_attention_mask dataloader_inter_document_masking eod_mask_loss
            create_attention_mask_in_dataloader num_dataset_builder_threads
            object_storage_cache_path mid_level_dataset_surplus allow_ambiguous_pad_tokens
            fim_data fim_rate fim_spm_rate fim_split_sample fim_fragment_rate fim_no_prefix
            fim_prefix_token fim_middle_token fim_suffix_token fim_pad_token fim_eod_token
            pad_vocab_size vocab_file merge_file vocab_extra_ids tokenizer_type tokenizer_model
            metadata_path special_tokens tiktoken_pattern tiktoken_num_special_tokens
            tokenizer_sentencepiece_legacy tokenizer_sentencepiece_ignore_extra_whitespaces
            tokenizer_hf_no_use_fast tokenizer_hf_no_include_special_tokens trust_remote_code
            null_tokenizer_eod_id null_tokenizer_pad_id chat_template sft
            sft_tokenizer_prompt_format
        """,
        "megatron_anchor's: how documents are packed and what each sees; alone, all are causal": """
            attention_pattern anchor_token anchor_position anchor_first_token_loss packing
            document_length_schedule loss_weighting effective_context_alpha
            effective_context_gamma effective_context_tail
            document_alignment document_list domain_tags domain_tag_format interleave_chunks
            interleave_max_chunks interleave_min_chunk_length interleave_max_chunk_length
            balance_attention_work save_last save_last_every dump_bad_batch allow_model_change
        """,
        "process groups, memory, and the sharing of gradients": """
            distributed_backend distributed_timeout_minutes align_grad_reduce local_rank
            lazy_mpu_init use_megatron_fsdp use_torch_fsdp2 nccl_communicator_config_path
            use_tp_pp_dp_mapping use_gloo_process_groups use_sharp sharp_enabled_group
            high_priority_stream_groups distributed_timeout_seconds_after_init
            flight_recorder_dump_path flight_recorder_trace_buffer_size
            flight_recorder_dump_on_timeout flight_recorder_include_stack_trace
            flight_recorder_include_only_active flight_recorder_extra_dump_on_exec
            disable_jit_fuser model_parallel_size num_layers_per_virtual_pipeline_stage
            num_virtual_stages_per_pipeline_rank overlap_grad_reduce ddp_num_buckets
            ddp_bucket_size ddp_pad_buckets_for_high_nccl_busbw
            ddp_reduce_scatter_with_fp32_accumulation
            ddp_param_name_patterns_for_fp32_local_accumulation ddp_average_in_collective
            overlap_param_gather overlap_param_gather_with_optimizer_step align_param_gather
            use_distributed_optimizer use_layer_wise_param_layout nccl_ub
            disable_symmetric_registration fsdp_manual_registration create_all_gather_group
            data_parallel_sharding_strategy outer_dp_sharding_strategy
            gradient_reduce_div_fusion fsdp_double_buffer suggested_communication_unit_size
            keep_fp8_transpose_cache enable_full_sharding_in_hsdp
            num_distributed_optimizer_instances torch_fsdp2_reshard_after_forward
            fake_process_group tp_comm_overlap_cfg use_flash_attn te_rng_tracker
            recompute_activations checkpoint_activations deprecated_use_mcore_models
            empty_unused_memory_level manual_gc manual_gc_interval manual_gc_eval
        """,
        "what is saved and loaded": """
            save save_interval save_params_interval save_activations_interval
            save_tokens_per_expert_interval save_wgrads_interval save_dgrads_interval
            save_retain_interval load load_main_params_from_ckpt non_persistent_save_interval
            non_persistent_ckpt_type non_persistent_global_ckpt_dir
            non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo finetune
            pretrained_checkpoint ckpt_step use_checkpoint_args use_mp_args_from_checkpoint_args
            use_tokenizer_model_from_checkpoint_args exit_on_missing_checkpoint ckpt_format
            auto_detect_ckpt_format ckpt_convert_format ckpt_convert_save
            ckpt_convert_update_legacy_dist_opt_format ckpt_fully_parallel_save async_save
            async_strategy use_persistent_ckpt_worker async_ckpt_cpu_priority
            async_ckpt_io_priority async_ckpt_use_cpu_shm ckpt_fully_parallel_load
            ckpt_fully_parallel_load_exchange_algo ckpt_fully_parallel_save_process_group
            ckpt_fully_parallel_load_process_group ckpt_assume_constant_structure
            ckpt_load_validate_sharding_integrity strict_fsdp_dtensor_load dist_ckpt_strictness
            dist_ckpt_save_pre_mcore_014 dist_ckpt_optim_fully_reshardable
            distrib_optim_fully_reshardable_mem_efficient replication replication_jump
            replication_factor verify_integrity stream_ckpt_dequant no_save_optim no_save_rng
            no_load_optim no_load_rng override_ckpt_iteration use_dist_ckpt_deprecated
            dist_ckpt_format_deprecated dist_ckpt_workers ckpt_fully_parallel_save_deprecated
            enable_msc disable_msc_deprecated
        """,
        "failures and restarts": """
            adlr_autoresume adlr_autoresume_interval inprocess_restart inprocess_max_iterations
            inprocess_monitor_thread_interval inprocess_monitor_process_interval
            inprocess_progress_watchdog_interval inprocess_heartbeat_interval
            inprocess_soft_timeout inprocess_hard_timeout inprocess_heartbeat_timeout
            inprocess_barrier_timeout inprocess_completion_timeout inprocess_last_call_wait
            inprocess_termination_grace_time inprocess_granularity inprocess_active_world_size
            inprocess_empty_cuda_cache enable_ft_package calc_ft_timeouts ft_num_warmup_iters
            error_injection_rate error_injection_type rerun_mode check_for_spiky_loss
            fault_injector_ranks fault_injector_num_ranks fault_injector_fault_types
            fault_injector_fault_probabilities fault_injector_fault_delay
            fault_injector_delay_start_iteration fault_injector_mtti_seconds
            fault_injector_offset_seconds fault_injector_seed
        """,
        "logs and profiles": """
            profile profile_step_start profile_step_end use_pytorch_profiler
            pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack
            pytorch_profiler_collect_chakra profile_ranks record_memory_history
            memory_snapshot_path record_shapes nvtx_ranges log_interval log_params_norm
            log_throughput log_progress timing_log_level timing_log_option tensorboard_dir
            tensorboard_log_interval tensorboard_queue_size log_timers_to_tensorboard
            log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard
            log_memory_to_tensorboard log_memory_interval log_device_memory_used
            log_num_zeros_in_grad log_world_size_to_tensorboard wandb_project wandb_exp_name
            wandb_save_dir wandb_entity logging_level log_energy moe_routing_trace_path
            moe_routing_trace_max_training_iters moe_routing_trace_capture_logits
            moe_routing_trace_capture_hidden_states moe_routing_trace_dump_weights log_straggler
            straggler_ctrlr_port straggler_minmax_count disable_straggler_on_startup
            run_workload_inspector_server enable_one_logger one_logger_project
            one_logger_run_name one_logger_async app_tag_run_name app_tag_run_version
        """,
        "Megatron's own engine for generating text": """
            inference_batch_times_seqlen_threshold max_tokens_to_oom output_bert_embeddings
            bert_embedder_type cuda_graph_scope_deprecated use_legacy_static_engine
            inference_max_requests inference_max_seq_length inference_dynamic_batching
            inference_dynamic_batching_buffer_size_gb
            inference_dynamic_batching_paused_buffer_size_gb
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
            inference_logging_step_interval inference_text_gen_server_logging
            inference_wandb_logging inference_coordinator_port mamba_inference_conv_states_dtype
            mamba_inference_ssm_states_dtype inference_use_synchronous_zmq_collectives
            inference_disable_ep_consensus inference_shards
        """,
        "models of images and retrieval, which have no decoder of ours": """
            bert_binary_head ict_head_size biencoder_projection_dim
            biencoder_shared_query_context_model ict_load bert_load titles_data_path
            query_in_block_prob use_one_sent_docs evidence_data_path
            retriever_report_topk_accuracies retriever_score_scaling block_data_path
            embedding_path indexer_batch_size indexer_log_interval num_classes img_h img_w
            num_channels patch_dim classes_fraction data_per_class_fraction data_sharding
            head_lr_mult vision_pretraining vision_pretraining_type vision_backbone_type
            swin_backbone_type mask_type mask_factor iter_per_epoch dino_local_img_size
            dino_local_crops_number dino_head_hidden_size dino_bottleneck_size
            dino_freeze_last_layer dino_norm_last_layer dino_warmup_teacher_temp
            dino_teacher_temp dino_warmup_teacher_temp_epochs
        """,
        "what the run counted and found out by itself": """
            consumed_train_samples consumed_train_bins consumed_valid_samples
            skipped_train_samples data_parallel_size rank world_size iteration curr_iteration
            do_train do_valid do_test model_type num_floating_point_operations_so_far
            transformer_pipeline_model_parallel_size use_custom_fsdp use_dist_ckpt
            use_layer_wise_distributed_optimizer grpo_samples_per_iteration
            _is_global_batch_size_explicitly_specified
        """,
    }.items()
}
"""Reason to names."""
