# SPDX-License-Identifier: Apache-2.0
"""The state that a layer keeps for a sequence (Mamba, linear attention, short convolution).

The arithmetic is vLLM's (vllm/model_executor/layers/mamba/mamba_utils.py), without speculative decoding; a
test compares both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ALIGNMENT = 16  # multiple of the block size that vLLM chooses for these models


@dataclass(frozen=True)
class StateLayers:
    """Layers of one kind. Counts the values of one layer's state in the whole engine: the convolution, and
    the recurrence, which may have its own dtype."""

    name: str
    layers: int
    conv_values: int
    recurrent_values: int
    recurrent_dtype: str | None = None  # None: the dtype of the cache

    def state_bytes(self, dtype_bytes: Mapping[str, int], dtype: str, ranks: int = 1) -> int:
        """Returns the bytes of one layer's state on one rank."""
        recurrent = dtype_bytes[self.recurrent_dtype or dtype]
        size = self.conv_values * dtype_bytes[dtype] + self.recurrent_values * recurrent
        return -(-size // ranks)


def state_layers(text: Mapping[str, Any], kind: str, layers: int) -> StateLayers | None:
    """Returns the state of ``layers`` layers of ``kind``; None if the config does not determine its size."""
    values = _values(text, kind)
    if values is None:
        return None
    dtype = text.get("mamba_ssm_dtype") or text.get("mamba_ssm_cache_dtype")
    recurrent = None if dtype in (None, "auto") else str(dtype).removeprefix("torch.")
    return StateLayers(f"state ({kind})", layers, *values, recurrent)


def raised_block_size(block_size: int, state_bytes: int, token_bytes: int) -> int:
    """Returns vLLM's tokens per block: an attention block must be at least as large as a state, because the
    blocks of all layers have the same size."""
    if block_size * token_bytes >= state_bytes:
        return block_size
    return -(-state_bytes // (token_bytes * _ALIGNMENT)) * _ALIGNMENT


def _values(text: Mapping[str, Any], kind: str) -> tuple[int, int] | None:
    def number(*names: str) -> int:
        return next((int(text[name]) for name in names if text.get(name)), 0)

    hidden = number("hidden_size", "d_model", "n_embd")
    if kind in ("conv", "short_conv"):
        width, kernel = number("conv_dim") or hidden, number("conv_L_cache")
        return (width * (kernel - 1), 0) if kernel else None
    if kind == "linear_attention":
        heads = number("linear_num_value_heads")
        if heads:  # gated delta net
            keys = number("linear_num_key_heads") * number("linear_key_head_dim")
            size = number("linear_value_head_dim")
            conv = (2 * keys + heads * size) * (number("linear_conv_kernel_dim") - 1)
            return conv, heads * size * number("linear_key_head_dim")
        heads = number("num_attention_heads")
        size = number("head_dim") or (hidden // heads if heads else 0)
        return (0, heads * size * size) if heads and size else None
    state, kernel = (
        number("mamba_d_state", "ssm_state_size", "state_size"),
        number("mamba_d_conv", "conv_kernel"),
    )
    if not state or not kernel:
        return None
    heads, size = number("mamba_n_heads", "mamba_num_heads"), number("mamba_d_head", "mamba_head_dim")
    if heads and size:  # Mamba 2
        groups = number("mamba_n_groups", "n_groups") or 1
        return (heads * size + 2 * groups * state) * (kernel - 1), heads * size * state
    inner = number("mamba_intermediate_size", "intermediate_size_mamba") or hidden * number(
        "mamba_expand", "expand"
    )
    return (inner * (kernel - 1), inner * state) if inner else None
