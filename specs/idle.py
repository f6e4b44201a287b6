# SPDX-License-Identifier: Apache-2.0
"""Publishes KV events of an idle server: makes vLLM take one step when the tiers have news.

vLLM takes and publishes KV events in its steps, and an idle engine waits for a request on its input queue.
Meanwhile background writes complete and other servers evict records. Routers must learn of that before they
send the next request. vLLM's own message WAKEUP on that queue ends the wait; the engine then steps because
the connector has pending work, on the thread that always uses the manager.
"""

import queue
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kv_offload._core import TieredCache

_POLL_SECONDS = 0.1


def find_engine() -> Any | None:
    """Returns vLLM's EngineCoreProc of this process; None if there is none (an engine within an LLM object).

    vLLM does not hand its engine to connectors. The thread that fills its input queue belongs to it (0.31 to
    0.33).
    """
    core = sys.modules.get("vllm.v1.engine.core")
    kind = getattr(core, "EngineCoreProc", None)
    if kind is None:
        return None
    for thread in threading.enumerate():
        owner = getattr(getattr(thread, "_target", None), "__self__", None)
        if isinstance(owner, kind) and isinstance(getattr(owner, "input_queue", None), queue.Queue):
            return owner
    return None


class EngineWaker:
    """Watches for news on a thread of its own, and wakes the engine for one step.

    ``due`` is True from a wake-up until ``taken()``: the connector then has pending work.
    """

    def __init__(
        self,
        cache: "TieredCache",
        find_engine: Callable[[], Any | None] = find_engine,
        poll_seconds: float = _POLL_SECONDS,
    ) -> None:
        """Asks the cache every ``poll_seconds``. Does not keep it alive: its end ends the thread too."""
        self.due = False
        self._cache = weakref.ref(cache)
        self._find_engine = find_engine
        self._poll_seconds = poll_seconds
        self._engine: Any | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvo-events", daemon=True)
        self._thread.start()

    def taken(self) -> None:
        """Ends a wake-up: the step that it asked for takes the events."""
        self.due = False

    def stop(self) -> None:
        """Stops the thread, which then uses neither cache nor engine. Idempotent."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._poll_seconds):
            cache = self._cache()
            if cache is None:
                return
            if cache.has_tier_news() and not self.due:
                self._wake()
            del cache

    def _wake(self) -> None:
        if self._engine is None:
            self._engine = self._find_engine()
        engine = self._engine
        if engine is None or _is_paused(engine):
            return  # the events follow with the next step
        from vllm.v1.engine import EngineCoreRequestType

        self.due = True
        # A message that waits already wakes the engine.
        if engine.input_queue.empty():
            engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


def _is_paused(engine: Any) -> bool:
    """True while vLLM schedules no requests (pause, sleep); some of its calls then fail if there is work."""
    paused = getattr(engine, "is_scheduler_paused", None)
    return paused is not None and bool(paused())
