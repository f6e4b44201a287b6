# SPDX-License-Identifier: Apache-2.0
"""Fields of vLLM's configuration of the model, its adapters and its drafter."""

from .decision import Decision, counts, elsewhere, like, same

MODEL: dict[str, Decision] = {
    "model_config.model": elsewhere("model: identity of the weights"),
    "model_config.model_weights": elsewhere("model: identity of the weights"),
    "model_config.revision": elsewhere("model: identity of the weights"),
    "model_config.hf_config_path": elsewhere("model: identity of the files that configure it"),
    "model_config.code_revision": elsewhere("model: the commit of remote code"),
    "model_config.runner": counts("selects the layers and masks that a checkpoint is run with"),
    "model_config.convert": counts("selects the layers and masks that a checkpoint is run with"),
    "model_config.model_impl": counts("selects the layers and masks that a checkpoint is run with"),
    "model_config.model_class_overrides": counts(
        "selects the layers and masks that a checkpoint is run with"
    ),
    "model_config.is_submodel_config": counts("selects the layers and masks that a checkpoint is run with"),
    "model_config.dtype": counts("computation and cache precision"),
    "model_config.hf_config": counts("the resolved model configuration, as a digest"),
    "model_config.hf_text_config": counts("the resolved model configuration, as a digest"),
    "model_config.hf_overrides": counts("replaces values of the model configuration"),
    "model_config.quantization": counts("weight and activation precision"),
    "model_config.quantization_config": counts("weight and activation precision"),
    "model_config.trust_remote_code": counts("selects code from the repository instead of vLLM's"),
    "model_config.disable_sliding_window": counts("turns sliding windows into full attention"),
    "model_config.max_model_len": counts(
        "selects the rotation or scaling of positions in some models (see resolved_settings.py)"
    ),
    "model_config.spec_target_max_model_len": same("limits drafts, which the target model verifies"),
    "model_config.word_embeddings_untied_by_checkpoint": same(
        "derived from the checkpoint, which the model identity covers"
    ),
    "model_config.tokenizer": same("keys are hashes of token ids, not of text"),
    "model_config.tokenizer_mode": same("keys are hashes of token ids, not of text"),
    "model_config.tokenizer_revision": same("keys are hashes of token ids, not of text"),
    "model_config.skip_tokenizer_init": same("keys are hashes of token ids, not of text"),
    "model_config.config_format": same("format of the configuration file; hf_config holds the result"),
    "model_config.seed": same("sampling and output, after the last layer"),
    "model_config.max_logprobs": same("sampling and output, after the last layer"),
    "model_config.logprobs_mode": same("sampling and output, after the last layer"),
    "model_config.use_fp64_gumbel": same("sampling and output, after the last layer"),
    "model_config.return_sampling_mask": same("sampling and output, after the last layer"),
    "model_config.logits_processors": same("sampling and output, after the last layer"),
    "model_config.generation_config": same("sampling and output, after the last layer"),
    "model_config.override_generation_config": same("sampling and output, after the last layer"),
    "model_config.pooler_config": same("sampling and output, after the last layer"),
    "model_config.hf_token": same("credentials and permissions for what a request may fetch"),
    "model_config.allowed_local_media_path": same("credentials and permissions for what a request may fetch"),
    "model_config.allowed_media_domains": same("credentials and permissions for what a request may fetch"),
    "model_config.allow_deprecated_quantization": same("permits a method; quantization names it"),
    "model_config.enforce_eager": same("how kernels are launched"),
    "model_config.disable_cascade_attn": same("how kernels are launched"),
    "model_config.enable_trace_replay": same("records or replays traces of requests"),
    "model_config.enable_prompt_embeds": same("embeddings of a prompt are part of its keys"),
    "model_config.served_model_name": same("a label"),
    "model_config.enable_sleep_mode": same("where weights and memory are while the server sleeps"),
    "model_config.sleep_preserve_parameter_names": same(
        "where weights and memory are while the server sleeps"
    ),
    "model_config.sleep_mode_backend": same("where weights and memory are while the server sleeps"),
    "model_config.sleep_mode_offload_cudagraph": same("where weights and memory are while the server sleeps"),
    "model_config.enable_nccl_comm_suspend": same("where weights and memory are while the server sleeps"),
    "model_config.enable_cumem_allocator": same("where weights and memory are while the server sleeps"),
    "model_config.io_processor_plugin": same("turns requests into prompts, which the keys cover"),
    "model_config.renderer_num_workers": same("turns requests into prompts, which the keys cover"),
    "model_config.multimodal_config.mm_processor_kwargs": counts(
        "how images, audio and video become model inputs; not in the keys"
    ),
    "model_config.multimodal_config.media_io_kwargs": counts(
        "how images, audio and video become model inputs; not in the keys"
    ),
    "model_config.multimodal_config.mm_device_do_normalize": counts(
        "how images, audio and video become model inputs; not in the keys"
    ),
    "model_config.multimodal_config.video_pruning_rate": counts("which encoder outputs reach the model"),
    "model_config.multimodal_config.video_pruning_method": counts("which encoder outputs reach the model"),
    "model_config.multimodal_config.allow_missing_mm_embeddings": counts(
        "which encoder outputs reach the model"
    ),
    "model_config.multimodal_config.mm_encoder_only": counts("which encoder outputs reach the model"),
    "model_config.multimodal_config.mm_encoder_attn_dtype": counts("encoder precision"),
    "model_config.multimodal_config.mm_encoder_fp8_scale_path": counts("encoder precision"),
    "model_config.multimodal_config.mm_encoder_fp8_scale_save_margin": counts("encoder precision"),
    "model_config.multimodal_config.language_model_only": same(
        "which media are accepted; accepted media are in the keys"
    ),
    "model_config.multimodal_config.limit_per_prompt": same(
        "which media are accepted; accepted media are in the keys"
    ),
    "model_config.multimodal_config.enable_mm_embeds": same(
        "which media are accepted; accepted media are in the keys"
    ),
    "model_config.multimodal_config.mm_hasher_algorithm": same("its digests differ, so keys do"),
    "model_config.multimodal_config.mm_processor_cache_gb": same(
        "size and place of a cache in the front end (0 is refused without prefix caching)"
    ),
    "model_config.multimodal_config.mm_processor_cache_type": same(
        "size and place of a cache in the front end (0 is refused without prefix caching)"
    ),
    "model_config.multimodal_config.mm_shm_cache_max_object_size_mb": same(
        "size and place of a cache in the front end (0 is refused without prefix caching)"
    ),
    "model_config.multimodal_config.mm_tensor_ipc": same(
        "size and place of a cache in the front end (0 is refused without prefix caching)"
    ),
    "model_config.multimodal_config.mm_ipc_gpu_memory_gb": same(
        "size and place of a cache in the front end (0 is refused without prefix caching)"
    ),
    "model_config.multimodal_config.mm_encoder_tp_mode": same(
        "how encoder kernels are launched or split between ranks"
    ),
    "model_config.multimodal_config.mm_encoder_attn_backend": same(
        "how encoder kernels are launched or split between ranks"
    ),
    "model_config.multimodal_config.mm_encoder_fp8_scale_save_path": same("a file that is written"),
    "model_config.multimodal_config.interleave_mm_strings": same(
        "position of placeholders in the prompt, whose tokens are in the keys"
    ),
    "model_config.multimodal_config.skip_mm_profiling": same("measures memory at start"),
    "quant_config": elsewhere(
        "model_config.hf_config, quantization and quantization_config: derived from them"
    ),
    "load_config.load_format": counts(
        "dummy weights have the name of real ones, and formats differ in the files that they read; omitted "
        "where it selects only how fast one set of safetensors files is read (resolved_settings)"
    ),
    "load_config.model_loader_extra_config": counts("selects weights: adapters and subsets of files"),
    "load_config.ignore_patterns": counts("selects weights: adapters and subsets of files"),
    "load_config.download_dir": elsewhere("model: identity of the weights"),
    "load_config.safetensors_load_strategy": same("speed and device of loading"),
    "load_config.safetensors_prefetch_num_threads": same("speed and device of loading"),
    "load_config.safetensors_prefetch_block_size": same("speed and device of loading"),
    "load_config.device": same("speed and device of loading"),
    "load_config.use_tqdm_on_load": same("speed and device of loading"),
    "load_config.pt_load_map_location": same("speed and device of loading"),
    "lora_config.lora_dtype": counts(
        "adapter precision and the modules it applies to; keys hold its name only"
    ),
    "lora_config.target_modules": counts(
        "adapter precision and the modules it applies to; keys hold its name only"
    ),
    "lora_config.default_mm_loras": elsewhere("model.adapters: identity of adapters that no request names"),
    "lora_config.enable_tower_connector_lora": counts(
        "adapter precision and the modules it applies to; keys hold its name only"
    ),
    "lora_config.enable_mixed_moe_lora_format": counts(
        "adapter precision and the modules it applies to; keys hold its name only"
    ),
    "lora_config.enable_moe_shared_loras": counts(
        "adapter precision and the modules it applies to; keys hold its name only"
    ),
    "lora_config.max_lora_rank": same("capacity for adapters"),
    "lora_config.max_loras": same("capacity for adapters"),
    "lora_config.max_cpu_loras": same("capacity for adapters"),
    "lora_config.max_lora_cls_labels": same("capacity for adapters"),
    "lora_config.fully_sharded_loras": same("how adapters are split between ranks and launched"),
    "lora_config.specialize_active_lora": same("how adapters are split between ranks and launched"),
    "speculative_config.model": elsewhere("model.draft: identity of the draft weights"),
    "speculative_config.revision": elsewhere("model.draft: identity of the draft weights"),
    "speculative_config.method": counts("layers of a drafter have blocks in the cache"),
    "speculative_config.quantization": counts("layers of a drafter have blocks in the cache"),
    "speculative_config.moe_backend": counts("layers of a drafter have blocks in the cache"),
    "speculative_config.kv_cache_dtype": counts("layers of a drafter have blocks in the cache"),
    "speculative_config.code_revision": counts("layers of a drafter have blocks in the cache"),
    "speculative_config.index_share_for_mtp_iteration": counts(
        "layers of a drafter have blocks in the cache"
    ),
    "speculative_config.parallel_drafting": counts("layers of a drafter have blocks in the cache"),
    "speculative_config.draft_tensor_parallel_size": counts("layers of a drafter have blocks in the cache"),
    "speculative_config.tensor_parallel_size": counts("layers of a drafter have blocks in the cache"),
    "speculative_config.max_model_len": counts("layers of a drafter have blocks in the cache"),
    "speculative_config.draft_load_config": like("load_config", "how the drafter's weights are read"),
    "speculative_config.draft_model_config": like("model_config", "the drafter, like the model"),
    "speculative_config.attention_backend": elsewhere("settings.backends"),
    "speculative_config.target_model_config": same("the model's own configurations"),
    "speculative_config.target_parallel_config": same("the model's own configurations"),
    "speculative_config.draft_parallel_config": same("the model's own configurations"),
    "speculative_config.enforce_eager": same("how kernels are launched"),
    "speculative_config.disable_padded_drafter_batch": same("how kernels are launched"),
    "speculative_config.use_local_argmax_reduction": same("how kernels are launched"),
    "speculative_config.num_speculative_tokens": same(
        "how many tokens are drafted and accepted: the target model verifies them"
    ),
    "speculative_config.num_speculative_tokens_per_batch_size": same(
        "how many tokens are drafted and accepted: the target model verifies them"
    ),
    "speculative_config.prompt_lookup_max": same(
        "how many tokens are drafted and accepted: the target model verifies them"
    ),
    "speculative_config.prompt_lookup_min": same(
        "how many tokens are drafted and accepted: the target model verifies them"
    ),
    "speculative_config.suffix_decoding_max_tree_depth": same(
        "how many tokens are drafted and accepted: the target model verifies them"
    ),
    "speculative_config.suffix_decoding_max_cached_requests": same(
        "how many tokens are drafted and accepted: the target model verifies them"
    ),
    "speculative_config.suffix_decoding_max_spec_factor": same(
        "how many tokens are drafted and accepted: the target model verifies them"
    ),
    "speculative_config.suffix_decoding_min_token_prob": same(
        "how many tokens are drafted and accepted: the target model verifies them"
    ),
    "speculative_config.rejection_sample_method": same(
        "how many tokens are drafted and accepted: the target model verifies them"
    ),
    "speculative_config.synthetic_acceptance_rates": same(
        "how many tokens are drafted and accepted: the target model verifies them"
    ),
    "speculative_config.synthetic_acceptance_length": same(
        "how many tokens are drafted and accepted: the target model verifies them"
    ),
    "speculative_config.enable_adaptive_verification": same(
        "how many tokens are drafted and accepted: the target model verifies them"
    ),
    "speculative_config.draft_sample_method": same(
        "how many tokens are drafted and accepted: the target model verifies them"
    ),
    "speculative_config.dspark_draft_topk": same(
        "how many tokens are drafted and accepted: the target model verifies them"
    ),
    "speculative_config.use_heterogeneous_vocab": same(
        "how many tokens are drafted and accepted: the target model verifies them"
    ),
    "speculative_config.draft_lm_head_quantization": same(
        "how many tokens are drafted and accepted: the target model verifies them"
    ),
    "speculative_config.xpress_topc": same(
        "how many tokens are drafted and accepted: the target model verifies them"
    ),
    "speculative_config.fly_window_size": same(
        "how many tokens are drafted and accepted: the target model verifies them"
    ),
    "speculative_config.fly_entropy_threshold": same(
        "how many tokens are drafted and accepted: the target model verifies them"
    ),
    "speculative_config.fly_entropy_top_k": same(
        "how many tokens are drafted and accepted: the target model verifies them"
    ),
    "speculative_config.disable_eagle_block_drop": same(
        "which blocks are kept or hashed, not what they hold"
    ),
    "speculative_config.disable_lookahead_block_hashes": same(
        "which blocks are kept or hashed, not what they hold"
    ),
}
