"""The files under a root that is in use.

Not by ``Path.rglob``: it raises when a directory goes while it looks, and a reset takes directories away.
"""

from __future__ import annotations

import os
from pathlib import Path


def paths_in(root: Path) -> list[Path]:
    """Every file and directory under ``root``, without ``root``; any of them may be gone already."""
    return [Path(parent, name) for parent, dirs, names in os.walk(root) for name in dirs + names]


def used_bytes(root: Path) -> int:
    """What ``du`` says of ``root``: the blocks of all files and directories in it."""
    total = 0
    for path in [root, *paths_in(root)]:
        try:
            total += path.lstat().st_blocks * 512
        except OSError:
            continue
    return total
