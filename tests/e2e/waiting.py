"""Waiting for something that another process does: by looking, with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import records
from local_server import LocalServer


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.1)


def step(server: LocalServer, **options: float) -> None:
    """A short prompt: an engine that is idle neither learns what its threads did nor publishes metrics."""
    server.ask([7] * 16, max_tokens=1, **options)


def recorded(root: Path, count: int, server: LocalServer, seconds: float = 240) -> None:
    """Until ``root`` holds ``count`` records."""

    def enough() -> bool:
        found = len(records.files(root))
        if found < count:
            step(server)
        return found >= count

    until(
        enough,
        seconds,
        f"{count} records under {root}, {len(records.files(root))} there\n{server.log_tail()}",
    )


def known(count: int, server: LocalServer, seconds: float = 240) -> None:
    """Until ``server`` knows of ``count`` records, its own and others': in use, it looks once a second."""

    def enough() -> bool:
        step(server)
        return server.metric("kv_offload_tier_chunks", tier="fs") >= count

    until(enough, seconds, f"{count} records known to the server\n{server.log_tail()}")
