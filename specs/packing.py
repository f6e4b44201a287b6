# SPDX-License-Identifier: Apache-2.0
"""The properties of this release and this machine that decide how vLLM packs cache pages.

Workers only; vLLM must have set its configuration.
"""

import hashlib
import platform
from typing import Any

from . import compat


def bytes_version() -> str:
    """Returns the vLLM version whose pages these are, without the label of its build.

    Raises ValueError when vLLM does not know its version.
    """
    public = compat.vllm_version().partition("+")[0]
    if not any(letter.isdigit() for letter in public):
        raise ValueError(f"vLLM calls its version {public!r}")
    return public if ".dev" not in public else compat.vllm_version()


# Backends that store plain 16-bit values in the same order on every CUDA GPU.
_SAME_ON_ALL_GPUS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")


def layer_backend(layer: Any) -> str:
    """Returns the name of a layer's attention backend, or of its class without one (Mamba)."""
    backend = getattr(layer, "attn_backend", None)
    return str(backend.get_name()) if backend is not None else type(layer).__name__


def layer_packing(layer: Any, vllm_config: Any, device_type: str) -> str:
    """Returns the machine properties that decide how a layer's pages are packed; "" if none do.

    CPU_ATTN packs K and V for the instruction set that it finds. GPU kernels choose encodings of quantized
    values by compute capability. Raises vLLM's errors.
    """
    if device_type == "cpu":
        return _cpu_packing(layer, vllm_config)
    from vllm.platforms import current_platform

    plain = compat.layer_element(layer, vllm_config) != "bytes"
    quantized = getattr(vllm_config.model_config, "quantization", None) is not None
    if device_type == "cuda" and plain and not quantized and layer_backend(layer) in _SAME_ON_ALL_GPUS:
        return ""
    capability = current_platform.get_device_capability()
    if capability is None:
        raise ValueError(f"the compute capability of {device_type} is not known")
    # ROCm devices also have type "cuda", and their capability numbers overlap CUDA's.
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
    # On other platforms one name covers several packings, chosen by CPU features (neon: with BFMMLA).
    import torch

    return f"{platform.machine()} {name} {torch.backends.cpu.get_cpu_capability()} {_processor_features()}"


def _processor_features() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        lines = [
            line.partition(":")[2].split() for line in file if line.startswith(("Features", "flags", "isa"))
        ]
    return hashlib.sha256(" ".join(sorted(lines[0]) if lines else []).encode()).hexdigest()[:16]
