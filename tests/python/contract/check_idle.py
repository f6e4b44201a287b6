# SPDX-License-Identifier: Apache-2.0
"""Run by test_contract.py under each vLLM release: an idle engine is woken to publish removals."""

import inspect
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import adapter
import pytest

adapter.use_specs()

from kv_offload.specs import idle  # noqa: E402
from kv_offload.specs.spec import KVOffloadSpec  # noqa: E402
from vllm.v1.engine import EngineCoreRequestType  # noqa: E402
from vllm.v1.engine.core import EngineCoreProc  # noqa: E402

from kv_offload.tiers.registry import parse_tier  # noqa: E402

WAIT_SECONDS = 240


class FakeCache:
    """A cache whose removals are set by the test."""

    def __init__(self) -> None:
        self.has = False
        self.asked = threading.Semaphore(0)

    def has_removals(self) -> bool:
        self.asked.release()
        return self.has


class FakeEngine:
    """The part of vLLM's engine that the waker uses."""

    def __init__(self, sleeping: bool = False) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.sleeping = sleeping

    def is_sleeping(self) -> bool:
        return self.sleeping


WAKEUP = (EngineCoreRequestType.WAKEUP, None)
Start = Callable[..., idle.EngineWaker]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[idle.EngineWaker] = []

    def make(cache: FakeCache, found: Any, wake_seconds: float = 0) -> idle.EngineWaker:
        started.append(
            idle.EngineWaker(
                cache,  # type: ignore[arg-type]
                cache,
                lambda manager: found,
                poll_seconds=0.001,
                wake_seconds=wake_seconds,
            )
        )
        return started[-1]

    yield make
    for one in started:
        one.stop()


def test_removals_wake_the_engine_until_its_step_has_taken_them(start: Start) -> None:
    cache, woken = FakeCache(), FakeEngine()
    waker = start(cache, woken)
    assert cache.asked.acquire(timeout=WAIT_SECONDS)
    assert woken.input_queue.empty()
    assert not waker.needs_step()
    cache.has = True
    assert woken.input_queue.get(timeout=WAIT_SECONDS) == WAKEUP
    assert waker.needs_step()
    assert woken.input_queue.empty(), "one message until the step"
    waker.end_wakeup()
    assert woken.input_queue.get(timeout=WAIT_SECONDS) == WAKEUP, "more removals than one step takes"
    cache.has = False
    waker.end_wakeup()
    assert not waker.needs_step()


def test_a_queue_with_a_message_gets_no_second_one(start: Start) -> None:
    cache, busy = FakeCache(), FakeEngine()
    busy.input_queue.put("request")
    cache.has = True
    waker = start(cache, busy)
    while not waker.needs_step():
        assert cache.asked.acquire(timeout=WAIT_SECONDS)
    waker.end_wakeup()
    while not waker.needs_step():
        assert cache.asked.acquire(timeout=WAIT_SECONDS)
    assert busy.input_queue.qsize() == 1


def test_an_engine_that_sleeps_needs_no_step_until_it_wakes_up(start: Start) -> None:
    cache, engine = FakeCache(), FakeEngine()
    cache.has = True
    waker = start(cache, engine)
    assert engine.input_queue.get(timeout=WAIT_SECONDS) == WAKEUP
    assert waker.needs_step()
    engine.sleeping = True
    assert not waker.needs_step(), "it was put to sleep after the wake-up"
    engine.sleeping = False
    assert waker.needs_step()


def test_without_an_engine_no_step_is_needed(start: Start) -> None:
    cache = FakeCache()
    cache.has = True
    waker = start(cache, None)
    for _ in range(3):
        assert cache.asked.acquire(timeout=WAIT_SECONDS)
    assert not waker.needs_step()


def test_the_thread_ends_with_the_cache(start: Start) -> None:
    cache = FakeCache()
    waker = start(cache, FakeEngine())
    assert cache.asked.acquire(timeout=WAIT_SECONDS)
    del cache
    waker._thread.join(WAIT_SECONDS)
    assert not waker._thread.is_alive()


def test_the_waker_does_not_keep_its_engine_alive() -> None:
    cache, engines = FakeCache(), [FakeEngine()]
    cache.has = True
    waker = idle.EngineWaker(cache, cache, lambda manager: engines[0], poll_seconds=0.001)  # type: ignore[arg-type]
    engine = weakref.ref(engines[0])
    assert engines[0].input_queue.get(timeout=WAIT_SECONDS) == WAKEUP
    waker.stop()  # its thread holds the engine while it wakes it
    assert waker.needs_step()
    engines.clear()
    assert engine() is None
    assert not waker.needs_step()


