# SPDX-License-Identifier: Apache-2.0
"""Identifies the weights of a model without reading all of them.

A local directory is identified by its contents, not by its path: a copy elsewhere keeps its hits, changed
weights do not. A model of the hub is identified by its name and commit. Weights at an address (an object
store) cannot be identified; only the operator can name them.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kv_offload.weights_digest import weights_digest

DIGEST_VERSION = 2  # version of weights_digest; in 2 every tensor is sampled
UNKNOWN = "unknown"
MODELSCOPE = "modelscope"

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
_NOT_WEIGHTS = {"training_args.bin", "optimizer.pt", "scheduler.pt", "optimizer.bin"}
# Files of these types configure the model, its processors and its code; all of them count.
_CONFIGS = (".json", ".py", ".yaml", ".yml", ".npz", ".npy", ".onnx")
# Except these: keys are hashes of token ids, so tokenizer files and chat templates change no byte.
_NOT_CONFIGS = {
    "added_tokens.json",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "trainer_state.json",
    "vocab.json",
}
# Keys written by tools that save a model; they do not affect computation.
BOOKKEEPING = {"_name_or_path", "_commit_hash", "transformers_version"}


def model_identity(
    name: str,
    revision: str | None = None,
    *,
    address: str | None = None,
    model_id: str | None = None,
    cache_dir: str | None = None,
    configured_by: str | None = None,
    code: Sequence[str] = (),
    code_revision: str | None = None,
    draft: Mapping[str, Any] | None = None,
    adapters: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Returns the identity of the weights of ``name``: a directory, a file, or a name on the hub.

    ``configured_by``: another location of its configuration (--hf-config-path). ``code``: hub repositories
    whose code it runs, at ``code_revision``. ``draft``: name and revision of a drafter. ``adapters``: LoRA
    adapters that a kind of input selects; keys do not hold their contents.

    ``address``: where vLLM reads the weights (its model_weights, such as s3://...), if ``name`` is a
    directory with only configs. ``model_id``: the operator's name of the weights, which is added to the
    identity. ``cache_dir`` is vLLM's download_dir. Reads a few MiB of local weights (weights_digest) and uses
    no network. Raises OSError if a local file cannot be read.
    """
    environ = os.environ if environ is None else environ
    identity = _found(name, revision, cache_dir, environ)
    # A directory with only configs has no weights to sample.
    if configured_by:
        path = Path(configured_by).expanduser()
        identity["configured_by"] = (
            {"configs": _configs_digest(path)}
            if path.is_dir()
            else _found(configured_by, None, cache_dir, environ)
        )
    if code:
        identity["code"] = [_found(each, code_revision, cache_dir, environ) for each in code]
    if draft:
        identity["draft"] = _found(draft["name"], draft.get("revision"), cache_dir, environ)
    if adapters:
        identity["adapters"] = {
            kind: _found(each, None, cache_dir, environ) for kind, each in adapters.items()
        }
    if address:
        identity["address"] = address.rstrip("/")
    if model_id is not None:
        identity["model_id"] = model_id
    return identity


def code_repositories(hf_config: Any) -> list[str]:
    """Returns the hub repositories, other than the model's, whose code transformers runs for a
    model with this configuration, if it trusts remote code."""
    classes = getattr(hf_config, "auto_map", None) or {}
    named = [name for value in classes.values() for name in (value if isinstance(value, list) else [value])]
    return sorted({name.split("--")[0] for name in named if isinstance(name, str) and "--" in name})


def weights_problem(identity: Mapping[str, Any]) -> str | None:
    """Returns why ``identity`` does not distinguish sets of weights; None if it does."""
    if identity.get("model_id"):
        return None
    other_parts = (identity.get("draft"), identity.get("configured_by"), *identity.get("code", ()))
    for part in (*other_parts, *identity.get("adapters", {}).values()):
        if part and part.get("revision") == UNKNOWN:
            return f"{part['name']!r} is used with it, and the hub's local cache has no such revision"
    if "address" in identity:
        return f"the weights are at {identity['address']}, where they can change without this server noticing"
    if identity.get("weight_files") == 0:
        return "the model's directory has no weight files"
    if identity.get("hub") == MODELSCOPE:
        return (
            f"{identity['name']!r} is loaded from ModelScope (VLLM_USE_MODELSCOPE), whose revisions are not "
            "recorded here"
        )
    if identity.get("revision") == UNKNOWN:
        asked = f" at revision {identity['asked_revision']!r}" if "asked_revision" in identity else ""
        return f"{identity['name']!r}{asked} is not a directory, and the hub's local cache has no such model"
    return None


