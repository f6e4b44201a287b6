"""The files in /dev/shm."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

VLLMS_OWN = ("psm_", "sem.mp-", "vllm_dist_")  # its queues, its locks, how its ranks on CPU talk
WORKER = "PYTEST_XDIST_WORKER"
LOCKS = Path("/proc/locks")


def _used_beside() -> set[tuple[int, int]]:
    """(device, inode) of what other workers of pytest have locked, as a region is while it is used."""
    ours = f"{WORKER}={os.environ.get(WORKER)}".encode()
    found = set()
    for line in LOCKS.read_text().splitlines():
        words = [word for word in line.split() if word != "->"]
        with contextlib.suppress(OSError):  # the process has ended
            environment = Path(f"/proc/{words[4]}/environ").read_bytes().split(b"\0")
            if any(entry.startswith(f"{WORKER}=".encode()) and entry != ours for entry in environment):
                major, minor, inode = words[5].split(":")
                found.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return found


def names() -> set[str]:
    """Of the files there, less those that vLLM itself leaves behind and those of tests that run beside."""
    found = {}
    for entry in os.scandir("/dev/shm"):
        with contextlib.suppress(FileNotFoundError):
            if not entry.name.startswith(VLLMS_OWN):
                about = entry.stat()
                found[entry.name] = (about.st_dev, about.st_ino)
    beside = _used_beside()
    return {name for name, file in found.items() if file not in beside and Path("/dev/shm", name).exists()}