def test_an_engine_is_not_woken_again_at_once(start: Start) -> None:
    cache, engine = FakeCache(), FakeEngine()
    cache.has = True
    waker = start(cache, engine, wake_seconds=3600)
    assert engine.input_queue.get(timeout=WAIT_SECONDS) == WAKEUP
    waker.end_wakeup()
    while cache.asked.acquire(blocking=False):
        pass
    for _ in range(3):
        assert cache.asked.acquire(timeout=WAIT_SECONDS)
    assert engine.input_queue.empty()
    assert not waker.needs_step()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(idle.logger, "warning", lambda text, *given: lines.append(text % given))
    return lines


def test_a_failure_is_reported_once_and_the_thread_continues(start: Start, warnings: list[str]) -> None:
    cache, engine = FakeCache(), FakeEngine()
    real, failures = cache.has_removals, iter(range(3))

    def fails() -> bool:
        if next(failures, None) is not None:
            raise OSError("no memory")
        return real()

    cache.has_removals = fails  # type: ignore[method-assign]
    cache.has = True
    start(cache, engine)
    assert engine.input_queue.get(timeout=WAIT_SECONDS) == WAKEUP
    assert len(warnings) == 1
    assert "no memory" in warnings[0]


def test_a_missing_engine_is_reported_once(start: Start, warnings: list[str]) -> None:
    cache = FakeCache()
    cache.has = True
    start(cache, None)
    for _ in range(4):
        assert cache.asked.acquire(timeout=WAIT_SECONDS)
    assert len(warnings) == 1
    assert "found no engine" in warnings[0]


def connected(manager: Any) -> Any:
    return SimpleNamespace(connector_scheduler=SimpleNamespace(manager=manager))


def test_the_engine_of_a_manager_is_found_by_the_thread_that_fills_its_queue() -> None:
    ends = threading.Event()

    class Fills(EngineCoreProc):  # type: ignore[misc]
        def process_input_sockets(self, *arguments: Any) -> None:
            ends.wait()

    managers, threads, cores = [object(), object(), object()], [], []
    several = SimpleNamespace(_connectors=[SimpleNamespace(), connected(managers[2])])
    for connector in (connected(managers[0]), connected(managers[1]), several, None):
        core = Fills.__new__(Fills)
        core.input_queue = queue.Queue()
        core.scheduler = SimpleNamespace(connector=connector)
        cores.append(core)
        threads.append(threading.Thread(target=core.process_input_sockets))
    assert idle.find_engine(managers[0]) is None
    for thread in threads:
        thread.start()
    try:
        for core, manager in zip(cores, managers, strict=False):
            assert idle.find_engine(manager) is core
        assert idle.find_engine(object()) is None
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    assert idle.find_engine(managers[0]) is None


def test_only_tiers_that_find_removals_are_watched() -> None:
    bucket = {"type": "s3", "bucket": "records"}
    redis = {"type": "redis", "url": "redis://127.0.0.1:6379/0"}
    directory = {"type": "fs", "root_dir": "/nowhere", "max_bytes": "1GiB"}

    def watched(*entries: dict[str, Any], events: bool = True) -> tuple[bool, list[bool]]:
        spec = SimpleNamespace(
            kv_events_config=SimpleNamespace(enable_kv_cache_events=events),
            _options=SimpleNamespace(secondary_tiers=[parse_tier(entry) for entry in entries]),
        )
        tiers: list[Any] = [SimpleNamespace(watch_removals=False) for _ in entries]
        any_watches = KVOffloadSpec._watch_removals(spec, tiers, None)  # type: ignore[arg-type]
        return any_watches, [tier.watch_removals for tier in tiers]

    assert watched(bucket) == (False, [False])
    assert watched(bucket, directory, redis) == (True, [False, True, True])
    assert watched(directory, events=False) == (False, [False])
    assert watched({**directory, "enable_kv_events": False}) == (False, [False])


def test_vllm_fills_the_queue_of_its_engine_on_a_thread_with_a_method_of_the_engine() -> None:
    names = inspect.unwrap(EngineCoreProc.__init__).__code__.co_names
    assert "process_input_sockets" in names
    assert "Thread" in names
    assert "input_queue" in names


def test_vllms_engine_reports_whether_it_is_paused_or_sleeps() -> None:
    assert EngineCoreProc.is_sleeping.__code__.co_argcount == 1
    assert {"is_scheduler_paused", "is_sleeping"} <= set(EngineCoreProc.is_sleeping.__code__.co_names)
    engine = EngineCoreProc.__new__(EngineCoreProc)
    assert weakref.ref(engine)() is engine
