# SPDX-License-Identifier: Apache-2.0
"""Hides the differences between the offloading interfaces of vLLM's releases.

Supports 0.31, 0.32 and 0.33, detected by their features, not by their version number. Any other interface is
refused with one sentence when the spec is first used: importing this module raises UnsupportedVllmError (an
ImportError). The differences:

                                    0.31   0.32   0.33
    get_load_source, CacheHitSource  -      x      x
    submit_load(expedited=)          -      -      x
    on_reset_flushed                 -      -      x
    config_info, config_info_keys    -      -      x
    OffloadingEvent.metadata_only    -      -      x      (older: vLLM tracks no payloads of pending hits)
    unregister_kv_caches             -      -      x      (life_cycle.py)
    sliding_window_size_in_chunks    -      -      x      (per group; older: the workers report it)
    on_schedule_end                  before the stores    the last call of a step
    blocks of a resumed session      added again          replace the known ones
"""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from kv_offload.vllm_versions import SUPPORTED, version_problem


class UnsupportedVllmError(ImportError):
    """This vLLM's offloading interface is not supported; the text names the differences."""


def vllm_version() -> str:
    """Returns vLLM's own version string, or "unknown"."""
    try:
        import vllm

        return str(vllm.__version__)
    except (ImportError, AttributeError):
        return "unknown"


def refusal(version: str, found: str) -> str:
    """Returns the one-sentence error for an unsupported vLLM."""
    return (
        f"KVOffloadSpec supports vLLM {SUPPORTED}, and this is vLLM {version}, where {found}; "
        "install a supported vLLM or another version of vllm-kv-offload"
    )


def shape_problems(base: Any, config: Any) -> list[str]:
    """Returns how vLLM's ``kv_offload.base`` and ``kv_offload.config`` differ from all supported ones."""
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
        problems.append("the constructor of GPULoadStoreSpec has other arguments")
    return problems


def _key_problems(base: Any) -> list[str]:
    """Checks the key format that the core parses (csrc/base/types.h): block hash, then 4-byte group ID."""
    try:
        key = bytes(base.make_offload_key(b"\x01\x02\x03", 0x04050607))
    except Exception as error:
        return [f"make_offload_key fails ({type(error).__name__}: {error})"]
    if key == b"\x01\x02\x03\x04\x05\x06\x07":
        return []
    return [f"make_offload_key returns {key.hex()} for hash 010203 and group 04050607"]


# The arguments that vLLM passes to each of our methods, in order. Only some releases pass those after "|".
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
    # We call these methods.
    "ReqContext": {"set_state": "val", "get_state": "cls", "get_offload_key_position": "key"},
}


def _signature_problems(base: Any) -> list[str]:
    """Returns the methods whose parameters differ from those of our methods or from those that we pass."""
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
    """Returns vLLM's ``kv_offload.base`` and ``kv_offload.config``; raises UnsupportedVllmError."""
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

make_key = base.make_offload_key
group_of = base.get_offload_group_idx
block_hash_of = base.get_offload_block_hash

_EVENT_FIELDS = _field_names(OffloadingEvent)


def load_sources() -> tuple[Any, Any] | None:
    """Returns vLLM's names for the sources of a hit, (host memory, disk); None before 0.32."""
    if not hasattr(OffloadingManager, "get_load_source"):
        return None
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    return CacheHitSource.HOST, CacheHitSource.DISK


def host_address() -> str:
    """Returns the address of this host that vLLM uses between hosts."""
    from vllm.utils.network_utils import get_ip

    return str(get_ip())


def message_queues() -> Any | None:
    """Returns the module of the message queues between engine core and ranks.

    A process that waits for a message calls ``sched_yield`` of that module in a loop. Returns None if the
    module does not exist or has no ``sched_yield``.
    """
    try:
        from vllm.distributed.device_communicators import shm_broadcast
    except ImportError:
        return None
    return shm_broadcast if hasattr(shm_broadcast, "sched_yield") else None


