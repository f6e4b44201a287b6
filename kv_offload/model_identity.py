"""Which weights a model has, without reading them all.

A local directory is known by what is in it, not by where it is: a copy elsewhere keeps its hits, weights
saved again do not. A model of the hub is known by its name and commit.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_NOT_WEIGHTS = {"training_args.bin", "optimizer.pt", "scheduler.pt", "optimizer.bin"}
# How the weights are to be read. Tokenizer files are not among them: keys are hashes of token ids.
_CONFIGS = ("config.json", "params.json", "quantize_config.json", "hf_quant_config.json")
# Written by the tools that save a model; they change nothing that is computed.
_BOOKKEEPING = {"_name_or_path", "_commit_hash", "transformers_version"}
_END_BYTES = 64 << 10


def model_identity(
    name: str,
    revision: str | None = None,
    *,
    cache_dir: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Facts that stand for the weights of ``name``: a directory, a file, or a name of the hub.

    ``cache_dir`` is vLLM's download_dir. Reads 128 KiB of each weight file; no network. Raises OSError
    when a local file cannot be read.
    """
    path = Path(name).expanduser()
    snapshot = re.fullmatch(r".*/models--([^/]+)/snapshots/([^/]+)/?", name)
    if snapshot:  # vLLM started offline puts the cached directory in the place of the name
        return {"name": snapshot.group(1).replace("--", "/"), "revision": snapshot.group(2)}
    if path.is_dir():
        return _directory_identity(path)
    if path.is_file():
        return {"weights": _weights_digest([path]), "weight_files": 1, "weight_bytes": path.stat().st_size}
    commit = _hub_commit(name, revision, cache_dir, os.environ if environ is None else environ)
    return {"name": name, "revision": commit or revision or "unknown"}


def _directory_identity(directory: Path) -> dict[str, Any]:
    weights = sorted(
        file
        for file in directory.iterdir()
        if file.suffix in _WEIGHTS and file.name not in _NOT_WEIGHTS and file.is_file()
    )
    facts: dict[str, Any] = {
        "weights": _weights_digest(weights),
        "weight_files": len(weights),
        "weight_bytes": sum(file.stat().st_size for file in weights),
        "configs": _configs_digest(directory),
    }
    architecture = _architecture(directory / "config.json")
    return facts | ({"architecture": architecture} if architecture else {})


def _weights_digest(files: list[Path]) -> str:
    """Names, sizes, and the first and last 64 KiB: the head of a safetensors file lists its tensors, and
    weights of another training differ everywhere, its end included."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_END_BYTES))
            stream.seek(max(_END_BYTES, size - _END_BYTES))
            digest.update(stream.read(_END_BYTES))
    return digest.hexdigest()


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
    """The commit that a branch or tag stands for in the local cache of the hub (its refs/ files)."""
    reference = _hub_folder(name, cache_dir, environ) / "refs" / (revision or "main")
    try:
        return reference.read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def _hub_folder(name: str, cache_dir: str | None, environ: Mapping[str, str]) -> Path:
    home = environ.get("HF_HOME") or os.path.join(
        environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    cache = cache_dir or environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    return Path(cache) / f"models--{name.replace('/', '--')}"


def hub_snapshot(name: str, environ: Mapping[str, str] | None = None) -> Path | None:
    """Where the local cache of the hub keeps the main revision of ``name``; None when it does not."""
    environment = os.environ if environ is None else environ
    commit = _hub_commit(name, None, None, environment)
    folder = _hub_folder(name, None, environment) / "snapshots" / (commit or "")
    return folder if commit and folder.is_dir() else None
