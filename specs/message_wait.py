# SPDX-License-Identifier: Apache-2.0
"""How vLLM's processes wait for messages from each other while a request waits for records of a tier.

During such a wait the engine core steps once per millisecond, and core and ranks spin with ``sched_yield``
for a second after each message. With few cores, that starves the reader threads and a store on the same host:
loads that take 0.2 s took 0.4 to 4.3 s (docs/troubleshooting.md). So the processes sleep between checks for a
message while records are being read, and otherwise spin as in vLLM.
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

LOOK_EVERY_SECONDS = 0.0002  # maximum added delay of a message, plus the system's timer slack


class SleepWhileFetching:
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
            self._sleep(LOOK_EVERY_SECONDS)
        else:
            self._spin()

    def end(self) -> None:
        """Restores vLLM's function and releases the region. Idempotent."""
        self._region = None
        # A later instance may have replaced this one; it calls this one until it ends too.
        while isinstance(now := self._queues.sched_yield, SleepWhileFetching) and now._region is None:
            self._queues.sched_yield = now._spin


def wait_for_messages(how: str, copier: str, region: "HostRegion", owner: object) -> Callable[[], None]:
    """Makes this process wait as in ``how``, the setting ``wait_while_loading``.

    ``copier``: "host" or "cuda"; "auto" sleeps if vLLM computes on the CPU. Returns a function that undoes
    it. Until then it holds the region, but not longer than ``owner`` is alive.
    """
    if how == "spin" or (how == "auto" and copier != "host"):
        return _nothing
    queues = compat.message_queues()
    if queues is None:
        logger.warning(
            "this vLLM waits for messages in a way that is not known, so wait_while_loading does nothing"
        )
        return _nothing
    if getattr(queues, "SPINLOOP_EXT_ENABLED", False):
        logger.warning(
            "VLLM_USE_SPINLOOP_EXT=1: vLLM spins for 0.1 s before each look for a message, and "
            "wait_while_loading changes nothing about that"
        )
    wait = SleepWhileFetching(region, queues)
    weakref.finalize(owner, wait.end).atexit = False
    return wait.end


def _nothing() -> None: ...
