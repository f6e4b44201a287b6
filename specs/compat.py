# SPDX-License-Identifier: Apache-2.0
"""The one place that knows how vLLM's offloading interface differs between releases.

Supported are 0.31, 0.32 and 0.33, distinguished by what they have, not by their number. Any other
interface is refused here, in one sentence, when the spec is first used: importing this module raises
UnsupportedVllmError (an ImportError). What differs:

                                    0.31   0.32   0.33
    get_load_source, CacheHitSource  -      x      x
    submit_load(expedited=)          -      -      x
    on_reset_flushed                 -      -      x
    config_info, config_info_keys    -      -      x
    OffloadingEvent.metadata_only    -      -      x      (before, vLLM tracks no payload of a pending hit)
    unregister_kv_caches             -      -      x      (life_cycle.py)
    sliding_window_size_in_chunks    -      -      x      (of a group; before, the workers tell)
    on_schedule_end                  before the stores    the last call of a step
    blocks of a session that goes on added again          taken as what it has
"""

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from kv_offload.vllm_versions import SUPPORTED, version_problem


class UnsupportedVllmError(ImportError):
    """This vLLM has no offloading interface that we know; the text names what was found."""


def vllm_version() -> str:
    """The version that vLLM gives itself, or "unknown"."""
    try:
        import vllm

        return str(vllm.__version__)
    except (ImportError, AttributeError):
        return "unknown"


def refusal(version: str, found: str) -> str:
    """The one sentence for a vLLM that is not supported."""
    return (
        f"KVOffloadSpec supports vLLM {SUPPORTED}, and this is vLLM {version}, where {found}; "
        "install a supported vLLM or another version of vllm-kv-offload"
    )


def shape_problems(base: Any, config: Any) -> list[str]:
    """How vLLM's modules ``kv_offload.base`` and ``kv_offload.config`` differ from all that we know."""
    problems: list[str] = []
    for name, methods in (
        ("OffloadingManager", {"on_new_request", "lookup", "prepare_load", "prepare_store"}),
        ("OffloadingWorker", {"submit_store", "submit_load", "get_finished", "wait"}),
        ("OffloadingSpec", {"get_manager", "get_worker"}),
    ):
        found = set(getattr(getattr(base, name, None), "__abstractmethods__", ()))
        if found != methods:
            problems.append(f"{name} asks for {', '.join(sorted(found)) or 'nothing'}")
    problems += _signature_problems(base)
    for module, name, fields in (
        (base, "ReqContext", {"req_id", "kv_transfer_params"}),
        (base, "PrepareStoreOutput", {"keys_to_store", "store_spec", "evicted_keys"}),
        (base, "TransferResult", {"job_id", "success", "transfer_size", "transfer_time"}),
        (base, "OffloadingEvent", {"keys", "medium", "removed"}),
        (base, "CanonicalKVCaches", {"tensors", "group_data_refs"}),
        (base, "CanonicalKVCacheRef", {"tensor_idx", "page_size_bytes"}),
        (config, "OffloadingGroupConfig", {"tokens_per_block", "layer_names", "group_id"}),
        (config, "OffloadingConfig", {"groups", "extra_config", "engine_id", "model", "cache", "parallel"}),
        (config, "OffloadingCacheConfig", {"tokens_per_hash", "blocks_per_chunk"}),
        (config, "OffloadingParallelConfig", {"rank", "world_size", "tp_size", "pp_size"}),
    ):
        missing = fields - _field_names(getattr(module, name, None))
        if missing:
            problems.append(f"{name} has no {', '.join(sorted(missing))}")
    problems += _key_problems(base)
    results = {result.name for result in getattr(base, "LookupResult", ())}
    if results != {"HIT", "HIT_PENDING", "RETRY", "MISS"}:
        problems.append(f"LookupResult is one of {', '.join(sorted(results)) or 'nothing'}")
    parameters = _parameters(getattr(base, "GPULoadStoreSpec", None))
    if not {"block_ids", "group_sizes", "block_indices"} <= parameters:
        problems.append("GPULoadStoreSpec is made from other arguments")
    return problems


