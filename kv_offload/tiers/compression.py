# SPDX-License-Identifier: Apache-2.0
"""The setting ``compress``, for kinds that can compress records."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from kv_offload.tiers.base import Answer, TierConfig

if TYPE_CHECKING:
    from kv_offload._core import TierSpec
    from kv_offload.namespace import NamespaceIdentity


class CompressedTierConfig(TierConfig):
    """A tier whose records may be compressed without loss."""

    compress: Literal["auto", "none", "zstd"] = Field(
        default="auto",
        description='lossless compression. "zstd": compress records that become at least a tenth smaller '
        '(bfloat16: about 1.45 times); "auto": compress bfloat16 and float16 while that makes reads faster, '
        'by the measured speeds of the tier and the codec; "none": store raw bytes. Records state their '
        "codec, so the setting can be changed at any time",
    )

    def traits(self) -> list[str]:
        """Adds the compression."""
        return [*super().traits(), *([] if self.compress == "none" else [f"compress {self.compress}"])]

    def measured(self, figures: Mapping[str, Any]) -> list[Answer]:
        """Returns whether "auto" would compress records at these speeds."""
        from kv_offload import _core

        speeds = [figures.get(f"{verb}_bytes_per_second", 0.0) for verb in ("read", "write")]
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
