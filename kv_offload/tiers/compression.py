# SPDX-License-Identifier: Apache-2.0
"""The setting ``compress``, for kinds that can compress records."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from kv_offload.losses import ErrorBounds
from kv_offload.tiers.base import Answer, TierConfig

if TYPE_CHECKING:
    from kv_offload._core import TierSpec
    from kv_offload.namespace import NamespaceIdentity


_LOSSLESS = ("auto", "none", "zstd")
_LOSSY = "lossy:"
LEAST_ERROR, MOST_ERROR = 0.02, 0.5  # LossyCodec in csrc/record/lossy_codec.h; a test compares them


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


class CompressedTierConfig(TierConfig):
    """A tier whose records may be compressed."""

    compress: Annotated[str, BeforeValidator(_known_compression)] = Field(
        default="auto",
        description='"zstd": compress without loss the records that become at least a tenth smaller '
        '(bfloat16: about 1.45 times). "auto": compress bfloat16 and float16 without loss while that makes '
        'reads faster, by the measured speeds of the tier and the codec. "none": store raw bytes. '
        '"lossy:E": compress bfloat16 and float16 WITH LOSS, with a relative error of at most E '
        f"({LEAST_ERROR} to {MOST_ERROR}) for each 64 neighbouring elements, and everything else like zstd. "
        '"lossy:KEYS:VALUES", such as "lossy:0.05:0.1": the same with a larger error for values. '
        "Records state their codec, so the lossless settings can be changed at any time. A server with a "
        "lossy tier uses a separate namespace on all its tiers",
    )

    def error_bounds(self) -> ErrorBounds | None:
        """Returns the bounds of "lossy:E" or "lossy:KEYS:VALUES"; None for the other settings."""
        return _bounds_of(self.compress) if self.compress.startswith(_LOSSY) else None

    def traits(self) -> list[str]:
        """Adds the compression."""
        bounds = self.error_bounds()
        if bounds is not None:
            return [*super().traits(), f"LOSSY, relative error up to {bounds.text()}"]
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