def misplaces_session_blocks() -> bool:
    """True if the connector appends the blocks of a resumed streaming-input session to its known blocks.

    In 0.31 and 0.32 the session is scheduled again with all its blocks, and the connector then assigns its
    chunks to wrong blocks.
    """
    return not has_config_info()  # 0.33 added config_info and also replaces the known blocks


def has_config_info() -> bool:
    """True if vLLM publishes ``vllm:kv_offload_config_info`` (0.33)."""
    return hasattr(OffloadingManager, "config_info")


def new_stats() -> Any:
    """Returns an empty OffloadingConnectorStats."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

    return OffloadingConnectorStats()


def tracks_pending_hits() -> bool:
    """True if vLLM tracks a chunk's event payload from HIT_PENDING on (0.33); older releases start at HIT."""
    return "metadata_only" in _EVENT_FIELDS


def untrack_event(keys: list[bytes]) -> Any:
    """Returns an event that makes vLLM drop the payloads of chunks that are not in host memory, unless they
    are advertised on storage. Nothing is published: describe_chunks gives 0.33's ``metadata_only`` to older
    releases.
    """
    event = OffloadingEvent(keys=keys, medium=Medium.CPU, removed=True)
    event.metadata_only = True
    return event


def make_event(
    keys: list[bytes],
    *,
    removed: bool,
    on_storage: bool = False,
    locality: str | None = None,
    removal_expected: bool = True,
) -> Any:
    """Returns an OffloadingEvent for host memory or for storage.

    ``locality``: LOCAL or REMOTE; None: unspecified. ``removal_expected``: vLLM keeps a chunk's payload until
    its removal is reported. The event names no tier (``ownership``): Dynamo drops events that do.
    """
    fields: dict[str, Any] = {
        "locality": None if locality is None else Locality(locality),
        "removal_expected": removal_expected,
    }
    known = {name: value for name, value in fields.items() if name in _EVENT_FIELDS}
    medium = Medium.STORAGE if on_storage else Medium.CPU
    return OffloadingEvent(keys=keys, medium=medium, removed=removed, **known)


ALL_TIERS = 255


