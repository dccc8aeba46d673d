# SPDX-License-Identifier: Apache-2.0
"""Table of vLLM's settings that determine KV: each field of each configuration class.

A field that is not in any list counts in both formats: a setting that a later vLLM adds causes a
miss, never wrong output. Each excluded field has a reason why it cannot affect KV.
`tests/unit/test_namespace_fields.py` fails if a field of the installed vLLM is missing here.

Names that the installed vLLM does not have belong to other versions, 0.29 to 0.33.
"""

from collections.abc import Mapping

from kvhaven.identity.setting_tables import ConfigFields, Reasons

# Reasons that several classes share.
_AFTER = "it affects only the output, after KV is computed"
_API = "it affects only the interface to clients"
_ADDRESS = "an address, a port or an id, which differs between runs"
_DERIVED = "vLLM derives it from fields that count"
_LIMIT = "a limit on accepted requests, or on the work of a step"
_LOCATION = "the location of files, whose content counts"
_MEMORY = "amount or location of memory"
_OBSERVED = "it affects only logs, metrics, traces or profiles"
_START_UP = "it affects only loading, warm-up or shutdown"
_STATE = "the engine's state at run time"
_TIMES = "it determines when a token is computed, not its inputs"
_TOKENS = "it determines tokens, which are in the key"
# Reasons why fields do not count in the portable format.
_BACKEND = "choice of a kernel: in the portable format, KV of all kernels is interchangeable"
_COMPILED = "compilation of the model: in the portable format, its KV is interchangeable"
_DIVIDED = "distribution of the work: portable shards are whole heads"


