# SPDX-License-Identifier: Apache-2.0
"""A server with two ranks and encrypted records reloads from both tiers. One of its processes is killed
(SIGKILL) while it writes; the next server must find every record. One test repeats this with records that are
compressed as well.

One directory lives through several servers; each life kills another process: the engine core, a worker, the
API server. (test_restart kills all at once.) KV_OFFLOAD_KILLS=<n> adds n lives, killed anywhere at a random
moment.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
import records
import shared_memory
import waiting
from answers import BLOCK, assert_same, make_prompts
from local_server import Answer, LocalServer, ServerError
from setting import PROMPT_BLOCKS, PROMPTS, Reference, Serve, patient_config

from kv_offload.exposition import Page

VICTIMS = ("EngineCore", "Worker_TP1", "APIServer")
NEW_PROMPTS = 4  # per life
# after one stall of the disk: the chunks of the prompt that waited and of the next prompt
MOST_LATE = 2 * PROMPT_BLOCKS
RECORDED_BEFORE_KILL = 30  # of the records of NEW_PROMPTS: the second prompt is being written


@dataclass
class History:
    """The prompts that were answered so far, in request order."""

    root: Path
    prompts: list[list[int]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    records: int = 0  # on disk when the last server was killed
    unasked: int = 0  # records of prompts that were never answered, so no request looks for them
    server: LocalServer | None = None  # of the current life

    def begin(self, start: Serve, model: Path) -> LocalServer:
        self.server = serve(start, model, self.root)
        return self.server


def serve(start: Serve, model: Path, root: Path, arguments: Sequence[str] = (), **tier: Any) -> LocalServer:
    key = root.with_name(f"{root.name}-key")
    if not key.exists():
        key.touch(0o600)
        key.write_bytes(os.urandom(32))
    return start(
        model,
        # One writer thread writes in order, so the recorded prefix has no holes.
        patient_config("96MiB", root, n_write_threads=1, encryption_key_file=str(key), **tier),
        arguments=["--tensor-parallel-size", "2", *arguments],
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )


def kill(server: LocalServer, victim: str) -> None:
    """Sends SIGKILL to one process; vLLM, or else this function, ends the others."""
    assert server.process is not None
    if victim == "all":
        server.kill()
        return
    pids = [process.pid for process in server.processes() if f"VLLM::{victim}" in process.command]
    if victim == "APIServer":
        pids = [server.process.pid]
    assert len(pids) == 1, f"{victim}: {[process.command for process in server.processes()]}"
    os.kill(pids[0], signal.SIGKILL)
    with contextlib.suppress(AssertionError):
        waiting.until(lambda: not _alive(server), 10, "the others end")
    server.kill()


def _alive(server: LocalServer) -> bool:
    assert server.process is not None
    server.process.poll()
    return bool(server.processes())


class Asking(threading.Thread):
    """Sends each prompt once the previous ones are recorded, until the server is killed.

    Adds the answers to ``history``. ``ended`` is the error that ended the thread before the last prompt.
    """

    def __init__(self, server: LocalServer, prompts: Sequence[list[int]], history: History) -> None:
        super().__init__()
        self.server, self.prompts, self.history = server, prompts, history
        self.ended: Exception | None = None

    def run(self) -> None:
        before = len(records.files(self.history.root))
        try:
            for number, prompt in enumerate(self.prompts):
                answer = self.server.ask(prompt)
                self.history.prompts.append(prompt)
                self.history.answers.append(answer)
                # Full host memory evicts chunks that a slow disk has not taken yet; that would leave a hole.
                waiting.recorded(self.history.root, before + (number + 1) * PROMPT_BLOCKS, self.server)
        except (OSError, HTTPException, ServerError, KeyError, ValueError, AssertionError) as error:
            self.ended = error


def account(server: LocalServer, hit: list[int]) -> str:
    """Returns the server's nonzero cache metrics without histogram buckets, for a failure message."""
    lines = server.get("/metrics").splitlines()
    ours = [line for line in lines if "kv_offload" in line.split("{")[0] and "_bucket" not in line]
    said = [line for line in ours if not line.startswith("#") and float(line.split()[-1])]
    return "\n".join([f"hit: {hit} of {PROMPT_BLOCKS} each", *said, server.log_tail()])