def tiers_allowed(req_context: Any, localities: Sequence[str]) -> tuple[bool, int]:
    """Returns the sources that a request may load from (``kv_load_tiers``): (host memory, bit mask of tiers).

    ``localities``: LOCAL or REMOTE for each tier.
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
    """Returns (end of the chunk under ``key``, end of the request's last whole chunk), both in tokens.

    vLLM records the position of every key of a request, group by group, then the positions of the partial
    chunks that it tries. It has no public method for the last position. Called once per pass over a request.
    Returns None if the positions are not available.
    """
    positions = getattr(req_context, "_offload_key_positions", None)
    first = req_context.get_offload_key_position(key)
    if not positions or first is None:
        return None
    return first, max(positions.values())


def first_key(req_context: Any) -> bytes | None:
    """Returns the key of a request's first chunk; None if it has no whole chunk or was never looked up.

    See ``asked_span``: vLLM records the keys from the first chunk on.
    """
    return next(iter(getattr(req_context, "_offload_key_positions", None) or ()), None)


def hints_envelope(req_context: Any) -> Any | None:
    """Returns the request's KvHintsEnvelope, or None."""
    return getattr(req_context, "kv_hints", None)


@dataclasses.dataclass(frozen=True, slots=True)
class CacheSalt:
    """The cache_salt of a request, as state of its ReqContext."""

    value: str | None


def pass_cache_salts() -> None:
    """Makes vLLM's connector attach the ``cache_salt`` of each request to its ReqContext. Idempotent.

    No release passes it. Raises ValueError if the connector creates its contexts in another way.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    create = getattr(scheduler, "_create_req_context", None)
    if getattr(create, "passes_cache_salts", False):
        return
    if not callable(create) or _signature(create) != ["req"]:
        raise ValueError(
            "tenants: this vLLM has no way to pass the cache_salt of a request to the plugin; recognise "
            "tenants by clients instead"
        )

    @functools.wraps(create)
    def with_cache_salt(req: Any) -> Any:
        context = create(req)
        context.set_state(CacheSalt(getattr(req, "cache_salt", None)))
        return context

    with_cache_salt.passes_cache_salts = True  # type: ignore[attr-defined]
    scheduler._create_req_context = with_cache_salt


def cache_salt(req_context: Any) -> str | None:
    """Returns the cache_salt of a request; None if it has none, or before ``pass_cache_salts``."""
    salt: CacheSalt | None = req_context.get_state(CacheSalt)
    return None if salt is None else salt.value


def group_has_window(group: Any) -> bool | None:
    """True if a group of the OffloadingConfig drops the blocks before a window; None before 0.33."""
    if not hasattr(group, "sliding_window_size_in_chunks"):
        return None
    return group.sliding_window_size_in_chunks is not None


def current_vllm_config() -> Any | None:
    """Returns this process's VllmConfig, or None outside vLLM's config context, such as in the scheduler."""
    try:
        from vllm.config import get_current_vllm_config_or_none

        return get_current_vllm_config_or_none()
    except ImportError:
        return None


def layer_has_window(layer: Any, vllm_config: Any) -> bool:
    """True if a layer's cache is not full attention. Passes on vLLM's exceptions for unusual layers."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return not isinstance(layer.get_kv_cache_spec(vllm_config), FullAttentionSpec)


def layer_window(layer: Any, vllm_config: Any) -> int | None:
    """Returns the tokens before a position that vLLM keeps for a sliding-window layer.

    Returns None for any other layer, including subclasses of the spec. Passes on vLLM's exceptions for
    unusual layers.
    """
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    spec = layer.get_kv_cache_spec(vllm_config)
    if type(spec) is not SlidingWindowSpec:
        return None
    # vLLM derives extra_retained_tokens from this value when it plans the caches; layer specs do not hold it.
    lookahead = int(getattr(vllm_config, "num_prefill_lookahead_tokens", 0))
    return int(spec.sliding_window) + max(int(getattr(spec, "extra_retained_tokens", 0)), lookahead - 1, 0)


def group_drops_blocks(group: Any, vllm_config: Any) -> bool:
    """True if vLLM is known to drop the blocks of ``group`` that leave the window of its layers on this rank.

    All layers of the group on this rank must have a window. Returns False if vLLM keeps all blocks of
    windowed layers: without its hybrid cache manager, or if it cannot give their pages the size of the MLA
    layers' pages. A group that keeps them also has full-attention layers, but in a pipeline those may be on
    another rank, and only 0.33 reports a group's window.
    """
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return False
    has_window = group_has_window(group)
    if has_window is None:
        return bool(vllm_config.parallel_config.pipeline_parallel_size == 1)
    return has_window


def loads_end_anywhere(layers: Mapping[str, Any], offloaded: Set[str], vllm_config: Any) -> bool:
    """True if vLLM may end a load inside a chunk although the chunks of all groups have the same size.

    vLLM limits a load to the tokens that groups without offloading hold (HiSparse). For layers that recompute
    their window (prefix replay) it moves the end of a load to a block boundary. Also returns True for context
    parallelism, which windows do not support.

    ``layers``: all layers of this rank, by name. ``offloaded``: the names of the layers in our groups.
    Passes on vLLM's exceptions for unusual layers.
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
    """True if a layer's cache has one state per block (Mamba) and vLLM keeps only the last state of a chunk.

    This is vLLM's Mamba cache mode "align". Passes on vLLM's exceptions for unusual layers.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = layer.get_kv_cache_spec(vllm_config)
    return isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align"


# vLLM's names of fp8 caches with one scale per tensor or head, which is stored outside of the cache. Their
# tensors are uint8.
_FP8_ELEMENTS = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
# Backends that store e5m2 in a cache of that name. Others accept the name and store e4m3 (TRITON_ATTN).
_E5M2_BACKENDS = ("CPU_ATTN", "FLASHINFER")


def layer_element(layer: Any, vllm_config: Any) -> str:
    """Returns the element type of a layer's cache, in torch's words: "bfloat16" or "float16" if it is not
    quantized, "float8_e4m3fn" or "float8_e5m2" with scales per tensor or head, and otherwise "bytes".

    A cache called fp8_e5m2 is "bytes" unless the attention backend is known to store e5m2. Passes on vLLM's
    exceptions for unusual layers.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec

    spec = layer.get_kv_cache_spec(vllm_config)
    if not isinstance(spec, AttentionSpec):
        return "bytes"
    name = str(spec.dtype).removeprefix("torch.")
    mode = int(getattr(spec, "kv_quant_mode", 0))
    if mode == 0:
        return name if name in ("bfloat16", "float16") else "bytes"
    if mode != 1 or name != "uint8":  # KVQuantMode.FP8_PER_TENSOR
        return "bytes"
    found = _FP8_ELEMENTS.get(getattr(layer, "kv_cache_dtype", ""), "bytes")
    if found == "float8_e5m2":
        backend = getattr(layer, "attn_backend", None)
        return found if backend is not None and backend.get_name() in _E5M2_BACKENDS else "bytes"
    return "bytes" if found == "float8_e4m3fn" and _has_fnuz() else found


def _has_fnuz() -> bool:
    """True if fp8 is e4m3fnuz here, as on some AMD GPUs: its bits have other values."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_fp8_fnuz())


def layer_spec(layer: Any, vllm_config: Any) -> Any:
    """Returns the spec of a layer's cache as the model runner uses it; None if the layer has no cache.

    In 0.31, 0.32 and 0.33 ``get_kv_cache_spec`` does not contain the backend's own packing of pages
    (``num_head_slots``, ``state_content_bytes``). The runner adds it with ``customize_spec``.

    Passes on vLLM's exceptions for unusual layers.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec

    spec = layer.get_kv_cache_spec(vllm_config)
    backend = getattr(layer, "attn_backend", None)
    if isinstance(spec, AttentionSpec) and backend is not None:
        return backend.customize_spec(spec)
    return spec


def layer_may_lose(layer: Any, vllm_config: Any) -> bool:
    """True if a layer's cache has keys and values per head in 16 bits or fp8, on which the lossy codec was
    measured. Other caches, e.g. latent ones (MLA) and states in the form of a window, are excluded.

    Passes on vLLM's exceptions for unusual layers.
    """
    if layer_element(layer, vllm_config) == "bytes":
        return False
    spec = layer_spec(layer, vllm_config)
    return (
        type(spec).__name__ in ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
        and getattr(spec, "head_size_v", spec.head_size) not in (0, None)
        and getattr(spec, "state_content_bytes", None) is None
        and getattr(spec, "tokens_per_state", 1) == 1
    )


def layer_is_replicated(layer: Any, vllm_config: Any) -> bool:
    """True if vLLM declares that all tensor-parallel ranks hold the same bytes of a layer's cache.

    Passes on vLLM's exceptions for unusual layers.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec

    spec = layer.get_kv_cache_spec(vllm_config)
    return isinstance(spec, AttentionSpec) and getattr(spec, "max_tp_shards", None) == 1


def layer_cache(layer: Any) -> Any | None:
    """Returns a layer's cache tensor in the shape that its backend uses; None unless there is exactly one."""
    cache: Any = getattr(layer, "kv_cache", None)
    if isinstance(cache, (list, tuple)):
        cache = cache[0] if len(cache) == 1 else None
    return cache if hasattr(cache, "data_ptr") and cache.numel() else None


def block_hash_seed(algorithm: str) -> tuple[str, bool]:
    """Returns (seed of vLLM's block hashes in hex or as text, True if each process draws its own seed).

    vLLM sets NONE_HASH only after it creates the manager, so this function resolves the seed the same way.
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
