# SPDX-License-Identifier: Apache-2.0
"""Fields of vLLM's configuration of the cache, attention, states, kernels and connectors."""

from .decision import Decision, counts, elsewhere, same

CACHE: dict[str, Decision] = {
    "cache_config.block_size": elsewhere("groups: tokens_per_block"),
    "cache_config.mamba_block_size": elsewhere("groups: tokens_per_block"),
    "cache_config.kv_cache_layout": elsewhere("kv_cache_layout"),
    "cache_config.prefix_match_unit": elsewhere("tokens_per_hash"),
    "cache_config.hash_block_size": elsewhere("tokens_per_hash"),
    "cache_config.prefix_caching_hash_algo": elsewhere("hash_algorithm"),
    "cache_config.mamba_page_size_padded": elsewhere("groups: shard_bytes"),
    "cache_config.skip_page_size_padded": elsewhere("groups: shard_bytes"),
    "cache_config.sliding_window": elsewhere("model_config.hf_text_config"),
    "cache_config.cache_dtype": counts("encoding of K and V"),
    "cache_config.kv_cache_dtype_skip_layers": counts("encoding of K and V"),
    "cache_config.mamba_cache_dtype": counts("encoding of states"),
    "cache_config.mamba_ssm_cache_dtype": counts("encoding of states"),
    "cache_config.mamba_cache_mode": counts("which states a block holds"),
    "cache_config.use_replayssm": counts("which states a block holds"),
    "cache_config.replayssm_buffer_len": counts("which states a block holds"),
    "cache_config.use_kda_recoverssm": counts("which states a block holds"),
    "cache_config.kv_sharing_fast_prefill": counts("leaves out or approximates parts of the computation"),
    "cache_config.swa_bounded_replay": counts("leaves out or approximates parts of the computation"),
    "cache_config.gpu_memory_utilization": same("size of the device cache, and what is derived from it"),
    "cache_config.num_gpu_blocks_override": same("size of the device cache, and what is derived from it"),
    "cache_config.num_gpu_blocks": same("size of the device cache, and what is derived from it"),
    "cache_config.num_cpu_blocks": same("size of the device cache, and what is derived from it"),
    "cache_config.kv_cache_size_tokens": same("size of the device cache, and what is derived from it"),
    "cache_config.kv_cache_max_concurrency": same("size of the device cache, and what is derived from it"),
    "cache_config.kv_cache_memory_bytes": same("size of the device cache, and what is derived from it"),
    "cache_config.effective_attention_block_size": same(
        "size of the device cache, and what is derived from it"
    ),
    "cache_config.simple_cpu_offload_num_blocks": same(
        "size of the device cache, and what is derived from it"
    ),
    "cache_config.user_specified_block_size": same("how a size was chosen; the size itself is in groups"),
    "cache_config.user_specified_mamba_block_size": same(
        "how a size was chosen; the size itself is in groups"
    ),
    "cache_config._block_size_resolved": same("how a size was chosen; the size itself is in groups"),
    "cache_config.is_attention_free": same("derived from the model"),
    "cache_config.enable_prefix_caching": same("which blocks are looked for and kept, not what they hold"),
    "cache_config.prefix_cache_retention_interval": same(
        "which blocks are looked for and kept, not what they hold"
    ),
    "cache_config.enable_mamba_shared_prefix_checkpoint": same(
        "which blocks are looked for and kept, not what they hold"
    ),
    "cache_config.cache_hit_alignment_tokens": same(
        "which blocks are looked for and kept, not what they hold"
    ),
    "cache_config.kv_offloading_size": same("makes a kv_transfer_config"),
    "cache_config.kv_offloading_backend": same("makes a kv_transfer_config"),
    "attention_config.backend": elsewhere("settings.backends: the backend of each layer"),
    "attention_config.backend_per_kind": elsewhere("settings.backends: the backend of each layer"),
    "attention_config.disable_flashinfer_q_quantization": counts("precision of queries or of the index"),
    "attention_config.use_prefill_query_quantization": counts("precision of queries or of the index"),
    "attention_config.indexer_kv_dtype": counts("precision of queries or of the index"),
    "attention_config.indexer_sparse_logits": counts("precision of queries or of the index"),
    "attention_config.hisparse_config": counts("layout or contents of pages"),
    "attention_config.hisparse_config.device_buffer_size": counts("layout or contents of pages"),
    "attention_config.hisparse_config.eager_host_mirror": counts("layout or contents of pages"),
    "attention_config.use_non_causal": counts("the mask"),
    "attention_config.flash_attn_version": counts("selects a kernel that may expect pages of its own"),
    "attention_config.use_trtllm_attention": counts("selects a kernel that may expect pages of its own"),
    "attention_config.mla_prefill_backend": counts("selects a kernel that may expect pages of its own"),
    "attention_config.sparse_mla_force_mqa": counts("selects a kernel that may expect pages of its own"),
    "attention_config.minimax_m3_msa_decode_backend": counts(
        "selects a kernel that may expect pages of its own"
    ),
    "attention_config.trtllm_ragged_backend": counts("selects a kernel that may expect pages of its own"),
    "attention_config.flash_attn_max_num_splits_for_cuda_graph": same(
        "kernel tile sizes, splits and workspaces"
    ),
    "attention_config.tokenspeed_mla_min_split_kv": same("kernel tile sizes, splits and workspaces"),
    "attention_config.tq_max_kv_splits_for_cuda_graph": same("kernel tile sizes, splits and workspaces"),
    "attention_config.sparse_mla_prefill_workspace_factor": same("kernel tile sizes, splits and workspaces"),
    "attention_config.flex_attn_block_m": same("kernel tile sizes, splits and workspaces"),
    "attention_config.flex_attn_block_n": same("kernel tile sizes, splits and workspaces"),
    "attention_config.flex_attn_q_block_size": same("kernel tile sizes, splits and workspaces"),
    "attention_config.flex_attn_kv_block_size": same("kernel tile sizes, splits and workspaces"),
    "attention_config.indexer_tp_shard_min_rows": same("how work is split between ranks"),
    "attention_config.minimax_m3_indexer_cp": same("how work is split between ranks"),
    "mamba_config.backend": counts("state layout and rounding"),
    "mamba_config.enable_stochastic_rounding": counts("state layout and rounding"),
    "mamba_config.stochastic_rounding_philox_rounds": counts("state layout and rounding"),
    "mamba_config.ssu_algorithm": counts("state layout and rounding"),
    "diffusion_config.canvas_length": counts("how many tokens are computed together, and how often"),
    "diffusion_config.max_denoising_steps": counts("how many tokens are computed together, and how often"),
    "kernel_config.moe_backend": counts("precision of activations differs between these backends"),
    "kernel_config.linear_backend": counts("precision of activations differs between these backends"),
    "kernel_config.linear_backend_per_quant": counts(
        "precision of activations differs between these backends"
    ),
    "kernel_config.monokernel": counts("kernels that vLLM does not call equivalent"),
    "kernel_config.sparse_indexer_topk_backend": counts("selects which entries of an index are attended to"),
    "kernel_config.ir_op_priority": same("order of equivalent kernels"),
    "kernel_config.ir_op_priority.rms_norm": same("order of equivalent kernels"),
    "kernel_config.ir_op_priority.fused_add_rms_norm": same("order of equivalent kernels"),
    "kernel_config.ir_op_priority.gelu_and_mul_sparse": same("order of equivalent kernels"),
    "kernel_config.enable_flashinfer_autotune": same("kernel tuning and warm-up"),
    "kernel_config.enable_rocm_segmented_attn_autotune": same("kernel tuning and warm-up"),
    "kernel_config.enable_cutedsl_warmup": same("kernel tuning and warm-up"),
    "kernel_config.enable_jit_warmup": same("kernel tuning and warm-up"),
    "kv_transfer_config.enable_permute_local_kv": counts("changes the order of axes in the cache"),
    "kv_transfer_config.kv_connector_extra_config": elsewhere(
        "blocks_per_chunk, canonical_layout and model_id; other keys choose sizes and places"
    ),
    "kv_transfer_config.kv_connector": same("name and place of the connector"),
    "kv_transfer_config.kv_connector_module_path": same("name and place of the connector"),
    "kv_transfer_config.kv_role": same("name and place of the connector"),
    "kv_transfer_config.engine_id": same("name and place of the connector"),
    "kv_transfer_config.kv_port": same("name and place of the connector"),
    "kv_transfer_config.kv_ip": same("name and place of the connector"),
    "kv_transfer_config.kv_rank": same("name and place of the connector"),
    "kv_transfer_config.kv_parallel_size": same("name and place of the connector"),
    "kv_transfer_config.kv_buffer_device": same("name and place of the connector"),
    "kv_transfer_config.kv_buffer_size": same("name and place of the connector"),
    "kv_transfer_config.kv_load_failure_policy": same("what happens after a failed load"),
    "ec_transfer_config.ec_connector": counts("encoder outputs come from other servers"),
    "ec_transfer_config.ec_connector_module_path": counts("encoder outputs come from other servers"),
    "ec_transfer_config.engine_id": same("name and place of the connector"),
    "ec_transfer_config.ec_buffer_device": same("name and place of the connector"),
    "ec_transfer_config.ec_buffer_size": same("name and place of the connector"),
    "ec_transfer_config.ec_role": same("name and place of the connector"),
    "ec_transfer_config.ec_ip": same("name and place of the connector"),
    "ec_transfer_config.ec_port": same("name and place of the connector"),
    "ec_transfer_config.ec_rank": same("name and place of the connector"),
    "ec_transfer_config.ec_parallel_size": same("name and place of the connector"),
    "ec_transfer_config.ec_connector_extra_config": same("name and place of the connector"),
    "ec_transfer_config.mm_encoder_output_widths": same("derived from the model"),
}
