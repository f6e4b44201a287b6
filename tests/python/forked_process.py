# SPDX-License-Identifier: Apache-2.0
"""Starts programs as forks of a process that has imported vLLM (zygote.py): they need not import it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any


class Zygote:
    """The process that is forked. Use it as a context manager; it is thread-safe.

    ``environment``: its environment, which decides the release of vLLM that it imports. ``modules``: what it
    imports, instead of the modules of a server.
    """

    def __init__(self, log_file: Path, environment: dict[str, str], modules: Sequence[str] = ()) -> None:
        self.log_file = log_file
        self.environment = environment
        self.modules = modules
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Zygote:
        environment = self.environment | {"PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment.pop("LD_PRELOAD", None)
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("zygote.py")), *self.modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                start_new_session=True,
            )
        return self  # the process is still importing; the first request waits for it

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        try:
            self._process.communicate(timeout=30)  # closes its input, which ends it
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def start(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        log_file: Path,
        directory: Path | None = None,
    ) -> ForkedProcess:
        """Runs ``command`` (a module or script, and its arguments) in a session of its own."""
        request = {
            "run": [str(word) for word in command],
            "environment": environment,
            "log": str(log_file),
            "directory": str(directory or Path.cwd()),
        }
        return ForkedProcess(self, int(self.ask(request)["pid"]))

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            assert self._process is not None
            pipes: tuple[IO[str] | None, ...] = (self._process.stdin, self._process.stdout)
            requests, replies = pipes
            assert requests is not None
            assert replies is not None
            print(json.dumps(request), file=requests, flush=True)
            while line := replies.readline():
                reply: dict[str, Any] = json.loads(line)
                if "ready" not in reply:
                    return reply
            raise RuntimeError(f"the zygote has ended\n{self.log_file.read_text(errors='replace')[-4000:]}")


class ForkedProcess:
    """The subset of subprocess.Popen that the tests use, for a child of the zygote."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.zygote = zygote
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.zygote.ask({"poll": self.pid})["status"]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + timeout if timeout is not None else None
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.02)
        return code

    def terminate(self) -> None:
        if self.poll() is None:  # not reaped, so the pid is still its own
            os.kill(self.pid, signal.SIGTERM)
