# SPDX-License-Identifier: Apache-2.0
"""Run by test_life_cycles.py under each vLLM release: resets, sleep, weight updates, event payloads.

The methods of vLLM's Scheduler, connector and Worker are real; memory that Worker.sleep unmaps is overwritten
here.
"""

import logging
import random
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapter
import pytest
import torch

adapter.use_specs()

from kv_offload.specs import life_cycle  # noqa: E402
from kv_offload.specs.load_spec import RowLoadStoreSpec  # noqa: E402
from kv_offload.specs.worker import KVOffloadWorker  # noqa: E402
from live_root import records_in  # noqa: E402
from vllm.distributed.kv_transfer import kv_transfer_state  # noqa: E402
from vllm.v1.worker import gpu_worker  # noqa: E402

from oracle.check_oracle import (  # noqa: E402
    FORCED,
    FULL,
    HYBRID,
    Setup,
    _check_at_rest,
    ask_again,
    boot,
    live,
    until_scanned,
    with_disk,
)
from oracle.check_tiers import toy, with_tiers  # noqa: E402
from oracle.drive import Rates  # noqa: E402
from oracle.engine import Engine  # noqa: E402
from oracle.faults import _Around  # noqa: E402
from oracle.runner import WrongBytes  # noqa: E402

ALL_GROUPS = (1 << 64) - 1


def prompts(count: int = 3, tokens: int = 200) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(1000) for _ in range(tokens)] for _ in range(count)]


WHOLE = [192] * 3  # tokens of the prompts above that are in whole chunks


def fixed(setup: Setup) -> Setup:
    return replace(setup, extra={**setup.extra, "fixed_weights": True})


@pytest.fixture(autouse=True)
def wrapped_once() -> Iterator[None]:
    """Restores vLLM's classes after each test."""
    patched = [
        (owner, name, owner.__dict__.get(name))
        for owner in (gpu_worker.Worker, life_cycle_connector())
        for name in ("sleep", "discard", "unregister_kv_caches", *life_cycle._CHANGES_WEIGHTS)
        if hasattr(owner, name)
    ]
    yield
    life_cycle._fixed.clear()
    for owner, name, before in patched:
        if before is None:
            if name in owner.__dict__:
                delattr(owner, name)
        else:
            setattr(owner, name, before)


def life_cycle_connector() -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

    return OffloadingConnector


# ---- resets


@pytest.mark.parametrize("setup", [FULL, HYBRID], ids=["full attention", "hybrid"])
def test_with_fixed_weights_a_reset_keeps_memory_and_disk(setup: Setup, tmp_path: Path) -> None:
    setup = with_disk(fixed(setup), tmp_path / "root", max_bytes="64MiB")
    engine = boot(setup)
    ask_again(engine, prompts())
    assert engine.reset(running=True)
    assert ask_again(engine, prompts()) == WHOLE
    assert engine.reset(running=True)
    _check_at_rest(engine)
    engine.shutdown()
    after = boot(setup, engine.model_dir)
    assert ask_again(after, prompts()) == WHOLE
    after.shutdown()


def test_by_default_a_reset_invalidates_memory_and_disk_permanently(tmp_path: Path) -> None:
    setup = with_disk(FULL, tmp_path / "root", max_bytes="64MiB")
    engine = boot(setup)
    ask_again(engine, prompts())
    assert engine.reset(running=True)
    assert ask_again(engine, prompts()) == [0, 0, 0]
    engine.shutdown()
    after = boot(setup, engine.model_dir)
    assert ask_again(after, prompts()) == [0, 0, 0]
    after.shutdown()


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("setup", [FULL, HYBRID], ids=["full attention", "hybrid"])
def test_every_byte_is_right_over_many_resets_that_keep_the_cache(
    setup: Setup, on_disk: bool, tmp_path: Path
) -> None:
    root = tmp_path / "root" if on_disk else None
    setup = fixed(setup) if root is None else with_disk(fixed(setup), root)
    engine = live(setup, 71, 400, Rates(reset=0.05, forced_reset=FORCED * 10), root=root)
    assert engine.happened["resets"] > 5


