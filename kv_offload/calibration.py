# SPDX-License-Identifier: Apache-2.0
"""Calibrations of ``lossy:E``: factors that lower the error bound of sensitive layers and KV heads, and
weights that distribute an error over channels.

A calibration has factors for each 64 channels of the keys and of the values of a KV head, and a weight for
each channel. ``kv-offload calibrate`` computes them (``kv_offload.sensitivity``). The encoder multiplies E
by the factors, and the steps of channels by their weights. A record has its weights, so a decoder needs no
calibration.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

BLOCK = 64  # channels that share a factor, and elements that share a bound
VERSION = 2
_FORMAT = "kv-offload calibration"
_MOST_BYTES = 64 << 20  # of a file
# The factor of typical heads. Heads for which more than 1 would be best have 1: this loses little, and keeps
# the bound low.
_TYPICAL_FACTOR = 0.5
_LEAST_FACTOR = 2.0**-10
_DIGITS = 5  # of a factor
# Weights are powers of 2, at most this one or its inverse. Larger ones gain nothing (measured).
MOST_OCTAVES = 2
# The encoder drops the weights of 16 tokens if an integer would exceed _MOST_INTEGER. With lossy:_USUAL_BOUND
# and larger bounds, channels as large as in the calibration's text do not cause that.
_USUAL_BOUND = 0.2
_MOST_INTEGER = 127
LEAST_BOUND = 0.02  # LossyCodec::kLeastError
_ROUNDS = 4  # until the weights change no more
_MOST_ROWS = 4096  # kMostWeightRows in csrc/record/bound_factors.h
_WEIGHT_OF_ONE = 8  # ChannelWeights::kCodeOfOne
_NO_WEIGHTS = bytes([_WEIGHT_OF_ONE]) * BLOCK

# Parts of a server's identity that `kv-offload calibrate` does not have, and where they come from.
_NOT_CALIBRATED = {
    "adapters": "--default-mm-loras",
    "address": "weights that vLLM reads from an address",
    "configured_by": "--hf-config-path",
    "draft": "a drafter",
}

Blocks = tuple[float, ...]  # by 64 channels; the last ones of a head may be fewer


class CalibrationError(ValueError):
    """A calibration file is missing, damaged, or of another model; the text says what to do."""


class PageLayout(NamedTuple):
    """How a layer's part of a block consists of keys and values, in one shard."""

    key_bytes: int  # of a run of keys, which a run of values follows: specs/kv_runs.py
    value_bytes: int
    by_head: bool  # all tokens of the first head are first; otherwise all heads of the first token
    element_bytes: int
    page_bytes: int  # a multiple of the runs of all heads


class ChannelStatistics(NamedTuple):
    """The keys or the values of one KV head, by channel."""

    # Mean KL divergence per evaluated token that an error of this channel causes, if the relative error of
    # its 64 channels is 1 and all channels have the same.
    sensitivities: Sequence[float]
    peaks: Sequence[float]  # largest magnitude, as a part of the norm of the 64 channels


@dataclass(frozen=True)
class HeadFactors:
    """The factors of the keys or of the values of one KV head."""

    plain: Blocks  # if all channels have the same step
    weighted: Blocks  # with the weights
    weights: tuple[int, ...]  # by channel: the base-2 logarithm of its step relative to the others


@dataclass(frozen=True)
class LayerFactors:
    """The factors of one layer, by KV head."""

    keys: tuple[HeadFactors, ...]
    values: tuple[HeadFactors, ...]

    @property
    def key_size(self) -> int:
        """Returns the channels of a key."""
        return len(self.keys[0].weights)

    @property
    def value_size(self) -> int:
        """Returns the channels of a value."""
        return len(self.values[0].weights)


class GroupFactors(NamedTuple):
    """What the encoder needs for one cache group; argument of TierSpec.set_bound_factors."""

    # By shard, for each 64 neighbouring elements of a block: the factor, and the row of its weights, from
    # 1; 0: none.
    shards: list[list[tuple[float, int]]]
    weights: bytes  # rows of 64 codes; 8: 1, 9: 2


