# SPDX-License-Identifier: Apache-2.0
"""Opening a root for a command: a directory, or an address of any kind of tier."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_offload.tiers.base import Root


def open_root(place: str, *, changes: bool = False) -> "Root":
    """What lies at ``place``; ``changes``: the command removes records.

    Raises ValueError saying what is there instead, OSError or RuntimeError when it cannot be looked at or
    may not be changed. An address is never repeated where it is refused: there may be a password in it.
    """
    from kv_offload.config import tier_at

    return tier_at(place).open_root(changes=changes, given=place)
