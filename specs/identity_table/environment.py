# SPDX-License-Identifier: Apache-2.0
"""Environment variables of vllm/envs.py."""

from .decision import Decision, counts, elsewhere, same

VLLM_VARIABLES: dict[str, Decision] = {
    "VLLM_SSM_CONV_STATE_LAYOUT": counts("order of axes in convolution states"),
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": counts("order of elements in ROCm cache pages"),
    "VLLM_KV_CACHE_LAYOUT": elsewhere("kv_cache_layout"),
    "VLLM_TARGET_DEVICE": elsewhere("settings.device"),
    "VLLM_USE_MODELSCOPE": elsewhere("model: identity of the weights"),
    "VLLM_MODEL_REDIRECT_PATH": elsewhere("model: identity of the weights"),
    "VLLM_TEST_FORCE_LOAD_FORMAT": elsewhere("settings.load_config.load_format"),
    "VLLM_USE_DEEP_GEMM_E8M0": counts("format of the scales of quantized values"),
    "VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES": counts("format of the scales of quantized values"),
    "VLLM_MLA_DISABLE": counts("selects MLA or full attention"),
    "VLLM_FLOAT32_MATMUL_PRECISION": counts("precision of matrix products"),
    "VLLM_BATCH_INVARIANT": counts("bitwise reproducible results are promised"),
    "VLLM_MARLIN_INPUT_DTYPE": counts("precision of activations or of dequantized weights"),
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": counts("precision of activations or of dequantized weights"),
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": counts("precision of activations or of dequantized weights"),
    "VLLM_HUMMING_USE_F16_ACCUM": counts("precision of activations or of dequantized weights"),
    "VLLM_HUMMING_MOE_GEMM_TYPE": counts("precision of activations or of dequantized weights"),
    "VLLM_B12X_MOE_FP4_FORCE_A16": counts("precision of activations or of dequantized weights"),
    "VLLM_CPU_INT4_W4A8": counts("precision of activations or of dequantized weights"),
    "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD": counts("precision of activations or of dequantized weights"),
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD": counts("precision of activations or of dequantized weights"),
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": counts("precision of activations or of dequantized weights"),
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": counts(
        "precision of activations or of dequantized weights"
    ),
    "VLLM_USE_FLASHINFER_MOE_INT4": counts("precision of activations or of dequantized weights"),
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": counts("precision of activations or of dequantized weights"),
    "VLLM_USE_DEEP_GEMM": counts("precision of activations or of dequantized weights"),
    "VLLM_MOE_USE_DEEP_GEMM": counts("precision of activations or of dequantized weights"),
    "VLLM_USE_TRITON_AWQ": counts("precision of activations or of dequantized weights"),
    "VLLM_XPU_INC_WNA16_BACKEND": counts("precision of activations or of dequantized weights"),
    "VLLM_ROCM_USE_AITER_FP8BMM": counts("precision of activations or of dequantized weights"),
    "VLLM_ROCM_USE_AITER_FP4BMM": counts("precision of activations or of dequantized weights"),
    "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM": counts("precision of activations or of dequantized weights"),
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": counts("precision of activations or of dequantized weights"),
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT": counts("precision of activations or of dequantized weights"),
    "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE": counts("precision of activations or of dequantized weights"),
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": counts("precision of sums between ranks"),
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16": counts("precision of sums between ranks"),
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB": counts("precision of sums between ranks"),
    "VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB": counts("precision of sums between ranks"),
    "VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB": counts("precision of sums between ranks"),
    "VLLM_ROCM_USE_AITER": counts("AITER kernels of ROCm, some with cache pages or precision of their own"),
    "VLLM_ROCM_USE_AITER_MLA": counts(
        "AITER kernels of ROCm, some with cache pages or precision of their own"
    ),
    "VLLM_ROCM_USE_AITER_MHA": counts(
        "AITER kernels of ROCm, some with cache pages or precision of their own"
    ),
    "VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION": counts(
        "AITER kernels of ROCm, some with cache pages or precision of their own"
    ),
    "VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA": counts(
        "AITER kernels of ROCm, some with cache pages or precision of their own"
    ),
    "VLLM_ROCM_AITER_MLA_ASM_PADDING": counts(
        "AITER kernels of ROCm, some with cache pages or precision of their own"
    ),
    "VLLM_ROCM_USE_AITER_MOE": counts(
        "AITER kernels of ROCm, some with cache pages or precision of their own"
    ),
    "VLLM_ROCM_USE_AITER_MOE_SITUV2": counts(
        "AITER kernels of ROCm, some with cache pages or precision of their own"
    ),
    "VLLM_ROCM_USE_AITER_LINEAR": counts(
        "AITER kernels of ROCm, some with cache pages or precision of their own"
    ),
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN": counts(
        "AITER kernels of ROCm, some with cache pages or precision of their own"
    ),
    "VLLM_ROCM_MONO_DECODE": counts("AITER kernels of ROCm, some with cache pages or precision of their own"),
    "VLLM_ENABLE_HPC_OPS": counts("kernels that vLLM does not call equivalent"),
    "VLLM_USE_OINK_OPS": counts("kernels that vLLM does not call equivalent"),
    "VLLM_USE_HW_AGNOSTIC": counts("kernels that vLLM does not call equivalent"),
    "VLLM_DISABLED_KERNELS": counts("kernels that vLLM does not call equivalent"),
    "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM": counts("kernels that vLLM does not call equivalent"),
    "VLLM_GDN_DECODE_KERNEL": counts("kernels that vLLM does not call equivalent"),
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": counts("random routing of experts"),
    "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE": counts("drops tokens of an expert above the limit"),
    "VLLM_VIDEO_LOADER_BACKEND": counts("how media become model inputs; not in the keys"),
    "VLLM_MEDIA_CONNECTOR": counts("how media become model inputs; not in the keys"),
    "VLLM_MAX_AUDIO_DECODE_DURATION_S": counts("how media become model inputs; not in the keys"),
    "VLLM_PLUGINS": counts("plugins may replace any part of vLLM"),
    "VLLM_MARLIN_USE_ATOMIC_ADD": same("order of sums in equivalent kernels"),
    "VLLM_CPU_ATTN_SPLIT_KV": same("order of sums in equivalent kernels"),
    "VLLM_TRITON_USE_TD": same("order of sums in equivalent kernels"),
    "VLLM_TRITON_FORCE_FIRST_CONFIG": same("order of sums in equivalent kernels"),
    "VLLM_TUNED_CONFIG_FOLDER": same("order of sums in equivalent kernels"),
    "VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE": same("order of sums in equivalent kernels"),
    "VLLM_USE_FUSED_MOE_GROUPED_TOPK": same("order of sums in equivalent kernels"),
    "VLLM_MOE_SKIP_PADDING": same("order of sums in equivalent kernels"),
    "VLLM_ROCM_USE_AITER_LINEAR_HIPBMM": same("order of sums in equivalent kernels"),
    "VLLM_ROCM_AITER_MOE_DISPATCH_POLICY": same("order of sums in equivalent kernels"),
    "VLLM_ROCM_USE_AITER_RMSNORM": same("order of sums in equivalent kernels"),
    "VLLM_ROCM_AITER_MLA_DCP_VERIFY": same("order of sums in equivalent kernels"),
    "VLLM_ROCM_USE_AITER_TRITON_ROPE": same("order of sums in equivalent kernels"),
    "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS": same("order of sums in equivalent kernels"),
    "VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS": same("order of sums in equivalent kernels"),
    "VLLM_ROCM_USE_AITER_TRITON_GEMM": same("order of sums in equivalent kernels"),
    "VLLM_ROCM_USE_SKINNY_GEMM": same("order of sums in equivalent kernels"),
    "VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION": same("order of sums in equivalent kernels"),
    "VLLM_ZENTORCH_WEIGHT_PREPACK": same("layout of weights in memory"),
    "VLLM_ROCM_FP8_PADDING": same("layout of weights in memory"),
    "VLLM_ROCM_MOE_PADDING": same("layout of weights in memory"),
    "VLLM_XPU_FORCE_N_CONTIG_WEIGHT": same("layout of weights in memory"),
    "VLLM_REPLICATE_EMBED": same("layout of weights in memory"),
    "VLLM_ROCM_USE_AITER_CUSTOM_AR": same("how ranks exchange and share equal values"),
    "VLLM_DISABLE_PYNCCL": same("how ranks exchange and share equal values"),
    "VLLM_SKIP_P2P_CHECK": same("how ranks exchange and share equal values"),
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": same("how ranks exchange and share equal values"),
    "VLLM_ALLREDUCE_USE_SYMM_MEM": same("how ranks exchange and share equal values"),
    "VLLM_ALLREDUCE_USE_FLASHINFER": same("how ranks exchange and share equal values"),
    "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": same("how ranks exchange and share equal values"),
    "VLLM_USE_NCCL_SYMM_MEM": same("how ranks exchange and share equal values"),
    "VLLM_DCP_Q_REPLICATE": same("how ranks exchange and share equal values"),
    "VLLM_USE_DIRECT_DCP_A2A": same("how ranks exchange and share equal values"),
    "VLLM_USE_DIRECT_DCP_Q_GATHER": same("how ranks exchange and share equal values"),
    "VLLM_USE_DIRECT_DCP_KV_GATHER": same("how ranks exchange and share equal values"),
    "VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT": same("how ranks exchange and share equal values"),
    "VLLM_STEP5_SHARD_SP_SHARED_EXPERT": same("how ranks exchange and share equal values"),
    "VLLM_KIMI_K3_GEMM_AR": same("how ranks exchange and share equal values"),
    "VLLM_ENABLE_GEMM_RS": same("how ranks exchange and share equal values"),
    "VLLM_DISTRIBUTED_USE_SPLIT_GROUP": same("how ranks exchange and share equal values"),
    "VLLM_DEEPEP_BUFFER_SIZE_MB": same("how ranks exchange and share equal values"),
    "VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE": same("how ranks exchange and share equal values"),
    "VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL": same("how ranks exchange and share equal values"),
    "VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE": same("how ranks exchange and share equal values"),
    "VLLM_DEEPEP_V2_PREFER_OVERLAP": same("how ranks exchange and share equal values"),
    "VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION": same("how ranks exchange and share equal values"),
    "VLLM_DBO_COMM_SMS": same("how ranks exchange and share equal values"),
    "VLLM_XPU_PP_MICROBATCH": same("how ranks exchange and share equal values"),
    "VLLM_PP_LAYER_PARTITION": same("how many layers a pipeline stage has; shards hold the names"),
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM": same("streams and launches of kernels"),
    "VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD": same("streams and launches of kernels"),
    "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD": same("streams and launches of kernels"),
    "VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD": same("streams and launches of kernels"),
    "VLLM_LORA_DISABLE_PDL": same("streams and launches of kernels"),
    "VLLM_LORA_ENABLE_DUAL_STREAM": same("streams and launches of kernels"),
    "VLLM_USE_V2_MODEL_RUNNER": same("streams and launches of kernels"),
    "VLLM_USE_BREAKABLE_CUDAGRAPH": same("streams and launches of kernels"),
    "VLLM_ENABLE_CUDAGRAPH_GC": same("streams and launches of kernels"),
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": same("streams and launches of kernels"),
    "VLLM_GPU_SYNC_CHECK": same("streams and launches of kernels"),
    "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": same("sizes of workspaces"),
    "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE": same("sizes of workspaces"),
    "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN": same("sizes of workspaces"),
    "VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS": same("sizes of workspaces"),
    "VLLM_USE_STANDALONE_COMPILE": same("compilation, tuning and warm-up"),
    "VLLM_ENABLE_PREGRAD_PASSES": same("compilation, tuning and warm-up"),
    "VLLM_PATTERN_MATCH_DEBUG": same("compilation, tuning and warm-up"),
    "VLLM_DEBUG_DUMP_PATH": same("compilation, tuning and warm-up"),
    "VLLM_USE_AOT_COMPILE": same("compilation, tuning and warm-up"),
    "VLLM_USE_BYTECODE_HOOK": same("compilation, tuning and warm-up"),
    "VLLM_FORCE_AOT_LOAD": same("compilation, tuning and warm-up"),
    "VLLM_USE_MEGA_AOT_ARTIFACT": same("compilation, tuning and warm-up"),
    "VLLM_DISABLE_COMPILE_CACHE": same("compilation, tuning and warm-up"),
    "VLLM_COMPILE_CACHE_SAVE_FORMAT": same("compilation, tuning and warm-up"),
    "VLLM_USE_LAYERNAME": same("compilation, tuning and warm-up"),
    "VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE": same("compilation, tuning and warm-up"),
    "VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING": same("compilation, tuning and warm-up"),
    "VLLM_DEEP_GEMM_WARMUP": same("compilation, tuning and warm-up"),
    "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": same("compilation, tuning and warm-up"),
    "VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS": same("compilation, tuning and warm-up"),
    "VLLM_TRITON_JIT_WARMUP_NUM_THREADS": same("compilation, tuning and warm-up"),
    "VLLM_XLA_CACHE_PATH": same("compilation, tuning and warm-up"),
    "VLLM_XLA_CHECK_RECOMPILATION": same("compilation, tuning and warm-up"),
    "VLLM_XLA_USE_SPMD": same("compilation, tuning and warm-up"),
    "VLLM_TPU_USING_PATHWAYS": same("compilation, tuning and warm-up"),
    "VLLM_ENABLE_STARTUP_PLAN": same("compilation, tuning and warm-up"),
    "VLLM_MAIN_CUDA_VERSION": same("read when vLLM is built"),
    "MAX_JOBS": same("read when vLLM is built"),
    "NVCC_THREADS": same("read when vLLM is built"),
    "VLLM_USE_PRECOMPILED": same("read when vLLM is built"),
    "VLLM_USE_PRECOMPILED_RUST": same("read when vLLM is built"),
    "VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX": same("read when vLLM is built"),
    "VLLM_DOCKER_BUILD_CONTEXT": same("read when vLLM is built"),
    "VLLM_BUILD_COMMIT": same("read when vLLM is built"),
    "VLLM_BUILD_PIPELINE": same("read when vLLM is built"),
    "VLLM_BUILD_URL": same("read when vLLM is built"),
    "VLLM_IMAGE_TAG": same("read when vLLM is built"),
    "CMAKE_BUILD_TYPE": same("read when vLLM is built"),
    "VERBOSE": same("read when vLLM is built"),
    "VLLM_SKIP_VERSION_SUFFIX": same("read when vLLM is built"),
    "VLLM_CONFIG_ROOT": same("places of files and libraries"),
    "VLLM_CACHE_ROOT": same("places of files and libraries"),
    "CUDA_HOME": same("places of files and libraries"),
    "VLLM_NCCL_SO_PATH": same("places of files and libraries"),
    "LD_LIBRARY_PATH": same("places of files and libraries"),
    "VLLM_CUDART_SO_PATH": same("places of files and libraries"),
    "VLLM_NCCL_INCLUDE_PATH": same("places of files and libraries"),
    "VLLM_ASSETS_CACHE": same("places of files and libraries"),
    "VLLM_ASSETS_CACHE_MODEL_CLEAN": same("places of files and libraries"),
    "VLLM_ENABLE_CUDA_COMPATIBILITY": same("places of files and libraries"),
    "VLLM_CUDA_COMPATIBILITY_PATH": same("places of files and libraries"),
    "VLLM_HAS_FLASHINFER_CUBIN": same("places of files and libraries"),
    "VLLM_HOST_IP": same("addresses, ports and process names"),
    "VLLM_PORT": same("addresses, ports and process names"),
    "VLLM_RPC_BASE_PATH": same("addresses, ports and process names"),
    "VLLM_LOOPBACK_IP": same("addresses, ports and process names"),
    "VLLM_PROCESS_NAME_PREFIX": same("addresses, ports and process names"),
    "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME": same("addresses, ports and process names"),
    "VLLM_GPU_NIC_PCIE_MAPPING": same("addresses, ports and process names"),
    "VLLM_NIC_SELECTION_VARS": same("addresses, ports and process names"),
    "LOCAL_RANK": same("position of this process"),
    "CUDA_VISIBLE_DEVICES": same("position of this process"),
    "VLLM_DP_RANK": same("position of this process"),
    "VLLM_DP_RANK_LOCAL": same("position of this process"),
    "VLLM_DP_SIZE": same("position of this process"),
    "VLLM_DP_MASTER_IP": same("position of this process"),
    "VLLM_DP_MASTER_PORT": same("position of this process"),
    "VLLM_ENGINE_READY_TIMEOUT_S": same("how processes are started and stopped"),
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": same("how processes are started and stopped"),
    "VLLM_WORKER_MULTIPROC_METHOD": same("how processes are started and stopped"),
    "VLLM_ENABLE_V1_MULTIPROCESSING": same("how processes are started and stopped"),
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": same("how processes are started and stopped"),
    "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE": same("how processes are started and stopped"),
    "VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM": same("how processes are started and stopped"),
    "VLLM_USE_RAY_WRAPPED_PP_COMM": same("how processes are started and stopped"),
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": same("how processes are started and stopped"),
    "VLLM_RAY_PER_WORKER_GPUS": same("how processes are started and stopped"),
    "VLLM_RAY_BUNDLE_INDICES": same("how processes are started and stopped"),
    "VLLM_RAY_DP_PACK_STRATEGY": same("how processes are started and stopped"),
    "VLLM_RAY_DP_PLACEMENT_NODE_IPS": same("how processes are started and stopped"),
    "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY": same("how processes are started and stopped"),
    "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": same("how processes are started and stopped"),
    "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH": same("how processes are started and stopped"),
    "VLLM_ELASTIC_EP_DRAIN_REQUESTS": same("how processes are started and stopped"),
    "VLLM_USE_SPINLOOP_EXT": same("how processes are started and stopped"),
    "VLLM_CPU_KVCACHE_SPACE": same("CPU threads and memory of the cache"),
    "VLLM_CPU_OMP_THREADS_BIND": same("CPU threads and memory of the cache"),
    "VLLM_CPU_NUM_OF_RESERVED_CPU": same("CPU threads and memory of the cache"),
    "VLLM_CPU_CI_ENV": same("CPU threads and memory of the cache"),
    "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY": same("where weights are stored and how they are loaded"),
    "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": same("where weights are stored and how they are loaded"),
    "VLLM_WSL2_ENABLE_PIN_MEMORY": same("where weights are stored and how they are loaded"),
    "VLLM_FASTSAFETENSORS_QUEUE_SIZE": same("where weights are stored and how they are loaded"),
    "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE": same("where weights are stored and how they are loaded"),
    "S3_ACCESS_KEY_ID": same("where weights are stored and how they are loaded"),
    "S3_SECRET_ACCESS_KEY": same("where weights are stored and how they are loaded"),
    "S3_ENDPOINT_URL": same("where weights are stored and how they are loaded"),
    "VLLM_RINGBUFFER_WARNING_INTERVAL": same("logs, metrics, traces and usage reports"),
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": same("logs, metrics, traces and usage reports"),
    "VLLM_USAGE_STATS_SERVER": same("logs, metrics, traces and usage reports"),
    "VLLM_NO_USAGE_STATS": same("logs, metrics, traces and usage reports"),
    "VLLM_DO_NOT_TRACK": same("logs, metrics, traces and usage reports"),
    "VLLM_USAGE_SOURCE": same("logs, metrics, traces and usage reports"),
    "VLLM_CONFIGURE_LOGGING": same("logs, metrics, traces and usage reports"),
    "VLLM_LOGGING_CONFIG_PATH": same("logs, metrics, traces and usage reports"),
    "VLLM_LOGGING_LEVEL": same("logs, metrics, traces and usage reports"),
    "VLLM_LOGGING_STREAM": same("logs, metrics, traces and usage reports"),
    "VLLM_LOGGING_PREFIX": same("logs, metrics, traces and usage reports"),
    "VLLM_LOGGING_COLOR": same("logs, metrics, traces and usage reports"),
    "NO_COLOR": same("logs, metrics, traces and usage reports"),
    "FORCE_COLOR": same("logs, metrics, traces and usage reports"),
    "VLLM_LOG_STATS_INTERVAL": same("logs, metrics, traces and usage reports"),
    "VLLM_TRACE_FUNCTION": same("logs, metrics, traces and usage reports"),
    "VLLM_LOG_BATCHSIZE_INTERVAL": same("logs, metrics, traces and usage reports"),
    "VLLM_COMPUTE_NANS_IN_LOGITS": same("logs, metrics, traces and usage reports"),
    "VLLM_RAISE_ON_LOGIT_NANS": same("logs, metrics, traces and usage reports"),
    "VLLM_CUSTOM_SCOPES_FOR_PROFILING": same("logs, metrics, traces and usage reports"),
    "VLLM_NVTX_SCOPES_FOR_PROFILING": same("logs, metrics, traces and usage reports"),
    "VLLM_GC_DEBUG": same("logs, metrics, traces and usage reports"),
    "VLLM_DEBUG_WORKSPACE": same("logs, metrics, traces and usage reports"),
    "VLLM_LOG_MODEL_INSPECTION": same("logs, metrics, traces and usage reports"),
    "VLLM_DEBUG_MFU_METRICS": same("logs, metrics, traces and usage reports"),
    "VLLM_DISABLE_LOG_LOGO": same("logs, metrics, traces and usage reports"),
    "VLLM_REQUEST_BODY_LOG_LEVEL": same("logs, metrics, traces and usage reports"),
    "VLLM_USE_FASTOKENS": same("front end: limits, parsing and answers; prompts are in the keys"),
    "VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT": same(
        "front end: limits, parsing and answers; prompts are in the keys"
    ),
    "VLLM_CHAT_TEMPLATE_FUEL": same("front end: limits, parsing and answers; prompts are in the keys"),
    "VLLM_API_KEY": same("front end: limits, parsing and answers; prompts are in the keys"),
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": same("front end: limits, parsing and answers; prompts are in the keys"),
    "VLLM_HTTP_MAX_REQUEST_BODY_SIZE": same(
        "front end: limits, parsing and answers; prompts are in the keys"
    ),
    "VLLM_MAX_N_SEQUENCES": same("front end: limits, parsing and answers; prompts are in the keys"),
    "VLLM_MAX_COMPLETION_PROMPTS": same("front end: limits, parsing and answers; prompts are in the keys"),
    "VLLM_MAX_STOP_STRINGS": same("front end: limits, parsing and answers; prompts are in the keys"),
    "VLLM_MAX_NUM_BAD_WORDS": same("front end: limits, parsing and answers; prompts are in the keys"),
    "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS": same(
        "front end: limits, parsing and answers; prompts are in the keys"
    ),
    "VLLM_USE_RUST_FRONTEND": same("front end: limits, parsing and answers; prompts are in the keys"),
    "VLLM_USE_RUST_BENCH": same("front end: limits, parsing and answers; prompts are in the keys"),
    "VLLM_RUST_FRONTEND_PATH": same("front end: limits, parsing and answers; prompts are in the keys"),
    "VLLM_SERVER_DEV_MODE": same("front end: limits, parsing and answers; prompts are in the keys"),
    "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": same("front end: limits, parsing and answers; prompts are in the keys"),
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": same(
        "front end: limits, parsing and answers; prompts are in the keys"
    ),
    "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS": same(
        "front end: limits, parsing and answers; prompts are in the keys"
    ),
    "VLLM_ENFORCE_STRICT_TOOL_CALLING": same(
        "front end: limits, parsing and answers; prompts are in the keys"
    ),
    "VLLM_ENABLE_RESPONSES_API_STORE": same(
        "front end: limits, parsing and answers; prompts are in the keys"
    ),
    "VLLM_ENABLE_COHERE_API": same("front end: limits, parsing and answers; prompts are in the keys"),
    "VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT": same(
        "front end: limits, parsing and answers; prompts are in the keys"
    ),
    "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS": same(
        "front end: limits, parsing and answers; prompts are in the keys"
    ),
    "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS": same(
        "front end: limits, parsing and answers; prompts are in the keys"
    ),
    "VLLM_SYSTEM_START_DATE": same("front end: limits, parsing and answers; prompts are in the keys"),
    "VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY": same(
        "front end: limits, parsing and answers; prompts are in the keys"
    ),
    "VLLM_SKIP_MODEL_NAME_VALIDATION": same(
        "front end: limits, parsing and answers; prompts are in the keys"
    ),
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": same("front end: limits, parsing and answers; prompts are in the keys"),
    "VLLM_IMAGE_FETCH_TIMEOUT": same(
        "fetching and caching media, whose contents are in the keys; a limit refuses a request"
    ),
    "VLLM_VIDEO_FETCH_TIMEOUT": same(
        "fetching and caching media, whose contents are in the keys; a limit refuses a request"
    ),
    "VLLM_AUDIO_FETCH_TIMEOUT": same(
        "fetching and caching media, whose contents are in the keys; a limit refuses a request"
    ),
    "VLLM_MEDIA_CACHE": same(
        "fetching and caching media, whose contents are in the keys; a limit refuses a request"
    ),
    "VLLM_MEDIA_CACHE_MAX_SIZE_MB": same(
        "fetching and caching media, whose contents are in the keys; a limit refuses a request"
    ),
    "VLLM_MEDIA_CACHE_TTL_HOURS": same(
        "fetching and caching media, whose contents are in the keys; a limit refuses a request"
    ),
    "VLLM_MEDIA_FETCH_MAX_RETRIES": same(
        "fetching and caching media, whose contents are in the keys; a limit refuses a request"
    ),
    "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB": same(
        "fetching and caching media, whose contents are in the keys; a limit refuses a request"
    ),
    "VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES": same(
        "fetching and caching media, whose contents are in the keys; a limit refuses a request"
    ),
    "VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB": same(
        "fetching and caching media, whose contents are in the keys; a limit refuses a request"
    ),
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": same(
        "fetching and caching media, whose contents are in the keys; a limit refuses a request"
    ),
    "VLLM_MEDIA_LOADING_THREAD_COUNT": same(
        "fetching and caching media, whose contents are in the keys; a limit refuses a request"
    ),
    "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": same(
        "fetching and caching media, whose contents are in the keys; a limit refuses a request"
    ),
    "VLLM_MAX_AUDIO_DECODE_BYTES": same(
        "fetching and caching media, whose contents are in the keys; a limit refuses a request"
    ),
    "VLLM_MAX_EMBED_DECODE_BYTES": same(
        "fetching and caching media, whose contents are in the keys; a limit refuses a request"
    ),
    "VLLM_MAX_AUDIO_PREPROCESS_WORKERS": same(
        "fetching and caching media, whose contents are in the keys; a limit refuses a request"
    ),
    "VLLM_MAX_IMAGE_PIXELS": same(
        "fetching and caching media, whose contents are in the keys; a limit refuses a request"
    ),
    "VLLM_USE_FLASHINFER_SAMPLER": same("sampling and grammars, after the last layer"),
    "VLLM_XPU_USE_SAMPLER_KERNEL": same("sampling and grammars, after the last layer"),
    "VLLM_V1_USE_OUTLINES_CACHE": same("sampling and grammars, after the last layer"),
    "VLLM_XGRAMMAR_CACHE_MB": same("sampling and grammars, after the last layer"),
    "VLLM_REGEX_COMPILATION_TIMEOUT_S": same("sampling and grammars, after the last layer"),
    "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT": same("sampling and grammars, after the last layer"),
    "VLLM_MSGPACK_ZERO_COPY_THRESHOLD": same("messages between processes"),
    "VLLM_ALLOW_INSECURE_SERIALIZATION": same("messages between processes"),
    "VLLM_MQ_MAX_CHUNK_BYTES_MB": same("messages between processes"),
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": same("messages between processes"),
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": same("messages between processes"),
    "VLLM_RANDOMIZE_DP_DUMMY_INPUTS": same("messages between processes"),
    "VLLM_LORA_RESOLVER_CACHE_DIR": same("adapters: where they are found; a key holds an adapter's name"),
    "VLLM_LORA_RESOLVER_HF_REPO_LIST": same("adapters: where they are found; a key holds an adapter's name"),
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": same("adapters: where they are found; a key holds an adapter's name"),
    "VLLM_NIXL_SIDE_CHANNEL_HOST": same("other connectors"),
    "VLLM_NIXL_SIDE_CHANNEL_PORT": same("other connectors"),
    "VLLM_P2P_SIDE_CHANNEL_HOST": same("other connectors"),
    "VLLM_P2P_SIDE_CHANNEL_PORT": same("other connectors"),
    "VLLM_P2P_MAX_PEERS": same("other connectors"),
    "VLLM_P2P_HANDSHAKE_TIMEOUT_S": same("other connectors"),
    "VLLM_P2P_IDLE_TIMEOUT_S": same("other connectors"),
    "VLLM_EC_SIDE_CHANNEL_HOST": same("other connectors"),
    "VLLM_EC_SIDE_CHANNEL_PORT": same("other connectors"),
    "VLLM_MOONCAKE_CONNECTOR_TIMEOUT": same("other connectors"),
    "VLLM_MOONCAKE_BOOTSTRAP_PORT": same("other connectors"),
    "VLLM_MOONCAKE_STORE_TIER_LOG": same("other connectors"),
    "VLLM_MOONCAKE_LOAD_RECV_THREADS": same("other connectors"),
    "VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO": same("other connectors"),
    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": same("other connectors"),
    "MOONCAKE_PREFERRED_SEGMENT": same("other connectors"),
    "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": same("other connectors"),
    "VLLM_USE_SIMPLE_KV_OFFLOAD": same("other connectors"),
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": same(
        "which cache groups exist; the namespace contains them"
    ),
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": same("form of published events"),
}