def test_kept_and_invalidated_chunks_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for setup, kept in ((FULL, False), (fixed(FULL), True)):
        engine = boot(setup)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="vllm.kv_offload"):
            for _ in range(2):
                ask_again(engine, prompts(1))
                assert engine.reset(running=True)
                engine.drain()
        lines = [line for line in caplog.messages if "reset the KV cache" in line]
        assert len(lines) == 1
        assert "12 chunks in host memory" in lines[0]
        assert ("are kept" in lines[0]) is kept
        assert ("Sleep" in lines[0] and "pause" in lines[0] and "fixed_weights" in lines[0]) is not kept
        engine.shutdown()


# ---- weights


def update_weights(engine: Engine) -> None:
    """Changes the bytes that the model computes for the same tokens."""
    for _, _, runner in engine.ranks:
        runner.layers = [[(words, ~salts) for words, salts in group] for group in runner.layers]


def test_after_a_weight_update_no_byte_of_the_old_weights_is_loaded(tmp_path: Path) -> None:
    engine = boot(with_disk(FULL, tmp_path / "root", max_bytes="64MiB"))
    ask_again(engine, prompts())
    assert engine.reset(running=True)
    update_weights(engine)
    assert ask_again(engine, prompts()) == [0, 0, 0]
    assert ask_again(engine, prompts()) == WHOLE
    engine.shutdown()


def test_the_check_detects_fixed_weights_that_change() -> None:
    engine = boot(fixed(FULL))
    ask_again(engine, prompts())
    assert engine.reset(running=True)
    update_weights(engine)
    with pytest.raises(WrongBytes):
        ask_again(engine, prompts())
    engine.shutdown()


HARMLESS = {"compute_weight_checksums", "supports_draft_weight_updates"}
# must not be refused: they finish a refused update
AFTER_THE_START = {"finish_weight_update", "shutdown_weight_transfer_engine"}


def test_every_weight_update_is_refused_when_weights_are_fixed() -> None:
    changes = {
        name for name in vars(gpu_worker.Worker) if "weight" in name and not name.startswith("_")
    } - HARMLESS
    engine, other = boot(fixed(FULL)), boot(FULL)
    config = engine.ranks[0][0]
    for name in changes - AFTER_THE_START:
        with pytest.raises(RuntimeError, match=f"{name} is refused: fixed_weights"):
            getattr(gpu_worker.Worker, name)(SimpleNamespace(vllm_config=config), *arguments_of(name))
    loaded = SimpleNamespace(vllm_config=config, model_runner=SimpleNamespace(model=object()))
    with pytest.raises(RuntimeError, match="load_model is refused: fixed_weights"):
        gpu_worker.Worker.load_model(loaded)
    with pytest.raises(AttributeError):  # the first load begins
        gpu_worker.Worker.load_model(SimpleNamespace(vllm_config=config, model_runner=SimpleNamespace()))
    with pytest.raises(RuntimeError, match="sleep at level 2 is refused"):
        gpu_worker.Worker.sleep(SimpleNamespace(vllm_config=config), level=2)
    # Another engine of the same process updates its own weights.
    called: list[str] = []
    runner = SimpleNamespace(reload_weights=lambda **_: called.append("reloaded"))
    gpu_worker.Worker.reload_weights(SimpleNamespace(vllm_config=other.ranks[0][0], model_runner=runner))
    assert called == ["reloaded"]
    engine.shutdown()
    other.shutdown()


