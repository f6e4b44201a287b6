# SPDX-License-Identifier: Apache-2.0
"""Parts of a prompt that are not tokens: images at placeholder tokens, and embeddings."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

PLACEHOLDER = 999  # the token at each position of an image


@dataclass(frozen=True)
class Image:
    """An image that fills ``length`` positions from ``offset`` on.

    identifier: the value that vLLM hashes for it; None: the hash of its content, as vLLM's front end makes
    it.
    """

    content: str
    offset: int
    length: int
    identifier: str | None = None

    def feature(self) -> MultiModalFeatureSpec:
        return MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=self.identifier or hashlib.sha256(self.content.encode()).hexdigest(),
            mm_position=PlaceholderRange(offset=self.offset, length=self.length),
        )


@dataclass(frozen=True)
class Inputs:
    """The inputs of a request besides its tokens.

    embeddings: one row for each position of the prompt.
        is_token: for each position, True where the token counts instead of the row; None: all rows count.
    """

    images: Sequence[Image] = ()
    embeddings: torch.Tensor | None = None
    is_token: Sequence[bool] | None = None

    def token_ids(self, prompt: list[int]) -> list[int] | None:
        return None if self.embeddings is not None and self.is_token is None else prompt

    def request_fields(self) -> dict[str, Any]:
        """Returns the arguments for vLLM's Request."""
        return {
            "mm_features": [image.feature() for image in self.images] or None,
            "prompt_embeds": self.embeddings,
            "prompt_is_token_ids": None if self.is_token is None else list(self.is_token),
        }

    def contents(self) -> dict[int, int]:
        """Maps a position to a number made from the input that replaces its token."""
        found = {
            image.offset + place: _number(f"{image.content}/{place}".encode())
            for image in self.images
            for place in range(image.length)
        }
        for position, row in enumerate(() if self.embeddings is None else self.embeddings):
            if self.is_token is None or not self.is_token[position]:
                found[position] = _number(row.numpy().tobytes())
        return found


def _number(text: bytes) -> int:
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
