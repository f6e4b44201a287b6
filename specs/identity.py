"""What identifies this engine's cache: each rank publishes what it knows of it in the region, as JSON.

vLLM sets its VllmConfig in the workers but not around the manager, and there is no channel from worker to
scheduler; the region's control page carries at most 4095 bytes of text for each rank.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kv_offload.config import OffloadConfig
from kv_offload.log import get_logger
from kv_offload.model_identity import model_identity
from kv_offload.namespace import GroupIdentity, NamespaceIdentity, setting_text

from . import compat
from .canonical import CanonicalPages

logger = get_logger(__name__)

MAX_FINGERPRINT_BYTES = 4095
CANONICAL_VERSION = 1  # of the order of bytes in the canonical layout
UNKNOWN = "unknown"


def worker_fingerprint(
    config: Any,
    device_type: str,
    copier: str,
    pages: Sequence[Sequence[int]],
    cache_blocks: int,
    canonical: CanonicalPages | str | None = None,
) -> str:
    """One rank's part of the identity. ``pages``: bytes of one block of each ref, per group position.
    ``cache_blocks``: how many blocks its cache has. ``canonical``: the canonical layout, or why it has none,
    where it was asked for.

    Long values are replaced by their digest, so that the text fits in the control page.
    """
    vllm_config = compat.current_vllm_config()
    fingerprint: dict[str, Any] = {
        "copier": copier,
        "cache_blocks": cache_blocks,
        "shard": _layout_digest(config, pages),  # may differ between ranks (pipeline stages)
        "settings": {"device": device_type} | (_settings(vllm_config, config) if vllm_config else {}),
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
        fingerprint["model"] = _weights_source(vllm_config)
        fingerprint["max_model_len"] = getattr(vllm_config.model_config, "max_model_len", 0)
        fingerprint["hash_algorithm"] = vllm_config.cache_config.prefix_caching_hash_algo
        fingerprint["windowed"] = _windowed(vllm_config, config)
        fingerprint["elements"] = _elements(vllm_config, config)
        fingerprint["resumed_is_new"] = bool(getattr(vllm_config, "use_v2_model_runner", False))
    text = json.dumps(fingerprint, sort_keys=True, default=str)
    if len(text.encode()) > MAX_FINGERPRINT_BYTES:
        fingerprint["settings"] = {"digest": _digest(setting_text(fingerprint["settings"]))}
        text = json.dumps(fingerprint, sort_keys=True, default=str)
    return text


def _layout_digest(config: Any, pages: Sequence[Sequence[int]]) -> str:
    """Of the names of all layers and the bytes of a block of each."""
    layout = [
        (list(group.layer_names), list(sizes)) for group, sizes in zip(config.groups, pages, strict=True)
    ]
    return _digest(setting_text(layout))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _weights_source(vllm_config: Any) -> dict[str, Any]:
    """Where the weights of config.model.name come from, beside that name.

    For a model behind s3:// and the like vLLM puts a temporary directory of its configs in the place of the
    name, and keeps the address in model_weights.
    """
    return {
        "revision": getattr(vllm_config.model_config, "revision", None),
        "cache_dir": getattr(vllm_config.load_config, "download_dir", None),
        "address": getattr(vllm_config.model_config, "model_weights", None) or _tensorizer_uri(vllm_config),
    }


def _tensorizer_uri(vllm_config: Any) -> str | None:
    extra = getattr(vllm_config.load_config, "model_loader_extra_config", None)
    uri = (
        extra.get("tensorizer_uri") if isinstance(extra, Mapping) else getattr(extra, "tensorizer_uri", None)
    )
    return uri if isinstance(uri, str) and uri else None


def _settings(vllm_config: Any, config: Any) -> dict[str, str]:
    """Settings that change the bytes of a block, beside those that the OffloadingConfig names."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    settings: dict[str, Any] = {
        "compute_dtype": getattr(model, "dtype", None),
        "quantization": getattr(model, "quantization", None),
        "hf_overrides": getattr(model, "hf_overrides", None) or None,
        "calculate_kv_scales": getattr(cache, "calculate_kv_scales", None),
        "kv_cache_dtype": getattr(cache, "cache_dtype", None),
        "mamba_cache_dtype": getattr(cache, "mamba_cache_dtype", None),
        "mamba_ssm_cache_dtype": getattr(cache, "mamba_ssm_cache_dtype", None),
        "backends": _backends(vllm_config, config),
    }
    rope = getattr(getattr(model, "hf_text_config", None), "rope_scaling", None) or {}
    if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) in ("longrope", "su", "dynamic"):
        settings["max_model_len"] = model.max_model_len  # chooses the rotation of every position
    load_format = getattr(getattr(vllm_config, "load_config", None), "load_format", None)
    if load_format not in (None, "auto"):  # dummy: made-up weights under the name of real ones
        settings["load_format"] = load_format
    draft = getattr(getattr(vllm_config, "speculative_config", None), "model", None)
    if draft is not None:
        settings["draft_model"] = draft
    texts = {name: setting_text(value) for name, value in settings.items() if value is not None}
    return {name: text if len(text) <= 128 else _digest(text) for name, text in texts.items()}


