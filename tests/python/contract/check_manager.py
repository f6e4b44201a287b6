# SPDX-License-Identifier: Apache-2.0
"""Run by test_contract.py under each vLLM release: every method and state of the manager.

Chunks become hits as in production: a worker's job reports its ticket.
"""

import inspect
import pickle
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import adapter
import numpy as np
import pytest

adapter.use_specs()

from kv_offload.specs import KVOffloadSpec, compat  # noqa: E402
from kv_offload.specs.load_spec import RowLoadStoreSpec  # noqa: E402
from kv_offload.specs.manager import KVOffloadManager  # noqa: E402
from kv_offload.specs.request import HintReader  # noqa: E402
from vllm.v1.kv_offload import base  # noqa: E402

from contract.parts import blocks, context, key, keys, kv_caches, offloading_config  # noqa: E402

HIT, MISS = base.LookupResult.HIT, base.LookupResult.MISS
PENDING, RETRY = base.LookupResult.HIT_PENDING, base.LookupResult.RETRY
ROWS = 1 << 20 >> 12  # rows of one 4 KiB block each


class Engine:
    """Manager and worker of one engine, with helper methods."""

    def __init__(self, **options: Any) -> None:
        self.config = offloading_config(**options)
        self.caches = kv_caches(groups=options.get("groups", 1))
        self.worker = KVOffloadSpec(self.config).get_worker(self.caches)
        self.manager = KVOffloadSpec(self.config).get_manager()
        self.jobs = 0

    def request(self, name: str = "r", params: dict[str, Any] | None = None, **more: Any) -> Any:
        made = context(name, params, **more)
        self.manager.on_new_request(made)
        return made

    def offer(self, offered: list[bytes], request: Any) -> Any:
        return self.manager.prepare_store(offered, request)

    def copy(self, output: Any, block_ids: list[int], store: bool = True) -> None:
        self.jobs += 1
        rows = pickle.loads(pickle.dumps(output.store_spec if store else output))
        sizes = [len(block_ids)] + [0] * (len(self.config.groups) - 1)
        spec = blocks(block_ids, sizes, [0] * len(sizes))
        if store:
            assert self.worker.submit_store(self.jobs, spec, rows) is True
        else:
            assert self.worker.submit_load(self.jobs, rows, spec) is True
        self.worker.wait({self.jobs})
        assert [result.success for result in self.worker.get_finished()] == [True]

    def store(self, offered: list[bytes], request: Any) -> Any:
        """Stores chunks until they are hits; they occupy blocks 0, 1, ..."""
        output = self.offer(offered, request)
        self.copy(output, list(range(len(output.keys_to_store))))
        self.manager.complete_store(set(output.keys_to_store), request)
        return output

    def end_step(self, new: Sequence[str] = (), preempted: Sequence[str] = ()) -> None:
        self.manager.on_schedule_end(base.ScheduleEndContext(new_req_ids=new, preempted_req_ids=preempted))

    def lookup(self, asked: list[bytes], request: Any) -> list[Any]:
        return [self.manager.lookup(one, request) for one in asked]

    def stop(self) -> None:
        self.worker.shutdown()
        self.manager.shutdown()


@pytest.fixture
def engine() -> Any:
    made = Engine()
    yield made
    made.stop()


def test_overridden_methods_of_the_manager_keep_vllms_parameters() -> None:
    assert issubclass(KVOffloadManager, base.OffloadingManager)
    for name, ours in vars(KVOffloadManager).items():
        theirs = getattr(base.OffloadingManager, name, None)
        if name.startswith("_") or not callable(theirs):
            continue
        expected = list(inspect.signature(theirs).parameters)
        assert list(inspect.signature(ours).parameters) == expected, name


def test_a_chunk_is_missed_then_stored_then_hit(engine: Engine) -> None:
    request = engine.request()
    assert engine.lookup(keys(1, 2), request) == [MISS, MISS]
    output = engine.offer(keys(1, 2), request)
    assert isinstance(output, base.PrepareStoreOutput)
    assert output.keys_to_store == keys(1, 2)
    assert list(output.evicted_keys) == []
    assert engine.lookup(keys(1, 2), request) == [PENDING, PENDING]
    engine.copy(output, [0, 1])
    engine.manager.complete_store(set(output.keys_to_store), request)
    assert engine.lookup(keys(1, 2, 3), request) == [HIT, HIT, MISS]


