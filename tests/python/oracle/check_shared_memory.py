# SPDX-License-Identifier: Apache-2.0
"""Run by test_shared_memory.py under each vLLM release: two engines that share host memory.

The fake model compares every byte that a request is about to read, and raises WrongBytes.
"""

import gc
import os
import random
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapter
import pytest

adapter.use_specs()

from vllm.v1.request import RequestStatus  # noqa: E402

from kv_offload import _core  # noqa: E402
from oracle.check_life_cycles import DESCRIBING, Published, payloads  # noqa: E402
from oracle.check_oracle import (  # noqa: E402
    FULL,
    HYBRID,
    STATES,
    Setup,
    _check_at_rest,
    ask_again,
)
from oracle.engine import Engine, make_model_dir  # noqa: E402

PATIENCE_SECONDS = 300
TOKENS = 200
WHOLE = 192  # tokens of a prompt that are in whole chunks

SETUPS = {
    "full attention": FULL,
    "hybrid": HYBRID,
    "two ranks": replace(FULL, world_size=2, extra={"cpu_bytes_to_use": "1MiB"}),
    "states": STATES,
}


def prompts(count: int, seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1000) for _ in range(TOKENS)] for _ in range(count)]


def stats(engine: Engine) -> dict[str, Any]:
    found: dict[str, Any] = engine.manager._cache.stats()
    return found


def hit_tokens(engine: Engine, place: str) -> float:
    found: float = engine.manager._metrics.value("kv_offload_hit_tokens_total", [place])
    return found


def number_of(engine: Engine) -> str:
    """Returns the number under which other engines know this one."""
    info = "kv_offload_shared_memory_info"
    (found,) = [str(n) for n in range(64) if engine.manager._metrics.value(info, [str(n)])]
    return found


def sharing(setup: Setup, **more: Any) -> Setup:
    extra = {**setup.extra, "share_host_memory": True, "load_policy": "always", **more}
    return replace(setup, extra=extra)


def step_until(neighbours: int, *engines: Engine) -> None:
    """Steps idle engines until each reads this number of others."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(stats(engine)["neighbours"] != neighbours for engine in engines):
        assert time.monotonic() < deadline, [stats(engine) for engine in engines]
        for engine in engines:
            engine.step_idle()


@contextmanager
def two_engines(setup: Setup) -> Iterator[tuple[Engine, Engine]]:
    """Two engines of one model that have found each other."""
    model_dir = make_model_dir()
    engines = [Engine(sharing(setup), f"oracle-{uuid.uuid4()}", model_dir) for _ in range(2)]
    try:
        step_until(1, *engines)
        yield engines[0], engines[1]
    finally:
        for engine in engines:
            engine.shutdown()


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_prompts_of_a_neighbour_are_loaded_with_their_bytes_and_not_stored_again(setup: Setup) -> None:
    asked = prompts(3)
    with two_engines(setup) as (owner, reader):
        ask_again(owner, asked)
        alone = ask_again(owner, asked)
        held = stats(owner)["resident_chunks"]
        assert ask_again(reader, asked) == alone
        assert all(alone)
        assert stats(reader)["resident_chunks"] == 0
        assert stats(owner)["resident_chunks"] == held
        found = hit_tokens(reader, "neighbour")
        assert found == hit_tokens(owner, "cpu") > 0
        assert hit_tokens(reader, "cpu") == 0
        by_number = "kv_offload_neighbour_hit_tokens_total"
        assert reader.manager._metrics.value(by_number, [number_of(owner)]) == found
        for engine in (owner, reader):
            _check_at_rest(engine)
            assert stats(engine)["borrowed_chunks"] == 0


def test_a_reset_ends_the_sharing_of_one_engine_and_the_other_keeps_its_chunks() -> None:
    first, second = prompts(3), prompts(3, seed=6)
    with two_engines(FULL) as (owner, reader):
        ask_again(owner, first)
        ask_again(reader, second)
        number = number_of(owner)
        assert owner.reset(running=True)
        assert owner.manager._metrics.value("kv_offload_shared_memory_info", [number]) == 0
        assert ask_again(reader, first) == [0] * 3, "bytes from before the reset of their engine"
        assert ask_again(owner, second) == [0] * 3, "bytes of an engine that was not reset"
        assert ask_again(reader, second) == [WHOLE] * 3
        assert ask_again(owner, second) == [WHOLE] * 3
        _check_at_rest(owner)


def test_chunks_of_a_neighbour_leave_no_payload_and_no_event() -> None:
    asked = prompts(3)
    with two_engines(DESCRIBING) as (owner, reader):
        ask_again(owner, asked)
        published = Published(reader)
        assert ask_again(reader, asked) == [WHOLE] * 3
        assert hit_tokens(reader, "neighbour") > 0
        assert payloads(reader) == []
        reader.add("aborted", asked[0], 1)
        found = reader.scheduler.connector.get_num_new_matched_tokens(reader.scheduler.requests["aborted"], 0)
        assert found == (WHOLE, True)
        assert len(payloads(reader)) == WHOLE // DESCRIBING.block_size
        reader.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
        reader.step_idle()
        assert payloads(reader) == []
        assert not published.held


def test_an_engine_continues_when_its_neighbour_has_ended() -> None:
    asked = prompts(3)
    with two_engines(FULL) as (owner, reader):
        ask_again(owner, asked)
        assert ask_again(reader, asked[:1]) == [WHOLE]
        owner.shutdown()
        assert ask_again(reader, asked) == [0] * 3
        assert ask_again(reader, asked) == [WHOLE] * 3


@pytest.mark.parametrize("setup", [FULL, HYBRID], ids=["full attention", "hybrid"])
def test_more_prompts_than_either_memory_holds_are_loaded_with_their_bytes(setup: Setup) -> None:
    asked, rng = prompts(60), random.Random(7)
    loaded = 0
    with two_engines(setup) as engines:
        for number in range(120):
            engine = engines[rng.randrange(2)]
            loaded += sum(ask_again(engine, [asked[min(rng.randrange(60), rng.randrange(60))]]))
            if number % 10 == 9:
                engines[rng.randrange(2)].step_idle()
        assert loaded > 0
        assert all(hit_tokens(engine, "neighbour") > 0 for engine in engines)
        for engine in engines:
            _check_at_rest(engine)


# ---- memory that is also kept


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The shared memory directory of all engines: kept regions outlive them."""
    original = _core.HostRegion
    with tempfile.TemporaryDirectory(dir="/dev/shm") as top:
        elsewhere = SimpleNamespace(
            attach_worker=partial(original.attach_worker, shm_directory=top),
            attach_scheduler=partial(original.attach_scheduler, shm_directory=top),
        )
        monkeypatch.setattr(_core, "HostRegion", elsewhere)
        yield Path(top)
        gc.collect()


