# SPDX-License-Identifier: Apache-2.0
"""Configurations written for others: vLLM's own offloading specs and the llm-d backend."""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kv_offload.names import SPEC_MODULE, SPEC_NAME
from kv_offload.tiers.base import TierConfig
from kv_offload.tiers.registry import kind_of_tier, kinds
from kv_offload.vllm_verdict import CONNECTOR, REPORTING_CONNECTOR
from kv_offload.vllm_versions import keys_read_by_vllm

_NEAR = 0.6  # difflib ratio from which a key counts as misspelled

# Read by vLLM itself (OffloadingConnector, OffloadingSpec, the factory), whatever the spec.
VLLM_KEYS = (
    "spec_name",
    "spec_module_path",
    "block_size",
    "blocks_per_chunk",
    "offload_prompt_only",
    "self_describing_kv_events",
    "sync_load_budget_bytes",
    "canonical_layout",
)
# Keys of CPUOffloadingSpec and TieringOffloadingSpec without an equivalent here, and why they are not needed.
IGNORED_KEYS = {
    "cache_policy_module_path": "eviction policies are part of the core",
    "max_tracker_size": "there is no tracker table to size",
    "tier_poll_interval_s": "tiers have their own threads and are not polled",
    "backpressure": "writes are shed by measured queue depth",
}
IGNORED_TIER_KEYS = {
    "module_path": "tiers are part of the core",
    "backpressure": IGNORED_KEYS["backpressure"],
}
# Words in the name of a size limit. On a tier, such a key is meant as the size of the tier.
_BOUND_KEY = re.compile(
    r"size|quota|capacity|limit|byte|(^|[^a-z])space|budget|watermark|usage|(^|[^a-z])[kmgt]i?b([^a-z]|$)|"
    r"max_?(disk|storage|file|record|entr|block|item|object|chunk)",
    re.IGNORECASE,
)
_TIER_KEY = re.compile(r"disk|ssd|nvme|storage|tier|file|(^|_)fs(_|$)", re.IGNORECASE)
_RESERVE_KEY = re.compile(r"(^|[^a-z])(min|free|reserve|keep|available)", re.IGNORECASE)
_SECRET_KEY = re.compile(r"secret|passw|access_?key|session_?token|credential", re.IGNORECASE)

_SHARED = (
    "use mooncake or redis, which hosts share over the network, or fs with a root_dir on a shared file system"
)
# vLLM's tier types, and the replacement for each.
OTHER_TIERS = {
    "example": "it stores nothing",
    "obj": "use s3, with its bucket, region and endpoint",
    "p2p": _SHARED,
    "kvcr": _SHARED,
}


def example_tier() -> dict[str, Any]:
    """Returns an entry of secondary_tiers, of the first kind."""
    return dict(next(iter(kinds().values())).example)


def own_keys(
    extra: Mapping[str, Any],
    known: Sequence[str],
    tier_keys: Sequence[str],
    eviction_policies: Sequence[str],
    notes: list[str],
    problems: list[str],
) -> dict[str, Any]:
    """Returns our top-level keys. Adds a note for each ignored key and a problem for each unknown one."""
    ours: dict[str, Any] = {}
    for key, value in extra.items():
        if key in known:
            ours[key] = value
        elif key in IGNORED_KEYS:
            notes.append(f"{key} is ignored: {IGNORED_KEYS[key]}")
        elif key == "store_threshold":
            _note_store_threshold(value, notes, problems)
        elif key in tier_keys:
            problems.append(f"{key!r} belongs in a tier: secondary_tiers[...].{key}")
        elif key not in VLLM_KEYS:
            _unknown_key(key, value, (*known, *VLLM_KEYS), "", notes, problems)
    problems += _chunk_problems(extra)
    # vLLM's arc, and policies of a module of the user.
    policy = ours.get("eviction_policy")
    foreign = policy == "arc" or (policy is not None and "cache_policy_module_path" in extra)
    if foreign and policy not in eviction_policies:
        del ours["eviction_policy"]
        notes.append(
            f"eviction_policy {policy!r} is not available; prefix is used and learns which chunks are reused"
        )
    for key in ("eviction_policy", "secondary_tiers"):  # null means the default
        if ours.get(key, ...) is None:
            del ours[key]
    return ours