def _key_problems(base: Any) -> list[str]:
    """Keys are taken apart in the core (csrc/base/types.h): a block hash, then the group in four bytes."""
    try:
        key = bytes(base.make_offload_key(b"\x01\x02\x03", 0x04050607))
    except Exception as error:
        return [f"make_offload_key fails ({type(error).__name__}: {error})"]
    if key == b"\x01\x02\x03\x04\x05\x06\x07":
        return []
    return [f"a key is made as {key.hex()} of the hash 010203 and the group 04050607"]


# What vLLM passes to each of our methods, in this order; after the bar, what only some releases pass.
_PASSED = {
    "OffloadingManager": {
        "on_new_request": "req_context",
        "lookup": "key req_context",
        "prepare_load": "keys req_context",
        "complete_load": "keys req_context",
        "prepare_store": "keys req_context",
        "complete_store": "keys req_context success",
        "on_request_finished": "req_context",
        "on_schedule_end": "context",
    },
    "OffloadingWorker": {
        "submit_store": "job_id src_spec dst_spec",
        "submit_load": "job_id src_spec dst_spec | expedited",
        "get_finished": "",
        "wait": "job_ids",
    },
    "OffloadingSpec": {"get_manager": "", "get_worker": "kv_caches"},
    # Called by us.
    "ReqContext": {"set_state": "val", "get_state": "cls", "get_offload_key_position": "key"},
}


def _signature_problems(base: Any) -> list[str]:
    """Methods that are called with other arguments than ours take, or that take others than we give."""
    problems = []
    for name, methods in _PASSED.items():
        for method, text in methods.items():
            function = getattr(getattr(base, name, None), method, None)
            if function is None:
                problems.append(f"{name} has no {method}")
                continue
            always, _, sometimes = text.partition("|")
            found = [each for each in _signature(function) if each != "self"]
            if found[: len(always.split())] != always.split() or not (
                set(found[len(always.split()) :]) <= set(sometimes.split())
            ):
                problems.append(f"{name}.{method} takes {', '.join(found) or 'nothing'}")
    return problems


