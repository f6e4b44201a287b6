# SPDX-License-Identifier: Apache-2.0
"""The setting ``compress``, for kinds that can compress records."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from kv_offload.losses import ErrorBounds
from kv_offload.tiers.base import Answer, TierConfig

if TYPE_CHECKING:
    from kv_offload._core import TierSpec
    from kv_offload.namespace import NamespaceIdentity


_LOSSLESS = ("auto", "none", "zstd")
_LOSSY = "lossy:"
LEAST_ERROR, MOST_ERROR = 0.02, 0.6  # LossyCodec in csrc/record/lossy_codec.h; a test compares them


def _bounds_of(text: str) -> ErrorBounds:
    """Returns the bounds of "lossy:E" or "lossy:KEYS:VALUES". Raises ValueError with what is possible."""
    first, *others = text.removeprefix(_LOSSY).split(":")
    try:
        errors = [float(first), *map(float, others or [first])]
    except ValueError:
        errors = []
    if len(errors) != 2 or not all(LEAST_ERROR <= error <= MOST_ERROR for error in errors):
        raise ValueError(
            f"is {text!r}; expected 'lossy:E' or 'lossy:KEYS:VALUES' with relative errors "
            f"from {LEAST_ERROR} to {MOST_ERROR}"
        )
    keys, values = errors
    if values < keys:
        raise ValueError(
            f"is {text!r}; VALUES must be at least KEYS; did you mean 'lossy:{values:g}:{keys:g}'?"
        )
    return ErrorBounds(keys, values)


def _known_compression(value: object) -> object:
    """Returns the value, with the numbers of "lossy:E" in their shortest form. Raises ValueError, which lists
    the possible values."""
    if value in _LOSSLESS:
        return value
    if isinstance(value, str) and value.startswith(_LOSSY):
        bounds = _bounds_of(value)
        errors = (bounds.keys,) if bounds.keys == bounds.values else bounds
        return _LOSSY + ":".join(map(repr, errors))
    raise ValueError(
        f"is {value!r}; possible: 'auto', 'none' or 'zstd', or with loss 'lossy:E', where E is a relative "
        f"error from {LEAST_ERROR} to {MOST_ERROR}, or 'lossy:KEYS:VALUES'"
    )


def _absolute(given: object) -> object:
    if given is None:
        return None
    if not isinstance(given, str) or not given.strip():
        raise ValueError("expected the path of a file that `kv-offload calibrate` wrote")
    return os.path.abspath(os.path.expanduser(given))


class CompressedTierConfig(TierConfig):
    """A tier whose records may be compressed."""

    compress: Annotated[str, BeforeValidator(_known_compression)] = Field(
        default="auto",
        description='"zstd": compress without loss the records that become at least a tenth smaller '
        '(bfloat16: about 1.45 times). "auto": compress bfloat16 and float16 without loss while that makes '
        'reads faster, by the measured speeds of the tier and the codec. "none": store raw bytes. '
        '"lossy:E": compress bfloat16, float16 and fp8 WITH LOSS, with a relative error of at most E '
        f"({LEAST_ERROR} to {MOST_ERROR}) for each 64 neighbouring elements, and everything else like zstd. "
        '"lossy:KEYS:VALUES", such as "lossy:0.05:0.1": the same with a larger error for values. '
        "Records state their codec, so the lossless settings can be changed at any time. A server with a "
        "lossy tier uses a separate namespace on all its tiers",
    )

    calibration: Annotated[str | None, BeforeValidator(_absolute)] = Field(
        default=None,
        description='file that `kv-offload calibrate MODEL` wrote; only with "lossy:E". E is then the bound '
        "of the layers and heads that tolerate the largest errors; the others have lower bounds. Servers "
        "with another calibration have another namespace",
    )

    @field_validator("calibration")
    @classmethod
    def _for_one_bound(cls, value: str | None, info: ValidationInfo) -> str | None:
        compress = info.data.get("compress")  # missing if it is invalid
        if value is None or compress is None:
            return value
        bounds = _bounds_of(compress) if compress.startswith(_LOSSY) else None
        if bounds is None or bounds.keys != bounds.values:
            raise ValueError(
                f"is set, but compress is {compress!r}; a calibration needs lossy:E, for example lossy:0.3"
            )
        return value

    def error_bounds(self) -> ErrorBounds | None:
        """Returns the bounds of "lossy:E" or "lossy:KEYS:VALUES"; None for the other settings."""
        return _bounds_of(self.compress) if self.compress.startswith(_LOSSY) else None

    def findings(self) -> list[Answer]:
        """Adds the layers and the digest of the calibration, or why it cannot be used."""
        from kv_offload.calibration import Calibration, CalibrationError

        if self.calibration is None:
            return super().findings()
        try:
            found = Calibration.read(Path(self.calibration))
        except CalibrationError as error:
            return [*super().findings(), Answer("refused", str(error))]
        text = f"calibration {self.calibration} has {len(found.layers)} layers, digest {found.digest[:12]}"
        return [*super().findings(), Answer("ok", text)]

    def portable(self) -> dict[str, Any]:
        """Adds the absolute path of the calibration, because the server may start in another directory."""
        path = self.calibration
        return super().portable() | ({} if path is None else {"calibration": path})

    def traits(self) -> list[str]:
        """Adds the compression."""
        bounds = self.error_bounds()
        if bounds is not None:
            calibrated = "" if self.calibration is None else ", calibrated"
            return [*super().traits(), f"LOSSY, relative error up to {bounds.text()}{calibrated}"]
        return [*super().traits(), *([] if self.compress == "none" else [f"compress {self.compress}"])]

    def measured(self, figures: Mapping[str, Any]) -> list[Answer]:
        """Returns whether "auto" would compress records at these speeds."""
        from kv_offload import _core

        speeds = [figures.get(f"{verb}_bytes_per_second", 0.0) for verb in ("read", "write")]
        bounds = self.error_bounds()
        if bounds is not None:
            text = (
                f"compress is {self.compress}: records lose precision, with a relative error up to "
                f"{bounds.text()}; kv-offload stat --loss shows the measured errors and the ratio"
            )
            return [Answer("note", text)]
        if self.compress == "none" or not all(speeds):
            return []
        encode, decode = _core.measure_codec()
        read, write = speeds
        advice = _core.codec_advice(
            encode_bytes_per_second=encode,
            decode_bytes_per_second=decode,
            read_bytes_per_second=read,
            write_bytes_per_second=write,
        )
        core = f"one core compresses {encode / 1e9:.1f} and decompresses {decode / 1e9:.1f} GB/s of bfloat16"
        chosen = {"auto": "compress auto is", "zstd": "compress is zstd; auto would be"}[self.compress]
        return [
            Answer(
                "ok",
                f"{chosen} {advice}; {core}",
                {"encode_bytes_per_second": encode, "decode_bytes_per_second": decode},
            )
        ]

    def spec(self, name: str, bound: int | None, identity: "NamespaceIdentity") -> "TierSpec":
        """Adds the setting."""
        spec = super().spec(name, bound, identity)
        spec.compress = self.compress
        return spec
