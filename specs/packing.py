# SPDX-License-Identifier: Apache-2.0
"""The properties of this vLLM release and this machine that decide how vLLM packs the pages of a cache.

For workers only: vLLM's configuration must be set.
"""

import hashlib
import platform
from typing import Any

from . import compat


def bytes_version() -> str:
    """Returns the vLLM version that decides the page format, without its build label.

    Development versions keep the label. Raises ValueError if vLLM does not know its version.
    """
    public = compat.vllm_version().partition("+")[0]
    if not any(letter.isdigit() for letter in public):
        raise ValueError(f"vLLM calls its version {public!r}")
    return public if ".dev" not in public else compat.vllm_version()


# Backends that store unquantized 16-bit values in the same order on every CUDA GPU.
_SAME_ON_ALL_GPUS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")


def layer_backend(layer: Any) -> str:
    """Returns the name of a layer's attention backend, or of its class if it has no backend (Mamba)."""
    backend = getattr(layer, "attn_backend", None)
    return str(backend.get_name()) if backend is not None else type(layer).__name__


def layer_packing(layer: Any, vllm_config: Any, device_type: str) -> str:
    """Returns the machine properties that decide how a layer's pages are packed; "" if there are none.

    CPU_ATTN packs K and V for the detected instruction set. GPU kernels choose encodings of quantized values
    by compute capability. The CUDA toolkit decides nothing here: NVFP4 pages have one layout and one scale
    convention (vllm/third_party/fmha_sm100/nvfp4_kv.py), and toolkits from 13.4 on only add an instruction
    that dequantizes the values (q8kv4). Passes on vLLM's exceptions.
    """
    if device_type == "cpu":
        return _cpu_packing(layer, vllm_config)
    from vllm.platforms import current_platform

    plain = compat.layer_element(layer, vllm_config) in ("bfloat16", "float16")
    quantized = getattr(vllm_config.model_config, "quantization", None) is not None
    if device_type == "cuda" and plain and not quantized and layer_backend(layer) in _SAME_ON_ALL_GPUS:
        return ""
    capability = current_platform.get_device_capability()
    if capability is None:
        raise ValueError(f"the compute capability of {device_type} is not known")
    # The device name is needed: ROCm devices also have type "cuda", and their capabilities overlap CUDA's.
    return f"{current_platform.device_name} {capability.major}.{capability.minor}"


def _cpu_packing(layer: Any, vllm_config: Any) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    if layer_backend(layer) != "CPU_ATTN":
        return ""
    spec = layer.get_kv_cache_spec(vllm_config)
    name = _get_attn_isa(
        vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype
    )
    if platform.machine() == "x86_64":
        return f"x86_64 {name}"
    # On other CPUs one name covers several packings, chosen by processor features (neon: with BFMMLA).
    import torch

    return f"{platform.machine()} {name} {torch.backends.cpu.get_cpu_capability()} {_processor_features()}"


def _processor_features() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        lines = [
            line.partition(":")[2].split() for line in file if line.startswith(("Features", "flags", "isa"))
        ]
    return hashlib.sha256(" ".join(sorted(lines[0]) if lines else []).encode()).hexdigest()[:16]