def arguments_of(name: str) -> list[Any]:
    return [{}] if name in ("update_weights", "init_weight_transfer_engine") else []


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (SimpleNamespace(weight_transfer_config=object()), "set up to receive weights"),
        (None, "configuration is not known"),
    ],
    ids=["a server that receives weights", "an unknown server"],
)
def test_fixed_weights_are_refused_where_they_cannot_be_enforced(config: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        life_cycle.refuse_weight_updates(config)


# ---- sleep


class Sleeper:
    """The parts of vLLM's Worker that its sleep() and discard() use; unmapped memory is overwritten."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.sleep_mode_backend = self
        self.model_runner = SimpleNamespace()
        self.vllm_config = engine.ranks[0][0]
        self.held_back: list[int] = []
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *_: (0, 0))
        _, self.connector, _ = engine.ranks[0]
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", self.connector)

    def suspend(self, level: int) -> None:
        self.discard(())

    def discard(self, tags: tuple[str, ...]) -> None:
        self.held_back.append(len(self.connector.connector_worker._unsubmitted_store_jobs))
        for group in self.engine.ranks[0][2].layers:
            for words, _ in group:
                words.fill(0x5A5A5A5A5A5A5A5A)


LAST = prompts(3)[2][:192]  # its last step ends at the end of a chunk
LAST_WHOLE = 191  # the last token is always computed


def compute_without_waiting(engine: Engine) -> None:
    """Acts as an engine in the caller's process: the request has ended, its last stores have not started."""
    engine.add("r", LAST, 1)
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    side = engine.ranks[0][1].connector_worker
    assert side._unsubmitted_store_jobs, "no store is left to submit"


SLEEPS: dict[str, Callable[[Any], None]] = {
    "sleep": lambda sleeper: gpu_worker.Worker.sleep(sleeper, level=1),
    "release of the KV cache": lambda sleeper: gpu_worker.Worker.discard(sleeper, ("kv_cache",)),
}


@pytest.mark.parametrize("how", SLEEPS)
def test_copies_end_before_the_kv_cache_is_unmapped(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The connector is not reset here, as a later vLLM will offer it (clear_connector_cache=False): copies
    # from unmapped memory would be found.
    engine = boot(FULL)
    compute_without_waiting(engine)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    sleeper = Sleeper(engine, monkeypatch)
    SLEEPS[how](sleeper)
    assert sleeper.held_back == [0]
    engine.drain()
    assert ask_again(engine, [LAST]) == [LAST_WHOLE]
    engine.shutdown()


def test_the_check_detects_a_sleep_that_does_not_wait_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life_cycle, "finish_copies", lambda connector: None)
    engine = boot(FULL)
    compute_without_waiting(engine)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    SLEEPS["sleep"](Sleeper(engine, monkeypatch))
    engine.drain()
    with pytest.raises(WrongBytes):
        ask_again(engine, [LAST])
    engine.shutdown()


class HeldCopies:
    """The core's worker, whose copies end when the test says so."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, int, float]] = []
        self.waited_for: set[int] = set()

    def submit(self, job_id: int, *_: Any, **__: Any) -> None:
        pass

    def poll(self) -> list[tuple[int, int, float]]:
        return self.ended

    def wait(self, job_ids: set[int]) -> None:
        self.waited_for = set(job_ids)


def test_a_worker_waits_for_all_copies_in_flight_before_it_finishes() -> None:
    copies: Any = HeldCopies()
    worker = KVOffloadWorker(copies, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    blocks = SimpleNamespace(block_ids=[], group_sizes=[], block_indices=[])
    for job_id in (1, 2):
        worker.submit_store(job_id, blocks, RowLoadStoreSpec(job_id, [], ()))
    worker.submit_load(3, RowLoadStoreSpec(3, [], ()), blocks)
    copies.ended = [(2, 0, 0.0)]
    assert [result.job_id for result in worker.get_finished()] == [2]
    worker.finish()
    assert copies.waited_for == {1, 3}


def test_all_connectors_of_a_multiconnector_finish_their_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = boot(FULL)
    compute_without_waiting(engine)
    sleeper = Sleeper(engine, monkeypatch)
    several = SimpleNamespace(_connectors=[SimpleNamespace(), sleeper.connector])
    several.unregister_kv_caches = sleeper.connector.unregister_kv_caches if is_told() else None
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", several)
    SLEEPS["sleep"](sleeper)
    assert sleeper.held_back == [0]
    engine.shutdown()


def is_told() -> bool:
    return hasattr(life_cycle_connector(), "unregister_kv_caches")


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_a_sleep_with_jobs_in_flight_keeps_stored_chunks(
    on_disk: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setup = with_disk(fixed(FULL), tmp_path / "root") if on_disk else fixed(FULL)
    engine = boot(setup)
    ask_again(engine, prompts(2))
    compute_without_waiting(engine)
    assert engine.reset(running=True)
    SLEEPS["sleep"](Sleeper(engine, monkeypatch))
    engine.drain()
    found = ask_again(engine, [*prompts(2), LAST])
    assert found[:2] == WHOLE[:2]
    assert found[2] < LAST_WHOLE  # its last store was in flight
    _check_at_rest(engine)
    engine.shutdown()


# ---- payloads of self-describing events


class FailingStores(_Around):
    """A worker whose copies to host memory all fail."""

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        from kv_offload.specs.compat import TransferResult

        self.inner.region.report(self.rank, dst_spec.ticket, ALL_GROUPS)
        self.claimed[job_id] = TransferResult(job_id, True, 1, 0.001)
        self.told.append(self.claimed[job_id])
        return True


DESCRIBING = replace(FULL, events=True, extra={**FULL.extra, "self_describing_kv_events": True})


class Published:
    """Counts the blocks of subscribers: stored minus removed, by medium."""

    def __init__(self, engine: Engine) -> None:
        self.held: Counter[Any] = Counter()
        self.described = 0
        engine.scheduler.kv_event_publisher = self

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            if getattr(event, "medium", "GPU") == "GPU":  # AllBlocksCleared has no medium
                continue
            for block in event.block_hashes:
                step = 1 if type(event).__name__ == "BlockStored" else -1
                self.held[event.medium, block] += step
                assert self.held[event.medium, block] >= 0, "a removed block was never stored"
            self.described += bool(getattr(event, "token_ids", ()))

    def shutdown(self) -> None:
        pass


def payloads(engine: Engine) -> list[bytes]:
    return list(engine.scheduler.connector.connector_scheduler._events_tracker._pending_event_metadata)


def test_stores_that_fail_leave_no_payload() -> None:
    engine = boot(replace(DESCRIBING, wrap_worker=FailingStores))
    published = Published(engine)
    ask_again(engine, prompts())
    engine.drain()
    assert payloads(engine) == []
    assert not +published.held
    engine.shutdown()


def test_chunks_in_memory_have_a_payload_each() -> None:
    engine = boot(DESCRIBING)
    published = Published(engine)
    ask_again(engine, prompts())
    engine.drain()
    assert len(payloads(engine)) == engine.manager._cache.stats()["resident_chunks"] == 36
    assert published.described == 36
    assert sum(published.held.values()) == 36
    engine.shutdown()


def test_records_that_are_removed_leave_no_payload(tmp_path: Path) -> None:
    setup = with_disk(DESCRIBING, tmp_path / "root", max_bytes="64MiB")
    engine = boot(setup)
    ask_again(engine, prompts())
    engine.shutdown()
    after = boot(setup, engine.model_dir)
    until_scanned(after)
    for record in records_in(tmp_path / "root"):
        record.unlink()
    for number, prompt in enumerate(prompts()):
        after.add(f"r{number}", prompt, 1, params={"kv_offload_skip_store": True})
    after.drain()
    assert after.manager._cache.absent(payloads(after)) == []
    after.shutdown()


def test_records_on_a_server_that_evicts_silently_keep_no_payload() -> None:
    setup = with_tiers(replace(DESCRIBING, extra={**DESCRIBING.extra, "cpu_bytes_to_use": "64KiB"}), toy())
    engine = boot(setup)
    ask_again(engine, prompts(6))
    engine.drain()
    assert engine.manager._cache.absent(payloads(engine)) == []
    engine.shutdown()


def test_a_reset_with_fixed_weights_keeps_the_epoch_of_the_root(tmp_path: Path) -> None:
    """With fixed weights, resets start no new epoch: servers that share the root continue to share."""
    setup = with_disk(fixed(FULL), tmp_path / "root", max_bytes="64MiB")
    engine, other = boot(setup), None
    try:
        ask_again(engine, prompts())
        assert engine.reset(running=True)
        other = Engine(setup, f"oracle-{uuid.uuid4()}", engine.model_dir)
        assert ask_again(other, prompts()) == WHOLE
    finally:
        engine.shutdown()
        if other is not None:
            other.shutdown()
        shutil.rmtree(tmp_path / "root")
