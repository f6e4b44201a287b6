# SPDX-License-Identifier: Apache-2.0
"""Makes vLLM's processes sleep instead of spin for messages while a request waits for tier records.

During that wait the engine core steps once a millisecond, and core and ranks spin with ``sched_yield`` for a
second after each message. On hosts with few cores, that leaves no CPU to the reader threads or to a store on
the same host: 0.2 s loads took 0.4 to 4.3 s (docs/troubleshooting.md). While reads are in flight, the
processes therefore sleep between two checks for a message; otherwise they spin, as vLLM does.
"""

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kv_offload.log import get_logger

from . import compat

if TYPE_CHECKING:
    from kv_offload._core import HostRegion

logger = get_logger(__name__)

POLL_SECONDS = 0.0002  # maximum added message latency, plus the system's timer slack


class FetchAwareWait:
    """Replaces ``sched_yield`` in the module of vLLM's message queues. Thread-safe."""

    def __init__(
        self, region: "HostRegion", queues: Any, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._region: HostRegion | None = region
        self._queues = queues
        self._sleep = sleep
        self._spin = queues.sched_yield
        queues.sched_yield = self

    def __call__(self) -> None:
        region = self._region
        if region is not None and region.fetching:
            self._sleep(POLL_SECONDS)
        else:
            self._spin()

    def end(self) -> None:
        """Restores vLLM's ``sched_yield`` and releases the region. Idempotent."""
        self._region = None
        # A newer instance may have replaced us and call us as its ``_spin``; then we stay until it ends too.
        while isinstance(now := self._queues.sched_yield, FetchAwareWait) and now._region is None:
            self._queues.sched_yield = now._spin


def wait_for_messages(how: str, copier: str, region: "HostRegion", owner: object) -> Callable[[], None]:
    """Applies ``how``, the setting ``wait_while_loading``, to this process.

    ``copier``: "host" or "cuda"; "auto" sleeps where vLLM computes on the CPU. Returns a function that
    restores vLLM's waiting. Holds a reference to the region until that call, or until ``owner`` is collected.
    """
    if how == "spin" or (how == "auto" and copier != "host"):
        return _no_op
    queues = compat.message_queues()
    if queues is None:
        logger.warning("vLLM waits for messages in an unknown way here, so wait_while_loading has no effect")
        return _no_op
    if getattr(queues, "SPINLOOP_EXT_ENABLED", False):
        logger.warning(
            "VLLM_USE_SPINLOOP_EXT=1: vLLM spins for 0.1 s before each check for a message, and "
            "wait_while_loading cannot change that"
        )
    wait = FetchAwareWait(region, queues)
    weakref.finalize(owner, wait.end).atexit = False
    return wait.end


def _no_op() -> None: ...