def test_lookup_is_the_core_builtin_and_the_class_has_a_python_version(engine: Engine) -> None:
    request = engine.request()
    engine.store(keys(1), request)
    assert engine.manager.lookup(key(1), request) is HIT
    assert KVOffloadManager.lookup(engine.manager, key(1), request) is HIT
    assert "lookup" in vars(engine.manager)


def test_a_known_chunk_is_not_taken_twice(engine: Engine) -> None:
    first, second = engine.request("a"), engine.request("b")
    output = engine.offer(keys(1, 2), first)
    again = engine.offer(keys(1, 2, 3), second)
    assert again.keys_to_store == keys(3)
    engine.copy(output, [0, 1])
    engine.manager.complete_store(set(output.keys_to_store), first)
    assert engine.offer(keys(1, 2), second).keys_to_store == []


def test_an_offer_without_new_chunks_returns_an_empty_result_not_none(engine: Engine) -> None:
    request = engine.request()
    for offered in ([], keys(1)):
        engine.store(offered, request) if offered else None
        output = engine.offer(offered, request)
        assert output is not None
        assert output.keys_to_store == []
        assert isinstance(output.store_spec, RowLoadStoreSpec)


def test_the_spec_of_a_job_is_small_and_survives_pickling(engine: Engine) -> None:
    output = engine.offer(keys(1, 2, 3), engine.request())
    text = pickle.dumps(output.store_spec)
    assert len(text) < 1000
    read = pickle.loads(text)
    assert isinstance(read, base.LoadStoreSpec)
    assert read.ticket == output.store_spec.ticket != 0
    assert read.rows.dtype == np.uint32
    assert read.rows.tolist() == output.store_spec.rows.tolist()
    assert read.group_rows == (3,)


def test_loaded_bytes_are_the_stored_ones(engine: Engine) -> None:
    request = engine.request()
    engine.store(keys(1, 2, 3), request)
    tensor = engine.caches.tensors[0].tensor
    assert engine.lookup(keys(1, 2, 3), request) == [HIT] * 3
    spec = engine.manager.prepare_load(keys(1, 2, 3), request)
    engine.copy(spec, [5, 6, 7], store=False)
    engine.manager.complete_load(set(keys(1, 2, 3)), request)
    assert [int(tensor[block, 0]) for block in (5, 6, 7)] == [0, 1, 2]
    assert (tensor[5:8] == tensor[5:8, :1]).all()


def test_an_empty_load_is_an_ordinary_job(engine: Engine) -> None:
    request = engine.request()
    spec = engine.manager.prepare_load([], request)
    assert spec.group_rows == (0,)
    engine.copy(spec, [], store=False)
    engine.manager.complete_load(set(), request)


def test_a_store_that_failed_on_a_rank_is_never_a_hit(engine: Engine) -> None:
    request = engine.request()
    output = engine.offer(keys(1, 2), request)
    engine.copy(output, [0])  # one block for two chunks, as vLLM sends chunks with null blocks
    engine.manager.complete_store(set(output.keys_to_store), request)
    assert engine.lookup(keys(1, 2), request) == [MISS, MISS]
    engine.store(keys(1, 2), request)
    assert engine.lookup(keys(1, 2), request) == [HIT, HIT]


def test_a_store_reported_as_failed_is_never_a_hit(engine: Engine) -> None:
    request = engine.request()
    output = engine.offer(keys(1), request)
    engine.copy(output, [0])
    engine.manager.complete_store(set(output.keys_to_store), request, success=False)
    assert engine.lookup(keys(1), request) == [MISS]


def test_the_least_recently_used_chunk_is_evicted() -> None:
    engine = Engine(eviction_policy="lru")
    for number in range(ROWS + 4):
        request = engine.request(f"r{number}")
        output = engine.store(keys(number), request)
        assert output.keys_to_store == keys(number)
        assert list(output.evicted_keys) == (keys(number - ROWS) if number >= ROWS else [])
        engine.manager.on_request_finished(request)
    later = engine.request("later")
    assert engine.lookup(keys(ROWS + 3), later) == [HIT]
    assert engine.lookup(keys(0), later) == [MISS]


