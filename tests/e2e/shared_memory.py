"""The files in /dev/shm."""

from __future__ import annotations

import os

VLLMS_OWN = ("psm_", "sem.mp-", "vllm_dist_")  # its queues, its locks, how its ranks on CPU talk


def names() -> set[str]:
    """Of the files there, less those that vLLM itself leaves behind."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(VLLMS_OWN)}
