# SPDX-License-Identifier: Apache-2.0
"""Opening a root for a command: a directory, or an address of any type of tier."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_offload.tiers.base import Root


def open_root(place: str, *, changes: bool = False) -> "Root":
    """Opens the root at ``place``; ``changes``: the command removes records.

    Raises ValueError naming what exists there instead, OSError or RuntimeError if it cannot be read or must
    not be changed. An error never shows a refused address, which may contain a password.
    """
    from kv_offload.config import tier_at

    return tier_at(place).open_root(changes=changes, given=place)