def _chunk_problems(extra: Mapping[str, Any]) -> list[str]:
    """Checks the blocks per chunk, as vLLM does after loading the model. Also refuses chunks without a block,
    which vLLM accepts for block_size."""
    if extra.get("block_size") is not None and extra.get("blocks_per_chunk") is not None:
        return ["block_size and blocks_per_chunk are both given: give one of them"]
    problems = []
    for key in ("block_size", "blocks_per_chunk"):
        value = extra.get(key)
        try:
            fits = value is None or int(value) > 0
        except (TypeError, ValueError, OverflowError):
            fits = False
        if not fits:
            problems.append(f"{key} is {value!r}; it must be a number from 1")
    return problems


def _note_store_threshold(value: Any, notes: list[str], problems: list[str]) -> None:
    try:
        threshold = int(value)
    except (TypeError, ValueError, OverflowError):
        problems.append(f"store_threshold is {value!r}; it must be a number")
        return
    if threshold >= 2:  # below 2 it is off in vLLM too
        notes.append(
            f"store_threshold {threshold} is ignored, host memory stores every chunk: to reduce disk writes, "
            f'give its tier "write_policy": "reuse:{threshold}"'
        )


def own_tier_keys(index: int, tier: Any, notes: list[str], problems: list[str]) -> dict[str, Any] | None:
    """Returns the keys of one tier that its kind knows; None, with a problem, if it is not one of our
    tiers."""
    where = f"secondary_tiers[{index}]"
    if not isinstance(tier, Mapping):
        problems.append(f"{where} is {tier!r}; it must be a table such as {json.dumps(example_tier())}")
        return None
    kind = kinds().get(str(tier.get("type")))
    if kind is None:
        name = tier.get("type")
        given = "has no type" if name is None else f"is of type {name!r}"
        hint = OTHER_TIERS.get(str(name))
        problems.append(
            f"{where} {given}; possible: {', '.join(kinds())}{f' ({hint})' if hint else ''}, such as "
            + json.dumps(example_tier())
        )
        return None
    known = tuple(kind.model_fields)
    ours: dict[str, Any] = {}
    for key, value in tier.items():
        if key in known:
            ours[key] = value
        elif key in IGNORED_TIER_KEYS:
            notes.append(f"{where}.{key} is ignored: {IGNORED_TIER_KEYS[key]}")
        elif _BOUND_KEY.search(str(key)):
            problems.append(_unknown_bound(str(key), kind, f"{where}: "))
        else:
            _unknown_key(key, value, known, f"{where}: ", notes, problems)
    return ours


def _unknown_bound(key: str, kind: type[TierConfig], where: str) -> str:
    """Refuses another name for the size of a tier: ignoring it would apply a limit that the user did not
    choose."""
    text, bound_key = f"{where}{key!r} is not known", kind.bound_key
    if bound_key is None:
        return f"{text}: {kind.bounded_by}"
    if _RESERVE_KEY.search(key):
        text += ", and no setting here reserves free space"
    elif difflib.get_close_matches(key.lower(), (bound_key,), cutoff=_NEAR):
        text += f"; did you mean {bound_key!r}?"
    possible = ", ".join(sorted(kind.model_fields))
    return f"{text}; {bound_key} limits the size of a tier; possible: {possible}"


def _unknown_key(
    key: object, value: object, possible: Sequence[str], where: str, notes: list[str], problems: list[str]
) -> None:
    """Handles an unknown key: a problem if it resembles a known key or holds tables, otherwise a note."""
    if key in keys_read_by_vllm():
        notes.append(f"{where}{key} is left to vLLM, which reads it; it has no effect here")
        return
    if where and _SECRET_KEY.search(str(key)):
        problems.append(
            f"{where}{key!r} is not known, and credentials do not belong here: vLLM logs its configuration. "
            f"possible: {', '.join(sorted(possible))}"
        )
        return
    if not where and _BOUND_KEY.search(str(key)) and _TIER_KEY.search(str(key)):
        problems.append(f"{key!r} is not known; secondary_tiers[...].max_bytes limits a tier")
        return
    near = difflib.get_close_matches(str(key).lower(), possible, n=1, cutoff=_NEAR)
    if near and not (_RESERVE_KEY.search(str(key)) and not _RESERVE_KEY.search(near[0])):
        problems.append(
            f"{where}{key!r} is not known; did you mean {near[0]!r}? possible: {', '.join(sorted(possible))}"
        )
    elif _holds_tables(value):  # such as tiers: [{...}]: the user did not want to serve without them
        problems.append(f"{where}{key!r} is not known; possible: {', '.join(sorted(possible))}")
    else:
        notes.append(f"{where}{key!r} is not known and is ignored; possible: {', '.join(sorted(possible))}")


