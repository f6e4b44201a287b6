# SPDX-License-Identifier: Apache-2.0
"""The canonical layout: records that are the same for every tensor-parallel size.

A record shard is one KV head of a chunk, in all layers of the group (several heads if the model has more than
64). A rank's row holds the shards of its heads, one after the other. A cache that every rank holds
completely (MLA) has one shard and keeps its byte order.

The layout is used only if two sources agree: the layout that vLLM certifies for a layer (the mapping in its
CanonicalKVCacheRef, the same in 0.31, 0.32 and 0.33), and the actual memory layout of the layer's cache. The
mapping alone is not enough: with one rank it is a single run over the whole page, without head boundaries.
"""

from dataclasses import dataclass
from typing import Any

from . import compat

MOST_SHARDS = 64  # upper bound per record


@dataclass(frozen=True)
class CanonicalPages:
    """The layout of one rank's caches in canonical records."""

    shards: int  # per record, independent of the number of ranks
    shards_per_area: int  # shards of a record in this rank's rows
    pages: tuple[tuple[int, ...], ...]  # bytes of a block without parallelism, per group position and layer


class _NotCanonicalError(Exception):
    """This cache has no canonical layout; the text is the reason."""


class _NotWholeError(ValueError):
    """The bytes of one rank would be used as the bytes of all ranks."""


def canonical_pages(config: Any, kv_caches: Any, replicated: bool) -> CanonicalPages | str:
    """Returns the canonical layout of this rank's caches, or one clause that says why they have none.

    ``config``: the OffloadingConfig. ``replicated``: every rank holds all bytes, and one area stores them.
    Raises ValueError if a layer contradicts ``replicated``.
    """
    try:
        return _pages(config, kv_caches, replicated)
    except _NotCanonicalError as reason:
        return str(reason)
    except _NotWholeError:
        raise
    except Exception as error:  # an unknown kind of layer: use the plain layout
        return f"its layers could not be inspected ({type(error).__name__}: {error})"


def record_shards(heads: int) -> int:
    """Returns the shards of a record with ``heads`` KV heads: their largest divisor up to MOST_SHARDS."""
    return max(shards for shards in range(1, MOST_SHARDS + 1) if heads % shards == 0)


def _pages(config: Any, kv_caches: Any, replicated: bool) -> CanonicalPages:
    # Ranks may split KV heads only, and all pages must have one layout that vLLM certifies.
    parallel = config.parallel
    if parallel.world_size != parallel.tp_size or getattr(parallel, "dcp_size", 1) != 1:
        raise _NotCanonicalError("the ranks split layers or tokens, not only KV heads")
    vllm_config = compat.current_vllm_config()
    if vllm_config is None:
        raise _NotCanonicalError("this vLLM does not pass the configuration to its workers")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise _NotCanonicalError("calculate_kv_scales gives each rank its own scales")
    known = vllm_config.compilation_config.static_forward_context
    heads: set[int] = set()
    pages = []
    for group, refs in zip(config.groups, kv_caches.group_data_refs, strict=True):
        if len(refs) != len(group.layer_names):
            raise _NotCanonicalError(
                f"the layers of a block share one page (kv_cache_layout {config.kv_cache_layout})"
            )
        for name, ref in zip(group.layer_names, refs, strict=True):
            _check_certified(name, ref)
            if replicated:
                _check_whole(name, ref)
            else:
                tensor = kv_caches.tensors[ref.tensor_idx].tensor
                heads.add(_heads_of(name, known.get(name), ref, tensor, parallel.rank, vllm_config))
        pages.append(tuple(ref.mapping.canonical_page_size_bytes for ref in refs))
    if replicated:
        return CanonicalPages(1, 1, tuple(pages))
    if len(heads) != 1:
        raise _NotCanonicalError(f"layers have different numbers of KV heads ({sorted(heads)})")
    shards = record_shards(heads.pop())
    if shards % parallel.tp_size:
        raise _NotCanonicalError(
            f"a record has {shards} shards, which {parallel.tp_size} ranks cannot share equally"
        )
    return CanonicalPages(shards, shards // parallel.tp_size, tuple(pages))


def _check_certified(name: str, ref: Any) -> None:
    mapping = getattr(ref, "mapping", None)
    if mapping is None or not mapping.parallelism_agnostic:
        raise _NotCanonicalError(
            f"vLLM declares no layout of {name} that is the same for all tensor-parallel sizes"
        )


def _check_whole(name: str, ref: Any) -> None:
    if ref.mapping.canonical_page_size_bytes == ref.page_size_bytes:
        return
    # The plain layout would be wrong too: rank 0 would store its part for all ranks.
    raise _NotWholeError(
        "canonical_layout cannot be used: vLLM reports that every rank holds the whole cache, but "
        f"{name} holds only a part; start without canonical_layout"
    )


def _heads_of(name: str, layer: Any, ref: Any, tensor: Any, rank: int, vllm_config: Any) -> int:
    """Returns a layer's KV heads, summed over all ranks.

    Raises _NotCanonicalError unless each head is one run of bytes in a page, in the order of ranks and heads.
    """
    mapping, page = ref.mapping, ref.page_size_bytes
    if mapping.num_writers > 1:
        raise _NotCanonicalError(
            f"{mapping.num_writers} ranks hold the same KV heads; use a tensor-parallel size of at most "
            f"{mapping.canonical_page_size_bytes // page}"
        )
    cache = compat.layer_cache(layer)
    spec = None if layer is None else compat.layer_spec(layer, vllm_config)
    heads = getattr(spec, "num_kv_heads", 0)
    # These fields mark a backend with its own page packing. Without this check, two planes (K and V) would
    # look like two heads.
    packed = ("num_head_slots", "state_content_bytes")
    if any(getattr(spec, field, None) is not None for field in packed):
        raise _NotCanonicalError(f"the attention backend of {name} packs its pages in its own layout")
    if cache is None or not heads:
        raise _NotCanonicalError(f"the cache of {name} is not known")
    size = cache.element_size()
    is_by_heads = (
        cache.dim() == 4
        and cache.shape[1] == heads
        and cache[0, 0].is_contiguous()
        and cache[0, 0].numel() * size * heads == page
        and cache.stride(1) * size * heads == page
        and cache.stride(0) * size == tensor.stride(0) * tensor.element_size()
        and cache.data_ptr() == tensor.data_ptr()
    )
    if not is_by_heads:
        raise _NotCanonicalError(
            f"the KV heads of a page of {name} are not contiguous (shape {tuple(cache.shape)}, strides "
            f"{tuple(cache.stride())}); set VLLM_KV_CACHE_LAYOUT=LBHNC if the backend supports it"
        )
    runs = [(run.local_offset, run.canonical_offset, run.fragment_size) for run in mapping.runs]
    if runs != [(0, rank * page, page)]:
        raise _NotCanonicalError(f"vLLM stores the KV heads of {name} in another order")
    return int(mapping.canonical_page_size_bytes // page * heads)
