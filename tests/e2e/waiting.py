# SPDX-License-Identifier: Apache-2.0
"""Bounded polling for the actions of another process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import records
from local_server import LocalServer


def until(condition: Callable[[], bool], seconds: float, what: str | Callable[[], str]) -> None:
    """Polls ``condition``; on a timeout raises AssertionError with ``what``, which is evaluated only then."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.1)


def step(server: LocalServer, **options: float) -> None:
    """Sends a short prompt: an idle engine neither polls its threads nor publishes metrics."""
    server.ask([7] * 16, max_tokens=1, **options)


def reset(server: LocalServer) -> None:
    """Resets all caches; retries, because vLLM refuses while requests run."""
    until(lambda: bool(server.post("/reset_prefix_cache?reset_external=true")["success"]), 240, "a reset")


def written(server: LocalServer, seconds: float = 240) -> None:
    """Waits until ``server`` has no queued write and no temporary file."""
    quiet = 0

    def idle() -> bool:
        nonlocal quiet
        step(server)
        quiet = quiet + 1 if server.metric("kv_offload_queue_depth", op="write") == 0 else 0
        return quiet == 10  # one second: gauges are published twice in this time

    until(idle, seconds, lambda: f"all writes done\n{server.log_tail()}")


def recorded(root: Path, count: int, server: LocalServer, seconds: float = 240) -> None:
    """Waits until ``root`` holds ``count`` records."""

    def enough() -> bool:
        found = len(records.files(root))
        if found < count:
            step(server)
        return found >= count

    until(
        enough,
        seconds,
        lambda: f"{count} records under {root}, {len(records.files(root))} there\n{server.log_tail()}",
    )


def known(count: int, server: LocalServer, seconds: float = 240) -> None:
    """Waits until ``server`` knows ``count`` records, also others'. In use, it scans once a second."""

    def enough() -> bool:
        step(server)
        return server.metric("kv_offload_tier_chunks", tier="fs") >= count

    until(enough, seconds, lambda: f"{count} records known to the server\n{server.log_tail()}")