CONFIG_FIELDS: Mapping[str, ConfigFields] = {
    "VllmConfig": ConfigFields(
        counts="""
            model_config cache_config parallel_config scheduler_config device_config load_config
            offload_config attention_config aux_output_config engram_config mamba_config
            kernel_config lora_config speculative_config watermark_config diffusion_config
            structured_outputs_config observability_config logging_config compilation_config
            profiler_config kv_transfer_config kv_events_config ec_transfer_config
            ec_manager_config reasoning_config watchdog_config additional_config
        """,
        paged={_COMPILED: "optimization_level performance_mode"},
        ignored={
            "derived from model_config.quantization, hf_config and files, which count": """
                quant_config
            """,
            _ADDRESS: "instance_id",
            _START_UP: "shutdown_timeout",
            "weights from a trainer start a new epoch": "weight_transfer_config",
        },
    ),
    "ModelConfig": ConfigFields(
        counts="""
            dtype hf_config hf_text_config quantization quantization_config
            model_class_overrides model_impl code_revision disable_sliding_window
            multimodal_config pooler_config hf_image_processor_config encoder_config
            attention_chunk_size runner_type convert_type _architecture
        """,
        ignored={
            "the files that it selects count": """
                model model_weights revision hf_config_path _hf_config_revision config_format
            """,
            "its effects are visible in hf_config": "config_updated",
            _DERIVED: """
                model_arch_config _model_info is_submodel_config
                word_embeddings_untied_by_checkpoint _pooler_config_sources
                _supports_multimodal_inputs_cache
            """,
            "runner_type and convert_type are the results": "runner convert",
            "it sets compilation_config.mode": "enforce_eager",
            "a limit on requests; the field max_model_len is added if the model depends on it": """
                max_model_len original_max_model_len spec_target_max_model_len
            """,
            "MultiModalConfig contains it, and the table of that class applies": """
                language_model_only limit_mm_per_prompt enable_mm_embeds media_io_kwargs
                mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type
                mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only
                mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype
                mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
                mm_encoder_fp8_scale_save_margin interleave_mm_strings skip_mm_profiling
                video_pruning_rate video_pruning_method mm_tensor_ipc mm_ipc_gpu_memory_gb
                mm_device_do_normalize mm_processor_device
            """,
            _TOKENS: "tokenizer_mode tokenizer_revision skip_tokenizer_init",
            "its files count if the model reads the tokenizer itself": "tokenizer",
            _AFTER: """
                seed logits_processors logprobs_mode max_logprobs return_sampling_mask
                use_fp64_gumbel enable_trace_replay enable_return_routed_experts
            """,
            _API: """
                served_model_name io_processor_plugin renderer_num_workers hf_token
                allowed_local_media_path allowed_media_domains
            """,
            "its effects are visible in hf_config, quantization and the files": """
                trust_remote_code allow_deprecated_quantization
            """,
            "requests with prompt embeddings are not cached": "enable_prompt_embeds",
            "it has no effect, as cascade attention was removed": "disable_cascade_attn",
            "sleep resets the cache": """
                enable_sleep_mode sleep_mode_backend sleep_mode_offload_cudagraph
                sleep_preserve_parameter_names
            """,
            _MEMORY: "enable_cumem_allocator enable_nccl_comm_suspend",
        },
        files={
            "its generation_config.json determines more than sampling": "generation_config",
            "its quantization_config_file; the rest is visible in hf_config": "hf_overrides",
        },
        partly={
            "defaults of sampling": """
                override_generation_config: temperature top_k top_p min_p max_new_tokens
                repetition_penalty presence_penalty frequency_penalty do_sample
            """,
        },
    ),
    "MultiModalConfig": ConfigFields(
        counts="""
            language_model_only media_io_kwargs mm_processor_kwargs mm_encoder_only
            mm_encoder_attn_dtype video_pruning_rate video_pruning_method
        """,
        paged={
            _BACKEND: "mm_encoder_attn_backend",
            _DIVIDED: "mm_encoder_tp_mode",
            "pixels are normalized on the host or on the device": "mm_device_do_normalize",
        },
        ignored={
            _LIMIT: "limit_per_prompt enable_mm_embeds allow_missing_mm_embeddings",
            _MEMORY: """
                mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb
                mm_tensor_ipc mm_ipc_gpu_memory_gb
            """,
            "hashes of different algorithms are never equal": "mm_hasher_algorithm",
            _TOKENS: "interleave_mm_strings",
            _START_UP: "skip_mm_profiling",
            "it affects only scales that depend on traffic, which are refused": """
                mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin
            """,
        },
        files={"the scales in it count": "mm_encoder_fp8_scale_path"},
    ),
    "CacheConfig": ConfigFields(
        counts="""
            cache_dtype kv_cache_dtype_skip_layers sliding_window kv_sharing_fast_prefill
            swa_bounded_replay mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode
            use_replayssm replayssm_buffer_len use_kda_recoverssm
        """,
        paged={
            "portable shards do not depend on blocks": """
                block_size mamba_block_size
            """,
        },
        ignored={
            _MEMORY: """
                gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override
                num_gpu_blocks num_cpu_blocks kv_cache_size_tokens kv_cache_max_concurrency
                kv_offloading_size kv_offloading_backend simple_cpu_offload_num_blocks
            """,
            "it affects only the engine's own prefix cache": """
                enable_prefix_caching prefix_caching_hash_algo prefix_match_unit
                prefix_cache_retention_interval hash_block_size cache_hit_alignment_tokens
                enable_mamba_shared_prefix_checkpoint enable_mamba_fine_grained_prefix_cache
            """,
            "the layout is read from the tensors": """
                kv_cache_layout mamba_page_size_padded skip_page_size_padded
                effective_attention_block_size
            """,
            _DERIVED: """
                is_attention_free user_specified_block_size user_specified_mamba_block_size
                _block_size_resolved
            """,
        },
        refused={"scales come from the engine's first request": "calculate_kv_scales"},
    ),
    "ParallelConfig": ConfigFields(
        counts="""
            decode_context_parallel_size prefill_context_parallel_size worker_extension_cls
        """,
        paged={
            _DIVIDED: """
                tensor_parallel_size enable_expert_parallel enable_hc_sp all2all_backend
                cp_kv_cache_interleave_size dcp_kv_cache_interleave_size dcp_comm_backend
                dcp_q_replicate disable_custom_all_reduce
            """,
            "each platform has its own worker class": "worker_cls sd_worker_cls",
        },
        ignored={
            "the field stages contains it": "pipeline_parallel_size",
            "replicas compute the same KV": """
                data_parallel_size data_parallel_size_local data_parallel_rank
                data_parallel_rank_local data_parallel_index data_parallel_backend
                data_parallel_external_lb data_parallel_hybrid_lb dp_sync_interval
                disable_nccl_for_dp_synchronization enable_elastic_ep elastic_ep_max_dp_size
            """,
            "copies of an expert compute the same at any place": """
                enable_eplb eplb_config expert_placement_strategy enable_ep_weight_filter
            """,
            "it differs between the ranks of an engine": """
                rank node_rank numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids
                _api_process_count _api_process_rank
            """,
            _ADDRESS: """
                data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port
                _data_parallel_master_port_list _coord_store_port master_addr master_port
            """,
            "start of processes and communication between them": """
                distributed_executor_backend nnodes ray_runtime_env placement_group
                ray_workers_use_nsight enable_shm_tensor_arena
                distributed_timeout_seconds cpu_distributed_timeout_seconds
                enable_fault_tolerance fault_tolerance_config
            """,
            _TIMES: """
                enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold
            """,
            _START_UP: "max_parallel_loading_workers",
            _AFTER: "enable_batch_sharded_sampling",
            _DERIVED: "world_size is_moe_model _allow_auto_resolve_cp_interleave_size",
        },
    ),
    "EPLBConfig": ConfigFields(
        ignored={
            "copies of an expert compute the same at any place": """
                window_size step_interval num_redundant_experts log_balancedness
                log_balancedness_interval use_async policy communicator enable_migration_batching
            """,
        },
    ),
    "FaultToleranceConfig": ConfigFields(
        ignored={"a timeout for recovery": "engine_recovery_timeout_sec"},
    ),
    "SchedulerConfig": ConfigFields(
        ignored={
            _LIMIT: """
                max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs
                max_num_queued_reqs max_num_queued_tokens max_num_encoder_input_tokens
                encoder_cache_size max_model_len watermark
            """,
            _TIMES: """
                long_prefill_token_threshold long_prefill_token_threshold_adaptive
                enable_chunked_prefill policy disable_chunked_mm_input scheduler_cls
                scheduler_reserve_full_isl prefill_schedule_interval async_scheduling
            """,
            _DERIVED: "runner_type is_multimodal_model is_encoder_decoder",
            "the layout is read from the tensors": "disable_hybrid_kv_cache_manager",
            _API: "stream_interval",
        },
    ),
    "DeviceConfig": ConfigFields(
        paged={"the portable format is shared between device types": "device_type"},
        ignored={"it differs between the ranks of an engine": "device"},
    ),
    "LoadConfig": ConfigFields(
        counts="load_format",
        ignored={
            _LOCATION: "download_dir",
            _START_UP: """
                safetensors_load_strategy safetensors_prefetch_num_threads
                safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location
            """,
            "it restricts downloads; the files that are present count": "ignore_patterns",
        },
        partly={
            "ways of reading; the content at tensorizer's locations counts": """
                model_loader_extra_config: enable_multithread_load num_threads concurrency
                memory_limit distributed enable_weights_track tensorizer_uri tensorizer_dir
                num_readers limit_cpu_concurrency verify_hash s3_access_key_id
                s3_secret_access_key s3_endpoint
            """,
        },
    ),
    "OffloadConfig": ConfigFields(
        ignored={"location of weights, not their content": "offload_backend uva prefetch"}
    ),
    "UVAOffloadConfig": ConfigFields(
        ignored={"location of weights, not their content": "cpu_offload_gb cpu_offload_params"}
    ),
    "PrefetchOffloadConfig": ConfigFields(
        ignored={
            "location of weights, not their content": """
                offload_group_size offload_num_in_group offload_prefetch_step offload_params
            """,
        },
    ),
    "EngramConfig": ConfigFields(
        ignored={
            "location of embedding tables, not their content": """
                cpu_offload embedding_across_dp dp_shared_memory use_thp
            """,
        },
    ),
    "AttentionConfig": ConfigFields(
        counts="""
            indexer_kv_dtype use_fp4_indexer_cache use_non_causal disable_flashinfer_q_quantization
            use_prefill_query_quantization hisparse_config
        """,
        paged={
            _BACKEND: """
                backend backend_per_kind flash_attn_version use_trtllm_attention
                mla_prefill_backend minimax_m3_msa_decode_backend sparse_mla_force_mqa
                indexer_sparse_logits flex_attn_block_m flex_attn_block_n flex_attn_q_block_size
                flex_attn_kv_block_size tokenspeed_mla_min_split_kv indexer_tp_shard_min_rows
                minimax_m3_indexer_cp trtllm_ragged_backend
                flash_attn_max_num_splits_for_cuda_graph tq_max_kv_splits_for_cuda_graph
            """,
        },
        ignored={_MEMORY: "sparse_mla_prefill_workspace_factor"},
    ),
    "HiSparseConfig": ConfigFields(
        ignored={_MEMORY: "device_buffer_size"},
        counts="eager_host_mirror",
    ),
    "KernelConfig": ConfigFields(
        paged={
            _BACKEND: """
                ir_op_priority moe_backend linear_backend linear_backend_per_quant
                sparse_indexer_topk_backend enable_bf16x3_router_gemm monokernel
            """,
        },
        ignored={
            _START_UP: """
                enable_flashinfer_autotune enable_rocm_segmented_attn_autotune
                enable_cutedsl_warmup enable_jit_warmup
            """,
        },
    ),
    "IrOpPriorityConfig": ConfigFields(
        paged={_BACKEND: "rms_norm fused_add_rms_norm gelu_and_mul_sparse"},
    ),
    "MambaConfig": ConfigFields(
        counts="enable_stochastic_rounding stochastic_rounding_philox_rounds",
        paged={_BACKEND: "backend ssu_algorithm"},
    ),
    "LoRAConfig": ConfigFields(
        counts="""
            lora_dtype target_modules enable_tower_connector_lora enable_moe_shared_loras
        """,
        paged={_DIVIDED: "fully_sharded_loras", _BACKEND: "enable_mixed_moe_lora_format"},
        ignored={
            "limits on adapters": "max_lora_rank max_loras max_cpu_loras",
            "requests get it as their adapter, which is in the key": "default_mm_loras",
            "choice of captured graphs": "specialize_active_lora",
            _AFTER: "max_lora_cls_labels",
        },
    ),
    "SpeculativeConfig": ConfigFields(
        counts="""
            method draft_model_config draft_load_config quantization kv_cache_dtype
            num_speculative_tokens parallel_drafting index_share_for_mtp_iteration
            use_heterogeneous_vocab draft_lm_head_quantization
        """,
        paged={
            _BACKEND: "moe_backend attention_backend",
            _DIVIDED: "draft_tensor_parallel_size",
        },
        ignored={
            "the files that it selects count": "model revision code_revision",
            "configuration of the engine, which counts elsewhere": """
                target_model_config target_parallel_config draft_parallel_config
            """,
            _LIMIT: "max_model_len num_speculative_tokens_per_batch_size",
            "it sets compilation_config.mode": "enforce_eager",
            "it has no effect; draft_tensor_parallel_size is used": "tensor_parallel_size",
            "it determines proposals and their acceptance, not the KV of a token": """
                disable_padded_drafter_batch disable_eagle_block_drop use_local_argmax_reduction
                prompt_lookup_max prompt_lookup_min suffix_decoding_max_tree_depth
                suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
                suffix_decoding_min_token_prob rejection_sample_method synthetic_acceptance_rates
                synthetic_acceptance_length enable_adaptive_verification draft_sample_method
                dspark_draft_topk disable_lookahead_block_hashes fly_entropy_threshold
                fly_entropy_top_k fly_window_size xpress_topc
            """,
        },
    ),
    "DiffusionConfig": ConfigFields(counts="canvas_length max_denoising_steps"),
    "CompilationConfig": ConfigFields(
        paged={
            _COMPILED: """
                mode backend custom_ops ir_enable_torch_wrap splitting_ops compile_mm_encoder
                inductor_compile_config inductor_passes use_inductor_graph_partition pass_config
                dynamic_shapes_config fast_moe_cold_start
            """,
        },
        ignored={
            "location of the compiler's files": """
                debug_dump_path cache_dir compile_cache_save_format local_cache_dir
            """,
            "sizes that are compiled or captured, which depend on the scheduler's limits": """
                compile_sizes compile_ranges_endpoints cudagraph_mode cudagraph_num_of_warmups
                cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_specialize_lora
                max_cudagraph_capture_size cudagraph_mm_encoder encoder_cudagraph_token_budgets
                encoder_cudagraph_max_vision_items_per_batch
                encoder_cudagraph_max_frames_per_batch cudagraph_decoder_replay
                decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold
            """,
            _STATE: """
                enabled_custom_ops disabled_custom_ops traced_files compilation_time
                encoder_compilation_time static_forward_context static_all_moe_layers
            """,
        },
    ),
    "PassConfig": ConfigFields(
        paged={
            _COMPILED: """
                fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops fuse_allreduce_rms
                enable_qk_norm_rope_fusion fuse_rope_kvcache_cat_mla fuse_act_padding
                fuse_mla_dual_rms_norm fuse_rope_kvcache fuse_qk_norm_rope_kvcache
                rope_kvcache_fusion_max_token_num fi_allreduce_fusion_max_size_mb
                enable_sp fuse_gemm_comms sp_min_token_num
            """,
        },
    ),
    "DynamicShapesConfig": ConfigFields(
        paged={_COMPILED: "type evaluate_guards assume_32_bit_indexing"},
    ),
    "QuantizationConfigArgs": ConfigFields(counts="linear moe ignore targets"),
    "QuantSpec": ConfigFields(counts="weight activation"),
    "ECTransferConfig": ConfigFields(
        counts="ec_connector ec_role ec_connector_extra_config ec_connector_module_path",
        ignored={
            _ADDRESS: "engine_id ec_ip ec_port ec_rank ec_parallel_size",
            _MEMORY: "ec_buffer_device ec_buffer_size",
            _DERIVED: "mm_encoder_output_widths",
        },
    ),
    "EncoderCacheManagerConfig": ConfigFields(
        ignored={"it caches the encoder's output": "encoder_cache_manager_cls manager_config"},
    ),
    "KVTransferConfig": ConfigFields(
        ignored={
            "transfer of KV, not its content; the layout is read from the tensors": """
                kv_connector kv_role kv_connector_extra_config kv_connector_module_path
                enable_permute_local_kv kv_load_failure_policy kv_buffer_device kv_buffer_size
            """,
            _ADDRESS: "engine_id kv_ip kv_port kv_rank kv_parallel_size",
        },
    ),
    "KVEventsConfig": ConfigFields(
        ignored={
            _OBSERVED: """
                enable_kv_cache_events publisher endpoint replay_endpoint buffer_steps hwm
                max_queue_size topic
            """,
        },
    ),
    "PoolerConfig": ConfigFields(
        ignored={
            _AFTER: """
                task pooling_type seq_pooling_type tok_pooling_type use_activation
                enable_flash_late_interaction dimensions logit_mean logit_sigma step_tag_id
                returned_token_ids
            """,
            _LIMIT: "enable_chunked_processing max_embed_len",
        },
    ),
    "AuxOutputConfig": ConfigFields(
        ignored={_AFTER: "enable_return_routed_experts", _MEMORY: "max_bytes"}
    ),
    "StructuredOutputsConfig": ConfigFields(
        ignored={
            _AFTER: """
                backend disable_any_whitespace disable_additional_properties reasoning_parser
                reasoning_parser_plugin enable_in_reasoning
            """,
        },
    ),
    "ReasoningConfig": ConfigFields(
        ignored={
            _AFTER: """
                reasoning_parser reasoning_start_str reasoning_end_str _reasoning_start_token_ids
                _reasoning_end_token_ids _natural_reasoning_end_token_ids _enabled
            """,
        },
    ),
    "WatermarkConfig": ConfigFields(
        ignored={
            _AFTER: """
                key algorithm alpha context_width deduplicate_contexts
                deduplicate_contexts_max_history prf allow_target_only_watermarking
            """,
        },
    ),
    "LoggingConfig": ConfigFields(
        ignored={_OBSERVED: "log_level formatter configure_logging pylogging_config_file"}
    ),
    "ObservabilityConfig": ConfigFields(
        ignored={
            _OBSERVED: """
                show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces
                per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample
                custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing
                enable_mfu_metrics enable_mm_processor_stats enable_logging_iteration_details
                jit_monitor_mode jit_monitor_verbose
            """,
        },
    ),
    "ProfilerConfig": ConfigFields(
        ignored={
            _OBSERVED: """
                profiler torch_profiler_dir torch_profiler_activities torch_profiler_with_stack
                torch_profiler_with_flops torch_profiler_use_gzip
                torch_profiler_dump_cuda_time_total torch_profiler_record_shapes
                torch_profiler_with_memory proton_profiler_dir proton_context proton_data
                proton_backend proton_mode proton_hook proton_output_format
                proton_graph_attribution capture_torch_profiler detailed_trace_annotation
                ignore_frontend delay_iterations max_iterations warmup_iterations
                active_iterations wait_iterations
            """,
        },
    ),
    "WatchdogConfig": ConfigFields(ignored={_OBSERVED: "check_interval dump_dir timeout"}),
}

UNREACHED_CLASSES: Reasons = {
    "only the ignored field model_arch_config contains it": "ModelArchitectureConfig",
    "only the ignored field limit_per_prompt contains it": """
        BaseDummyOptions VideoDummyOptions ImageDummyOptions AudioDummyOptions
    """,
    "it belongs to a request or to a model's code, not to VllmConfig": """
        Range SpeechToTextParams SpeechToTextConfig
    """,
    "only the ignored field weight_transfer_config contains it": "WeightTransferConfig",
}
"""Classes of `vllm.config` whose fields need no treatment, by reason."""

NO_DRAFT_KV = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
"""Methods of speculation without their own KV: they do not change the namespace."""