def _holds_tables(value: object) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value)
    )


# vLLM's connector for specs, and ours, which adds a report to each response.
_CONNECTORS = (CONNECTOR, REPORTING_CONNECTOR)


def own_extra_config(transfer: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Returns our part of ``--kv-transfer-config``, and the reasons why vLLM would not load this plugin.

    Accepts an OffloadingConnector, a MultiConnector that contains one, and our part alone.
    """
    extra = transfer.get("kv_connector_extra_config", transfer)
    extra = extra if isinstance(extra, Mapping) else {}
    connector = transfer.get("kv_connector") or CONNECTOR
    if connector in _CONNECTORS:
        return extra, []
    if connector != "MultiConnector":
        possible = '"OffloadingConnector", or a "MultiConnector" with one among its connectors'
        return extra, [f"kv_connector is {connector!r}; it must be {possible}"]
    problems = multi_connector_problems(transfer)
    for child in _children(transfer):
        if child.get("kv_connector") in _CONNECTORS:
            return _extra_of(child), problems
    return {}, problems


def multi_connector_problems(transfer: Mapping[str, Any]) -> list[str]:
    """Returns why a MultiConnector of these connectors cannot serve with ours.

    All supported vLLM releases declare only the metrics of the first OffloadingConnector, and fail an
    assertion when another one reports its own. If one of the two is a ReportingConnector, vLLM declares them
    twice and fails. Two of our connectors would also share one region of host memory.
    """
    offloading = [child for child in _children(transfer) if child.get("kv_connector") in _CONNECTORS]
    if not offloading:
        return [
            'MultiConnector has no "OffloadingConnector" among its connectors, so vLLM does not load this '
            "plugin: add one"
        ]
    if len(offloading) == 1:
        return []
    names = ", ".join(str(_extra_of(child).get("spec_name")) for child in offloading)
    return [
        f"MultiConnector has {len(offloading)} OffloadingConnectors (spec_name {names}); a Reporting"
        "Connector counts as one, and vLLM supports only one: keep that of this plugin, and add the sizes "
        "and tiers of the others to its cpu_bytes_to_use and secondary_tiers"
    ]


def _children(transfer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    children = _extra_of(transfer).get("connectors")
    if not isinstance(children, (list, tuple)):
        return []
    return [child for child in children if isinstance(child, Mapping)]


def _extra_of(transfer: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = transfer.get("kv_connector_extra_config")
    return extra if isinstance(extra, Mapping) else {}


def is_llmd_config(extra: Mapping[str, Any]) -> bool:
    """True if it is written for llm-d's file system backend (SharedStorageOffloadingSpec)."""
    return (
        "shared_storage_path" in extra
        or extra.get("spec_name") == "SharedStorageOffloadingSpec"
        or str(extra.get("spec_module_path", "")).startswith("llmd_fs_backend")
    )


def llmd_advice(extra: Mapping[str, Any]) -> str:
    """Returns the equivalent of a configuration of llm-d's file system backend."""
    kind = kind_of_tier("disk")
    root = extra.get("shared_storage_path", kind.example[kind.place_key])
    tier = kind.entry(str(root), kind.example[str(kind.bound_key)])
    try:
        threads = min(int(extra.get("threads_per_gpu", 0)), 256)
    except (TypeError, ValueError, OverflowError):
        threads = 0
    if threads > 0:
        tier["n_read_threads"] = threads
    equivalent: dict[str, Any] = {"spec_name": SPEC_NAME, "spec_module_path": SPEC_MODULE}
    for key in VLLM_KEYS[2:]:
        if key in extra:
            equivalent[key] = extra[key]
    equivalent |= {"cpu_bytes_to_use": extra.get("cpu_bytes_to_use", "32GiB"), "secondary_tiers": [tier]}
    return (
        "it is written for the llm-d file system backend; the equivalent here is (set cpu_bytes_to_use and "
        "max_bytes to what this host has):\n" + json.dumps(equivalent, indent=2)
    )