def test_a_request_never_evicts_its_own_chunks(engine: Engine) -> None:
    """The head of a prefix is worth more than its tail."""
    request = engine.request()
    for first in range(0, ROWS, 8):
        engine.store(keys(*range(first, first + 8)), request)
    assert engine.offer(keys(ROWS), request).keys_to_store == []
    assert engine.lookup(keys(0), request) == [HIT]


def test_pinned_chunks_stay_and_the_last_chunks_that_do_not_fit_are_dropped(engine: Engine) -> None:
    request = engine.request()
    held = keys(*range(ROWS - 2))
    for part in range(0, len(held), 8):
        engine.store(held[part : part + 8], request)
    engine.lookup(held, request)
    engine.manager.prepare_load(held, request)
    output = engine.offer(keys(1000, 1001, 1002, 1003), request)
    assert output.keys_to_store == keys(1000, 1001)
    assert engine.lookup(held, request) == [HIT] * len(held)


def test_a_reused_request_id_is_a_new_request(engine: Engine) -> None:
    first = engine.request("same", {"kv_offload_skip_store": True})
    assert engine.offer(keys(1), first).keys_to_store == []
    engine.manager.on_request_finished(first)
    second = engine.request("same")
    output = engine.offer(keys(1), second)
    assert output.keys_to_store == keys(1)
    engine.manager.on_request_finished(second)
    engine.copy(output, [0])
    engine.manager.complete_store(set(output.keys_to_store), second)  # after the first request has ended
    third = engine.request("same")
    assert engine.lookup(keys(1), third) == [HIT]


def test_an_untracked_request_begins_and_ends_at_once(engine: Engine) -> None:
    before = engine.manager._cache.stats()
    for _ in range(3):
        made = engine.request("never scheduled")
        engine.manager.on_request_finished(made)
        engine.manager.on_request_finished(made)  # a second call is harmless
    assert engine.manager._cache.stats() == before


def test_valid_hints_of_a_request_are_applied_and_invalid_ones_ignored(engine: Engine) -> None:
    engine.store(keys(1), engine.request("a"))
    skipping = engine.request("b", {"kv_offload_skip_store": True})
    assert engine.lookup(keys(1), skipping) == [HIT]
    assert engine.offer(keys(2), skipping).keys_to_store == []
    forgetful = engine.request("d", {"kv_offload_skip_load": True, "kv_offload_priority": -1})
    assert engine.lookup(keys(1), forgetful) == [MISS]
    odd_hints = {"kv_offload_load_policy": 7, "kv_offload_skip_store": "no", "kv_offload_priority": 1.5}
    odd = engine.request("c", odd_hints | {"other": []})
    assert engine.lookup(keys(1), odd) == [HIT]
    assert engine.offer(keys(2), odd).keys_to_store == keys(2)


@pytest.mark.parametrize(
    ("matchers", "expected"),
    [
        ([base.TierMatcher(base.Medium.CPU, None)], HIT),
        ([base.TierMatcher(None, base.Locality.LOCAL)], HIT),
        ([base.TierMatcher(base.Medium.STORAGE, None)], MISS),
        ([base.TierMatcher(base.Medium.CPU, base.Locality.REMOTE)], MISS),
        ([], MISS),
    ],
)
def test_kv_load_tiers_selects_the_tiers_of_a_request(
    engine: Engine, matchers: list[Any], expected: Any
) -> None:
    engine.store(keys(1), engine.request("a"))
    limited = engine.request("b", load_tier_filter=base.TierFilter(tuple(matchers)))
    assert engine.lookup(keys(1), limited) == [expected]


@pytest.mark.parametrize(
    ("matchers", "allowed"),
    [
        ([(base.Medium.STORAGE, base.Locality.LOCAL)], (False, 0b10)),
        ([(base.Medium.CPU, None), (None, base.Locality.REMOTE)], (True, 0b01)),
        ([(base.Medium.STORAGE, None)], (False, compat.ALL_TIERS)),
        ([(base.Medium.CPU, None)], (True, 0)),
    ],
)
def test_kv_load_tiers_selects_tiers_by_locality(matchers: list[Any], allowed: tuple[bool, int]) -> None:
    chosen = base.TierFilter(tuple(base.TierMatcher(*matcher) for matcher in matchers))
    limited = context("a", load_tier_filter=chosen)
    assert compat.tiers_allowed(limited, ("REMOTE", "LOCAL")) == allowed


