# SPDX-License-Identifier: Apache-2.0
"""Locates keys, values and heads in the pages of a cache group, for the bounds of lossy records.

The logical page of a layer is [head, token, content] in vLLM 0.31, 0.32 and 0.33. The backends below put the
key of a head and token before its value in the content, in every layout (``kv_cache.split(head_size,
dim=-1)``). CPU_ATTN instead puts the keys of all tokens of a head before the values (``view(..., 2 * tokens,
head_size).chunk(2, dim=2)``), and packs each half for the instruction set. In both cases a page consists of
runs of keys, each followed by a run of values.

The runs are known only if the cache's shape and strides match and all layers of the group agree.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

from . import compat, packing

_Found = TypeVar("_Found")
UNKNOWN = (0, 0)
_KEY_BEFORE_VALUE = (
    *("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"),
    *("FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV"),
)
_GROUP = 64  # elements that share a bound
_MOST_REASON = 200  # characters; the reasons of all groups are in the control page of a rank


class _UnknownError(Exception):
    """The layout of a group is not known; the text has the reason."""


def kv_runs_of(config: Any, kv_caches: Any) -> list[tuple[int, int] | str]:
    """Returns (bytes of a run of keys, bytes of the run of values after it) per group position, or the reason
    why the layout is unknown. Called in the workers."""
    return _by_group(_group_runs, config, kv_caches)


def head_orders_of(config: Any, kv_caches: Any) -> list[tuple[int, bool, int] | str]:
    """Returns (KV heads of a page, True if each head has all of its tokens in one piece, bytes of the page)
    per group position, or the reason why the group cannot use a calibration. Called in the workers."""
    return _by_group(_group_order, config, kv_caches)


def _by_group(find: Callable[..., _Found], config: Any, kv_caches: Any) -> list[_Found | str]:
    """Returns the results of ``find``, or the reasons of its errors."""
    vllm_config = compat.current_vllm_config()
    if vllm_config is None:
        return ["vLLM's configuration is not set"] * len(config.groups)
    known = vllm_config.compilation_config.static_forward_context
    found: list[_Found | str] = []
    for group, refs in zip(config.groups, kv_caches.group_data_refs, strict=True):
        try:
            layers = [known[name] for name in group.layer_names]
            found.append(find(layers, refs, kv_caches.tensors, vllm_config))
        except _UnknownError as reason:
            found.append(str(reason)[:_MOST_REASON])
        except Exception as error:  # an unusual layer
            found.append(f"{type(error).__name__}: {error}"[:_MOST_REASON])
    return found


def share_of_values(runs: tuple[int, int], element: str = "bfloat16") -> float:
    """Returns the share of values in groups of 64 elements without a key, to which the values' bound applies.

    1 for runs of whole groups; 0 for runs of values with less than 64 elements. ``element``: the result of
    compat.layer_element.
    """
    key, value = runs
    period = key + value
    size = _GROUP * bytes_of(element)
    cycle = math.lcm(period, size)
    groups = sum(at % period >= key and at % period + size <= period for at in range(0, cycle, size))
    return groups * size / (cycle // period * value)


def bytes_of(element: str) -> int:
    """Returns the bytes of an element. ``element``: the result of compat.layer_element."""
    return 1 if element.startswith("float8") else 2


def _group_runs(layers: list[Any], refs: Any, tensors: Any, vllm_config: Any) -> tuple[int, int]:
    """Raises _UnknownError."""
    runs = {_layer_runs(layer, vllm_config) for layer in layers}
    if len(runs) != 1:
        raise _UnknownError(f"the layers differ in the bytes of keys and values: {sorted(runs)}")
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
            raise _UnknownError(f"pages do not consist of whole runs of {period} bytes")
    return found


def _group_order(layers: list[Any], refs: Any, tensors: Any, vllm_config: Any) -> tuple[int, bool, int]:
    """Raises _UnknownError."""
    runs = _group_runs(layers, refs, tensors, vllm_config)
    if len(refs) != len(layers):
        raise _UnknownError("the layers of a block share one page")
    orders = {
        _layer_order(compat.layer_cache(layer), ref, tensors[ref.tensor_idx].tensor, sum(runs))
        for layer, ref in zip(layers, refs, strict=True)
    }
    if len(orders) != 1:
        raise _UnknownError("the layers differ in their heads or in the order of their pages")
    return orders.pop()


def _layer_order(cache: Any, ref: Any, tensor: Any, period: int) -> tuple[int, bool, int]:
    """Raises _UnknownError unless a page is all runs of keys and values of a block, without gaps."""
    heads, tokens, width = cache.shape[1:]
    by_head = heads == 1 or cache.stride(1) == tokens * width
    by_token = cache.stride(1) == width and (tokens == 1 or cache.stride(2) == heads * width)
    content = heads * tokens * width * cache.element_size()
    if (
        ref.page_size_bytes != content
        or content % period
        or cache.data_ptr() != tensor.data_ptr()
        or cache.stride(0) * cache.element_size() != tensor.stride(0) * tensor.element_size()
        or not (by_head or by_token)
    ):
        raise _unusual(cache)
    return heads, by_head, content


def _layer_runs(layer: Any, vllm_config: Any) -> tuple[int, int]:
    """Raises _UnknownError."""
    if not compat.layer_may_lose(layer, vllm_config):
        raise _UnknownError("not keys and values per head in bfloat16, float16 or fp8")
    spec = compat.layer_spec(layer, vllm_config)
    cache = compat.layer_cache(layer)
    if cache is None:
        raise _UnknownError("a layer has no single cache tensor")
    if getattr(spec, "num_head_slots", None) is not None:
        raise _UnknownError("the attention backend packs its pages in its own layout")
    size = bytes_of(compat.layer_element(layer, vllm_config))
    key, value = spec.head_size, getattr(spec, "head_size_v", None) or spec.head_size
    if (
        cache.dim() != 4
        or cache.shape[1] != spec.num_kv_heads
        or cache.shape[3] != key + value
        or cache.stride(3) != 1
        or cache.element_size() != size
    ):
        raise _unusual(cache)
    backend = packing.layer_backend(layer)
    # The stride of an axis with one element has no meaning.
    steps = [cache.stride(axis) for axis in range(3) if cache.shape[axis] > 1]
    # vLLM's CPU backend stores all keys of a head before its values; the others, each key before its value.
    if backend == "CPU_ATTN" and key == value and cache[0, 0].is_contiguous():
        key = value = cache.shape[2] * key
        steps = [cache.stride(axis) for axis in range(2) if cache.shape[axis] > 1]
    elif backend not in _KEY_BEFORE_VALUE:
        raise _UnknownError(f"attention backend {backend}")
    if any(step % (key + value) for step in steps):
        raise _unusual(cache)
    return size * key, size * value


def _unusual(cache: Any) -> _UnknownError:
    return _UnknownError(f"a cache of shape {tuple(cache.shape)} with strides {cache.stride()}")
