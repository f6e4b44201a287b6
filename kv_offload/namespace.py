# SPDX-License-Identifier: Apache-2.0
"""The namespace of records: a digest of everything that changes the bytes of a chunk or their meaning.

Two engines share records exactly when their namespaces are equal. What does not change the bytes (the
directory of a model, sizes of caches, ports) is left out, so that it can change and keep the hits.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT_VERSION = 2  # of the record format and of what an identity holds


@dataclass(frozen=True)
class GroupIdentity:
    """One KV cache group."""

    group_id: int  # vLLM's original id, part of every key
    tokens_per_block: int
    num_layers: int
    shard_bytes: tuple[int, ...]  # bytes of each shard of a record, unpadded


@dataclass(frozen=True)
class NamespaceIdentity:
    """Everything the bytes of a chunk depend on. All values are texts, ints, bools or None; no floats."""

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
    # Version of the layout that is the same for any number of ranks, which then is not in here; 0: the other.
    canonical_layout: int = 0
    # Whatever else changes the bytes: compute dtype, quantization, attention backend, platform, overrides
    # of the model's config. Use setting_text() for anything that is not a plain value.
    settings: Mapping[str, str | int | bool | None] = field(default_factory=dict)

    def canonical_json(self) -> str:
        """Sorted keys, no spaces: equal identities give equal text. Raises TypeError on a float."""
        identity = asdict(self) | {"format_version": FORMAT_VERSION}
        if not self.canonical_layout:  # so that the namespaces of before there was one stay as they are
            del identity["canonical_layout"]
        _refuse_floats(identity, "identity")
        return _canonical(identity)

    def readable_json(self) -> str:
        """The same, indented for people: the text of namespace.json."""
        return json.dumps(json.loads(self.canonical_json()), sort_keys=True, indent=2) + "\n"

    def namespace_id(self) -> bytes:
        """sha256 of the canonical JSON: 32 bytes."""
        return hashlib.sha256(self.canonical_json().encode()).digest()

    def short_id(self) -> str:
        """The first 12 hex digits, for logs and metrics."""
        return self.namespace_id().hex()[:12]


def _canonical(identity: Mapping[str, Any]) -> str:
    return json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def described_id(text: str) -> str | None:
    """The id (hex) of the namespace that a namespace.json describes; None when it is not JSON."""
    try:
        return hashlib.sha256(_canonical(json.loads(text)).encode()).hexdigest()
    except ValueError:
        return None


def other_namespaces(root_dir: str, own: NamespaceIdentity, most: int = 3) -> list[str]:
    """How the newest other namespaces of a root differ: a text each, with the names of the fields.

    Reads a few small files; what cannot be read is left out.
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
        if different:
            texts.append(", ".join(different))
    return texts


def _flat(value: object, name: str = "") -> dict[str, object]:
    """Nested tables and lists as one table: {"model.revision": ..., "groups.0.num_layers": ...}."""
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
    """Any setting as one stable text: plain tables with sorted keys, all else by its str()."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def hash_seed_is_random(hash_algorithm: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether vLLM draws a new seed of its block hashes in each process, so that no record is found again.

    True for the xxhash algorithms without PYTHONHASHSEED (vLLM: init_none_hash).
    """
    environment = os.environ if environ is None else environ
    return hash_algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in environment


def random_seed_warning(hash_algorithm: str) -> str:
    """What to tell an operator whose tiers can never hit after a restart."""
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
