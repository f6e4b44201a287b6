# SPDX-License-Identifier: Apache-2.0
"""Locates keys and values in the pages of a cache group, for lossy records with two bounds.

The logical page of a layer is [head, token, content] in vLLM 0.31, 0.32 and 0.33. The backends below put the
key of a head and token before its value in the content, in every layout (``kv_cache.split(head_size,
dim=-1)``). CPU_ATTN instead puts the keys of all tokens of a head before the values (``view(..., 2 * tokens,
head_size).chunk(2, dim=2)``), and packs each half for the instruction set. In both cases a page consists of
runs of keys, each followed by a run of values.

The runs are known only if the cache's shape and strides match and all layers of the group agree.
"""

from typing import Any

from kv_offload.log import get_logger

from . import compat, packing

logger = get_logger(__name__)

UNKNOWN = (0, 0)
_KEY_BEFORE_VALUE = (
    *("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"),
    *("FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV"),
)
_BYTES = 2  # of a bfloat16 or float16


def kv_runs_of(config: Any, kv_caches: Any) -> list[tuple[int, int]]:
    """Returns (bytes of a run of keys, bytes of the run of values after it) per group position; UNKNOWN where
    the layers' layout is not known. Called in the workers."""
    vllm_config = compat.current_vllm_config()
    if vllm_config is None:
        return [UNKNOWN] * len(config.groups)
    known = vllm_config.compilation_config.static_forward_context
    found = []
    for group, refs in zip(config.groups, kv_caches.group_data_refs, strict=True):
        try:
            layers = [known[name] for name in group.layer_names]
            found.append(_group_runs(layers, refs, kv_caches.tensors, vllm_config))
        except Exception as error:  # an unusual layer
            logger.debug("which elements of %s are values is not known: %s", group.layer_names, error)
            found.append(UNKNOWN)
    return found


def _group_runs(layers: list[Any], refs: Any, tensors: Any, vllm_config: Any) -> tuple[int, int]:
    runs = {_layer_runs(layer, vllm_config) for layer in layers}
    if len(runs) != 1 or UNKNOWN in runs:
        return UNKNOWN
    (found,) = runs
    period = sum(found)
    caches: list[Any] = [compat.layer_cache(layer) for layer in layers]
    pairs = (
        list(zip(caches, refs, strict=True))
        if len(refs) == len(layers)
        else [(cache, ref) for cache in caches for ref in refs]  # all layers of a block share a page
    )
    for cache, ref in pairs:
        tensor = tensors[ref.tensor_idx].tensor
        distances = (
            cache.data_ptr() - tensor.data_ptr(),
            tensor.stride(0) * tensor.element_size(),
            ref.page_size_bytes,
        )
        if any(distance % period for distance in distances):
            return UNKNOWN
    return found


def _layer_runs(layer: Any, vllm_config: Any) -> tuple[int, int]:
    if not compat.layer_may_lose(layer, vllm_config):
        return UNKNOWN
    spec = compat.layer_spec(layer, vllm_config)
    cache = compat.layer_cache(layer)
    key, value = spec.head_size, getattr(spec, "head_size_v", None) or spec.head_size
    if (
        cache is None
        or getattr(spec, "num_head_slots", None) is not None
        or cache.dim() != 4
        or cache.shape[1] != spec.num_kv_heads
        or cache.shape[3] != key + value
        or cache.stride(3) != 1
        or cache.element_size() != _BYTES
    ):
        return UNKNOWN
    backend = packing.layer_backend(layer)
    steps = [cache.stride(axis) for axis in range(3) if cache.shape[axis] > 1]
    if backend == "CPU_ATTN" and key == value and cache[0, 0].is_contiguous():
        key = value = cache.shape[2] * key
        steps = [cache.stride(axis) for axis in range(2) if cache.shape[axis] > 1]
    elif backend not in _KEY_BEFORE_VALUE:
        return UNKNOWN
    if any(step % (key + value) for step in steps):
        return UNKNOWN
    return _BYTES * key, _BYTES * value
