# SPDX-License-Identifier: Apache-2.0
"""The settings of one process that are part of the namespace, as text.

They are vLLM's resolved configuration and its environment, filtered by ``identity_table``. Values that equal
the default of their field are omitted. The namespace includes vLLM's version, so a default is the same
wherever two namespaces are equal.
"""

import dataclasses
import enum
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kv_offload.model_identity import BOOKKEEPING, has_one_set_of_safetensors
from kv_offload.namespace import setting_text
from kv_offload.weights_digest import weights_digest

from .identity_table import CONFIGURATION, ENVIRONMENT, Decision

# Kinds of rotary embedding whose angles do not depend on max_model_len.
_FIXED_ROTATIONS = {None, "default", "linear", "yarn", "deepseek_yarn", "llama3", "mrope", "proportional"}
# Models whose computation reads max_model_len: attention temperature (Llama 4), rotation length.
_READS_MAX_MODEL_LEN = ("llama4", "minimax_m2", "cohere_compass")
# Configuration paths of an engine's models: the model and its drafter.
_MODELS = ("model_config", "speculative_config.draft_model_config")
# Configurations that say how the weights of these models are read.
_LOADERS = ("load_config", "speculative_config.draft_load_config")
# Values of load_format that read safetensors files, and differ only in speed if there is one set of them.
# ("auto" and "hf" read files of other formats only if there are none. "runai_streamer" is not one of these:
# its loader ignores secondary_weights and allow_patterns_overrides of a model's class, so it may load less.)
_SAFETENSORS_READERS = {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor"}
_MAX_DEPTH = 8


def configured(vllm_config: Any) -> dict[str, str]:
    """Returns {field path: text} for every field that counts and differs from its default."""
    found = dict(_walk(vllm_config, "", ""))
    for path in _MODELS:
        if _length_is_free(_at(vllm_config, path)):
            found.pop(f"{path}.max_model_len", None)
    if all(_has_one_set_of_weights(vllm_config, path) for path in _MODELS):
        for path in _LOADERS:
            if getattr(_at(vllm_config, path), "load_format", None) in _SAFETENSORS_READERS:
                found.pop(f"{path}.load_format", None)
    return found


def environment(
    environ: Mapping[str, str] = os.environ, known: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Returns {variable: text} for every variable that counts and is set.

    ``known``: the variables of vllm/envs.py (its ``environment_variables``). A variable in no table counts.
    """
    if known is None:
        from vllm.envs import environment_variables

        known = environment_variables
    counted = {name for name, decision in ENVIRONMENT.items() if decision.counts}
    counted |= known.keys() - ENVIRONMENT.keys()
    return {name: str(plain(environ[name])) for name in sorted(counted) if name in environ}


def decision_for(path: str, table: Mapping[str, Decision] = CONFIGURATION) -> Decision | None:
    """Returns the table entry for ``path`` or for an enclosing configuration; None for an unknown field."""
    while path:
        if path in table:
            return table[path]
        path = path.rpartition(".")[0]
    return None


def _walk(value: Any, path: str, section: str) -> Iterator[tuple[str, str]]:
    """Yields (path, text) of the fields below ``value`` that count.

    ``path``: the prefix of their names in the namespace. ``section``: the prefix of their entries in the
    table.
    """
    for name, field, default in _fields(value):
        inner = f"{path}.{name}".lstrip(".")
        line = f"{section}.{name}".lstrip(".")
        decision = decision_for(line)
        if decision is not None and not decision.counts:
            continue
        below = decision.like if decision is not None and decision.like else line
        if _is_configuration(field) and inner.count(".") < _MAX_DEPTH:
            yield from _walk(field, inner, below)
        elif field is not default and not _equal(field, default):
            yield inner, setting_text(plain(field))


def _is_configuration(value: Any) -> bool:
    """True for instances of vLLM's configuration classes, whose fields have their own table entries."""
    is_class = isinstance(value, type)
    return not is_class and (dataclasses.is_dataclass(value) or type(value).__name__ == "SimpleNamespace")


def _fields(config: Any) -> list[tuple[str, Any, Any]]:
    """Returns (name, value, default) of each field of a configuration."""
    if not dataclasses.is_dataclass(config):
        return [(name, value, None) for name, value in vars(config).items()]
    return [
        (field.name, getattr(config, field.name, None), _default(field))
        for field in dataclasses.fields(config)
    ]


def _default(field: Any) -> Any:
    """Returns the default of a dataclass or pydantic field; a new object if there is none."""
    for source in (field, field.default):  # pydantic stores a FieldInfo as the default
        factory = getattr(source, "default_factory", None)
        if callable(factory) and factory is not dataclasses.MISSING:
            try:
                return factory()
            except Exception:  # the factory needs arguments: always include the value
                return object()
    default = getattr(field.default, "default", field.default)
    missing = default is dataclasses.MISSING or type(default).__name__ == "PydanticUndefinedType"
    return object() if missing else default


def _equal(value: Any, default: Any) -> bool:
    return (
        setting_text(plain(value)) == setting_text(plain(default)) if type(default) is not object else False
    )


def plain(value: Any, depth: int = 0) -> Any:
    """Returns ``value`` as dicts, lists and scalars that are equal in every process.

    Replaces a file path by a digest of the file, because the file may change in place. ``depth`` is the
    nesting of objects: beyond _MAX_DEPTH, for example in an object that contains itself, the type replaces
    the value. Raises OSError if a file cannot be read.
    """
    if isinstance(value, (str, Path)) and _may_name_a_file(str(value)) and os.path.isfile(value):
        return f"file {weights_digest([Path(value)])}"
    if value is None or (isinstance(value, (str, int, float)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(part, depth) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part, depth) for part in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(part, depth) for part in value), key=setting_text)
    if depth >= _MAX_DEPTH:
        return type(value).__qualname__
    if hasattr(value, "to_dict") and not isinstance(value, type):  # a transformers configuration
        return _digest(_without_bookkeeping(plain(value.to_dict(), depth + 1)))
    if isinstance(value, type) or callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    if type(value).__module__ == "torch":
        return str(value)  # a dtype or device
    inside = (
        {name: plain(part, depth + 1) for name, part in vars(value).items()}
        if hasattr(value, "__dict__")
        else {}
    )
    return {"type": type(value).__qualname__, **inside}


def _may_name_a_file(text: str) -> bool:
    """False for words such as "auto", even if the working directory has a file of that name."""
    return os.sep in text or "." in text


def _without_bookkeeping(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_bookkeeping(part) for key, part in value.items() if key not in BOOKKEEPING}
    return [_without_bookkeeping(part) for part in value] if isinstance(value, list) else value


def _digest(value: Any) -> str:
    return hashlib.sha256(setting_text(value).encode()).hexdigest()[:32]


def _at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def _has_one_set_of_weights(vllm_config: Any, path: str) -> bool:
    """True if all _SAFETENSORS_READERS read the same weights of the model at ``path``, or there is none."""
    model = _at(vllm_config, path)
    if model is None:
        return True
    return has_one_set_of_safetensors(
        str(getattr(model, "model", "")),
        getattr(model, "revision", None),
        _at(vllm_config, "load_config.download_dir"),
    )


def _length_is_free(model: Any) -> bool:
    """True if max_model_len does not change the cache's bytes: neither model nor rotations depend on it.

    ``model``: a ModelConfig.
    """
    text = getattr(model, "hf_text_config", None)
    kinds = {str(getattr(config, "model_type", "")) for config in (text, getattr(model, "hf_config", None))}
    if any(kind.startswith(_READS_MAX_MODEL_LEN) for kind in kinds):
        return False
    return _rotations(text) <= _FIXED_ROTATIONS


def _rotations(text_config: Any) -> set[Any]:
    """Returns the kinds of rotary embedding in a text configuration, which may have one per kind of layer."""
    found: set[Any] = set()
    for name in ("rope_parameters", "rope_scaling"):
        scaling = getattr(text_config, name, None)
        if not isinstance(scaling, Mapping):
            continue
        nested = [part for part in scaling.values() if isinstance(part, Mapping)]
        for part in (scaling, *nested):
            found |= {part[key] for key in ("rope_type", "type") if isinstance(part.get(key), str)}
    return found