@dataclass(frozen=True)
class Calibration:
    """The factors of a model."""

    model: Mapping[str, Any]  # result of model_identity
    layers: tuple[LayerFactors, ...]
    made_of: Mapping[str, Any]  # text, tokens and versions; informative only

    @classmethod
    def of_statistics(
        cls,
        model: Mapping[str, Any],
        layers: Sequence[tuple[Sequence[ChannelStatistics], Sequence[ChannelStatistics]]],
        made_of: Mapping[str, Any],
    ) -> "Calibration":
        """Returns the factors for measured statistics of the keys and of the values, by layer and head.

        At equal divergence the ratio is largest if all elements contribute alike, so factors and weights
        are proportional to 1 / sqrt(sensitivity). Raises ValueError unless all sensitivities are finite and
        one is above 0.
        """
        heads = [head for layer in layers for kind in layer for head in kind]
        known = [each for head in heads for each in head.sensitivities]
        peaks = [each for head in heads for each in head.peaks]
        if not any(known) or not all(math.isfinite(each) and each >= 0 for each in (*known, *peaks)):
            raise ValueError("the sensitivities are not finite, or all of them are zero")
        plain = _typical(sum_ for head in heads for sum_ in _sums(head.sensitivities))
        weights = [_weights_of(head, plain) for head in heads]
        weighted = _typical(
            sum_
            for head, octaves in zip(heads, weights, strict=True)
            for sum_ in _sums(head.sensitivities, octaves)
        )
        made = iter(
            HeadFactors(
                tuple(_factor(each, plain) for each in _sums(head.sensitivities)),
                tuple(_factor(each, weighted) for each in _sums(head.sensitivities, octaves)),
                tuple(octaves),
            )
            for head, octaves in zip(heads, weights, strict=True)
        )
        return cls(
            dict(model),
            tuple(
                LayerFactors(*(tuple(next(made) for _ in kind) for kind in layer))  # as `heads`
                for layer in layers
            ),
            dict(made_of),
        )

    @cached_property
    def digest(self) -> str:
        """Returns the sha256 of the fields, in hex: part of the namespace."""
        return hashlib.sha256(json.dumps(self._fields(), sort_keys=True).encode()).hexdigest()

    def write(self, path: Path) -> None:
        """Writes the file; an existing one is replaced as a whole. Raises OSError."""
        text = json.dumps(self._fields() | {"digest": self.digest}, sort_keys=True) + "\n"
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    @classmethod
    def read(cls, path: Path) -> "Calibration":
        """Reads a file. Raises CalibrationError, which names the file and the error."""
        try:
            content = _content(path)
        except OSError as error:
            raise CalibrationError(
                f"calibration {path} cannot be read: {error.strerror}; make it with `kv-offload calibrate`"
            ) from error
        remedy = "make it again with `kv-offload calibrate`"
        try:
            fields = json.loads(content) if len(content) <= _MOST_BYTES else None
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
            raise CalibrationError(f"{path} is not a calibration, or is damaged; {remedy}")
        if fields.get("version") != VERSION:
            raise CalibrationError(
                f"calibration {path} has version {fields.get('version')!r}, this release reads {VERSION}; "
                f"{remedy}"
            )
        try:
            layers = tuple(_layer(each) for each in fields["layers"])
            made = cls(dict(fields["model"]), layers, dict(fields["made_of"]))
            is_whole = made.digest == fields.get("digest")
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CalibrationError(f"calibration {path} is damaged ({error}); {remedy}") from error
        if not is_whole:
            raise CalibrationError(f"calibration {path} is damaged: its digest does not match; {remedy}")
        return made

    def _fields(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "version": VERSION,
            "model": self.model,
            "layers": [asdict(layer) for layer in self.layers],
            "made_of": self.made_of,
        }

    def refuse_other_model(self, identity: Mapping[str, Any]) -> None:
        """Raises CalibrationError unless ``identity``, a result of model_identity, is of the same weights.

        The operator's ``model_id`` does not count.
        """
        ours, theirs = ({**each, "model_id": None} for each in (self.model, identity))
        different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        if not different:
            return
        unknown = [setting for name, setting in _NOT_CALIBRATED.items() if name in different]
        if unknown:
            remedy = (
                f'calibrations do not support {" and ".join(unknown)}: remove "calibration" from the tier'
            )
        elif "code" in different:
            remedy = (
                "make one with `kv-offload calibrate --trust-remote-code`, and serve without --code-revision"
            )
        else:
            remedy = "make one for this model with `kv-offload calibrate`"
        raise CalibrationError(
            f"the calibration is of another model: {', '.join(different)} differ; {remedy}"
        )

    def group_factors(
        self, shards: Sequence[tuple[Sequence[int], int]], page: PageLayout, heads: int
    ) -> GroupFactors:
        """Returns the factors of a cache group.

        ``shards``: the layers and the first KV head of each shard. A shard has ``heads`` KV heads of each
        layer, all of which the calibration has; ``page`` is that of a shard. 64 elements with several
        factors have the smallest. There are no weights for fp8, for elements whose channel is not known,
        and in groups with more weights than a record may have. Raises CalibrationError if the calibration
        has other head sizes, or if a block is not a multiple of 64 elements.
        """
        with_weights = page.element_bytes > 1
        blocks = [self._block(layers, page, first, heads, with_weights) for layers, first in shards]
        rows = {weights for block in blocks for _, weights in block} - {_NO_WEIGHTS}
        if len(rows) > _MOST_ROWS:
            blocks = [self._block(layers, page, first, heads, False) for layers, first in shards]
            rows = set()
        numbers = {weights: number for number, weights in enumerate(sorted(rows), 1)} | {_NO_WEIGHTS: 0}
        return GroupFactors(
            [[(factor, numbers[weights]) for factor, weights in block] for block in blocks],
            b"".join(sorted(rows)),
        )

    def _block(
        self, layers: Sequence[int], page: PageLayout, first_head: int, heads: int, with_weights: bool
    ) -> list[tuple[float, bytes]]:
        """Returns factor and weights of each 64 elements of a block of a shard."""
        runs, rest = divmod(page.page_bytes, page.key_bytes + page.value_bytes)
        if rest:
            raise CalibrationError(f"pages of {page.page_bytes} bytes are not whole runs of keys and values")
        parts: list[tuple[int, float, bytes]] = []  # number of elements, factor, weights
        for number in layers:
            layer = self.layers[number]
            sizes = (layer.key_size, page.key_bytes), (layer.value_size, page.value_bytes)
            if any(run_bytes % (size * page.element_bytes) for size, run_bytes in sizes):
                raise CalibrationError(
                    f"layer {number} has heads of {layer.key_size} and {layer.value_size} channels in the "
                    f"calibration, but runs of {page.key_bytes} and {page.value_bytes} bytes in the cache"
                )
            by_head = [
                _parts_of(layer.keys[head], page.key_bytes // page.element_bytes, with_weights)
                + _parts_of(layer.values[head], page.value_bytes // page.element_bytes, with_weights)
                for head in range(first_head, first_head + heads)
            ]
            for run in range(runs):
                parts += by_head[run * heads // runs if page.by_head else run % heads]
        return _in_blocks(parts)


def _content(path: Path) -> bytes:
    """Returns at most _MOST_BYTES + 1 bytes of a regular file. Raises OSError."""
    # O_NONBLOCK: a FIFO would block the start until another process writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(_MOST_BYTES + 1)
    finally:
        os.close(descriptor)


def _parts_of(head: HeadFactors, elements: int, with_weights: bool) -> list[tuple[int, float, bytes]]:
    """Returns the parts of a run of keys or values of one head: number of elements, factor, weights.

    The order of channels is known if the run has one token. Otherwise all of it has the smallest factor.
    """
    if elements != len(head.weights):
        return [(elements, min(head.plain), _NO_WEIGHTS[:1] * elements)]
    codes = bytes(_WEIGHT_OF_ONE + each for each in head.weights) if with_weights else b""
    return [
        (
            min(BLOCK, elements - BLOCK * at),
            head.weighted[at] if with_weights else head.plain[at],
            codes[BLOCK * at : BLOCK * (at + 1)] or _NO_WEIGHTS[: min(BLOCK, elements - BLOCK * at)],
        )
        for at in range(len(head.plain))
    ]


def _in_blocks(parts: Sequence[tuple[int, float, bytes]]) -> list[tuple[float, bytes]]:
    """Returns factor and weights of each 64 elements; the smallest factor of their parts."""
    blocks: list[tuple[float, bytes]] = []
    filled = 0  # elements of the last block
    for elements, factor, weights in parts:
        taken = 0
        while taken < elements:
            if filled == 0:
                blocks.append((factor, b""))
            count = min(BLOCK - filled, elements - taken)
            least, codes = blocks[-1]
            blocks[-1] = (min(least, factor), codes + weights[taken : taken + count])
            filled = (filled + count) % BLOCK
            taken += count
    if filled:
        raise CalibrationError(
            "a calibration is not possible for this cache: its blocks are not a multiple of 64 elements"
        )
    return blocks


def _sums(sensitivities: Sequence[float], octaves: Sequence[int] | None = None) -> list[float]:
    """Returns the sensitivity of each 64 channels, whose errors are distributed as the squared weights."""
    sums = []
    for begin in range(0, len(sensitivities), BLOCK):
        block = sensitivities[begin : begin + BLOCK]
        squares = [1.0 if octaves is None else 4.0 ** octaves[begin + at] for at in range(len(block))]
        total = math.fsum(each * square for each, square in zip(block, squares, strict=True))
        sums.append(total * len(block) / math.fsum(squares))
    return sums


def _typical(sensitivities: Iterable[float]) -> float:
    """Returns the geometric mean of those above 0: sensitivities differ by orders of magnitude."""
    logs = [math.log(each) for each in sensitivities if each > 0]
    return math.exp(math.fsum(logs) / len(logs))


def _weights_of(head: ChannelStatistics, typical: float) -> list[int]:
    """Returns the weights of the channels of a head, as base-2 logarithms. ``typical``: sensitivity of 64
    channels."""
    weights: list[int] = []
    for begin in range(0, len(head.sensitivities), BLOCK):
        block = slice(begin, begin + BLOCK)
        weights += _weights_of_block(head.sensitivities[block], head.peaks[block], typical)
    return weights


def _weights_of_block(sensitivities: Sequence[float], peaks: Sequence[float], typical: float) -> list[int]:
    best = [-math.log2(each) / 2 if each > 0 else None for each in sensitivities]
    known = [each for each in best if each is not None]
    if not known:
        return [0] * len(best)
    middle = math.fsum(known) / len(known)
    octaves = [
        MOST_OCTAVES if each is None else max(-MOST_OCTAVES, min(MOST_OCTAVES, round(each - middle)))
        for each in best
    ]
    # Larger weights of some channels make the steps of all others smaller.
    for _ in range(_ROUNDS):
        (sensitivity,) = _sums(sensitivities, octaves)
        bound = max(LEAST_BOUND, _USUAL_BOUND * _factor(sensitivity, typical))
        step = bound * math.sqrt(12 / math.fsum(4.0**each for each in octaves))  # as a part of the norm
        needed = [math.ceil(math.log2(peak / (_MOST_INTEGER * step))) if peak > 0 else 0 for peak in peaks]
        octaves = [
            min(MOST_OCTAVES, max(each, least)) if peak > 0 else each
            for each, least, peak in zip(octaves, needed, peaks, strict=True)
        ]
    return octaves


def _factor(sensitivity: float, mean: float) -> float:
    best = _TYPICAL_FACTOR * math.sqrt(mean / sensitivity) if sensitivity > 0 else 1.0
    return round(min(1.0, max(_LEAST_FACTOR, best)), _DIGITS)


def _layer(fields: Mapping[str, Any]) -> LayerFactors:
    """Raises KeyError, TypeError, ValueError or OverflowError for anything but factors of a layer."""
    keys, values = (tuple(_head(head) for head in fields[kind]) for kind in ("keys", "values"))
    for kind in (keys, values):
        # Keys and values have the same number of heads.
        if not kind or len(kind) != len(keys) or len({len(head.weights) for head in kind}) != 1:
            raise ValueError("a layer without heads, or with heads of several sizes")
    return LayerFactors(keys, values)


def _head(fields: Mapping[str, Any]) -> HeadFactors:
    plain, weighted = (tuple(map(float, fields[kind])) for kind in ("plain", "weighted"))
    weights = tuple(fields["weights"])
    if not weights or not all(type(each) is int and abs(each) <= MOST_OCTAVES for each in weights):
        raise ValueError(f"weights that are not whole numbers from {-MOST_OCTAVES} to {MOST_OCTAVES}")
    for factors in (plain, weighted):
        # One factor per block of channels; the last block may be shorter.
        if len(factors) != -(-len(weights) // BLOCK) or not all(0 < factor <= 1 for factor in factors):
            raise ValueError("factors that are not one for each 64 channels, above 0 and at most 1")
    return HeadFactors(plain, weighted, weights)
