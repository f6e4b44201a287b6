# SPDX-License-Identifier: Apache-2.0
"""How vLLM's processes wait for each other's messages while a request waits for records of a tier.

Its engine core steps once a millisecond then, and core and ranks spin for a second after each message, with
``sched_yield``. Where cores are few that leaves none to the threads that read, nor to a store on the same
host: loads that take 0.2 s took 0.4 to 4.3 s (docs/troubleshooting.md). So they sleep between two looks for a
message as long as records are on their way, and spin as vLLM does otherwise.
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

LOOK_EVERY_SECONDS = 0.0002  # a message is seen so much later at most, and by what the system's timer adds


class SleepWhileFetching:
    """Takes the place of ``sched_yield`` in the module of vLLM's message queues. Any thread may call it."""

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
        """Give vLLM its own back, and hold the region no longer. Idempotent."""
        self._region = None
        # One that was made later has our place and calls us, until it ends, too.
        while isinstance(now := self._queues.sched_yield, SleepWhileFetching) and now._region is None:
            self._queues.sched_yield = now._spin


def wait_for_messages(how: str, copier: str, region: "HostRegion", owner: object) -> Callable[[], None]:
    """Have this process wait as ``how`` says: ``wait_while_loading`` of the configuration.

    ``copier``: "host" or "cuda"; "auto" sleeps where vLLM computes on the cores. Returns what undoes it.
    Until then it holds the region, but no longer than somebody holds ``owner``.
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
