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


def recorded(root: Path, count: int, server: LocalServer, seconds: float = 60) -> None:
    """Until ``root`` holds ``count`` records.

    A short prompt now and then makes the engine step, so that it learns from its threads also when idle.
    """

    def enough() -> bool:
        found = len(records.files(root))
        if found < count:
            server.ask([7] * 16, max_tokens=1)
        return found >= count

    until(
        enough,
        seconds,
        f"{count} records under {root}, {len(records.files(root))} there\n{server.log_tail()}",
    )


def known(count: int, server: LocalServer, seconds: float = 60) -> None:
    """Until ``server`` knows of ``count`` records, its own and others': in use, it looks once a second."""

    def enough() -> bool:
        server.ask([7] * 16, max_tokens=1)
        return server.metric("kv_offload_tier_chunks", tier="fs") >= count

    until(enough, seconds, f"{count} records known to the server\n{server.log_tail()}")