def _layers(vllm_config: Any, config: Any) -> list[list[Any]]:
    known = vllm_config.compilation_config.static_forward_context
    return [[known[name] for name in group.layer_names if name in known] for group in config.groups]


def _backends(vllm_config: Any, config: Any) -> list[str]:
    """Names of the attention backends: each lays a page out in its own way."""
    names = set()
    try:
        for layer in (layer for layers in _layers(vllm_config, config) for layer in layers):
            backend = getattr(layer, "attn_backend", None)
            names.add(backend.get_name() if backend is not None else type(layer).__name__)
    except Exception as error:  # an unknown kind of layer: the namespace says less, serving goes on
        logger.debug("attention backends are not in the namespace: %s", error)
    return sorted(names)


def _windowed(vllm_config: Any, config: Any) -> list[bool] | None:
    """Per group position whether it forgets blocks behind a window; None when a layer does not say."""
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
    """Per group position what its bytes are, for their codec; "bytes" where layers differ or do not say."""
    try:
        found = [
            {compat.layer_element(layer, vllm_config) for layer in layers}
            for layers in _layers(vllm_config, config)
        ]
    except Exception as error:
        logger.debug("what the cache groups are made of is not known: %s", error)
        return ["bytes"] * len(config.groups)
    return [next(iter(names)) if len(names) == 1 else "bytes" for names in found]


def groups_of_states(config: Any) -> list[bool]:
    """Per group position whether only the last block of each of its chunks is kept (a Mamba cache, "align").

    Asked in the workers; where a layer does not say, its group is taken for one that keeps all blocks.
    """
    vllm_config = compat.current_vllm_config()
    try:
        if vllm_config is None:
            return [False] * len(config.groups)
        return [
            bool(layers) and all(compat.layer_holds_states(layer, vllm_config) for layer in layers)
            for layers in _layers(vllm_config, config)
        ]
    except Exception as error:  # its chunks of several blocks are not stored then, and counted
        logger.warning("which cache groups hold states is not known: %s", error)
        return [False] * len(config.groups)


def merge_fingerprints(texts: Sequence[str]) -> dict[str, Any]:
    """The fingerprints of all ranks as one: rank 0's, with windows that any rank saw.

    Raises ValueError when two ranks contradict each other in what must be equal.
    """
    ranks = [json.loads(text) for text in texts]
    merged = dict(ranks[0])
    for key in ("settings", "hash_algorithm", "model", "canonical"):
        for rank, fingerprint in enumerate(ranks):
            if key != "settings" and fingerprint.get(key) != merged.get(key):
                raise ValueError(
                    f"rank {rank} has {key} {fingerprint.get(key)!r}, rank 0 has {merged.get(key)!r}; "
                    "all ranks of one engine must be started with the same settings"
                )
    merged["settings"] = dict(merged["settings"])
    if any(
        fingerprint["settings"] != merged["settings"] for fingerprint in ranks
    ):  # stages with other backends
        merged["settings"]["ranks"] = _digest(
            setting_text([fingerprint["settings"] for fingerprint in ranks])
        )
    merged["cache_blocks"] = min(fingerprint.get("cache_blocks", 0) for fingerprint in ranks)
    merged["shards"] = _digest(setting_text([fingerprint["shard"] for fingerprint in ranks]))
    windowed = [fingerprint["windowed"] for fingerprint in ranks if fingerprint.get("windowed") is not None]
    merged["windowed"] = [any(flags) for flags in zip(*windowed, strict=True)] if windowed else None
    elements = [fingerprint["elements"] for fingerprint in ranks if "elements" in fingerprint]
    merged["elements"] = [
        names[0] if len(set(names)) == 1 else "bytes" for names in zip(*elements, strict=True)
    ]
    return merged


def keep_for(config: Any, options: OffloadConfig) -> str:
    """What a region of host memory is found by when the next engine starts; "" when it is not kept.

    All processes know it before they attach, and so before the namespace is known, which decides whether
    the bytes in a region that was found mean the same. Under one ``model_id`` the model's path may change.
    """
    if not options.keep_host_memory:
        return ""
    return setting_text([options.model_id or config.model.name, config.parallel.data_parallel_index])


def namespace_identity(
    config: Any,
    shard_bytes: Sequence[Sequence[int]],
    merged: Mapping[str, Any],
    replicated: bool,
    model_id: str | None = None,
) -> tuple[NamespaceIdentity, bool]:
    """(everything the records' bytes depend on, whether the hash seed is drawn anew by each process).

    ``shard_bytes``: [group position][area], of one shard. ``merged``: of merge_fingerprints. ``model_id``:
    the setting. Of the canonical layout the identity does not say how many ranks there are.
    """
    algorithm = merged.get("hash_algorithm", UNKNOWN)
    seed, seed_is_random = compat.block_hash_seed(algorithm)
    model = merged.get("model", {})
    parallel = config.parallel
    canonical = merged.get("canonical")
    settings = dict(merged["settings"]) | {"shards": canonical["pages"] if canonical else merged["shards"]}
    if canonical:
        shard_bytes = [shards[:1] * canonical["shards"] for shards in map(tuple, shard_bytes)]
    identity = NamespaceIdentity(
        model=model_identity(
            config.model.name,
            model.get("revision"),
            address=model.get("address"),
            model_id=model_id,
            cache_dir=model.get("cache_dir"),
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
