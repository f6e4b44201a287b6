# SPDX-License-Identifier: Apache-2.0
"""The identity of this engine's cache. Each rank publishes its part in the host region, as JSON.

vLLM sets its VllmConfig in the workers but not for the manager, and it has no channel from worker to
scheduler. The region's control page carries at most 4095 bytes of text per rank.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kv_offload.config import OffloadConfig
from kv_offload.log import get_logger
from kv_offload.model_identity import code_repositories, model_identity
from kv_offload.namespace import GroupIdentity, NamespaceIdentity, setting_text

from . import compat, packing
from .canonical import CanonicalPages
from .kv_runs import UNKNOWN as UNKNOWN_RUNS
from .resolved_settings import configured, environment

logger = get_logger(__name__)

MAX_FINGERPRINT_BYTES = 4095
_MAX_SETTINGS_BYTES = 2048  # part of MAX_FINGERPRINT_BYTES; the rest is for the other fields
CANONICAL_VERSION = 1  # version of the canonical layout's byte order
UNKNOWN = "unknown"


def worker_fingerprint(
    config: Any,
    device_type: str,
    copier: str,
    pages: Sequence[Sequence[int]],
    cache_blocks: int,
    canonical: CanonicalPages | str | None = None,
    kv_runs: Sequence[tuple[int, int] | str] = (),
    head_orders: Sequence[tuple[int, bool, int] | str] = (),
    layers: Sequence[list[tuple[int, int]] | str] = (),
) -> str:
    """Returns one rank's part of the identity.

    ``pages``: bytes of one block of each ref, per group position. ``cache_blocks``: the number of blocks in
    its cache. ``canonical``: the canonical layout, or the reason why there is none; None if not requested.
    ``kv_runs``, ``head_orders``, ``layers``: the results of kv_runs_of, head_orders_of and layer_ranges_of;
    empty: unknown for all groups, and without a calibration.
    Long values are replaced by their digest, so that the text fits in the control page.
    """
    vllm_config = compat.current_vllm_config()
    fingerprint: dict[str, Any] = {
        "copier": copier,
        "cache_blocks": cache_blocks,
        "shard": _layout_digest(config, pages),  # may differ between ranks (pipeline stages)
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "settings": {"device": device_type},
        "unread": ["vLLM's configuration (none is set in this process)"],
    }
    if isinstance(canonical, CanonicalPages):
        fingerprint["canonical"] = {
            "shards": canonical.shards,
            "shards_per_area": canonical.shards_per_area,
            "pages": _layout_digest(config, canonical.pages),
        }
    elif canonical is not None:
        fingerprint["kept_apart"] = canonical[:512]
    if vllm_config is not None:
        fingerprint["settings"], fingerprint["unread"] = _settings(vllm_config, config, device_type)
        fingerprint["numbered_images"] = _numbers_images(vllm_config)
        fingerprint["model"] = _weights_source(vllm_config)
        fingerprint["max_model_len"] = getattr(vllm_config.model_config, "max_model_len", 0)
        fingerprint["hash_algorithm"] = vllm_config.cache_config.prefix_caching_hash_algo
        fingerprint["windowed"] = _windowed(vllm_config, config)
        fingerprint["elements"] = _elements(vllm_config, config)
        fingerprint["may_lose"] = _may_lose(vllm_config, config)
        fingerprint["kv_runs"] = kv_runs or ["the worker reports no layout"] * len(config.groups)
        fingerprint["head_orders"] = list(head_orders)
        fingerprint["layers"] = list(layers)
        fingerprint["resumed_is_new"] = bool(getattr(vllm_config, "use_v2_model_runner", False))
    # Only the size of the settings decides, because the other fields differ between ranks and starts.
    if len(setting_text(fingerprint["settings"])) > _MAX_SETTINGS_BYTES:
        fingerprint["settings"] = {"digest": _digest(setting_text(fingerprint["settings"]))}
    return json.dumps(fingerprint, sort_keys=True, default=str)


def _layout_digest(config: Any, pages: Sequence[Sequence[int]]) -> str:
    """Returns a digest of all layer names and the bytes of a block of each layer."""
    layout = [
        (list(group.layer_names), list(sizes)) for group, sizes in zip(config.groups, pages, strict=True)
    ]
    return _digest(setting_text(layout))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _weights_source(vllm_config: Any) -> dict[str, Any]:
    """Returns the sources of the weights, in addition to config.model.name.

    For a model at a remote address (s3:// and similar) vLLM replaces the name with a temporary directory with
    the model's configs, and keeps the address in model_weights.
    """
    return {
        "revision": getattr(vllm_config.model_config, "revision", None),
        "cache_dir": getattr(vllm_config.load_config, "download_dir", None),
        "address": getattr(vllm_config.model_config, "model_weights", None)
        or _tensorizer_address(vllm_config),
        "configured_by": getattr(vllm_config.model_config, "hf_config_path", None),
        "code": _remote_code(vllm_config.model_config),
        "code_revision": getattr(vllm_config.model_config, "code_revision", None),
        "draft": _draft(vllm_config),
        "adapters": getattr(getattr(vllm_config, "lora_config", None), "default_mm_loras", None),
    }


def _draft(vllm_config: Any) -> dict[str, Any] | None:
    """Returns the source of the drafter's weights; None without a drafter that has its own weights.

    vLLM loads an MTP drafter from the model's repository, but not at the model's revision.
    """
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    found, model = (
        {"name": getattr(config, "model", None), "revision": getattr(config, "revision", None)}
        for config in (draft, vllm_config.model_config)
    )
    return found if isinstance(found["name"], str) and found != model else None


def _remote_code(model_config: Any) -> list[str]:
    """Returns the hub repositories of code_repositories() that vLLM may run."""
    if not getattr(model_config, "trust_remote_code", False):
        return []
    return code_repositories(getattr(model_config, "hf_config", None))


def _numbers_images(vllm_config: Any) -> bool:
    """True if vLLM identifies images by their arrival number instead of by a hash of their content."""
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    cached = getattr(media, "mm_processor_cache_gb", None) != 0
    return media is not None and not cached and not vllm_config.cache_config.enable_prefix_caching


def _tensorizer_address(vllm_config: Any) -> str | None:
    """Returns the path or URI from which Tensorizer reads the weights; None for the model's own directory.

    vLLM's command line copies Tensorizer's settings into a separate table, in which the model is the default
    of ``tensorizer_dir``.
    """
    extra = getattr(vllm_config.load_config, "model_loader_extra_config", None)
    model = getattr(vllm_config.model_config, "model", None)
    tables = [extra, extra.get("tensorizer_config")] if isinstance(extra, Mapping) else [extra]
    for name in ("tensorizer_uri", "tensorizer_dir"):
        for table in tables:
            found = table.get(name) if isinstance(table, Mapping) else getattr(table, name, None)
            if isinstance(found, str) and found and found != model:
                return found
    return None


def _settings(vllm_config: Any, config: Any, device_type: str) -> tuple[dict[str, str], list[str]]:
    """Returns (settings that change the bytes of a block, parts that could not be read)."""
    parts: dict[str, Callable[[], Mapping[str, str]]] = {
        "vLLM's version": lambda: {"vllm": packing.bytes_version()},
        "vLLM's configuration": lambda: configured(vllm_config),
        "vLLM's environment": environment,
        "attention backends": lambda: _backends(vllm_config, config, device_type),
    }
    settings: dict[str, str] = {"device": device_type}
    unread: list[str] = []
    for name, read in parts.items():
        try:
            settings |= read()
        except Exception as error:  # any vLLM error: the scheduler then refuses tiers
            unread.append(f"{name} ({type(error).__name__}: {error})"[:300])
    return {name: text if len(text) <= 128 else _digest(text) for name, text in settings.items()}, unread


def _layers(vllm_config: Any, config: Any) -> list[list[Any]]:
    known = vllm_config.compilation_config.static_forward_context
    return [[known[name] for name in group.layer_names if name in known] for group in config.groups]


def _backends(vllm_config: Any, config: Any, device_type: str) -> dict[str, str]:
    """Returns the attention backends, and the machine properties that decide how they pack their pages.

    Passes on vLLM's exceptions. Raises ValueError if no layer of this rank is known.
    """
    layers = [layer for layers in _layers(vllm_config, config) for layer in layers]
    if not layers:
        raise ValueError("no layer of the cache groups is known")
    names = sorted({packing.layer_backend(layer) for layer in layers})
    packed = sorted({packing.layer_packing(layer, vllm_config, device_type) for layer in layers} - {""})
    return {"backends": setting_text(names)} | ({"packing": setting_text(packed)} if packed else {})


def _windowed(vllm_config: Any, config: Any) -> list[bool] | None:
    """Returns per group position whether vLLM drops blocks before a window; None if a layer is unknown."""
    flags = [compat.group_has_window(group) for group in config.groups]
    if None not in flags:
        return [bool(flag) for flag in flags]
    try:
        groups = _layers(vllm_config, config)
        if not all(groups):
            return None
        return [compat.layer_has_window(layers[0], vllm_config) for layers in groups]
    except Exception as error:
        logger.debug("which groups have a window is not known: %s", error)
        return None


def _elements(vllm_config: Any, config: Any) -> list[str]:
    """Returns the element type per group position, for the codec; "bytes" if layers differ or are unknown."""
    try:
        found = [
            {compat.layer_element(layer, vllm_config) for layer in layers}
            for layers in _layers(vllm_config, config)
        ]
    except Exception as error:
        logger.debug("what the cache groups are made of is not known: %s", error)
        return ["bytes"] * len(config.groups)
    return [next(iter(names)) if len(names) == 1 else "bytes" for names in found]


def _may_lose(vllm_config: Any, config: Any) -> list[bool]:
    """Returns per group position whether the lossy codec supports the layers; False if they are unknown."""
    try:
        return [
            bool(layers) and all(compat.layer_may_lose(layer, vllm_config) for layer in layers)
            for layers in _layers(vllm_config, config)
        ]
    except Exception as error:
        logger.debug("whether the cache groups may lose precision is not known: %s", error)
        return [False] * len(config.groups)


def groups_of_states(config: Any) -> list[bool]:
    """Returns per group position whether only the last block of a chunk is kept (a Mamba cache, "align").

    Called in the workers. If vLLM cannot describe a layer, all groups count as groups that keep all blocks.
    """
    vllm_config = compat.current_vllm_config()
    try:
        if vllm_config is None:
            return [False] * len(config.groups)
        return [
            bool(layers) and all(compat.layer_holds_states(layer, vllm_config) for layer in layers)
            for layers in _layers(vllm_config, config)
        ]
    except Exception as error:  # chunks of several blocks are then not stored; this is counted
        logger.warning("which cache groups hold states is not known: %s", error)
        return [False] * len(config.groups)


def merge_fingerprints(texts: Sequence[str], ranks_per_area: int = 1, first_rank: int = 0) -> dict[str, Any]:
    """Merges the fingerprints of ranks: the values of the first, and the windows that any rank reports.

    ``ranks_per_area``: as many consecutive ranks hold the same bytes. ``first_rank``: of ``texts``. Raises
    ValueError if a fingerprint is malformed, or if two ranks differ in a value that must be equal.
    """
    ranks = _read_fingerprints(texts, first_rank)
    merged = dict(ranks[0])
    for key in ("hash_algorithm", "model", "canonical", "blocks_per_chunk"):
        for rank, fingerprint in enumerate(ranks, first_rank):
            if fingerprint.get(key) != merged.get(key):
                raise ValueError(
                    f"rank {rank} has {key} {fingerprint.get(key)!r}, rank {first_rank} has "
                    f"{merged.get(key)!r}; all ranks of one engine must be started with the same settings"
                )
    for at, fingerprint in enumerate(ranks):
        first = at - at % ranks_per_area
        for key, what in (("shard", "layers"), ("settings", "settings of the cache")):
            if fingerprint[key] != ranks[first][key]:
                raise ValueError(
                    f"rank {first_rank + at} has other {what} than rank {first_rank + first}, although vLLM "
                    f"declares that both hold the same KV cache: {fingerprint[key]!r} and "
                    f"{ranks[first][key]!r}; start all ranks with the same settings and the same vLLM"
                )
    merged["settings"] = dict(merged["settings"])
    if any(
        fingerprint["settings"] != merged["settings"] for fingerprint in ranks
    ):  # pipeline stages with different backends
        merged["settings"]["ranks"] = _digest(
            setting_text([fingerprint["settings"] for fingerprint in ranks])
        )
    merged["unread"] = sorted({part for fingerprint in ranks for part in fingerprint.get("unread", ())})
    merged["numbered_images"] = any(fingerprint.get("numbered_images") for fingerprint in ranks)
    merged["cache_blocks"] = min(fingerprint.get("cache_blocks", 0) for fingerprint in ranks)
    merged["shards"] = _digest(setting_text([fingerprint["shard"] for fingerprint in ranks]))
    return merged | _merged_groups(ranks)


def _read_fingerprints(texts: Sequence[str], first_rank: int) -> list[dict[str, Any]]:
    """Raises ValueError unless all texts are results of worker_fingerprint for as many cache groups.

    The texts of other hosts come over the network, from a build that may be another one.
    """
    found: list[dict[str, Any]] = []
    groups: set[int] = set()
    for rank, text in enumerate(texts, first_rank):
        try:
            fingerprint = json.loads(text)
        except (ValueError, RecursionError):
            fingerprint = None
        wrong = ["JSON"] if not isinstance(fingerprint, dict) else _malformed_fields(fingerprint)
        if not wrong:
            groups |= {len(fingerprint[key]) for key in _GROUP_FIELDS if fingerprint.get(key)}
            if len(groups) > 1:
                wrong = ["number of cache groups"]
        if wrong:
            raise ValueError(
                f"rank {rank} reports a cache layout that this process cannot read (its {', '.join(wrong)}): "
                "install the same release of vllm-kv-offload and of vLLM on all hosts"
            )
        found.append(fingerprint)
    return found


def _malformed_fields(fingerprint: Mapping[str, Any]) -> list[str]:
    """Returns the fields that worker_fingerprint does not write like this."""
    wrong = [key for key, is_valid in _FIELDS.items() if not is_valid(fingerprint.get(key))]
    for key, is_valid in _GROUP_FIELDS.items():
        values = fingerprint.get(key)
        if values is not None and not (isinstance(values, list) and all(map(is_valid, values))):
            wrong.append(key)
    return wrong


def _is_number(value: Any) -> bool:
    return type(value) is int and value >= 0  # JSON's true is an int too


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def _is_order(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and type(value[1]) is bool and _is_range(value[::2])


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_canonical(value: Any) -> bool:
    if not isinstance(value, dict):
        return value is None
    sizes = [value.get("shards"), value.get("shards_per_area")]
    return all(_is_number(size) and size for size in sizes) and _is_text(value.get("pages"))


_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "copier": _is_text,
    "cache_blocks": _is_number,
    "shard": _is_text,
    "settings": lambda value: isinstance(value, dict),
    "model": lambda value: value is None or isinstance(value, dict),
    "unread": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "canonical": _is_canonical,
}
# Of each cache group. A rank without a calibration has no head_orders and layers. A text is the reason why
# the layout or the layers of a group are not known.
_GROUP_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "windowed": _is_flag,
    "elements": _is_text,
    "may_lose": _is_flag,
    "kv_runs": lambda value: _is_text(value) or _is_range(value),
    "head_orders": lambda value: _is_text(value) or _is_order(value),
    "layers": lambda value: _is_text(value) or (isinstance(value, list) and all(map(_is_range, value))),
}


def _merged_groups(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the values that fingerprints have for each cache group.

    A window of any rank counts. Where ranks differ, no codec may assume an element type or a layout. A group
    may lose precision only if it may on all ranks.
    """
    windowed = [fingerprint["windowed"] for fingerprint in ranks if fingerprint.get("windowed") is not None]

    def by_group(key: str) -> list[tuple[Any, ...]]:
        return list(zip(*(fingerprint[key] for fingerprint in ranks if key in fingerprint), strict=True))

    # Empty for a rank without a calibration, which the host of that rank refuses if the others have one.
    orders = [fingerprint["head_orders"] for fingerprint in ranks if fingerprint.get("head_orders")]
    elements = by_group("elements")
    unknown: list[Any] = [None] * len(elements)
    layers = [fingerprint.get("layers") or unknown for fingerprint in ranks]

    return {
        "windowed": [any(flags) for flags in zip(*windowed, strict=True)] if windowed else None,
        "elements": [names[0] if len(set(names)) == 1 else "bytes" for names in elements],
        "may_lose": [all(flags) for flags in by_group("may_lose")],
        "kv_runs": [_merged_runs(runs) for runs in by_group("kv_runs")],
        # A rank that does not know the layout of a group gives the reason instead.
        "kv_runs_unknown": [
            next((reason for reason in runs if isinstance(reason, str)), "the ranks have different layouts")
            for runs in by_group("kv_runs")
        ],
        "head_orders": [_merged_order(found) for found in zip(*orders, strict=True)]
        or ["no rank reports its heads"] * len(elements),
        # A calibration needs those of each rank.
        "layers": [list(reports) for reports in itertools.zip_longest(*layers)],
    }


def _merged_runs(runs: Sequence[Any]) -> tuple[int, int]:
    """Returns the layout of a group that all ranks have; UNKNOWN_RUNS if they differ or do not know it."""
    alike = isinstance(runs[0], list) and all(other == runs[0] for other in runs)
    return (runs[0][0], runs[0][1]) if alike else UNKNOWN_RUNS


def _merged_order(orders: Sequence[Any]) -> tuple[int, bool, int] | str:
    """Returns the order of a group that all ranks have, or the reason why there is none."""
    reason = next((order for order in orders if isinstance(order, str)), None)
    if reason is not None:
        return reason
    alike = all(other == orders[0] for other in orders)
    return (orders[0][0], orders[0][1], orders[0][2]) if alike else "the ranks have different layouts"


def keep_for(config: Any, options: OffloadConfig) -> str:
    """Returns the name by which the next engine finds this host memory region; "" if it is not kept.

    All processes know this name before they attach, and therefore before the namespace is known. The
    namespace then decides whether the region's bytes are usable. With a ``model_id``, the model's path may
    change.
    """
    if not options.keep_host_memory:
        return ""
    return setting_text([options.model_id or config.model.name, config.parallel.data_parallel_index])


def share_for(config: Any, options: OffloadConfig) -> str:
    """Returns the name by which engines of one host find each other's memory; "" if it is not shared.

    As with ``keep_for``, the namespace then decides whether a region's bytes are usable.
    """
    return setting_text([options.model_id or config.model.name]) if options.share_host_memory else ""


def namespace_identity(
    config: Any,
    shard_bytes: Sequence[Sequence[int]],
    merged: Mapping[str, Any],
    replicated: bool,
    model_id: str | None = None,
) -> tuple[NamespaceIdentity, bool]:
    """Returns (everything that the records' bytes depend on, True if each process draws its own hash seed).

    ``shard_bytes``: bytes of one shard, [group position][area]. ``merged``: the result of merge_fingerprints.
    ``model_id``: the setting. With the canonical layout, the identity excludes the number of ranks.
    """
    algorithm = merged.get("hash_algorithm", UNKNOWN)
    seed, seed_is_random = compat.block_hash_seed(algorithm)
    model = merged.get("model", {})
    parallel = config.parallel
    canonical = merged.get("canonical")
    settings = dict(merged["settings"]) | {"shards": canonical["pages"] if canonical else merged["shards"]}
    # The canonical layout is equal for all numbers of ranks, so nothing that depends on it is included.
    if canonical:
        shard_bytes = [shards[:1] * canonical["shards"] for shards in map(tuple, shard_bytes)]
    identity = NamespaceIdentity(
        model=model_identity(
            config.model.name,
            model.get("revision"),
            address=model.get("address"),
            model_id=model_id,
            cache_dir=model.get("cache_dir"),
            configured_by=model.get("configured_by"),
            code=model.get("code") or (),
            code_revision=model.get("code_revision"),
            draft=model.get("draft"),
            adapters=model.get("adapters"),
        ),
        kv_dtype=config.model.dtype,
        kv_cache_layout=str(getattr(config, "kv_cache_layout", None)),
        groups=tuple(
            GroupIdentity(group.group_id, group.tokens_per_block, len(group.layer_names), tuple(shards))
            for group, shards in zip(config.groups, shard_bytes, strict=True)
        ),
        blocks_per_chunk=config.cache.blocks_per_chunk,
        tokens_per_hash=config.cache.tokens_per_hash,
        hash_algorithm=algorithm,
        hash_seed=seed,
        tp_size=1 if canonical else parallel.tp_size,
        pp_size=parallel.pp_size,
        pcp_size=getattr(parallel, "pcp_size", 1),
        dcp_size=getattr(parallel, "dcp_size", 1),
        world_size=1 if canonical else parallel.world_size,
        replicated=replicated and parallel.world_size > 1 and not canonical,
        canonical_layout=CANONICAL_VERSION if canonical else 0,
        settings=settings,
    )
    return identity, seed_is_random
