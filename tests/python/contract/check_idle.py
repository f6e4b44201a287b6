# SPDX-License-Identifier: Apache-2.0
"""Run by test_contract.py under each vLLM release: an idle engine steps for events, through vLLM's loop."""

import inspect
import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import adapter
import pytest

adapter.use_specs()

from kv_offload.specs import idle  # noqa: E402
from vllm.v1.engine import EngineCoreRequestType  # noqa: E402
from vllm.v1.engine.core import EngineCoreProc  # noqa: E402

WAIT_SECONDS = 240


class News:
    """A cache that has news when a test says so."""

    def __init__(self) -> None:
        self.has = False
        self.asked = threading.Semaphore(0)

    def has_tier_news(self) -> bool:
        self.asked.release()
        return self.has

    def until_asked_again(self) -> None:
        """Waits for two questions: the first may have begun before the call."""
        while self.asked.acquire(blocking=False):
            pass
        for _ in range(2):
            assert self.asked.acquire(timeout=WAIT_SECONDS)


def engine(paused: bool = False) -> Any:
    return SimpleNamespace(input_queue=queue.Queue(), is_scheduler_paused=lambda: paused)


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


def test_news_wake_the_engine_once_until_its_step_has_taken_the_events(start: Start) -> None:
    news, woken = News(), engine()
    waker = start(news, woken)
    news.until_asked_again()
    assert woken.input_queue.empty()
    assert not waker.due
    news.has = True
    assert woken.input_queue.get(timeout=WAIT_SECONDS) == (EngineCoreRequestType.WAKEUP, None)
    assert waker.due
    waker.taken()
    assert not waker.due
    assert woken.input_queue.get(timeout=WAIT_SECONDS)[0] is EngineCoreRequestType.WAKEUP


def test_a_queue_with_a_message_gets_no_second_one(start: Start) -> None:
    news, busy = News(), engine()
    busy.input_queue.put("request")
    news.has = True
    waker = start(news, busy)
    news.until_asked_again()
    waker.taken()
    news.until_asked_again()
    assert busy.input_queue.qsize() == 1
    assert waker.due


@pytest.mark.parametrize("found", [None, engine(paused=True)])
def test_without_an_engine_and_while_it_is_paused_nothing_is_due(start: Start, found: Any) -> None:
    news = News()
    news.has = True
    waker = start(news, found)
    news.until_asked_again()
    assert not waker.due
    assert found is None or found.input_queue.empty()


def test_the_thread_ends_with_the_cache(start: Start) -> None:
    news = News()
    waker = start(news, engine())
    news.until_asked_again()
    del news
    waker._thread.join(WAIT_SECONDS)
    assert not waker._thread.is_alive()


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
