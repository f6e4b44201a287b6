# SPDX-License-Identifier: Apache-2.0
"""The wait between vLLM's processes while records are in flight: vLLM's own loop, with our sleep."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from adapter import use_specs

use_specs()

from kv_offload.specs import compat  # noqa: E402
from kv_offload.specs.message_wait import (  # noqa: E402
    POLL_SECONDS,
    FetchAwareWait,
    wait_for_messages,
)


class Region:
    fetching = False


@pytest.fixture
def region() -> Any:
    return Region()


@pytest.fixture
def queues() -> Iterator[Any]:
    """vLLM's module, with a counter for its own spinning."""
    module = compat.message_queues()
    own, module.spun = module.sched_yield, 0

    def spin() -> None:
        module.spun += 1

    module.sched_yield = spin
    yield module
    module.sched_yield = own
    del module.spun


def wait_once(queues: Any) -> None:
    """Waits as a rank does that has just received a message."""
    condition = queues.SpinCondition.__new__(queues.SpinCondition)
    condition.is_reader, condition.busy_loop_s, condition.last_read = True, 1e9, time.monotonic()
    condition.wait()


def test_vllm_spins_by_the_function_that_is_replaced(queues: Any) -> None:
    wait_once(queues)
    assert queues.spun == 1


def test_a_rank_sleeps_while_a_request_waits_for_records_and_spins_otherwise(
    region: Any, queues: Any
) -> None:
    slept: list[float] = []
    wait = FetchAwareWait(region, queues, slept.append)
    wait_once(queues)
    assert (queues.spun, slept) == (1, [])
    region.fetching = True
    wait_once(queues)
    wait_once(queues)
    assert (queues.spun, slept) == (1, [POLL_SECONDS] * 2)
    region.fetching = False
    wait_once(queues)
    assert (queues.spun, len(slept)) == (2, 2)
    region.fetching = True
    wait.end()
    wait.end()
    wait_once(queues)
    assert (queues.spun, len(slept)) == (3, 2)


@pytest.mark.parametrize(
    ("how", "copier", "sleeps"),
    [
        ("auto", "host", True),
        ("auto", "cuda", False),
        ("sleep", "cuda", True),
        ("spin", "host", False),
    ],
)
def test_auto_sleeps_where_vllm_computes_on_the_cores(
    region: Any, queues: Any, how: str, copier: str, sleeps: bool
) -> None:
    own = queues.sched_yield
    undo = wait_for_messages(how, copier, region, region)
    assert isinstance(queues.sched_yield, FetchAwareWait) is sleeps
    undo()
    assert queues.sched_yield is own


def test_two_engines_in_one_process_may_end_in_any_order(region: Any, queues: Any) -> None:
    slept: list[float] = []
    region.fetching = True
    first = FetchAwareWait(region, queues, slept.append).end
    other: Any = Region()
    second = wait_for_messages("sleep", "host", other, other)
    first()
    wait_once(queues)
    assert queues.spun == 1
    second()
    wait_once(queues)
    assert (queues.spun, slept) == (2, [])


def test_an_unknown_wait_loop_of_vllm_is_not_replaced(
    region: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "message_queues", lambda: None)
    wait_for_messages("sleep", "host", region, region)()
    assert "wait_while_loading has no effect" in caplog.text


def test_spinning_before_each_poll_is_logged(
    region: Any, queues: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(queues, "SPINLOOP_EXT_ENABLED", True)
    wait_for_messages("sleep", "host", region, region)()
    assert "VLLM_USE_SPINLOOP_EXT=1" in caplog.text
