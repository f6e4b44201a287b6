# SPDX-License-Identifier: Apache-2.0
"""A vLLM OpenAI server on this machine, as a context manager: start, request, read metrics, stop or kill.

    with LocalServer(model, log_file, blocks=40, kv_transfer=kv_transfer_config("1GiB", root)) as server:
        answer = server.ask(token_ids)

The server runs in its own session, so that its API process, engine core and workers can be found and ended
together, even after they rename themselves.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from kv_offload.exposition import Page

# The CPU build of vLLM has no working `vllm serve`; this is the same server.
SERVER_MODULE = "vllm.entrypoints.openai.api_server"


class ServerError(RuntimeError):
    """The server did not come up, died, or refused a request; carries the end of its log."""


@dataclass(frozen=True)
class Answer:
    """The result of one greedy completion.

    ``top`` holds, per generated token, the log-probabilities of the most likely token ids;
    ``cached_tokens`` how many tokens of the prompt were not computed; ``seconds`` the whole request.
    """

    token_ids: tuple[int, ...]
    top: tuple[dict[int, float], ...]
    text: str
    cached_tokens: int
    seconds: float


def difference(one: Answer, other: Answer) -> float:
    """Returns the distance of two answers to one prompt.

    Infinite for different tokens, else the root mean square difference of the log-probabilities.
    """
    if one.token_ids != other.token_ids:
        return math.inf
    squares = [
        (left[token] - right[token]) ** 2
        for left, right in zip(one.top, other.top, strict=True)
        for token in left.keys() & right.keys()
    ]
    return math.sqrt(sum(squares) / len(squares))


@dataclass(frozen=True)
class Process:
    """A member of the server's session."""

    pid: int
    parent: int
    command: str


