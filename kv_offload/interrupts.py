# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C as an event that a command handles when it can, instead of an exception at any instruction."""

import signal
import threading
from collections.abc import Callable
from typing import Any


class Interrupts:
    """Records Ctrl-C instead of raising KeyboardInterrupt, and calls ``on_interrupt`` if given, so that the
    command can finish or count its work in progress. Has no effect outside the main thread.

    ``on_interrupt`` may run between any two instructions of the main thread: it must not take a lock.
    """

    def __init__(self, on_interrupt: Callable[[], None] | None = None) -> None:
        self._on_interrupt = on_interrupt
        self._previous: Any = None
        self._is_set = False

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _record(self, *_: object) -> None:
        self._is_set = True
        if self._on_interrupt is not None:
            self._on_interrupt()

    def is_set(self) -> bool:
        """Returns True after Ctrl-C."""
        return self._is_set
