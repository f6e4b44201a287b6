# SPDX-License-Identifier: Apache-2.0
"""Run by test_contract.py under each vLLM release: an idle engine is woken to publish removals."""

import inspect
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import adapter
import pytest

adapter.use_specs()

from kv_offload.specs import idle  # noqa: E402
from vllm.v1.engine import EngineCoreRequestType  # noqa: E402
from vllm.v1.engine.core import EngineCoreProc  # noqa: E402

WAIT_SECONDS = 240


class News:
    """A cache that has removals when a test says so."""

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

    def make(news: News, found: Any) -> idle.EngineWaker:
        started.append(idle.EngineWaker(news, lambda: found, poll_seconds=0.001))  # type: ignore[arg-type]
        return started[-1]

    yield make
    for one in started:
        one.stop()


def test_removals_wake_the_engine_until_its_step_has_taken_them(start: Start) -> None:
    news, woken = News(), FakeEngine()
    waker = start(news, woken)
    assert news.asked.acquire(timeout=WAIT_SECONDS)
    assert woken.input_queue.empty()
    assert not waker.needs_step()
    news.has = True
    assert woken.input_queue.get(timeout=WAIT_SECONDS) == WAKEUP
    assert waker.needs_step()
    assert woken.input_queue.empty(), "one message until the step"
    waker.taken()
    assert woken.input_queue.get(timeout=WAIT_SECONDS) == WAKEUP, "more removals than one step takes"
    news.has = False
    waker.taken()
    assert not waker.needs_step()


def test_a_queue_with_a_message_gets_no_second_one(start: Start) -> None:
    news, busy = News(), FakeEngine()
    busy.input_queue.put("request")
    news.has = True
    waker = start(news, busy)
    while not waker.needs_step():
        assert news.asked.acquire(timeout=WAIT_SECONDS)
    waker.taken()
    while not waker.needs_step():
        assert news.asked.acquire(timeout=WAIT_SECONDS)
    assert busy.input_queue.qsize() == 1


def test_an_engine_that_sleeps_needs_no_step_until_it_wakes_up(start: Start) -> None:
    news, engine = News(), FakeEngine()
    news.has = True
    waker = start(news, engine)
    assert engine.input_queue.get(timeout=WAIT_SECONDS) == WAKEUP
    assert waker.needs_step()
    engine.sleeping = True
    assert not waker.needs_step(), "it was put to sleep after the wake-up"
    engine.sleeping = False
    assert waker.needs_step()


def test_without_an_engine_no_step_is_needed(start: Start) -> None:
    news = News()
    news.has = True
    waker = start(news, None)
    for _ in range(3):
        assert news.asked.acquire(timeout=WAIT_SECONDS)
    assert not waker.needs_step()


def test_the_thread_ends_with_the_cache(start: Start) -> None:
    news = News()
    waker = start(news, FakeEngine())
    assert news.asked.acquire(timeout=WAIT_SECONDS)
    del news
    waker._thread.join(WAIT_SECONDS)
    assert not waker._thread.is_alive()


def test_the_waker_does_not_keep_its_engine_alive() -> None:
    news, engines = News(), [FakeEngine()]
    news.has = True
    waker = idle.EngineWaker(news, lambda: engines[0], poll_seconds=0.001)  # type: ignore[arg-type]
    engine = weakref.ref(engines[0])
    assert engines[0].input_queue.get(timeout=WAIT_SECONDS) == WAKEUP
    waker.stop()  # its thread holds the engine while it wakes it
    assert waker.needs_step()
    engines.clear()
    assert engine() is None
    assert not waker.needs_step()


def test_the_engine_is_found_by_the_thread_that_fills_its_queue() -> None:
    assert idle.find_engine() is None
    core = EngineCoreProc.__new__(EngineCoreProc)
    core.input_queue = queue.Queue()
    ends = threading.Event()

    class Fills(EngineCoreProc):  # type: ignore[misc]
        def process_input_sockets(self, *arguments: Any) -> None:
            ends.wait()

    core.__class__ = Fills
    thread = threading.Thread(target=core.process_input_sockets)
    thread.start()
    try:
        assert idle.find_engine() is core
    finally:
        ends.set()
        thread.join()
    assert idle.find_engine() is None


def test_vllm_fills_the_queue_of_its_engine_on_a_thread_with_a_method_of_the_engine() -> None:
    names = inspect.unwrap(EngineCoreProc.__init__).__code__.co_names
    assert "process_input_sockets" in names
    assert "Thread" in names
    assert "input_queue" in names


def test_vllms_engine_says_whether_it_is_paused_or_sleeps() -> None:
    assert EngineCoreProc.is_sleeping.__code__.co_argcount == 1
    assert {"is_scheduler_paused", "is_sleeping"} <= set(EngineCoreProc.is_sleeping.__code__.co_names)
    engine = EngineCoreProc.__new__(EngineCoreProc)
    assert weakref.ref(engine)() is engine