class RunningProcess(Protocol):
    """The part of subprocess.Popen that is used here."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...


def kv_transfer_config(
    cpu_bytes: int | str, root_dir: str | Path | None = None, max_bytes: int | str = "4GiB", **extra: Any
) -> dict[str, Any]:
    """Returns the value of ``--kv-transfer-config``: host memory, and a disk tier if ``root_dir`` is
    given."""
    tiers = [{"type": "fs", "root_dir": str(root_dir), "max_bytes": max_bytes}] if root_dir else []
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KVOffloadSpec",
            "spec_module_path": "kv_offload.specs",
            "cpu_bytes_to_use": cpu_bytes,
            **({"secondary_tiers": tiers} if tiers else {}),
            **extra,
        },
    }


@dataclass
class LocalServer:
    """Options of the server and, once started, its process.

    blocks: KV blocks of vLLM's own cache (128 tokens each on CPU); small, so that it overflows.
    cache_gib: memory that vLLM sets aside for its own cache, at least what ``blocks`` need.
    environment: added to the inherited one.
    eager: pass ``--enforce-eager``; without it vLLM may compile the model and capture CUDA graphs.
    on_wait: called about twice a second while the server starts, with the seconds so far.
    """

    model: Path
    log_file: Path
    blocks: int | None = None
    kv_transfer: dict[str, Any] | None = None
    max_model_len: int = 4096
    cache_gib: int = 1
    arguments: Sequence[str] = ()
    eager: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    start_seconds: float = 480.0
    on_wait: Callable[[float], None] | None = None
    port: int = 0
    process: RunningProcess | None = None
    boot_seconds: float = 0.0

    def __enter__(self) -> LocalServer:
        if self.process is None:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def command(self) -> list[str]:
        command = [
            sys.executable,
            "-m",
            SERVER_MODULE,
            "--model",
            str(self.model),
            "--served-model-name",
            "tiny",
        ]
        command += [
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--max-model-len",
            str(self.max_model_len),
        ]
        command += ["--enable-prompt-tokens-details", "--max-logprobs", "20"]
        if self.eager:
            command.append("--enforce-eager")
        # Without this vLLM would serve a float32 model in bfloat16.
        command += ["--dtype", json.loads((self.model / "config.json").read_text())["dtype"]]
        if self.blocks is not None:
            command += ["--num-gpu-blocks-override", str(self.blocks)]
        if self.kv_transfer is not None:
            command += ["--kv-transfer-config", json.dumps(self.kv_transfer)]
        return [*command, *self.arguments]

    def start(self) -> None:
        """Starts the server and returns when it answers; ServerError if that takes too long."""
        assert self.process is None, "it runs already"
        self.port = self.port or free_port()
        environment = dict(os.environ)
        environment.update(
            VLLM_CPU_KVCACHE_SPACE=str(self.cache_gib),
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
            TRANSFORMERS_OFFLINE="1",
            TOKENIZERS_PARALLELISM="false",
            PYTHONSAFEPATH="1",  # in a checkout, kv_offload/ would hide the installed package
        )
        environment.update(self.environment)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        self.process = self.launch(environment)
        try:
            self._wait_until_ready(began)
        except BaseException:
            self.kill()
            raise
        self.boot_seconds = time.monotonic() - began

    def launch(self, environment: dict[str, str]) -> RunningProcess:
        """Starts ``command`` in its own session and appends its output to ``log_file``."""
        with self.log_file.open("ab") as log:
            return subprocess.Popen(
                self.command(), stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def _wait_until_ready(self, began: float) -> None:
        assert self.process is not None
        while True:
            if self.process.poll() is not None:
                raise ServerError(f"the server ended with code {self.process.returncode}\n{self.log_tail()}")
            elapsed = time.monotonic() - began
            if elapsed > self.start_seconds:
                raise ServerError(f"the server was not ready after {elapsed:.0f} s\n{self.log_tail()}")
            try:
                self.get("/health", timeout=2)
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.4)
            if self.on_wait is not None:
                self.on_wait(elapsed)

    def ask(
        self,
        prompt: Sequence[int] | str,
        max_tokens: int = 8,
        logprobs: int = 8,
        timeout: float = 300,
        **extra: Any,
    ) -> Answer:
        """Returns a greedy completion of ``prompt`` (token ids or text)."""
        body = {
            "model": "tiny",
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": logprobs,
            "return_tokens_as_token_ids": True,
            **extra,
        }
        began = time.perf_counter()
        reply = self.post("/v1/completions", body, timeout)
        seconds = time.perf_counter() - began
        choice = reply["choices"][0]
        details = reply["usage"].get("prompt_tokens_details") or {}
        return Answer(
            token_ids=tuple(_token_id(name) for name in choice["logprobs"]["tokens"]),
            top=tuple(
                {_token_id(name): value for name, value in entry.items()}
                for entry in choice["logprobs"]["top_logprobs"]
            ),
            text=choice["text"],
            cached_tokens=int(details.get("cached_tokens") or 0),
            seconds=seconds,
        )

    def get(self, path: str, timeout: float = 300) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=timeout) as reply:
            return str(reply.read().decode())

    def post(self, path: str, body: dict[str, Any] | None = None, timeout: float = 300) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                text = reply.read().decode()
        except urllib.error.HTTPError as error:
            raise ServerError(
                f"{path}: {error.code} {error.read().decode()[:500]}\n{self.log_tail()}"
            ) from error
        return json.loads(text) if text else None

    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum over all series of ``name`` on /metrics with ``labels``; 0 without any."""
        return Page(self.get("/metrics")).sum(name, **labels)

    def processes(self) -> list[Process]:
        """Returns the live processes of the server's session."""
        return session_processes(self.process.pid) if self.process is not None else []

    def stop(self, timeout: float = 60) -> None:
        """Stops the server; kills the rest of its session after ``timeout`` seconds."""
        if self.process is None:
            return
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        self.kill()

    def kill(self) -> None:
        """Sends SIGKILL to every process of the session and waits until all have ended."""
        if self.process is None:
            return
        deadline = time.monotonic() + 240
        while members := self.processes():
            for member in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)
            self.process.poll()
            if time.monotonic() > deadline:
                raise ServerError(f"processes that do not die: {members}")
            time.sleep(0.05)
        self.process.wait()
        self.process = None

    def log_tail(self, lines: int = 60) -> str:
        """Returns earlier errors and the end of the log, because vLLM's last error is seldom the cause."""
        text = self.log_file.read_text(errors="replace").splitlines()
        errors = [line for line in text[:-lines] if re.search(r"\w(Error|Exception): ", line)]
        causes = [f"--- errors before that in {self.log_file}", *errors[-10:]] if errors else []
        return "\n".join([*causes, f"--- the last lines of {self.log_file}", *text[-lines:]])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def session_processes(session: int) -> list[Process]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # pid (command) state parent group session ...; the command may hold spaces and parentheses.
            after = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if int(after[3]) == session and after[0] not in "ZX":
            found.append(Process(int(entry.name), int(after[1]), command))
    return found


def _token_id(name: str) -> int:
    return int(name.removeprefix("token_id:"))
