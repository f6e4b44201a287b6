# SPDX-License-Identifier: Apache-2.0
"""The namespace of records: a digest of everything that affects the bytes of a chunk or their meaning.

Two engines share records exactly if their namespaces are equal. Settings that do not affect the bytes (the
directory of a model, cache sizes, ports) are left out, so that changing them keeps the hits.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kv_offload.losses import ErrorBounds

FORMAT_VERSION = 2  # of the record format and of the fields of an identity


@dataclass(frozen=True)
class GroupIdentity:
    """One KV cache group."""

    group_id: int  # vLLM's original id, part of every key
    tokens_per_block: int
    num_layers: int
    shard_bytes: tuple[int, ...]  # bytes of each shard of a record, unpadded


@dataclass(frozen=True)
class NamespaceIdentity:
    """Everything that the bytes of a chunk depend on. All values are str, int, bool or None; no floats."""

    model: Mapping[str, Any]  # kv_offload.model_identity.model_identity(...)
    kv_dtype: str
    kv_cache_layout: str
    groups: tuple[GroupIdentity, ...]
    blocks_per_chunk: int
    tokens_per_hash: int
    hash_algorithm: str
    hash_seed: str  # NONE_HASH in hex
    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    world_size: int = 1
    replicated: bool = False  # one area that all ranks read
    # Version of the canonical layout, which excludes the number of ranks from the identity; 0: plain layout.
    canonical_layout: int = 0
    # Everything else that affects the bytes: compute dtype, quantization, attention backend, platform,
    # overrides of the model's config. Use setting_text() for values that are not plain.
    settings: Mapping[str, str | int | bool | None] = field(default_factory=dict)

    def with_error_bounds(
        self,
        bounds: ErrorBounds | None,
        kv_runs: Sequence[Sequence[int]] = (),
        fp8_elements: Mapping[int, str] | None = None,
        calibration: str = "",
    ) -> "NamespaceIdentity":
        """Returns the namespace of records with relative errors within ``bounds``; None: this one.

        ``kv_runs``: (bytes of keys, bytes of values) per group position, by which the bounds are applied.
        ``fp8_elements``: the element types of groups in fp8 that are stored with loss, by position. Earlier
        versions stored them without loss, and cannot read such records. ``calibration``: the digest of the
        calibration that lowers the bounds; "": none.

        A server with a lossy tier uses it for all its tiers and its host memory: what it loads with loss and
        computes from that is never found by a server without loss.
        """
        if bounds is None:
            return self
        errors = {"max_error": repr(bounds.keys), "max_value_error": repr(bounds.values)}
        if bounds.values != bounds.keys:
            errors["kv_runs"] = setting_text([list(runs) for runs in kv_runs])
        if fp8_elements:
            errors["fp8_elements"] = setting_text({str(at): name for at, name in fp8_elements.items()})
        if calibration:
            errors["calibration"] = calibration
        return replace(self, settings={**self.settings, **errors})

    def with_part(self, part: str) -> "NamespaceIdentity":
        """Returns the namespace of the records with this part of each chunk; "": this one, of whole chunks.

        For engines whose ranks span several hosts: each host stores the shards of its own ranks.
        """
        return replace(self, settings={**self.settings, "part": part}) if part else self

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> "NamespaceIdentity":
        """Returns the identity with these fields, as ``dataclasses.asdict`` gives them, even after JSON.

        Raises TypeError for missing, unknown or malformed fields.
        """
        groups = tuple(
            GroupIdentity(**{**group, "shard_bytes": tuple(group["shard_bytes"])})
            for group in fields["groups"]
        )
        return cls(**{**fields, "groups": groups})

    def canonical_json(self) -> str:
        """Returns JSON with sorted keys and no spaces: equal identities give equal text. Raises TypeError for
        floats."""
        identity = asdict(self) | {"format_version": FORMAT_VERSION}
        if not self.canonical_layout:  # keeps namespaces from before this field unchanged
            del identity["canonical_layout"]
        _refuse_floats(identity, "identity")
        return _canonical(identity)

    def readable_json(self) -> str:
        """Returns the same JSON, indented: the text of namespace.json."""
        return json.dumps(json.loads(self.canonical_json()), sort_keys=True, indent=2) + "\n"

    def namespace_id(self) -> bytes:
        """Returns the sha256 of the canonical JSON: 32 bytes."""
        return hashlib.sha256(self.canonical_json().encode()).digest()

    def short_id(self) -> str:
        """Returns the first 12 hex digits, for logs and metrics."""
        return self.namespace_id().hex()[:12]


def _canonical(identity: Mapping[str, Any]) -> str:
    return json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def described_id(text: str) -> str | None:
    """Returns the id (hex) of the namespace that a namespace.json describes; None if it is not JSON."""
    try:
        return hashlib.sha256(_canonical(json.loads(text)).encode()).hexdigest()
    except ValueError:
        return None


def other_namespaces(root_dir: str, own: NamespaceIdentity, most: int = 3) -> list[str]:
    """Returns how the newest other namespaces of a root differ: one text each, with the field names.

    Reads a few small files and skips unreadable ones.
    """
    try:
        found = [
            path
            for path in Path(root_dir).glob("*/namespace.json")
            if path.parent.name != own.namespace_id().hex()
        ]
        found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return []
    mine = _flat(json.loads(own.canonical_json()))
    texts = []
    for path in found[:most]:
        try:
            theirs = _flat(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue
        different = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        if different and different != ["settings.part"]:  # another host's part of the same chunks
            texts.append(", ".join(different))
    return texts


def _flat(value: object, name: str = "") -> dict[str, object]:
    """Flattens nested tables and lists: {"model.revision": ..., "groups.0.num_layers": ...}."""
    if isinstance(value, Mapping):
        parts = list(value.items())
    elif isinstance(value, list):
        parts = list(enumerate(value))
    else:
        return {name: value}
    return {
        inner: leaf
        for key, part in parts
        for inner, leaf in _flat(part, f"{name}.{key}" if name else str(key)).items()
    }


def setting_text(value: object) -> str:
    """Returns any setting as one stable text: plain tables with sorted keys, other values with str()."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def hash_seed_is_random(hash_algorithm: str, environ: Mapping[str, str] | None = None) -> bool:
    """True if vLLM draws a new block hash seed in each process, so that no record is found after a restart.

    True for the xxhash algorithms without PYTHONHASHSEED (vLLM: init_none_hash).
    """
    environment = os.environ if environ is None else environ
    return hash_algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in environment


def random_seed_warning(hash_algorithm: str) -> str:
    """Returns the warning for operators whose tiers can never hit after a restart."""
    return (
        f"RECORDS WILL NEVER BE FOUND AGAIN AFTER A RESTART: --prefix-caching-hash-algo {hash_algorithm} "
        "draws a new random seed in each process. Set PYTHONHASHSEED to the same value for every start, or "
        "use sha256 (vLLM's default), whose seed is fixed."
    )


def _refuse_floats(value: object, where: str) -> None:
    if isinstance(value, float):
        raise TypeError(f"{where} is {value!r}: a float has no canonical text; pass setting_text(value)")
    if isinstance(value, Mapping):
        for key, part in value.items():
            _refuse_floats(part, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            _refuse_floats(part, f"{where}[{index}]")
