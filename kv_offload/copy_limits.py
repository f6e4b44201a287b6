# SPDX-License-Identifier: Apache-2.0
"""Limits of ``kv-offload copy``: bytes per second, and the memory of records that were read but not yet
written."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_offload._core import WholeRecord


class RateLimit:
    """Spreads bytes over time. Thread-safe."""

    def __init__(
        self,
        bytes_per_second: int | None,
        pause: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate = bytes_per_second
        self._pause = pause
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, count: int) -> None:
        """Waits until ``count`` more bytes are within the rate."""
        if self._rate is None:
            return
        with self._lock:
            start = max(self._clock(), self._free_at)
            self._free_at = start + count / self._rate
        delay = start - self._clock()
        if delay > 0:
            self._pause(delay)


@dataclass(slots=True)
class Slot:
    """Memory for one record. ``bytes``: its size, at least."""

    record: "WholeRecord | None" = None
    bytes: int = 0


class RecordMemory:
    """Memory for the records between two tiers. Thread-safe.

    Slots in use: always up to ``jobs``, and up to twice as many while their bytes are within ``limit``. Slots
    that are not in use keep their memory for the next record, within ``limit`` too. So the memory is at most
    ``limit`` bytes, or ``jobs`` of the largest records if that is more.
    """

    def __init__(self, jobs: int, limit: int) -> None:
        self._jobs = jobs
        self._limit = limit
        self._changed = threading.Condition()
        self._closed = False
        self._used = 0  # slots
        self._used_bytes = 0
        self._unused: list[Slot] = []

    def take(self, size: int) -> Slot | None:
        """Waits for a slot for ``size`` bytes. Returns None after close().

        Call it in one thread at a time: smaller records would pass a large one that waits.
        """
        with self._changed:
            while not self._closed and not self._has_room(size):
                self._changed.wait()
            if self._closed:
                return None
            slot = self._unused.pop() if self._unused else Slot()
            slot.bytes = max(slot.bytes, size)
            self._used += 1
            self._used_bytes += slot.bytes
            self._trim()
            return slot

    def give_back(self, slot: Slot) -> None:
        """Ends the use of a slot. Without a record it has no memory."""
        with self._changed:
            self._used -= 1
            self._used_bytes -= slot.bytes
            if slot.record is not None:
                slot.bytes = max(slot.bytes, slot.record.size)  # it may be larger than it was listed
                self._unused.append(slot)
                self._trim()
            self._changed.notify()

    def close(self) -> None:
        """Ends all waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _has_room(self, size: int) -> bool:
        if self._used < self._jobs:
            return True
        return self._used < 2 * self._jobs and self._used_bytes + size <= self._limit

    def _trim(self) -> None:
        kept = self._used_bytes + sum(slot.bytes for slot in self._unused)
        while self._unused and kept > self._limit:
            kept -= self._unused.pop(0).bytes
