# SPDX-License-Identifier: Apache-2.0
"""KV cache bytes per token of a model, computed from its config.json.

Needs neither weights nor vLLM. The arithmetic is vLLM's (vllm/v1/kv_cache_interface.py): a layer keeps
``heads * (key size + value size)`` values of each token, an MLA layer one latent vector.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kv_offload.model_identity import hub_snapshot
from kv_offload.sizing import Geometry, tail_of_chunk
from kv_offload.state_shape import StateLayers, raised_block_size, state_layers

# Bytes of one value, by vLLM's names for --kv-cache-dtype and the names in a config.json.
DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
# Layers that keep a fixed-size state for each sequence instead of values for each token.
_STATE_LAYERS = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "short_conv", "M"}
_NO_CACHE_LAYERS = {"mlp", "moe", "-", "E"}
_FULL = {"full_attention", "attention", "hybrid", "*", "global"}
_WINDOWED = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one kind. ``values``: per token and head, keys and values together."""

    name: str
    layers: int
    heads: int
    values: int
    replicated: bool = False  # MLA: all ranks hold the same bytes, and one copy is stored
    value_bytes: int | None = None  # if independent of the dtype of the cache
    window: int | None = None  # length of the sliding window in tokens

    def bytes_per_token(self, dtype: str, ranks: int = 1) -> int:
        """Returns the bytes of one token in the whole engine; with fewer heads than ranks, heads are
        copied."""
        heads = self.heads if self.replicated else self.heads_of_rank(ranks) * ranks
        return self.layers * heads * self.values * (self.value_bytes or DTYPE_BYTES[dtype])

    def token_bytes_of_rank(self, dtype: str, ranks: int) -> int:
        """Returns the bytes of one token in one layer on one rank."""
        return self.heads_of_rank(ranks) * self.values * (self.value_bytes or DTYPE_BYTES[dtype])

    def heads_of_rank(self, ranks: int) -> int:
        return self.heads if self.replicated else max(1, self.heads // ranks)


@dataclass(frozen=True)
class ModelShape:
    """The layers of a model that have a KV cache."""

    name: str
    dtype: str  # of the computation, and by default of the cache
    groups: tuple[LayerGroup, ...]
    notes: tuple[str, ...]  # parts that the figures exclude
    states: tuple[StateLayers, ...] = ()

    def bytes_per_token(self, dtype: str, ranks: int = 1) -> int:
        return sum(group.bytes_per_token(dtype, ranks) for group in self.groups)

    def block_size(self, dtype: str, ranks: int = 1, block_size: int = 16) -> int:
        """Returns the tokens per block: vLLM raises ``block_size`` if layers keep a state."""
        largest = max((s.state_bytes(DTYPE_BYTES, dtype, ranks) for s in self.states), default=0)
        return raised_block_size(block_size, largest, self._token_bytes(dtype, ranks))

    def geometry(
        self, dtype: str, ranks: int = 1, block_size: int = 16, blocks_per_chunk: int = 1
    ) -> Geometry:
        """Returns the chunks of this model for ``TieredCache``.

        Layers with a state count one state per block, in blocks as large as those of the other layers. That
        is the space they use, and the most that is stored for them.
        """
        replicated = all(group.replicated for group in self.groups) and not self.states
        areas = 1 if replicated else ranks
        block = self.block_size(dtype, ranks, block_size)
        tokens = block * blocks_per_chunk
        layers = []
        for group in self.groups:
            tail = tail_of_chunk(group.window, block, blocks_per_chunk) if group.window else 0
            kept = block * tail or tokens
            layers.append((group.layers, group.token_bytes_of_rank(dtype, ranks) * kept))
        layers += [(state.layers, self._token_bytes(dtype, ranks) * tokens) for state in self.states]
        shards = [[count * size] * areas for count, size in _as_vllm_groups(layers)]
        return Geometry.of([tokens] * len(shards), shards)

    def long_chunks(
        self, dtype: str, ranks: int = 1, block_size: int = 16, blocks_per_chunk: int = 1
    ) -> list[str]:
        """Returns a sentence for each kind of layer whose window is shorter than a chunk by whole blocks."""
        block = self.block_size(dtype, ranks, block_size)
        windows = {group.window for group in self.groups if group.window}
        return [
            f"chunks of {block * blocks_per_chunk:,} tokens are longer than the sliding window of "
            f"{window:,}: for its layers, the last {tail_of_chunk(window, block, blocks_per_chunk)} of "
            f"{blocks_per_chunk} blocks of each chunk are stored"
            for window in sorted(windows)
            if tail_of_chunk(window, block, blocks_per_chunk)
        ]

    def _token_bytes(self, dtype: str, ranks: int) -> int:
        """Returns the bytes per token of the largest attention layer on one rank."""
        return max(group.token_bytes_of_rank(dtype, ranks) for group in self.groups)


def _as_vllm_groups(layers: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Splits (layers, bytes of each) like vLLM, into groups of about the same number of layers."""
    counts = [count for count, _ in layers]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    split = []
    for count, each in layers:
        parts = -(-count // size)
        split += [((count - part + parts - 1) // parts, each) for part in range(parts)]
    return split


def read_model(given: str) -> ModelShape:
    """Returns the shape of a model directory, a config.json, or a name in the local Hugging Face cache.

    Raises ValueError naming the missing part if the config is incomplete or of an unknown kind.
    """
    path = Path(given).expanduser()
    if not path.exists():
        snapshot = hub_snapshot(given)
        if snapshot is None:
            raise ValueError(
                f"{given}: no such file or directory, and no model of that name in the local cache of the hub"
            )
        path = snapshot
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} has no config.json; give a model directory or its config.json") from None
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise ValueError(f"{file} is not a JSON object")
    try:
        return model_shape(config, name=given.rstrip(os.sep))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        # Such as a list instead of a number.
        raise ValueError(f"{file} cannot be interpreted: {error!r}") from error


def model_shape(config: Mapping[str, Any], name: str = "") -> ModelShape:
    """Returns the shape for a parsed config.json. Raises ValueError if it is incomplete."""
    text: Mapping[str, Any] = config
    for part in _TEXT_PARTS:  # nested in multimodal models, twice in some
        text = text.get(part) or text
    notes: list[str] = []
    kinds = Counter(_kept_layers(text, notes))
    groups: list[LayerGroup] = []
    states: list[StateLayers] = []
    for kind, layers in kinds.items():
        if kind in _STATE_LAYERS:
            state = state_layers(text, kind, layers)
            if state is None:
                notes.append(
                    f"{layers} {kind} layers keep a state of a size not known here; it is not counted"
                )
            else:
                states.append(_with_known_dtype(state, notes))
        elif kind not in _NO_CACHE_LAYERS:
            groups += _layer_groups(text, kind, layers)
    if not groups:
        raise ValueError("no layer has a KV cache for each token; there is nothing to size")
    dtype = _serving_dtype(config, text, notes)
    return ModelShape(name, dtype, tuple(groups), tuple(notes), tuple(states))


def _with_known_dtype(state: StateLayers, notes: list[str]) -> StateLayers:
    if state.recurrent_dtype is None or state.recurrent_dtype in DTYPE_BYTES:
        return state
    notes.append(f"{state.name} is kept in {state.recurrent_dtype!r}, not known here; counted as the cache's")
    return replace(state, recurrent_dtype=None)


def _kept_layers(text: Mapping[str, Any], notes: list[str]) -> list[str]:
    """Returns the kind of each layer that has its own cache."""
    count = _number(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    kinds = _listed_layers(text, count)
    shared = int(text.get("num_kv_shared_layers") or 0)
    if shared:
        notes.append(f"the last {shared} layers share the cache of others")
        kinds = kinds[: count - shared]
    unknown = sorted(set(kinds) - _STATE_LAYERS - _NO_CACHE_LAYERS - _FULL - set(_WINDOWED))
    if unknown:
        raise ValueError(f"layers of an unknown kind: {', '.join(unknown)}")
    return ["full_attention" if kind in _FULL else kind for kind in kinds]


def _listed_layers(text: Mapping[str, Any], count: int) -> list[str]:
    for key in ("layer_types", "layers_block_type", "block_types"):
        if text.get(key):
            return [str(kind) for kind in text[key]]
    if text.get("hybrid_override_pattern"):  # a character for each layer
        return list(str(text["hybrid_override_pattern"]))
    if text.get("attn_layer_period"):
        period, offset = int(text["attn_layer_period"]), int(text.get("attn_layer_offset") or 0)
        return ["attention" if n % period == offset else "mamba" for n in range(count)]
    if text.get("full_attn_idxs") is not None:
        return ["attention" if n in text["full_attn_idxs"] else "conv" for n in range(count)]
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return ["full_attention"] * count
    # Without a pattern, all layers have the window. Gemma 2 alternates, and its config does not say so.
    every = int(text.get("sliding_window_pattern") or (2 if text.get("model_type") == "gemma2" else 0))
    whole = {n for n in range(count) if every and (n + 1) % every == 0}
    return ["full_attention" if n in whole else "sliding_attention" for n in range(count)]


def _layer_groups(text: Mapping[str, Any], kind: str, layers: int) -> list[LayerGroup]:
    if text.get("compress_ratios"):
        raise ValueError("caches with their own compression ratios (compress_ratios) are not supported")
    if text.get("kv_lora_rank"):
        latent = _number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim")
        groups = [LayerGroup("latent (MLA)", layers, 1, latent, replicated=True)]
        if text.get("index_head_dim"):  # keys of the sparse attention's indexer: fp8, a scale for 128 values
            values = _number(text, "index_head_dim")
            groups.append(LayerGroup("indexer", layers, 1, values + values // 128 * 4, True, 1))
        return groups
    window = text.get(_WINDOWED[kind]) if kind in _WINDOWED else None
    whole = kind == "full_attention"
    heads = text.get("num_global_key_value_heads") if whole else None
    head_size = text.get("global_head_dim") if whole else None
    heads = heads or text.get("num_key_value_heads") or text.get("num_kv_heads") or text.get("n_head_kv")
    if text.get("multi_query") and not heads:
        heads = 1
    heads = int(heads or _number(text, "num_attention_heads", "n_head", "num_heads"))
    size = int(head_size or text.get("head_dim") or 0)
    if not size:
        hidden = _number(text, "hidden_size", "n_embd", "d_model")
        size = hidden // _number(text, "num_attention_heads", "n_head", "num_heads")
    values = size + int(text.get("v_head_dim") or size)
    name = "full attention" if whole else f"{kind.split('_')[0]} attention"
    name += f" ({window:,} tokens)" if window else ""
    return [LayerGroup(name, layers, heads, values, window=window if kind == "sliding_attention" else None)]


def _serving_dtype(config: Mapping[str, Any], text: Mapping[str, Any], notes: list[str]) -> str:
    given = next(
        (part[key] for part in (text, config) for key in ("dtype", "torch_dtype") if part.get(key)), "float16"
    )
    given = str(given).removeprefix("torch.")
    if given == "float32":
        notes.append("the weights are float32; vLLM serves them in bfloat16 unless --dtype float32 is given")
        return "bfloat16"
    if given not in DTYPE_BYTES:
        notes.append(f"dtype {given!r} is not known here; counted as bfloat16")
        return "bfloat16"
    return given


def _number(text: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = text.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise ValueError(f"it has no {' or '.join(names)}")