def test_the_source_tier_of_a_hit_is_reported(engine: Engine) -> None:
    request = engine.request()
    engine.store(keys(1), request)
    assert engine.lookup(keys(1), request) == [HIT]
    if compat.load_sources() is None:
        pytest.skip("vLLM 0.31 does not ask the manager")
    assert engine.manager.get_load_source(key(1), request).value == "host"


def test_a_reset_invalidates_all_chunks(engine: Engine) -> None:
    request = engine.request()
    engine.store(keys(1, 2), request)
    engine.manager.reset_cache()
    engine.manager.on_reset_flushed()
    later = engine.request("later")
    assert engine.lookup(keys(1, 2), later) == [MISS, MISS]
    engine.store(keys(1), later)
    assert engine.lookup(keys(1), later) == [HIT]


def test_a_copy_that_runs_through_a_reset_ends_in_no_hit(engine: Engine) -> None:
    request = engine.request()
    output = engine.offer(keys(1), request)
    engine.manager.reset_cache()
    engine.copy(output, [0])  # the connector drops this completion
    engine.end_step()
    later = engine.request("later")
    assert engine.lookup(keys(1), later) == [MISS]


def test_a_row_is_not_reused_before_its_copy_has_ended(engine: Engine) -> None:
    output = engine.offer(keys(*range(ROWS)), engine.request())
    assert len(output.keys_to_store) == ROWS
    engine.manager.reset_cache()
    engine.end_step()
    later = engine.request("later")
    assert engine.offer(keys(5000), later).keys_to_store == []
    engine.copy(output, [block % 8 for block in range(ROWS)])
    engine.end_step()
    assert engine.offer(keys(5000), later).keys_to_store == keys(5000)


def test_a_request_that_runs_through_a_reset_stores_nothing_until_it_is_looked_up_again(
    engine: Engine,
) -> None:
    known = engine.request("known")
    engine.lookup(keys(1), known)
    engine.manager.reset_cache()
    assert engine.offer(keys(1), known).keys_to_store == []
    assert engine.offer(keys(2), engine.request("fresh")).keys_to_store == keys(2)
    # the request was preempted, or waited: 0.33 says so only after the offers of a step
    engine.lookup(keys(1), known)
    assert engine.offer(keys(1), known).keys_to_store == keys(1)


@pytest.mark.parametrize("resumed_is_new", [False, True])
def test_a_resumed_session_stops_offloading_where_vllm_mistakes_its_blocks(
    engine: Engine, resumed_is_new: bool
) -> None:
    turned_away = compat.misplaces_session_blocks()
    assert turned_away == (not compat.has_config_info()), "0.33 has both"
    engine.manager._options = replace(engine.manager._options, resumed_is_new=resumed_is_new)
    session = engine.request("session")
    engine.end_step(new=["session"])
    engine.store(keys(1), session)
    engine.end_step(preempted=["session"])
    engine.end_step(new=["session"] if resumed_is_new else [])
    engine.store(keys(2), session)
    engine.end_step(new=["session"])
    assert engine.offer(keys(3), session).keys_to_store == ([] if turned_away else keys(3))
    assert engine.lookup(keys(1), session) == [MISS if turned_away else HIT]
    assert engine.lookup(keys(1, 2), engine.request("other")) == [HIT, HIT]


def _held(engine: Engine) -> tuple[int, int]:
    """Returns the number of waiting requests and of pinned chunks."""
    stats = engine.manager._cache.stats()
    return stats["waiting_requests"], stats["pinned_chunks"]


def test_a_request_that_runs_without_load_or_store_holds_nothing(engine: Engine) -> None:
    engine.store(keys(1), engine.request("before"))
    output = engine.offer(keys(2), engine.request("beside"))
    waits = engine.request("waits")
    assert engine.lookup(keys(1, 2), waits) == [HIT, PENDING]
    engine.end_step()
    assert _held(engine) == (1, 2), "pins must be on the hits and on the chunks being stored"
    engine.end_step(new=["waits"])
    assert _held(engine) == (0, 1)
    engine.copy(output, [0])


def test_a_wait_from_before_a_preemption_is_over(engine: Engine) -> None:
    output = engine.offer(keys(2), engine.request("beside"))
    waits = engine.request("waits")
    engine.end_step(new=["waits"])
    engine.end_step(preempted=["waits"])
    assert engine.lookup(keys(2), waits) == [PENDING]
    engine.end_step(preempted=["waits"])
    assert _held(engine)[0] == 1, "after a reset, vLLM preempts a request and looks it up in one step"
    engine.end_step()  # vLLM schedules it again without a load, and does not report it
    engine.end_step(preempted=["waits", "unknown"])
    assert _held(engine)[0] == 0
    engine.copy(output, [0])


