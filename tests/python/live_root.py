# SPDX-License-Identifier: Apache-2.0
"""Lists the files under a root that is in use.

``Path.rglob`` does not work here: it raises when a directory is removed during the walk, and a reset removes
directories.
"""

from __future__ import annotations

import os
from pathlib import Path


def paths_in(root: Path) -> list[Path]:
    """Returns every file and directory below ``root``; any of them may have been removed already."""
    return [Path(parent, name) for parent, dirs, names in os.walk(root) for name in dirs + names]


def records_in(root: Path, key: str = "") -> list[Path]:
    """Returns the sorted files of records below ``root``: of all chunks, or of one (its key in hex)."""
    return sorted(path for path in paths_in(root) if path.suffix == ".rec" and path.name.startswith(key))


def used_bytes(root: Path) -> int:
    """Returns what ``du`` reports for ``root``: the blocks of all its files and directories."""
    total = 0
    for path in [root, *paths_in(root)]:
        try:
            total += path.lstat().st_blocks * 512
        except OSError:
            continue
    return total