def _signature(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _field_names(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()


def _parameters(kind: Any) -> set[str]:
    return set(_signature(kind))


def _supported_modules() -> tuple[Any, Any]:
    """vLLM's ``kv_offload.base`` and ``kv_offload.config``; raises UnsupportedVllmError."""
    version = vllm_version()
    problem = version_problem(version)
    if problem is not None:
        raise UnsupportedVllmError(refusal(version, problem))
    try:
        from vllm.v1.kv_offload import base, config
    except ImportError as error:
        raise UnsupportedVllmError(refusal(version, f"importing its kv_offload fails ({error})")) from error
    problems = shape_problems(base, config)
    if problems:
        raise UnsupportedVllmError(refusal(version, "; ".join(problems)))
    return base, config


base, _config = _supported_modules()

LoadStoreSpec = base.LoadStoreSpec
LookupResult = base.LookupResult
Locality = base.Locality
Medium = base.Medium
OffloadingEvent = base.OffloadingEvent
OffloadingManager = base.OffloadingManager
OffloadingSpec = base.OffloadingSpec
OffloadingWorker = base.OffloadingWorker
PrepareStoreOutput = base.PrepareStoreOutput
RequestOffloadingContext = base.RequestOffloadingContext
TransferResult = base.TransferResult

_EVENT_FIELDS = _field_names(OffloadingEvent)


def load_sources() -> tuple[Any, Any] | None:
    """(host memory, disk) as vLLM names where a hit came from; None before 0.32."""
    if not hasattr(OffloadingManager, "get_load_source"):
        return None
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    return CacheHitSource.HOST, CacheHitSource.DISK


def message_queues() -> Any | None:
    """The module of the queues between engine core and ranks, whose ``sched_yield`` is called in turns while
    one waits for a message; None where it is not that."""
    try:
        from vllm.distributed.device_communicators import shm_broadcast
    except ImportError:
        return None
    return shm_broadcast if hasattr(shm_broadcast, "sched_yield") else None


def mistakes_blocks_of_sessions() -> bool:
    """Whether the connector adds all blocks of a request that is scheduled anew to those that it knows of it
    already (0.31, 0.32): a session of streaming input that goes on, whose chunks are then looked for in other
    blocks."""
    return not has_config_info()  # both came with 0.33, which takes the blocks as all there are


def has_config_info() -> bool:
    """Whether vLLM publishes ``vllm:kv_offload_config_info`` (0.33)."""
    return hasattr(OffloadingManager, "config_info")


def new_stats() -> Any:
    """An empty OffloadingConnectorStats."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

    return OffloadingConnectorStats()


def tracks_pending_hits() -> bool:
    """True if self-describing events keep a chunk's payload from HIT_PENDING on (0.33), not from HIT."""
    return "metadata_only" in _EVENT_FIELDS


def untrack_events(keys: list[bytes]) -> list[Any]:
    """Events that make vLLM drop the payloads of chunks that never came to host memory.

    Before 0.33 only a removal drops a payload, and subscribers count the stores and removals of a block: so
    the chunks are stored and removed in one batch.
    """
    if tracks_pending_hits():
        return [OffloadingEvent(keys=keys, medium=Medium.CPU, removed=True, metadata_only=True)]
    return [make_event(keys, removed=False), make_event(keys, removed=True)]


def make_event(
    keys: list[bytes],
    *,
    removed: bool,
    tier: str | None = None,
    locality: str = "LOCAL",
    removal_expected: bool = True,
) -> Any:
    """An OffloadingEvent of host memory (``tier`` None) or of a tier below it.

    ``removal_expected``: vLLM keeps a chunk's payload until the tier reports its removal.
    """
    if tier is None:
        return OffloadingEvent(keys=keys, medium=Medium.CPU, removed=removed)
    fields = {"ownership": tier, "locality": Locality(locality), "removal_expected": removal_expected}
    known = {name: value for name, value in fields.items() if name in _EVENT_FIELDS}
    return OffloadingEvent(keys=keys, medium=Medium.STORAGE, removed=removed, **known)


ALL_TIERS = 255


def tiers_allowed(req_context: Any, localities: Sequence[str]) -> tuple[bool, int]:
    """(host memory, the tiers below it as bits) that a request may load from: its ``kv_load_tiers``.

    ``localities``: LOCAL or REMOTE, of each tier there is.
    """
    allowed = getattr(req_context, "load_tier_filter", None)
    if allowed is None:
        return True, ALL_TIERS
    bits = [
        1 << tier for tier, name in enumerate(localities) if allowed.allows(Medium.STORAGE, Locality(name))
    ]
    every = len(bits) == len(localities) and bits != []
    return bool(allowed.allows(Medium.CPU, Locality.LOCAL)), ALL_TIERS if every else sum(bits)


def asked_span(req_context: Any, key: bytes) -> tuple[int, int] | None:
    """(end of the chunk under ``key``, end of the request's last whole chunk), both in tokens.

    vLLM notes the position of every key of a request, group by group, and then those of parts of a chunk that
    it tries; what it has no public question for is how far they reach. Asked once per pass over a request.
    None where that is not to be had.
    """
    positions = getattr(req_context, "_offload_key_positions", None)
    first = req_context.get_offload_key_position(key)
    if not positions or first is None:
        return None
    return first, max(positions.values())


def group_has_window(group: Any) -> bool | None:
    """Whether a group of the OffloadingConfig forgets blocks behind a window; None before 0.33."""
    if not hasattr(group, "sliding_window_size_in_chunks"):
        return None
    return group.sliding_window_size_in_chunks is not None


def current_vllm_config() -> Any | None:
    """The VllmConfig of this process, if it is inside vLLM's context (workers are, the scheduler is not)."""
    try:
        from vllm.config import get_current_vllm_config_or_none

        return get_current_vllm_config_or_none()
    except ImportError:
        return None


def layer_has_window(layer: Any, vllm_config: Any) -> bool:
    """Whether a layer's cache is anything but full attention. Raises what vLLM raises for odd layers."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return not isinstance(layer.get_kv_cache_spec(vllm_config), FullAttentionSpec)


def layer_window(layer: Any, vllm_config: Any) -> int | None:
    """The tokens before a position that vLLM keeps for a sliding-window layer; None for any other layer,
    subclasses of the spec included. Raises what vLLM raises for odd layers."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    spec = layer.get_kv_cache_spec(vllm_config)
    if type(spec) is not SlidingWindowSpec:
        return None
    # vLLM sets extra_retained_tokens when it plans the caches, from this, and not in the specs of layers.
    lookahead = int(getattr(vllm_config, "num_prefill_lookahead_tokens", 0))
    return int(spec.sliding_window) + max(int(getattr(spec, "extra_retained_tokens", 0)), lookahead - 1, 0)


def group_drops_blocks(group: Any, vllm_config: Any) -> bool:
    """True if vLLM is known to drop the blocks of ``group`` that fall out of the window which all its layers
    on this rank have.

    False where vLLM keeps all blocks of windowed layers: without its hybrid cache manager, or where it cannot
    make their pages one size with those of MLA layers. Such a group has full-attention layers too, but in a
    pipeline they may be on another rank, and only 0.33 names the window of a group.
    """
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return False
    has_window = group_has_window(group)
    if has_window is None:
        return bool(vllm_config.parallel_config.pipeline_parallel_size == 1)
    return has_window


def loads_end_anywhere(layers: Mapping[str, Any], offloaded: Set[str], vllm_config: Any) -> bool:
    """True if vLLM may end a load inside a chunk although all groups have chunks of one size: it caps a load
    by what groups that it does not offload hold (HiSparse), and moves its end to a block for layers that
    recompute their window (prefix replay). Context parallelism is counted in, as windows do not support it.

    ``layers``: all of this rank, by name; ``offloaded``: the names of those in the groups that we are given.
    Raises what vLLM raises for odd layers.
    """
    parallel = vllm_config.parallel_config
    if any(
        getattr(parallel, name, 1) > 1
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size")
    ):
        return True
    for name, layer in layers.items():
        if not hasattr(layer, "get_kv_cache_spec"):
            continue
        spec = layer.get_kv_cache_spec(vllm_config)
        if spec is not None and (name not in offloaded or getattr(spec, "prefix_replay_tokens", 0) > 0):
            return True
    return False


def layer_holds_states(layer: Any, vllm_config: Any) -> bool:
    """Whether a layer's cache keeps one state a block (Mamba), of which vLLM keeps a chunk's last alone: its
    mode "align". Raises what vLLM raises for odd layers."""
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = layer.get_kv_cache_spec(vllm_config)
    return isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align"


def layer_element(layer: Any, vllm_config: Any) -> str:
    """What a layer's cache is made of: "bfloat16" or "float16" where it is plainly that, else "bytes". Raises
    what vLLM raises for odd layers."""
    from vllm.v1.kv_cache_interface import AttentionSpec

    spec = layer.get_kv_cache_spec(vllm_config)
    if not isinstance(spec, AttentionSpec) or getattr(spec, "kv_quant_mode", 0) != 0:
        return "bytes"
    name = str(spec.dtype).removeprefix("torch.")
    return name if name in ("bfloat16", "float16") else "bytes"


def layer_cache(layer: Any) -> Any | None:
    """The tensor that a layer computes on, in the shape that its backend sees; None where it has none, or
    several."""
    cache: Any = getattr(layer, "kv_cache", None)
    if isinstance(cache, (list, tuple)):
        cache = cache[0] if len(cache) == 1 else None
    return cache if hasattr(cache, "data_ptr") and cache.numel() else None


def block_hash_seed(algorithm: str) -> tuple[str, bool]:
    """(the seed of vLLM's block hashes in hex or as text, whether each process draws another one).

    vLLM sets NONE_HASH only after the manager was made, so the seed is resolved as it will do it.
    """
    try:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

        hash_function: Callable[[Any], bytes] = get_hash_fn_by_name(algorithm)
        seed = resolve_none_hash_seed(hash_function)
        if seed != resolve_none_hash_seed(hash_function):
            return os.urandom(16).hex(), True
        return hash_function(seed).hex(), False
    except (ImportError, ValueError, TypeError):
        return os.environ.get("PYTHONHASHSEED", "unknown"), False