def test_the_misses_of_a_preempted_request_count_with_its_new_length(engine: Engine) -> None:
    request = engine.request("r")
    _positions(request, keys(1, 2))
    assert engine.lookup(keys(1), request) == [MISS]
    engine.end_step(new=["r"])
    assert _missed(engine) == 32
    _positions(request, keys(1, 2, 3, 4, 5))  # it has generated three chunks
    engine.end_step(preempted=["r"])
    assert engine.lookup(keys(1), request) == [MISS]
    engine.end_step(preempted=["r"])
    engine.end_step(preempted=["r"])
    assert _missed(engine) == 32 + 80


def _missed(engine: Engine) -> float:
    return float(engine.manager._metrics.value("kv_offload_miss_tokens_total", ("not_stored",)))


def test_a_request_that_offers_nothing_holds_nothing(engine: Engine) -> None:
    output = engine.offer(keys(2), engine.request("beside"))
    waits = engine.request("waits")
    assert engine.lookup(keys(2), waits) == [PENDING]
    assert _held(engine)[0] == 1
    engine.offer([], waits)
    assert _held(engine)[0] == 0
    engine.copy(output, [0])


def test_events_report_stored_and_evicted_chunks_of_host_memory() -> None:
    engine = Engine(events=True, eviction_policy="lru")
    for number in range(ROWS + 1):
        engine.store(keys(number), engine.request(f"r{number}"))
    told = list(engine.manager.take_events())
    assert all(isinstance(event, base.OffloadingEvent) for event in told)
    assert {event.medium for event in told} == {base.Medium.CPU}
    held: set[bytes] = set()
    for event in told:
        (held.difference_update if event.removed else held.update)(event.keys)
    assert held == set(keys(*range(1, ROWS + 1)))
    assert list(engine.manager.take_events()) == []
    engine.stop()


def test_events_are_off_by_default(engine: Engine) -> None:
    engine.store(keys(1), engine.request())
    assert list(engine.manager.take_events()) == []


def test_stats_are_changes_and_each_metric_is_declared() -> None:
    now = [0.0]
    engine = Engine()
    engine.manager._clock = lambda: now[0]
    request = engine.request()
    engine.store(keys(1), request)
    engine.lookup(keys(1, 2), request)
    engine.manager.prepare_load(keys(1), request)
    engine.end_step()
    engine.manager.on_request_finished(request)
    stats = engine.manager.get_stats()
    assert not stats.is_empty()
    declared = KVOffloadSpec.build_metric_definitions({})
    for name, values in stats.data["data"].items():
        assert all(len(labels) == len(declared[name].labelnames) for labels in values), name
    assert engine.manager.get_stats() is None
    now[0] += 10
    assert engine.manager.get_stats() is None or now[0]
    engine.stop()


def test_work_is_pending_only_while_a_request_waits(engine: Engine) -> None:
    assert engine.manager.has_pending_work() is False
    engine.store(keys(1), engine.request())
    assert engine.manager.has_pending_work() is False


def test_a_second_shutdown_does_nothing(engine: Engine) -> None:
    engine.manager.shutdown()
    engine.manager.shutdown()


def test_config_info_fills_the_declared_labels(engine: Engine) -> None:
    (info,) = engine.manager.config_info()
    assert set(info) == set(KVOffloadSpec.config_info_keys({}))


def _positions(request: Any, asked: list[bytes]) -> None:
    for index, one in enumerate(asked):
        request.set_offload_key_position(one, 16 * (index + 1))


def test_a_miss_counts_the_rest_of_its_prompt(engine: Engine) -> None:
    request = engine.request()
    asked = keys(1, 2, 3, 4, 5)
    _positions(request, asked)
    assert engine.lookup(asked[2:3], request) == [MISS]  # the device cache had two chunks
    engine.offer(asked[2:], request)
    stats = engine.manager.get_stats()
    assert engine.manager._metrics.value("kv_offload_miss_tokens_total", ("not_stored",)) == 48
    assert stats is not None


