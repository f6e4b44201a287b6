# SPDX-License-Identifier: Apache-2.0
"""vLLM's own loop of an idle engine core, around an engine of the oracle: it waits on the input queue."""

import queue
import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

from oracle.engine import Engine


class IdleLoop(EngineCoreProc):  # type: ignore[misc]
    """An engine core whose requests are any objects. It was not initialized: only its loop is used."""

    def __init__(
        self, engine: Engine, source: Iterable[Any], on_message: Callable[[], None] = lambda: None
    ) -> None:
        """``source``: read on the input thread, as vLLM reads its sockets; the end of it is None.

        ``on_message``: called after each message of vLLM, such as WAKEUP.
        """
        self.on_message = on_message
        self.model_executor = SimpleNamespace(is_sleeping=False)
        self.engine = engine
        self.scheduler = engine.scheduler
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.aborts_queue: queue.Queue[Any] = queue.Queue()
        self.engines_running = False
        self.batch_queue = None
        self.shutdown_state = EngineShutdownState.RUNNING
        self.process_input_queue_block = True
        self._idle_state_callbacks: list[Any] = []
        self.arrived: list[Any] = []
        self.steps = 0  # without a request
        threading.Thread(target=self.process_input_sockets, args=(source,), daemon=True).start()

    def process_input_sockets(self, source: Iterable[Any]) -> None:  # type: ignore[override]
        for request in source:
            self.input_queue.put_nowait(("request", request))
        self.input_queue.put_nowait(("request", None))

    def _handle_client_request(self, request_type: Any, request: Any) -> None:
        if request_type == "request":
            self.arrived.append(request)
        else:
            super()._handle_client_request(request_type, request)
            self.on_message()

    def has_work(self) -> bool:
        return bool(self.arrived) or bool(super().has_work())

    def next(self) -> Any:
        """Returns the next object of ``source``. Steps whenever vLLM's loop would, until it arrives."""
        while not self.arrived:
            self._process_input_queue()
            if super().has_work():
                self.engine.step_idle()
                self.steps += 1
        return self.arrived.pop(0)
