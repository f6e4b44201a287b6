# SPDX-License-Identifier: Apache-2.0
"""Finds the files in /dev/shm that processes share, by inode: concurrent tests have their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

DIRECTORY = "/dev/shm"
REGION = "kv_offload-"  # the name prefix of our regions, while they have a name
# vLLM's queues, its locks, and the communication of its CPU ranks
VLLMS_OWN = ("psm_", "sem.mp-", "vllm_dist_")


class File(NamedTuple):
    device: int
    inode: int


def mapped(pids: Iterable[int]) -> set[File]:
    """Returns the files in /dev/shm that these processes map. Fails unless one is a region of ours."""
    found, paths = set(), set()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, _, _, device, inode, *path = line.split(maxsplit=5)
                if path and path[0].startswith(f"{DIRECTORY}/"):
                    major, minor = device.split(":")
                    found.add(File(os.makedev(int(major, 16), int(minor, 16)), int(inode)))
                    paths.add(path[0].removeprefix(f"{DIRECTORY}/"))
    assert any(path.startswith(REGION) for path in paths), f"no region of ours among {sorted(paths)}"
    return found


def left(files: set[File]) -> set[str]:
    """Returns the names of these files that still exist, except those that vLLM itself leaves."""
    names = set()
    for entry in os.scandir(DIRECTORY):
        with contextlib.suppress(FileNotFoundError):  # a file of a concurrent test
            about = entry.stat(follow_symlinks=False)
            if File(about.st_dev, about.st_ino) in files and not entry.name.startswith(VLLMS_OWN):
                names.add(entry.name)
    return names
