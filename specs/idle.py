# SPDX-License-Identifier: Apache-2.0
"""Publishes the removals that other servers cause while this server is idle: makes vLLM take one step.

vLLM takes and publishes KV events in its steps, and an idle engine waits for a message on its input queue.
vLLM's own message WAKEUP ends that wait. The engine then steps because the connector has pending work, on the
thread that always uses the manager.
"""

import queue
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kv_offload._core import TieredCache

_POLL_SECONDS = 0.05


def find_engine() -> Any | None:
    """Returns vLLM's EngineCoreProc of this process; None if there is none (an engine within an LLM object).

    vLLM does not pass its engine to connectors. The thread that fills the engine's input queue runs a method
    of the engine (0.31 to 0.33).
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
    """Looks for removals on its own thread, and wakes the engine for a step that publishes them.

    Keeps neither the cache nor the engine alive.
    """

    def __init__(
        self,
        cache: "TieredCache",
        find_engine: Callable[[], Any | None] = find_engine,
        poll_seconds: float = _POLL_SECONDS,
    ) -> None:
        """Starts the thread. The end of the cache ends it too."""
        self._due = False
        self._cache = weakref.ref(cache)
        self._find_engine = find_engine
        self._poll_seconds = poll_seconds
        self._engine: Callable[[], Any | None] = lambda: None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvo-removals", daemon=True)
        self._thread.start()

    def needs_step(self) -> bool:
        """True if the engine was woken and may step. For the engine's thread, on which it pauses too.

        A paused or sleeping engine must not step; it publishes the removals after it resumes.
        """
        if not self._due:
            return False
        engine = self._engine()
        return engine is not None and not engine.is_sleeping()

    def taken(self) -> None:
        """Ends a wake-up: the step takes the removals. The thread wakes the engine again if some are left."""
        self._due = False

    def stop(self) -> None:
        """Stops the thread, which then uses neither cache nor engine. Idempotent."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._poll_seconds):
            cache = self._cache()
            if cache is None:
                return
            if not self._due and cache.has_removals():
                self._wake()
            del cache

    def _wake(self) -> None:
        engine = self._engine()
        if engine is None:
            engine = self._find_engine()
            if engine is None:
                return  # the removals are published with the next step
            self._engine = weakref.ref(engine)
        from vllm.v1.engine import EngineCoreRequestType

        self._due = True
        # A message in the queue ends the wait too.
        if engine.input_queue.empty():
            engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
