"""Which weights a model has, without reading all of them.

A local directory is identified by its contents, not by its path: a copy elsewhere keeps its hits, weights
that were changed do not. A model of the hub is identified by its name and commit. Weights at an address (an
object store) cannot be identified: only the operator can name them.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kv_offload.weights_digest import weights_digest

DIGEST_VERSION = 2  # of weights_digest: every tensor is sampled
UNKNOWN = "unknown"
MODELSCOPE = "modelscope"

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
_NOT_WEIGHTS = {"training_args.bin", "optimizer.pt", "scheduler.pt", "optimizer.bin"}
# How the weights are to be read. Tokenizer files are not among them: keys are hashes of token ids.
_CONFIGS = ("config.json", "params.json", "quantize_config.json", "hf_quant_config.json")
# Written by the tools that save a model; they change nothing that is computed.
_BOOKKEEPING = {"_name_or_path", "_commit_hash", "transformers_version"}


def model_identity(
    name: str,
    revision: str | None = None,
    *,
    address: str | None = None,
    model_id: str | None = None,
    cache_dir: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What identifies the weights of ``name``: a directory, a file, or a name of the hub.

    ``address``: where vLLM reads the weights instead (its model_weights, such as s3://...), when ``name`` is
    a directory of configs only. ``model_id``: the operator's name of the weights; it is added to what is
    found. ``cache_dir`` is vLLM's download_dir. Reads a few MiB of local weights (weights_digest); no
    network. Raises OSError when a local file cannot be read.
    """
    identity = _found(name, revision, cache_dir, os.environ if environ is None else environ)
    if address:
        identity["address"] = address.rstrip("/")
    if model_id is not None:
        identity["model_id"] = model_id
    return identity


def weights_problem(identity: Mapping[str, Any]) -> str | None:
    """Why ``identity`` does not tell one set of weights from another, or None when it does."""
    if identity.get("model_id"):
        return None
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
    if snapshot:  # vLLM started offline puts the cached directory in the place of the name
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
    digest = hashlib.sha256()
    for name in _CONFIGS:
        file = directory / name
        if file.is_file():
            digest.update(f"{name}\0{_config_text(file)}\0".encode())
    return digest.hexdigest()


def _config_text(file: Path) -> str:
    text = file.read_text(encoding="utf-8", errors="surrogateescape")
    try:
        content = json.loads(text)
    except ValueError:
        return text
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if key not in _BOOKKEEPING}
    return json.dumps(content, sort_keys=True)


def _architecture(config: Path) -> str | None:
    try:
        names = json.loads(config.read_text(encoding="utf-8")).get("architectures")
        return str(names[0]) if names else None
    except (OSError, ValueError, AttributeError, LookupError, TypeError):
        return None


def _hub_commit(
    name: str, revision: str | None, cache_dir: str | None, environ: Mapping[str, str]
) -> str | None:
    """The commit that a branch or tag stands for in the local cache of the hub (its refs/ files).

    A file of a repository may be chosen behind a colon (vLLM: ``org/name:Q4_K_M``, GGUF).
    """
    if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    reference = _hub_folder(name.partition(":")[0], cache_dir, environ) / "refs" / (revision or "main")
    try:
        return reference.read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def _hub_folder(name: str, cache_dir: str | None, environ: Mapping[str, str]) -> Path:
    # As huggingface_hub.constants has it.
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = (
        cache_dir
        or environ.get("HF_HUB_CACHE")
        or environ.get("HUGGINGFACE_HUB_CACHE")
        or os.path.join(home, "hub")
    )
    return Path(os.path.expanduser(os.path.expandvars(cache))) / f"models--{name.replace('/', '--')}"


def hub_snapshot(name: str, environ: Mapping[str, str] | None = None) -> Path | None:
    """Where the local cache of the hub keeps the main revision of ``name``; None when it does not."""
    environment = os.environ if environ is None else environ
    commit = _hub_commit(name, None, None, environment)
    folder = _hub_folder(name, None, environment) / "snapshots" / (commit or "")
    return folder if commit and folder.is_dir() else None
