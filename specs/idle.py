# SPDX-License-Identifier: Apache-2.0
"""Publishes the removals that other servers cause while this server is idle: makes vLLM take one step.

vLLM takes and publishes KV events in its steps, and an idle engine waits for a message on its input queue.
vLLM's own message WAKEUP ends that wait. The engine then steps because the connector has pending work, on the
thread that always uses the manager.
"""

import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kv_offload.log import get_logger

if TYPE_CHECKING:
    from kv_offload._core import TieredCache

logger = get_logger(__name__)

_POLL_SECONDS = 0.05
_WAKE_SECONDS = 0.2  # at least, between two wake-ups: each costs an empty step


def _engine_kind() -> type | None:
    """Returns vLLM's class EngineCoreProc; None if it is not loaded."""
    return getattr(sys.modules.get("vllm.v1.engine.core"), "EngineCoreProc", None)


def find_engine(manager: Any) -> Any | None:
    """Returns the EngineCoreProc of this process that uses ``manager``; None if there is none.

    An engine within an LLM object is none. vLLM does not pass its engine to connectors. The thread that fills
    the engine's input queue runs a method of the engine (0.31 to 0.33).
    """
    kind = _engine_kind()
    if kind is None:
        return None
    for thread in threading.enumerate():
        owner = getattr(getattr(thread, "_target", None), "__self__", None)
        if not isinstance(owner, kind) or not isinstance(getattr(owner, "input_queue", None), queue.Queue):
            continue
        connector = getattr(getattr(owner, "scheduler", None), "connector", None)
        if any(each is manager for each in _managers_of(connector)):
            return owner
    return None


def _managers_of(connector: Any) -> list[Any]:
    """Returns the managers of a connector, and of those within a MultiConnector."""
    within = [manager for each in getattr(connector, "_connectors", ()) for manager in _managers_of(each)]
    return [getattr(getattr(connector, "connector_scheduler", None), "manager", None), *within]


class EngineWaker:
    """Polls the cache for removals on its own thread, and wakes the engine for a step that publishes them.

    Keeps the cache, the manager and the engine alive no longer than others do.
    """

    def __init__(
        self,
        cache: "TieredCache",
        manager: Any,
        find_engine: Callable[[Any], Any | None] = find_engine,
        poll_seconds: float = _POLL_SECONDS,
        wake_seconds: float = _WAKE_SECONDS,
    ) -> None:
        """Starts the thread. The end of the cache ends it too. ``manager``: that the engine uses."""
        self._due = False
        self._cache = weakref.ref(cache)
        self._manager = weakref.ref(manager)
        self._wake_seconds = wake_seconds
        self._next_wake = 0.0  # monotonic time
        self._warned: set[str] = set()
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

    def end_wakeup(self) -> None:
        """Ends a wake-up: the step takes removals. The thread wakes the engine again if removals remain."""
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
            try:
                if not self._due and cache.has_removals() and time.monotonic() >= self._next_wake:
                    self._wake()
            except Exception as error:
                self._warn_once(f"could not wake vLLM ({type(error).__name__}: {error})")
            del cache

    def _wake(self) -> None:
        engine = self._engine()
        if engine is None:
            engine = self._find_engine(self._manager())
            if engine is None:
                if _engine_kind() is not None:
                    self._warn_once("found no engine to wake (an LLM object has none)")
                return
            self._engine = weakref.ref(engine)
        from vllm.v1.engine import EngineCoreRequestType

        self._next_wake = time.monotonic() + self._wake_seconds
        self._due = True
        # A message in the queue ends the wait too.
        if engine.input_queue.empty():
            engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def _warn_once(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning(
                "KV events: %s. While vLLM is idle, removals by other servers wait for the next request", what
            )
