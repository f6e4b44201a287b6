# SPDX-License-Identifier: Apache-2.0
"""Run by test_contract.py under each vLLM release: hints about sessions, from a request to the core."""

import threading
import time
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import adapter
import pytest

adapter.use_specs()

from kv_offload.specs.hints import HintExecutor  # noqa: E402

from contract.check_manager import HIT, Engine  # noqa: E402
from contract.parts import context, keys  # noqa: E402
from kv_offload.hints import ACTION_TYPES  # noqa: E402

NEVER = float("inf")
WAIT_SECONDS = 240


def hints(*actions: Any, **more: Any) -> dict[str, Any]:
    return {"kv_offload_hints": {"version": 1, "actions": list(actions), **more}}


def outcomes(engine: Engine) -> dict[tuple[str, str], float]:
    value = engine.manager._metrics.value
    labels = ("accepted", "clipped", "rejected", "missing")
    counted = {
        (name, each): value("kv_offload_hints_total", (name, each))
        for name in (*ACTION_TYPES, "unknown")
        for each in labels
    }
    return {key: number for key, number in counted.items() if number}


class Sessions:
    """Turns of sessions on one engine: each stores its prompt, as vLLM does."""

    def __init__(self, **options: Any) -> None:
        self.engine = Engine(**options)
        self.requests = 0

    def begin(self, prompt: list[bytes], params: dict[str, Any] | None, **more: Any) -> Any:
        self.requests += 1
        request = context(f"r{self.requests}", params, **more)
        self.engine.manager.on_new_request(request)
        for index, chunk in enumerate(prompt):
            request.set_offload_key_position(chunk, 16 * (index + 1))
        self.engine.lookup(prompt[:1], request)
        return request

    def turn(self, prompt: list[bytes], params: dict[str, Any] | None, **more: Any) -> list[dict[str, str]]:
        request = self.begin(prompt, params, **more)
        self.store(prompt, request)
        return self.end(request)

    def store(self, prompt: list[bytes], request: Any) -> None:
        for first in range(0, len(prompt), 8):  # the device has 8 blocks
            output = self.engine.offer(prompt[first : first + 8], request)
            if output.keys_to_store:
                self.engine.copy(output, list(range(len(output.keys_to_store))))
                self.engine.manager.complete_store(set(output.keys_to_store), request)

    def end(self, request: Any) -> list[dict[str, str]]:
        state = self.engine.manager._live[request.req_id]
        self.engine.manager.on_request_finished(request)
        self.engine.end_step()
        return [] if state.hints is None else self.engine.manager._session_hints.report(state.hints)

    def evict(self, prompt: list[bytes]) -> None:
        """Stores other prompts until no chunk of this one is in host memory. It is on the tier by then."""
        until = time.monotonic() + WAIT_SECONDS
        self.wait_while(lambda: self.engine.manager._cache.tier_stats(0)["queued_writes"] > 0)
        for number in count(1000, 8):
            if self.absent(prompt) == prompt:
                return
            assert time.monotonic() < until
            self.turn(keys(*range(number, number + 8)), None)

    def absent(self, prompt: list[bytes]) -> list[bytes]:
        return list(self.engine.manager._cache.absent(prompt))

    def wait_while(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + WAIT_SECONDS
        pause = threading.Event()
        while condition():
            assert time.monotonic() < until
            self.engine.end_step()
            pause.wait(0.005)

    @property
    def known(self) -> int:
        return int(self.engine.manager._cache.stats()["sessions"])


@pytest.fixture
def sessions() -> Any:
    made = Sessions()
    yield made
    made.engine.stop()


def test_a_turn_may_say_when_its_session_returns(sessions: Sessions) -> None:
    given = hints({"type": "resume_in", "seconds": 20, "id": "x"}, session="a")
    assert sessions.turn(keys(1, 2), given) == [{"type": "resume_in", "id": "x", "outcome": "accepted"}]
    assert sessions.known == 1
    assert outcomes(sessions.engine) == {("resume_in", "accepted"): 1}


def test_a_request_carries_the_hint_about_its_own_return(sessions: Any) -> None:
    def carried(*actions: Any, **more: Any) -> float:
        request = sessions.begin(keys(1, 2), hints(*actions, session="a", **more))
        state = sessions.engine.manager._live[request.req_id]
        sessions.end(request)
        return float(state.hints.returns_in)

    assert carried({"type": "resume_in", "seconds": 20}) == 20
    assert carried({"type": "resume_at", "time": 0}) == 0
    assert carried({"type": "resume_in", "seconds": 20}, {"type": "release"}) == NEVER
    assert carried({"type": "release"}, branch="b") == 0, "its session stays"
    assert carried({"type": "resume_in", "seconds": 20, "target": {"session": "b"}}) == 0
    assert carried() == 0


def test_a_session_without_hints_is_remembered(sessions: Sessions) -> None:
    assert sessions.turn(keys(1, 2), hints(session="a")) == []
    assert sessions.known == 1
    assert sessions.turn(keys(1), hints({"type": "release", "target": {"session": "a"}})) == [
        {"type": "release", "outcome": "accepted"}
    ]
    assert sessions.known == 0


def test_a_name_selects_no_session_of_another_first_chunk_or_client(sessions: Sessions) -> None:
    """The first chunk's key depends on the cache_salt, so a tenant cannot name another tenant's session."""
    sessions.turn(keys(1, 2), hints(session="a", client="c"))
    release = {"type": "release", "target": {"session": "a"}}
    for prompt, more in ((keys(9, 2), {"client": "c"}), (keys(1), {}), (keys(1), {"client": "d"})):
        (outcome,) = sessions.turn(prompt, hints(release, **more))
        assert outcome["outcome"] == "missing", (prompt, more)
    (outcome,) = sessions.turn([], hints(release, client="c"))
    assert (outcome["outcome"], "no whole chunk" in outcome["reason"]) == ("missing", True)
    assert sessions.known == 1
    (outcome,) = sessions.turn(keys(1), hints(release, client="c"))
    assert outcome["outcome"] == "accepted"


def test_names_cannot_be_joined_into_another_name(sessions: Sessions) -> None:
    sessions.turn(keys(1), hints(session="ab", client="c"))
    for client, session in (("ca", "b"), ("c", "a"), ("", "cab")):
        more = {"client": client} if client else {}
        release = {"type": "release", "target": {"session": session}}
        (outcome,) = sessions.turn(keys(1), hints(release, **more))
        assert outcome["outcome"] == "missing"


def test_a_request_with_a_hint_about_a_session_uses_its_chunks_on_its_behalf(sessions: Sessions) -> None:
    """The prompt of the request may be all of the session's prompt: it remains the session's own."""
    sessions.turn(keys(1, 2), hints(session="a"))
    request = sessions.begin(
        keys(1, 2), hints({"type": "resume_in", "seconds": 9, "target": {"session": "a"}})
    )
    sessions.store(keys(1, 2), request)
    assert sessions.end(request) == [{"type": "resume_in", "outcome": "accepted"}]
    sessions.turn(keys(1, 2), hints(session="b"))  # from now on they are shared
    release = {"type": "release", "target": {"session": "a"}}
    (outcome,) = sessions.turn(keys(1), hints(release))
    assert outcome["outcome"] == "missing"


def test_the_report_of_a_live_request_has_its_hints(sessions: Sessions) -> None:
    params = hints({"type": "resume_in", "seconds": 1}, {"type": "resume_in"}, session="a")
    request = sessions.begin(keys(1), params)
    assert sessions.engine.manager.report_of(request.req_id)["hints"] == [
        {"type": "resume_in", "outcome": "rejected", "reason": "seconds is required"},
        {"type": "resume_in", "outcome": "pending"},
    ]
    plain = sessions.begin(keys(1), None)
    assert "hints" not in sessions.engine.manager.report_of(plain.req_id)


def test_a_request_that_a_reset_ended_executes_its_hints_once(sessions: Sessions) -> None:
    request = sessions.begin(keys(1), hints({"type": "resume_in", "seconds": 1}, session="a"))
    sessions.store(keys(1), request)
    sessions.end(request)
    sessions.engine.manager.reset_cache()
    sessions.engine.lookup(keys(1), request)  # vLLM continues it
    sessions.end(request)
    assert outcomes(sessions.engine) == {("resume_in", "accepted"): 1}


def test_a_time_in_the_past_or_far_away_is_clipped() -> None:
    given: list[Any] = []

    class Cache:
        def end_turn(self, handle: int, session: bytes, client: int, orders: list[Any]) -> list[str]:
            given.extend(orders)
            return ["accepted"] * len(orders)

    executor = HintExecutor(Cache(), lambda *_: None, wall_clock=lambda: 1000.0)  # type: ignore[arg-type]
    times = [{"type": "resume_at", "time": time} for time in (900, 1030, 1e300)]
    long = [{"type": "resume_in", "seconds": 1e300}, {"type": "pin", "seconds": 601}]
    read = executor.read(hints(*times, *long, session="a"), None)
    assert read is not None
    assert read.family != 0
    executor.finish(read, keys(1)[0], 0)
    assert [order[0] for order in given] == ["resume"] * 4 + ["pin"]
    assert [order[3] for order in given] == [0, 30, 7 * 86_400, 7 * 86_400, 600]
    assert [each.get("reason", "") for each in executor.report(read)][::2] == [
        "0 s instead of -100 s",
        "604800 s instead of 1e+300 s",
        "600 s instead of 601 s",
    ]
    assert [each["outcome"] for each in executor.report(read)] == [
        "clipped",
        "accepted",
        "clipped",
        "clipped",
        "clipped",
    ]


def test_a_supersede_needs_a_session(sessions: Sessions) -> None:
    (outcome,) = sessions.turn(keys(1), hints({"type": "supersede"}))
    assert outcome == {"type": "supersede", "outcome": "rejected", "reason": "needs a session"}
    sessions.turn(keys(1, 2), hints(session="a"))
    (outcome,) = sessions.turn(keys(1, 3), hints({"type": "supersede"}, session="a"))
    assert outcome["outcome"] == "accepted"


def test_a_branch_is_a_session_of_its_own(sessions: Sessions) -> None:
    sessions.turn(keys(1, 2), hints(session="a"))
    sessions.turn(keys(1, 2, 3), hints(session="a", branch="b"))
    assert sessions.known == 2
    release = {"type": "release", "target": {"session": "a", "branch": "b"}}
    assert sessions.turn(keys(1), hints(release, session="a"))[0]["outcome"] == "accepted"
    assert sessions.known == 1


def test_a_prompt_may_be_retained_and_pinned_within_the_limits(sessions: Sessions) -> None:
    stats = sessions.engine.manager._cache.stats
    given = hints(
        {"type": "retain", "seconds": 60},
        {"type": "pin", "seconds": 60, "bytes": 4096},
        session="a",
    )
    assert [each["outcome"] for each in sessions.turn(keys(1, 2), given)] == ["accepted", "accepted"]
    assert stats()["hint_pinned_bytes"] == 4096
    # An eighth of 1 MiB may be pinned, half of it by one client: 16 chunks.
    long = keys(*range(100, 124))
    (outcome,) = sessions.turn(long, hints({"type": "pin", "seconds": 3600}, session="b"))
    assert outcome["outcome"] == "clipped"
    assert stats()["hint_pinned_bytes"] == 16 * 4096
    (outcome,) = sessions.turn(keys(7), hints({"type": "pin", "seconds": 60}, session="c"))
    assert outcome["outcome"] == "rejected"
    assert outcome["reason"] == "over the limit of pinned bytes, or of chunks per request"
    release = {"type": "release", "target": {"session": "b"}}
    sessions.turn(long[:1], hints(release))
    assert stats()["hint_pinned_bytes"] == 4096


def test_a_prompt_is_retained_or_pinned_only_for_a_session(sessions: Sessions) -> None:
    given = hints({"type": "retain", "seconds": 60}, {"type": "pin", "seconds": 60})
    assert [each["reason"] for each in sessions.turn(keys(1), given)] == ["needs a session"] * 2


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("by", ["resume_in", "prefetch"])
def test_a_session_is_in_host_memory_before_it_returns(by: str, tmp_path: Any) -> None:
    tier = {"type": "fs", "root_dir": str(tmp_path / "root"), "max_bytes": "16MiB"}
    made = Sessions(secondary_tiers=[tier], model_id="m")
    try:
        prompt = keys(1, 2, 3)
        running = made.begin([], None)
        returns = [{"type": "resume_in", "seconds": 60}] if by == "resume_in" else []
        made.turn(prompt, hints(*returns, session="a"))
        made.evict(prompt)
        made.end(running)  # no request is left
        if by == "prefetch":
            given = hints({"type": "prefetch", "target": {"session": "a"}})
            assert made.turn(prompt[:1], given) == [{"type": "prefetch", "outcome": "accepted"}]
        # The short request stored the first chunk.
        read = 4096 * (3 if by == "resume_in" else 2)
        value = made.engine.manager._metrics.value
        made.wait_while(lambda: value("kv_offload_read_bytes_total", ("fs",)) < read)
        returned = made.begin([], hints(session="a"))
        assert made.engine.lookup(prompt, returned) == [HIT] * 3
        loaded = made.engine.manager.prepare_load(prompt, returned)
        made.engine.copy(loaded, [5, 6, 7], store=False)
        made.engine.manager.complete_load(prompt, returned)
        made.engine.end_step()
        assert value("kv_offload_prefetched_bytes_total", ("used",)) == read
    finally:
        made.engine.stop()


def test_a_prefetch_of_an_unknown_session_is_missing(sessions: Sessions) -> None:
    (outcome,) = sessions.turn(keys(1), hints({"type": "prefetch", "target": {"session": "a"}}))
    assert outcome == {
        "type": "prefetch",
        "outcome": "missing",
        "reason": "the target is not known, or has no chunk of its own in host memory",
    }


@pytest.mark.parametrize("allowed", ["ignore", ["priority"]])
def test_the_setting_ignores_hints_about_sessions(allowed: Any) -> None:
    made = Sessions(request_hints=allowed)
    try:
        given = hints({"type": "resume_in", "seconds": 1}, session="a")
        found = made.turn(keys(1), given)
        if allowed == "ignore":
            assert found == []
        else:
            assert [each["outcome"] for each in found] == ["rejected"]
        assert outcomes(made.engine).get(("resume_in", "accepted")) is None
    finally:
        made.engine.stop()


def test_the_setting_allows_single_types() -> None:
    made = Sessions(request_hints=["resume_in"])
    try:
        given = hints({"type": "resume_in", "seconds": 1}, {"type": "release"}, session="a")
        found = made.turn(keys(1), given | {"kv_offload_skip_store": True})
        assert {each["type"]: each["outcome"] for each in found} == {
            "resume_in": "accepted",
            "release": "rejected",
        }
    finally:
        made.engine.stop()


def test_a_request_without_hints_costs_the_core_nothing(sessions: Sessions) -> None:
    request = sessions.begin(keys(1), {"kv_offload_priority": 1})
    assert sessions.engine.manager._live[request.req_id].hints is None
    assert sessions.end(request) == []
    assert sessions.known == 0


# ---- vLLM's envelope


def envelope(*actions: tuple[str, str, Any]) -> Any:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    made = [
        KvHintAction(action_id=f"a{n}", action_type=name, action_version=version, payload=payload)
        for n, (name, version, payload) in enumerate(actions)
    ]
    return KvHintsEnvelope(protocol_version="1", message_id="m", actions=made)


def test_the_envelope_of_vllm_carries_the_same_hints(sessions: Sessions) -> None:
    given = envelope(
        ("kv_offload.session", "1", {"session": "a"}),
        ("kv.fetch", "7", {"of": "another component"}),
        ("kv_offload.resume_in", "1", {"seconds": 5}),
        ("kv_offload.resume_in", "2", {"seconds": 5}),
        ("kv_offload.nothing", "1", {}),
    )
    found = sessions.turn(keys(1, 2), None, kv_hints=given)
    assert [(each["type"], each.get("id"), each["outcome"]) for each in found] == [
        ("resume_in", "a3", "rejected"),
        ("unknown", "a4", "rejected"),
        ("resume_in", "a2", "accepted"),
    ]
    assert sessions.known == 1


def test_an_envelope_for_other_components_changes_nothing(sessions: Sessions) -> None:
    assert sessions.turn(keys(1), None, kv_hints=envelope(("kv.fetch", "1", {}))) == []
    assert outcomes(sessions.engine) == {}


def test_both_ways_may_be_used_at_once(sessions: Sessions) -> None:
    given = envelope(("kv_offload.resume_in", "1", {"seconds": 5}))
    found = sessions.turn(keys(1), hints({"type": "release"}, session="a"), kv_hints=given)
    assert sorted(each["type"] for each in found) == ["release", "resume_in"]
    assert {each["outcome"] for each in found} == {"accepted"}


def test_an_object_that_is_no_envelope_is_no_error(sessions: Sessions) -> None:
    read = sessions.engine.manager._session_hints.read
    for odd in (SimpleNamespace(), SimpleNamespace(actions=7), SimpleNamespace(actions=[None, 3])):
        assert read(None, odd) is None