def check_all_is_there(server: LocalServer, history: History) -> None:
    if not history.prompts:
        return
    again = [server.ask(prompt) for prompt in history.prompts]
    assert_same(again, history.answers)
    hit = [answer.cached_tokens // BLOCK for answer in again]
    # A disk that stalls for minutes is not an effect of the kill: the late chunks are recomputed and counted
    # as such.
    page = Page(server.get("/metrics"))
    late = page.sum("kv_offload_miss_tokens_total", reason="deadline") // BLOCK
    recorded = history.records - history.unasked
    assert sum(hit) + late >= 0.99 * recorded, f"{recorded} were recorded\n{account(server, hit)}"
    assert late <= MOST_LATE, account(server, hit)
    timeouts = page.sum("kv_offload_failures_total", op="read", kind="timeout")
    assert page.sum("kv_offload_failures_total") == timeouts, account(server, hit)
    # The recomputed chunks are being written to the disk.
    waiting.recorded(history.root, len(history.prompts) * PROMPT_BLOCKS + history.unasked, server)


def live(start: Serve, model: Path, history: History, victim: str, number: int, moment: float | None) -> None:
    """Runs one life: checks all records of the earlier lives, then is killed while it writes, or after
    ``moment`` seconds.
    """
    server = history.server or history.begin(start, model)
    in_memory = shared_memory.mapped(process.pid for process in server.processes())
    check_all_is_there(server, history)
    before, answered = len(records.files(history.root)), len(history.answers)
    asking = Asking(server, make_prompts(NEW_PROMPTS, PROMPT_BLOCKS, seed=100 + number), history)
    asking.start()
    try:
        if moment is None:
            wanted = before + RECORDED_BEFORE_KILL
            waiting.until(lambda: len(records.files(history.root)) >= wanted, 240, "records of new prompts")
        else:
            time.sleep(moment)
        assert asking.ended is None, asking.ended
        kill(server, victim)
    finally:
        server.kill()
        asking.join()
        history.server = None
    history.records = len(records.files(history.root))
    # Records are written in order: those beyond the answered prompts belong to the next prompt.
    answered = len(history.answers) - answered
    history.unasked += max(0, history.records - before - answered * PROMPT_BLOCKS)
    assert shared_memory.left(in_memory) == set()


@pytest.fixture(scope="module")
def history(start: Serve, model: Path, tmp_path_factory: pytest.TempPathFactory) -> History:
    """Starts the first life. Host memory is smaller than the prompts of the test."""
    history = History(tmp_path_factory.mktemp("killed"))
    history.begin(start, model)
    return history


def test_two_ranks_reload_from_host_memory_and_disk(history: History, reference: Reference) -> None:
    server = history.server
    assert server is not None
    first = []
    for number, prompt in enumerate(reference.prompts):
        first.append(server.ask(prompt))
        # Full host memory evicts chunks that a slow disk has not taken yet.
        waiting.recorded(history.root, (number + 1) * PROMPT_BLOCKS, server)
    again = [server.ask(prompt) for prompt in reversed(reference.prompts)]
    # Two ranks sum in another order than one; the rounding difference is far below the bound.
    assert_same(first, reference.answers)
    assert_same(again, reference.answers[::-1])
    hit = [answer.cached_tokens // BLOCK for answer in again]
    assert hit == [PROMPT_BLOCKS] * PROMPTS, account(server, hit)
    assert server.metric("kv_offload_hit_tokens_total", tier="cpu") > 0
    assert server.metric("kv_offload_hit_tokens_total", tier="fs") > 0
    assert {records.form(path) for path in records.files(history.root)} == {records.Form(False, True)}
    # The next test kills this server; the test after it needs these prompts as well.
    history.prompts += reference.prompts
    history.answers += first
    history.records = len(records.files(history.root))


def test_any_process_may_be_killed_while_it_writes(start: Serve, model: Path, history: History) -> None:
    before = len(history.answers)
    for number, victim in enumerate(VICTIMS):
        live(start, model, history, victim, number, None)
    with serve(start, model, history.root) as server:
        assert len(history.answers) >= before + len(VICTIMS), "a life did not answer its first new prompt"
        check_all_is_there(server, history)


# Compression saves nothing on K and V of a float32 model, so this model is bfloat16. There, a loaded prompt
# differs from a computed one by more than NOISE, but not from a hit in vLLM's own blocks. So the second
# answer is the reference.
def test_compressed_records_survive_a_kill(start: Serve, model: Path, tmp_path: Path) -> None:
    root, prompts = tmp_path / "encoded", make_prompts(3, PROMPT_BLOCKS)
    bfloat16 = ["--dtype", "bfloat16"]
    with serve(start, model, root, bfloat16, compress="zstd") as server:
        answers = []
        for number, prompt in enumerate(prompts):
            server.ask(prompt)
            answers.append(server.ask(prompt))
            assert answers[-1].cached_tokens == PROMPT_BLOCKS * BLOCK
            waiting.recorded(root, (number + 1) * PROMPT_BLOCKS, server)
        asking = Asking(server, make_prompts(1, PROMPT_BLOCKS, seed=200), History(root))
        asking.start()
        try:
            wanted = len(prompts) * PROMPT_BLOCKS + 6
            waiting.until(lambda: len(records.files(root)) >= wanted, 240, "records of a new prompt")
            kill(server, "EngineCore")
        finally:
            server.kill()
            asking.join()
    assert {records.form(path) for path in records.files(root)} == {records.Form(True, True)}
    with serve(start, model, root, bfloat16, compress="zstd") as server:
        again = [server.ask(prompt) for prompt in prompts]
        hit = [answer.cached_tokens // BLOCK for answer in again]
        assert hit == [PROMPT_BLOCKS] * len(prompts), account(server, hit)
        assert_same(again, answers)


@pytest.mark.skipif("KV_OFFLOAD_KILLS" not in os.environ, reason="long: KV_OFFLOAD_KILLS=<lives>")
@pytest.mark.timeout(24 * 3600)
def test_any_process_may_be_killed_at_any_moment(start: Serve, model: Path, tmp_path: Path) -> None:
    history, generator = History(tmp_path), random.Random(os.environ.get("KV_OFFLOAD_SEED", "0"))
    for number in range(int(float(os.environ["KV_OFFLOAD_KILLS"]))):
        victim = generator.choice([*VICTIMS, "all"])
        live(start, model, history, victim, 1000 + number, generator.uniform(0, 6))
    with serve(start, model, history.root) as server:
        check_all_is_there(server, history)
