# SPDX-License-Identifier: Apache-2.0
"""Calibrations of ``lossy:E``: factors that lower the error bound of sensitive layers and KV heads.

A calibration has one factor for each 64 channels of the keys and of the values of a KV head.
``kv-offload calibrate`` computes the factors (``kv_offload.sensitivity``); the encoder multiplies E by them.
A decoder does not need them.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

BLOCK = 64  # channels that share a factor, and elements that share a bound
VERSION = 1
_FORMAT = "kv-offload calibration"
_MOST_BYTES = 64 << 20  # of a file
# The factor of typical heads. Heads for which more than 1 would be best have 1: this loses little, and keeps
# the bound low.
_TYPICAL_FACTOR = 0.5
_LEAST_FACTOR = 2.0**-10
_DIGITS = 5  # of a factor

# Parts of a server's identity that `kv-offload calibrate` does not have, and where they come from.
_NOT_CALIBRATED = {
    "adapters": "--default-mm-loras",
    "address": "weights that vLLM reads from an address",
    "configured_by": "--hf-config-path",
    "draft": "a drafter",
}

Blocks = tuple[float, ...]  # by 64 channels; the last ones of a head may be fewer
Heads = tuple[Blocks, ...]


class CalibrationError(ValueError):
    """A calibration file is missing, damaged, or of another model; the text says what to do."""


class PageLayout(NamedTuple):
    """How a layer's part of a block consists of keys and values, in one shard."""

    key_bytes: int  # of a run of keys, which a run of values follows: specs/kv_runs.py
    value_bytes: int
    by_head: bool  # all tokens of the first head are first; otherwise all heads of the first token
    element_bytes: int
    page_bytes: int  # a multiple of the runs of all heads


@dataclass(frozen=True)
class LayerFactors:
    """The factors of one layer; ``key_size`` and ``value_size`` are channels of a head."""

    key_size: int
    value_size: int
    keys: Heads
    values: Heads


@dataclass(frozen=True)
class Calibration:
    """The factors of a model."""

    model: Mapping[str, Any]  # result of model_identity
    layers: tuple[LayerFactors, ...]
    made_of: Mapping[str, Any]  # text, tokens and versions; informative only

    @classmethod
    def of_sensitivities(
        cls,
        model: Mapping[str, Any],
        sensitivities: Sequence[tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]]],
        sizes: Sequence[tuple[int, int]],
        made_of: Mapping[str, Any],
    ) -> "Calibration":
        """Returns the factors for measured sensitivities.

        ``sensitivities``: of the keys and of the values, by layer, head and 64 channels: the expected KL
        divergence at a relative error of 1. ``sizes``: channels of a key and of a value, by layer.

        At equal divergence the ratio is largest if all elements contribute alike, so the factors are
        proportional to 1 / sqrt(sensitivity). Raises ValueError unless all are finite and one is above 0.
        """
        known = [each for layer in sensitivities for kind in layer for head in kind for each in head]
        positive = [each for each in known if each > 0]
        if not positive or not all(math.isfinite(each) and each >= 0 for each in known):
            raise ValueError("the sensitivities are not finite, or all of them are zero")
        # The geometric mean: sensitivities differ by orders of magnitude.
        mean = math.exp(math.fsum(map(math.log, positive)) / len(positive))

        def factors(kind: Sequence[Sequence[float]]) -> Heads:
            return tuple(tuple(_factor(each, mean) for each in head) for head in kind)

        return cls(
            dict(model),
            tuple(
                LayerFactors(key_size, value_size, factors(keys), factors(values))
                for (keys, values), (key_size, value_size) in zip(sensitivities, sizes, strict=True)
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

    def block_factors(
        self, layers: Sequence[int], page: PageLayout, first_head: int, heads: int
    ) -> list[float]:
        """Returns the factors of a block of a shard, in order, for each 64 neighbouring elements.

        ``layers``: of the cache group, in its order. A shard has ``heads`` KV heads of each, from
        ``first_head``, all of which the calibration has; ``page`` is that of the shard. 64 elements with
        several factors have the smallest. Raises CalibrationError if the calibration has other head sizes, or
        if a block is not a multiple of 64 elements.
        """
        size = page.element_bytes
        runs = page.page_bytes // (page.key_bytes + page.value_bytes)
        factors: list[float] = []
        filled = 0  # bytes of the last factor's elements
        for number in layers:
            layer = self.layers[number]
            if page.key_bytes % (layer.key_size * size) or page.value_bytes % (layer.value_size * size):
                raise CalibrationError(
                    f"layer {number} has heads of {layer.key_size} and {layer.value_size} channels in the "
                    f"calibration, but runs of {page.key_bytes} and {page.value_bytes} bytes in the cache"
                )
            for run in range(runs):
                head = first_head + (run * heads // runs if page.by_head else run % heads)
                for kind, channels, run_bytes in (
                    (layer.keys[head], layer.key_size, page.key_bytes),
                    (layer.values[head], layer.value_size, page.value_bytes),
                ):
                    filled = _extend(factors, filled, kind, channels * size, run_bytes, BLOCK * size)
        if filled:
            raise CalibrationError(
                "a calibration is not possible for this cache: its blocks are not a multiple of 64 elements"
            )
        return factors


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


def _extend(factors: list[float], filled: int, head: Blocks, head_bytes: int, run: int, block: int) -> int:
    """Appends the factors of a run of keys or values of one head; returns the bytes of the last, if partial.

    The order of channels is known if the run has one token. Otherwise all of it has the smallest factor.
    """
    parts = (
        [(min(block, head_bytes - block * at), factor) for at, factor in enumerate(head)]
        if run == head_bytes
        else [(run, min(head))]
    )
    for part, factor in parts:
        left = part
        while left:
            if filled == 0:
                factors.append(factor)
            factors[-1] = min(factors[-1], factor)
            taken = min(left, block - filled)
            filled = (filled + taken) % block
            left -= taken
    return filled


def _factor(sensitivity: float, mean: float) -> float:
    best = _TYPICAL_FACTOR * math.sqrt(mean / sensitivity) if sensitivity > 0 else 1.0
    return round(min(1.0, max(_LEAST_FACTOR, best)), _DIGITS)


def _layer(fields: Mapping[str, Any]) -> LayerFactors:
    """Raises KeyError, TypeError, ValueError or OverflowError for anything but factors of a layer."""
    sizes = fields["key_size"], fields["value_size"]
    kinds = tuple(tuple(tuple(map(float, head)) for head in fields[kind]) for kind in ("keys", "values"))
    for size, kind in zip(sizes, kinds, strict=True):
        # Keys and values have the same number of heads.
        if not isinstance(size, int) or size < 1 or not kind or len(kind) != len(kinds[0]):
            raise ValueError("a layer without heads or channels")
        for head in kind:
            # One factor per block of channels; the last block may be shorter.
            if len(head) != -(-size // BLOCK) or not all(0 < factor <= 1 for factor in head):
                raise ValueError("factors that are not one for each 64 channels, above 0 and at most 1")
    return LayerFactors(*sizes, *kinds)