def test_request_hints_can_be_disabled_and_priorities_are_bounded() -> None:
    asked = {"kv_offload_load_policy": "never", "kv_offload_priority": 2_147_483_647}
    asked |= {"kv_offload_skip_store": True}
    assert HintReader().read(asked) == {"load_policy": "never", "priority": 1, "skip_store": True}
    assert HintReader().read({"kv_offload_priority": -(10**30)}) == {"priority": -1}
    assert HintReader(allowed=frozenset()).read(asked) == {}
    assert HintReader(allowed={"priority"}).read(asked) == {"priority": 1}


def test_a_request_may_set_its_wait_for_remote_records() -> None:
    read = HintReader().read
    assert read({"kv_offload_remote_wait_ms": 250}) == {"remote_wait_seconds": 0.25}
    assert read({"kv_offload_remote_wait_ms": 0}) == {"remote_wait_seconds": 0.0}
    assert read({"kv_offload_remote_wait_ms": 10**30}) == {"remote_wait_seconds": 3600.0}
    for nonsense in (-1, 0.5, True, "1"):
        assert read({"kv_offload_remote_wait_ms": nonsense}) == {}


@pytest.mark.usefixtures("vllm_config")
def test_a_request_that_waits_for_remote_records_is_retried(tmp_path: Any) -> None:
    tier = {"type": "fs", "root_dir": str(tmp_path)}
    waiting = Engine(remote_wait_ms=60_000, secondary_tiers=[tier], model_id="m")
    try:
        impatient = waiting.request("b", {"kv_offload_remote_wait_ms": 0})
        until = time.monotonic() + 60
        while waiting.lookup(keys(1), impatient) == [RETRY] and time.monotonic() < until:
            waiting.end_step()  # wait until the directory scan is complete
        assert waiting.lookup(keys(1), impatient) == [MISS]
        assert waiting.lookup(keys(1), waiting.request("a")) == [RETRY]
    finally:
        waiting.stop()


def test_the_setting_ignores_hints(tmp_path: Any) -> None:
    engine = Engine(request_hints="ignore")
    request = engine.request("a", {"kv_offload_skip_store": True})
    assert len(engine.offer(keys(1), request).keys_to_store) == 1
    engine.stop()


def test_invalid_hints_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    reader = HintReader(clock=lambda: now[0])
    for _ in range(1000):
        reader.read({"kv_offload_load_policy": ["sometimes"], "kv_offload_priority": "high"})
    assert len(caplog.records) == 1
    now[0] = 60.0
    reader.read({"kv_offload_priority": True})
    assert "1999 others" in caplog.records[1].getMessage()


@pytest.mark.parametrize("name", ["kv_offload_prority", "kv_offload_load_polic\ny"])
def test_a_misspelt_hint_is_reported_with_the_valid_names(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    known = {"kv_offload_priority": 1, "kv_offload_remote_wait_ms": 5, "kv_offload_skip_load": False}
    # valid keys that are not ours
    others = {"kv_offload": {}, "do_remote_prefill": True, "kv_load_tiers": []}
    expected = HintReader().read({**known, **others})
    assert caplog.messages == []
    assert HintReader().read({name: 1, **known, **others}) == expected
    (line,) = caplog.messages
    assert line.startswith(f"kv_transfer_params: {name!r} is not known and is ignored; possible: ")
    assert all(each in line for each in known)
    assert "\n" not in line


def test_a_lookup_of_a_partial_chunk_does_not_end_the_prompt() -> None:
    """vLLM records the positions of parts of a block (--prefix-match-unit) after those of all chunks."""
    request = context()
    _positions(request, keys(1, 2, 3, 4, 5))
    request.set_offload_key_position(key(99), 20)
    assert compat.asked_span(request, key(2)) == (32, 80)


def test_one_debug_line_summarises_a_request(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    asked = keys(1, 2, 3)
    first = engine.request("first")
    engine.store(asked[:2], first)
    second = engine.request("second")
    _positions(second, asked)
    assert engine.lookup(asked, second) == [HIT, HIT, MISS]
    engine.manager.prepare_load(asked[:2], second)
    with caplog.at_level("DEBUG"):
        engine.manager.on_request_finished(second)
        engine.manager.on_request_finished(second)  # a second call logs nothing
    (record,) = [record for record in caplog.records if "second" in record.getMessage()]
    assert record.getMessage() == "Request second: 32 tokens from cpu, 16 tokens missing (not_stored)"
