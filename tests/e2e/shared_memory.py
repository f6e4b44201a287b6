"""What lies in /dev/shm."""

from __future__ import annotations

import os


def names() -> set[str]:
    """Of the files there, less those that vLLM itself leaves behind."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("psm_", "sem.mp-"))}