@contextmanager
def engine_to_kill(setup: Setup, model_dir: str, asked: list[list[int]]) -> Iterator[Callable[[], None]]:
    """Runs an engine in another process; it has computed the prompts. Yields a function that kills it."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(PATIENCE_SECONDS)
            ask_again(Engine(setup, f"oracle-{uuid.uuid4()}", model_dir), asked)
            os.write(told, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(told)
    alive = [pid]

    def kill() -> None:
        for each in alive:
            os.kill(each, signal.SIGKILL)
            os.waitpid(each, 0)
        alive.clear()

    try:
        assert os.read(ready, 1) == b"x", "the engine did not start"
        yield kill
    finally:
        kill()
        os.close(ready)


def test_the_chunks_of_a_killed_engine_are_hits_for_the_next_one_and_its_neighbour(shm: Path) -> None:
    asked, model_dir = prompts(3), make_model_dir()
    setup = sharing(FULL, keep_host_memory=True)
    engines: list[Engine] = []
    try:
        with engine_to_kill(setup, model_dir, asked) as kill:
            reader = Engine(setup, f"oracle-{uuid.uuid4()}", model_dir)
            engines.append(reader)
            step_until(1, reader)
            assert ask_again(reader, asked) == [WHOLE] * 3
            kill()
        owner = Engine(setup, f"oracle-{uuid.uuid4()}", model_dir)
        engines.append(owner)
        assert stats(owner)["taken_over_chunks"] == stats(owner)["resident_chunks"] > 0
        assert ask_again(owner, asked) == [WHOLE] * 3
        step_until(0, reader)
        step_until(1, reader, owner)
        before = hit_tokens(reader, "neighbour")
        assert ask_again(reader, asked) == [WHOLE] * 3
        assert hit_tokens(reader, "neighbour") == before + 3 * WHOLE
        assert len(list(shm.glob("kv_offload-kept-*"))) == 2
        for engine in engines:
            _check_at_rest(engine)
    finally:
        for engine in engines:
            engine.shutdown()
