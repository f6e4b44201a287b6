# SPDX-License-Identifier: Apache-2.0
"""The setting ``encryption_key_file``, for kinds that can encrypt records."""

import os
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from kv_offload.tiers.base import Answer
from kv_offload.tiers.compression import CompressedTierConfig

if TYPE_CHECKING:
    from kv_offload._core import TierSpec
    from kv_offload.namespace import NamespaceIdentity

_MOST_KEYS = 8  # EncryptionKeys::kMostKeys in csrc/record/encryption.h
_SHOWN_ID = 8  # digits of a key's id


_Keys = Annotated[tuple[str, ...], Field(max_length=_MOST_KEYS)]


def _paths(given: object) -> object:
    if given is None:
        return None
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, (list, tuple)) or not all(isinstance(path, str) for path in listed):
        raise ValueError("give the path of a file with 32 random bytes, or a list of them, newest first")
    if not listed or not all(path.strip() for path in listed):
        raise ValueError("is empty; name a file with 32 random bytes, or leave encryption_key_file out")
    return tuple(os.path.abspath(os.path.expanduser(path)) for path in listed)


# Absolute paths; None: no keys.
KeyFiles = Annotated[_Keys | None, BeforeValidator(_paths)]


def key_ids(paths: tuple[str, ...]) -> list[str]:
    """Returns the id of each file's key; it reveals nothing about the key. Raises ValueError with the
    remedy."""
    from kv_offload import _core

    try:
        return _core.encryption_key_ids(list(paths))
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def key_findings(paths: tuple[str, ...] | None) -> list[Answer]:
    """Returns the key that encrypts and the other keys that decrypt, or why they cannot be used; nothing
    without encryption."""
    if paths is None:
        return []
    try:
        first, *others = (key[:_SHOWN_ID] for key in key_ids(paths))
    except ValueError as error:
        return [Answer("refused", str(error))]
    also = f"; records of {', '.join(others)} can be decrypted too" if others else ""
    return [Answer("ok", f"records are encrypted with key {first} ({paths[0]}){also}")]


class EncryptedTierConfig(CompressedTierConfig):
    """A tier whose records are encrypted and named by keyed digests if ``encryption_key_file`` is given."""

    encryption_key_file: KeyFiles = Field(
        default=None,
        description="file with 32 random bytes, or a list of such files. Records are encrypted and "
        "authenticated (AES-256-GCM), and record names reveal nothing about prompts. The first key "
        "encrypts, all keys decrypt. Each file must be owned by the user that runs vLLM or by root, with "
        "mode 0600 or 0400",
    )

    def key_problems(self) -> list[str]:
        """Returns why the keys cannot be used."""
        if self.encryption_key_file is None:
            return []
        try:
            key_ids(self.encryption_key_file)
        except ValueError as error:
            return [f"{self.label()}: {error}"]
        return []

    def findings(self) -> list[Answer]:
        """Adds the key that encrypts and the other keys that decrypt; nothing without encryption."""
        return [*super().findings(), *key_findings(self.encryption_key_file)]

    def traits(self) -> list[str]:
        """Adds whether records are encrypted."""
        return [*super().traits(), *(["encrypted"] if self.encryption_key_file else [])]

    def portable(self) -> dict[str, Any]:
        """Returns absolute key paths, because the server may start in another directory."""
        keys = self.encryption_key_file
        return super().portable() | ({} if keys is None else {"encryption_key_file": list(keys)})

    def spec(self, name: str, bound: int | None, identity: "NamespaceIdentity") -> "TierSpec":
        """Adds the key files, which are read when the tier is opened."""
        spec = super().spec(name, bound, identity)
        spec.encryption_key_files = list(self.encryption_key_file or ())
        return spec
