"""The files in /dev/shm."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

VLLMS_OWN = ("psm_", "sem.mp-", "vllm_dist_")  # its queues, its locks, how its ranks on CPU talk
WORKER = "PYTEST_XDIST_WORKER"


def _used_beside() -> set[int]:
    """Inodes of what processes of other workers of pytest have locked, as a region is while it is used."""
    ours = f"{WORKER}={os.environ.get(WORKER)}".encode()
    found = set()
    for line in Path("/proc/locks").read_text().splitlines():
        words = [word for word in line.split() if word != "->"]
        with contextlib.suppress(OSError):  # the process has ended
            environment = Path(f"/proc/{words[4]}/environ").read_bytes().split(b"\0")
            if any(entry.startswith(WORKER.encode()) and entry != ours for entry in environment):
                found.add(int(words[5].rpartition(":")[2]))
    return found


def names() -> set[str]:
    """Of the files there, less those that vLLM itself leaves behind and those of tests that run beside."""
    found = {}
    for entry in os.scandir("/dev/shm"):
        with contextlib.suppress(FileNotFoundError):
            if not entry.name.startswith(VLLMS_OWN):
                found[entry.name] = entry.stat().st_ino
    beside = _used_beside()
    return {name for name, inode in found.items() if inode not in beside and Path("/dev/shm", name).exists()}