def _found(
    name: str, revision: str | None, cache_dir: str | None, environ: Mapping[str, str]
) -> dict[str, Any]:
    path = Path(name).expanduser()
    snapshot = re.fullmatch(r".*/models--([^/]+)/snapshots/([^/]+)/?", name)
    if snapshot:  # offline, vLLM replaces the name with the cached directory
        return {"name": snapshot.group(1).replace("--", "/"), "revision": snapshot.group(2)}
    if path.is_dir():
        return _directory_identity(path)
    if path.is_file():
        return _weights_identity([path])
    asked = {"asked_revision": revision} if revision else {}
    # The hub's cache may hold other weights under the same name.
    if environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true"):
        return {"name": name, "revision": UNKNOWN, "hub": MODELSCOPE} | asked
    commit = _hub_commit(name, revision, cache_dir, environ)
    if commit is not None:
        return {"name": name, "revision": commit}
    return {"name": name, "revision": UNKNOWN} | asked


def _directory_identity(directory: Path) -> dict[str, Any]:
    weights = sorted(
        file
        for file in directory.iterdir()
        if file.suffix in _WEIGHTS and file.name not in _NOT_WEIGHTS and file.is_file()
    )
    identity = _weights_identity(weights) | {"configs": _configs_digest(directory)}
    architecture = _architecture(directory / "config.json")
    return identity | ({"architecture": architecture} if architecture else {})


def _weights_identity(files: list[Path]) -> dict[str, Any]:
    return {
        "weights": weights_digest(files),
        "weights_digest": DIGEST_VERSION,
        "weight_files": len(files),
        "weight_bytes": sum(file.stat().st_size for file in files),
    }


def _configs_digest(directory: Path) -> str:
    """Returns the sha256 (hex) of all files that configure the model, those in folders included.

    Hidden folders (.git, .cache) are left out.
    """
    digest = hashlib.sha256()
    for file in sorted(path for path in directory.rglob("*") if path.suffix in _CONFIGS):
        name = file.relative_to(directory)
        if (
            file.name in _NOT_CONFIGS
            or not file.is_file()
            or any(part.startswith(".") for part in name.parts)
        ):
            continue
        content = _json_text(file) if file.suffix == ".json" else file.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _json_text(file: Path) -> bytes:
    """Returns a JSON file in one form, without BOOKKEEPING; unchanged if it cannot be parsed."""
    raw = file.read_bytes()
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if key not in BOOKKEEPING}
    return json.dumps(content, sort_keys=True).encode()


def _architecture(config: Path) -> str | None:
    try:
        names = json.loads(config.read_text(encoding="utf-8")).get("architectures")
        return str(names[0]) if names else None
    except (OSError, ValueError, AttributeError, LookupError, TypeError):
        return None


def _hub_commit(
    name: str, revision: str | None, cache_dir: str | None, environ: Mapping[str, str]
) -> str | None:
    """Returns the commit of a branch or tag in the local cache of the hub (its refs/ files).

    A colon may select a file of the repository (vLLM: ``org/name:Q4_K_M``, GGUF).
    """
    if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    reference = _hub_folder(name.partition(":")[0], cache_dir, environ) / "refs" / (revision or "main")
    try:
        return reference.read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def _hub_folder(name: str, cache_dir: str | None, environ: Mapping[str, str]) -> Path:
    # Same as huggingface_hub.constants.
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = (
        cache_dir
        or environ.get("HF_HUB_CACHE")
        or environ.get("HUGGINGFACE_HUB_CACHE")
        or os.path.join(home, "hub")
    )
    return Path(os.path.expanduser(os.path.expandvars(cache))) / f"models--{name.replace('/', '--')}"


def hub_snapshot(
    name: str,
    environ: Mapping[str, str] | None = None,
    *,
    revision: str | None = None,
    cache_dir: str | None = None,
) -> Path | None:
    """Returns the directory of a revision of ``name`` in the hub's local cache; None if missing.

    The default revision is "main".
    """
    environment = os.environ if environ is None else environ
    commit = _hub_commit(name, revision, cache_dir, environment)
    folder = _hub_folder(name, cache_dir, environment) / "snapshots" / (commit or "")
    return folder if commit and folder.is_dir() else None


def has_one_set_of_safetensors(
    name: str,
    revision: str | None = None,
    cache_dir: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> bool:
    """True if every reader of safetensors files reads the same weights of ``name``.

    Readers differ in how they treat files that the index does not name, and a second set of weights in
    Mistral's format (consolidated*). False if the files are not known.
    """
    environ = os.environ if environ is None else environ
    if Path(name).is_dir():
        folder: Path | None = Path(name)
    elif environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true"):
        folder = None
    else:
        folder = hub_snapshot(name, environ, revision=revision, cache_dir=cache_dir)
    # ModelScope's cache is not searched: its files are not known.
    names = {file.name for file in folder.glob("*.safetensors")} if folder else set()
    if folder is None or not names or any(each.startswith("consolidated") for each in names):
        return False
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return True  # no reader can choose among the files
    try:
        return names == set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
