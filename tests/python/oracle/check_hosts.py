# SPDX-License-Identifier: Apache-2.0
"""Run by test_ranks_on_hosts.py under each vLLM release: engines whose ranks span several emulated hosts.

The fake model compares every byte that a request is about to read, and raises WrongBytes. An emulated host
has a region with its own name; it reaches the scheduler over the loopback interface only.
"""

import functools
import gc
import json
import random
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import adapter
import pytest
import s3_server
from live_root import records_in
from mooncake_store import mooncake_store
from redis_server import RedisClient, redis_server
from slow_link import SlowLink
from torch.distributed import HashStore

adapter.use_specs()

from kv_offload.specs import hosts as specs_hosts  # noqa: E402
from kv_offload.specs import manager as specs_manager  # noqa: E402
from kv_offload.specs import spec as specs_spec  # noqa: E402
from kv_offload.specs import worker as specs_worker  # noqa: E402
from kv_offload.specs.tier_specs import TierPlan, common_settings  # noqa: E402

from kv_offload import _core  # noqa: E402
from kv_offload.config import OffloadConfig  # noqa: E402
from kv_offload.diagnosis import from_log  # noqa: E402
from kv_offload.tiers.mooncake.config import MooncakeTierConfig  # noqa: E402
from oracle import faults  # noqa: E402
from oracle.check_life_cycles import FailingStores, payloads  # noqa: E402
from oracle.check_oracle import (  # noqa: E402
    FORCED,
    FULL,
    HYBRID,
    MINOR,
    PATIENT_MS,
    STATES,
    STEPS,
    Setup,
    _check_at_rest,
    ask_again,
    boot,
    live,
)
from oracle.drive import Rates, total  # noqa: E402
from oracle.engine import Engine, make_model_dir  # noqa: E402
from oracle.runner import WrongBytes  # noqa: E402

PATIENCE_SECONDS = 300
TOKENS = 200
WHOLE = 192  # tokens of a prompt that are in whole chunks

TWO = replace(FULL, world_size=2, hosts=2, extra={"cpu_bytes_to_use": "1MiB", "load_policy": "always"})
# The ranks of a host hold the same bytes: the first one stores, and both load.
REPLICATED = replace(TWO, world_size=4, replicated=True)
KINDS = {
    "two hosts": TWO,
    "two hosts with two ranks each": replace(
        TWO, world_size=4, extra={"cpu_bytes_to_use": "2MiB", "load_policy": "always"}
    ),
    "three stages of a pipeline on three hosts": replace(
        TWO, world_size=3, hosts=3, pipelined=True, layers=6
    ),
    "hybrid": replace(HYBRID, world_size=2, hosts=2),
    "mamba-like, asynchronous scheduling": replace(
        STATES, world_size=2, hosts=2, async_scheduling=True, extra={"cpu_bytes_to_use": "1MiB"}
    ),
    "replicated, two hosts with two ranks each": REPLICATED,
    "replicated, a stage of two ranks on each of two hosts": replace(
        REPLICATED, pipelined=True, tensor_ranks=2, layers=3
    ),
}


@pytest.fixture(autouse=True)
def _one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of torch.distributed, for the ranks of one engine after the other."""
    shared = HashStore()
    monkeypatch.setattr(specs_hosts, "_rendezvous_store", lambda: shared)
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes both ends of a connection tolerate a stalled machine. Returns how to restore their own limits."""
    ends = {name: getattr(_core, name) for name in ("HostLinks", "HostAgent")}
    for name, original in ends.items():
        monkeypatch.setattr(_core, name, functools.partial(original, silence_seconds=PATIENCE_SECONDS))

    def restore() -> None:
        for name, original in ends.items():
            monkeypatch.setattr(_core, name, original)

    return restore


def prompts(count: int, seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1000) for _ in range(TOKENS)] for _ in range(count)]


def agents_of(engine: Engine) -> list[Any]:
    workers = [connector.connector_worker.worker for _, connector, _ in engine.ranks]
    return [worker.agent for worker in workers if worker.agent is not None]


def value(engine: Engine, name: str, *labels: str) -> float:
    found: float = engine.manager._metrics.value(name, list(labels))
    return found


def step_until(engine: Engine, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        engine.step_idle()


@contextmanager
def linked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SlowLink]]:
    """Puts a proxy, which the test may end, between the scheduler and each other host."""
    links: list[SlowLink] = []
    original = specs_hosts._await_endpoint

    def rerouted(*given: Any) -> str:
        address, port, secret = original(*given).split()
        links.append(SlowLink((address, int(port))))
        links[-1].__enter__()
        return f"127.0.0.1 {links[-1].port} {secret}"

    monkeypatch.setattr(specs_hosts, "_await_endpoint", rerouted)
    try:
        yield links
    finally:
        for link in links:
            link.__exit__(None, None, None)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_loaded_with_their_bytes_on_all_hosts(kind: str) -> None:
    engine = boot(KINDS[kind])
    try:
        assert len(agents_of(engine)) == KINDS[kind].hosts - 1
        asked = prompts(2)
        ask_again(engine, asked)
        assert all(ask_again(engine, asked))
        _check_at_rest(engine)
    finally:
        engine.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_that_a_request_reads_is_right(kind: str) -> None:
    for life in range(5):  # a short life may load too little to prove anything
        engine = live(KINDS[kind], seed=42 + 100 * life, steps=max(STEPS // 2, 200))
        loaded = total(engine, "vllm:kv_offload_load_bytes")
        print(kind, dict(engine.happened), f"loaded {loaded:,.0f} bytes")
        if loaded > 10_000:
            break
    assert loaded > 10_000


@pytest.mark.parametrize("fault", [faults.WrongRow, faults.SkippedLoad])
@pytest.mark.parametrize(("setup", "faulty"), [(TWO, (0, 1)), (REPLICATED, (3,))])
def test_the_oracle_detects_a_faulty_worker(fault: type, setup: Setup, faulty: tuple[int, ...]) -> None:
    def wrapped(worker: Any, rank: int) -> Any:
        return fault(worker, rank) if rank in faulty else worker

    with pytest.raises(WrongBytes):
        live(replace(setup, wrap_worker=wrapped), seed=0, steps=1500)


@pytest.mark.parametrize(("stages", "layers"), [(1, (3, 3)), (2, (1, 2))])
def test_a_host_has_one_copy_of_bytes_that_all_its_ranks_hold(
    stages: int, layers: tuple[int, int], roots: list[Path]
) -> None:
    setup = replace(REPLICATED, pipelined=stages > 1, tensor_ranks=4 // stages, layers=3)
    engine = boot(over_tiers(setup, roots, "1MiB"))
    try:
        workers = [connector.connector_worker.worker for _, connector, _ in engine.ranks]
        assert [worker._stores for worker in workers] == [True, False, True, False]
        assert workers[3].region.num_areas == 2
        ask_again(engine, prompts(1))
        settle(engine)
        assert ask_again(engine, prompts(1)) == [WHOLE]
        part_bytes = [layers_here * 16 * 8 * 4 for layers_here in layers]  # tokens, elements
        for own, part in enumerate(("ranks 0 to 1 of 4", "ranks 2 to 3 of 4")):
            (path,) = roots[own].glob("*/namespace.json")
            identity = json.loads(path.read_text())
            assert (identity["settings"]["part"], identity["replicated"]) == (part, True)
            assert identity["groups"][0]["shard_bytes"] == part_bytes
            assert len(records_in(roots[own])) == WHOLE // 16
        # A chunk takes a page in the area of each host.
        assert engine.manager._cache.stats()["resident_bytes"] == WHOLE // 16 * 2 * 4096
    finally:
        engine.shutdown()


def test_a_reset_forgets_the_chunks_of_all_hosts() -> None:
    engine = boot(TWO)
    try:
        asked = prompts(2)
        ask_again(engine, asked)
        assert engine.reset(running=True)
        assert ask_again(engine, asked) == [0, 0]
        assert ask_again(engine, asked) == [WHOLE, WHOLE]
        _check_at_rest(engine)
    finally:
        engine.shutdown()


def test_requests_compute_everything_after_a_host_has_shut_down() -> None:
    engine = boot(TWO)
    try:
        asked = prompts(2)
        ask_again(engine, asked)
        assert ask_again(engine, asked) == [WHOLE, WHOLE]
        for agent in agents_of(engine):
            agent.close()
        step_until(engine, lambda: value(engine, "kv_offload_lost_hosts") == 1)
        before = value(engine, "kv_offload_hit_tokens_total", "cpu")
        assert ask_again(engine, [*asked, *prompts(1, seed=9)]) == [0, 0, 0]
        assert value(engine, "kv_offload_hit_tokens_total", "cpu") == before
        assert value(engine, "kv_offload_miss_tokens_total", "host_lost") == 3 * WHOLE
        assert value(engine, "kv_offload_dropped_bytes_total", "cpu", "host_lost") > 0
    finally:
        engine.shutdown()


def test_chunks_are_used_again_when_a_host_is_connected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with linked(monkeypatch) as links:
        engine = boot(TWO)
        try:
            asked = prompts(2)
            ask_again(engine, asked)
            assert ask_again(engine, asked) == [WHOLE, WHOLE]
            links[0].cut()
            step_until(engine, lambda: value(engine, "kv_offload_lost_hosts") == 1)
            assert ask_again(engine, asked) == [0, 0]
            links[0].restore()
            step_until(engine, lambda: value(engine, "kv_offload_lost_hosts") == 0)
            assert ask_again(engine, asked) == [WHOLE, WHOLE]
            _check_at_rest(engine)
        finally:
            engine.shutdown()


def test_a_host_lost_during_stores_and_loads_delays_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    asked = prompts(6)
    with linked(monkeypatch) as links:
        engine = boot(TWO)
        try:
            for turn in range(12):
                for number in range(3):
                    engine.add(f"t{turn}-{number}", rng.choice(asked), 4)
                for _ in range(rng.randrange(6)):
                    engine.step()
                if turn % 3 == 0:
                    links[0].cut()
                engine.drain()
                links[0].restore()
                step_until(engine, lambda: value(engine, "kv_offload_lost_hosts") == 0)
                assert engine.scheduler.reset_prefix_cache()
            # A busy machine may notice the last cut only now.
            step_until(engine, lambda: all(ask_again(engine, asked)))
            _check_at_rest(engine)
        finally:
            engine.shutdown()


def test_a_silent_host_delays_a_waiting_request_only_until_it_is_lost(
    monkeypatch: pytest.MonkeyPatch, impatient: Callable[[], None]
) -> None:
    asked = prompts(1)
    impatient()
    with linked(monkeypatch) as links:
        # Only the loss of the host may end the wait for chunks that are being stored.
        engine = boot(replace(TWO, extra={**TWO.extra, "lookup_timeout_ms": 1000 * PATIENCE_SECONDS}))
        try:
            links[0].hold()
            assert ask_again(engine, asked) == [0]  # its results do not arrive
            assert ask_again(engine, asked) == [0]
            assert value(engine, "kv_offload_miss_tokens_total", "host_lost") > 0
            assert value(engine, "kv_offload_miss_tokens_total", "deadline") == 0
            links[0].release()
            step_until(engine, lambda: value(engine, "kv_offload_lost_hosts") == 0)
            step_until(engine, lambda: ask_again(engine, asked) == [WHOLE])
            _check_at_rest(engine)
        finally:
            engine.shutdown()


def test_a_late_failure_of_a_store_leaves_no_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    describing = {**TWO.extra, "self_describing_kv_events": True}
    with linked(monkeypatch) as links:
        engine = boot(replace(TWO, events=True, extra=describing, wrap_worker=FailingStores))
        try:
            links[0].hold()
            ask_again(engine, prompts(1))
            assert payloads(engine) != [], "the failure on the other host is known already"
            links[0].release()
            step_until(engine, lambda: payloads(engine) == [])
            assert not engine.manager._unreported
        finally:
            engine.shutdown()


def test_a_store_that_failed_at_once_is_not_awaited() -> None:
    manager = SimpleNamespace(
        _cache=SimpleNamespace(complete_store=lambda *given: None, absent=lambda keys: [b"failed"]),
        _options=SimpleNamespace(describes_events=True),
        _hosts=object(),
        _unstored=[],
        _unreported=set(),
    )
    specs_manager.KVOffloadManager.complete_store(manager, [b"failed", b"stored"], None)
    assert manager._unstored == [b"failed"]
    assert manager._unreported == {b"stored"}, "its payload would be dropped twice"


def test_a_late_store_keeps_its_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    describing = {**TWO.extra, "self_describing_kv_events": True}
    with linked(monkeypatch) as links:
        engine = boot(replace(TWO, events=True, extra=describing))
        try:
            links[0].hold()
            ask_again(engine, prompts(1))
            stored = payloads(engine)
            links[0].release()
            step_until(engine, lambda: not engine.manager._unreported)
            assert payloads(engine) == stored != []
            assert engine.manager._cache.absent(stored) == []
        finally:
            engine.shutdown()


@pytest.mark.parametrize(
    ("setting", "more"),
    [
        (
            'a tier of type "mooncake"',
            {"secondary_tiers": [{"type": "mooncake", "master": "127.0.0.1:1"}]},
        ),
        ("share_host_memory", {"share_host_memory": True}),
    ],
)
def test_settings_that_need_one_host_are_refused(
    setting: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MooncakeTierConfig, "works_on_several_hosts", False)
    with pytest.raises(ValueError, match=f"span 2 hosts, and it was given {setting}"):
        boot(replace(TWO, extra={**TWO.extra, **more}))


# ---- host memory that outlives the engine


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The shared memory directories of two hosts."""
    original = _core.HostRegion
    with tempfile.TemporaryDirectory(dir="/dev/shm") as top:
        found = [Path(top, f"host-{host}") for host in range(2)]
        for directory in found:
            directory.mkdir()

        def attach_worker(*given: Any, **named: Any) -> Any:
            own = named["first_rank"] // named["local_ranks"]
            return original.attach_worker(*given, **named, shm_directory=str(found[own]))

        def attach_scheduler(*given: Any, **named: Any) -> Any:
            return original.attach_scheduler(*given, **named, shm_directory=str(found[0]))

        elsewhere = SimpleNamespace(attach_worker=attach_worker, attach_scheduler=attach_scheduler)
        monkeypatch.setattr(_core, "HostRegion", elsewhere)
        yield found


def test_kept_memory_of_all_hosts_is_used_unless_one_host_lost_it(
    shm: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    asked = prompts(2)
    setup = replace(REPLICATED, extra={**REPLICATED.extra, "keep_host_memory": True})
    model_dir = make_model_dir()

    def found() -> list[list[int]]:
        engine = boot(setup, model_dir)
        try:
            answers = [ask_again(engine, asked) for _ in range(2)]
            settle(engine)
        finally:
            engine.shutdown()
        return answers

    caplog.set_level("WARNING", logger="vllm.kv_offload")
    for first in (0, WHOLE):
        assert found() == [[first, first], [WHOLE, WHOLE]]
        gc.collect()  # ends the use of the region, as the end of the process does
    assert "previous server" not in caplog.text
    (lost,) = shm[1].glob("kv_offload-kept-*")
    lost.unlink()
    assert found() == [[0, 0], [WHOLE, WHOLE]]
    reason = "the host of ranks 2 to 3 at 127.0.0.1: it has no host memory of an earlier engine"
    assert reason in caplog.text


def test_a_host_whose_memory_ends_with_the_engine_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    links = cast(Any, SimpleNamespace(keep_memory=lambda seconds: ("id", [], ["the host of rank 1"])))
    assert specs_hosts.keep_on_all_hosts(None) == ""
    with caplog.at_level("WARNING", logger="vllm.kv_offload"):
        assert specs_hosts.keep_on_all_hosts(links) == " id"
    assert "are taken on the host of rank 1, so its memory is freed" in caplog.text


# ---- tiers: each host has a directory of its own


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories of the hosts. All hosts are started with the first one."""
    original = specs_hosts.serve_tiers
    found = [tmp_path / f"host-{host}" for host in range(4)]

    def elsewhere(agent: Any, hosts: Any, options: Any, *more: Any) -> Any:
        tiers = tuple(
            tier.model_copy(update={"root_dir": str(found[hosts.own])}) for tier in options.secondary_tiers
        )
        return original(agent, hosts, options.model_copy(update={"secondary_tiers": tiers}), *more)

    monkeypatch.setattr(specs_worker, "serve_tiers", elsewhere)
    return found


def over_tiers(setup: Setup, roots: list[Path], memory: str = "512KiB") -> Setup:
    return over_tier(setup, {"type": "fs", "root_dir": str(roots[0]), "max_bytes": "64MiB"}, memory)


def over_tier(setup: Setup, entry: dict[str, Any], memory: str) -> Setup:
    tier = {**entry, "op_timeout_ms": PATIENT_MS}
    extra = {
        "cpu_bytes_to_use": memory,
        "load_policy": "always",
        "lookup_timeout_ms": PATIENT_MS,
        "secondary_tiers": [tier],
    }
    return replace(setup, extra={**setup.extra, **extra})


def settle(engine: Engine) -> None:
    """Waits until all results of all hosts have arrived and all chunks are written."""
    step_until(engine, lambda: not engine.manager.has_pending_work())
    _check_at_rest(engine)


def restarted(engine: Engine) -> Engine:
    settle(engine)
    engine.shutdown()
    return boot(engine.setup, engine.model_dir)


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_from_the_tiers_of_all_hosts_is_right(kind: str, roots: list[Path]) -> None:
    # Half of the host memory that the kinds need otherwise: prompts are loaded from the tiers.
    areas = KINDS[kind].hosts if KINDS[kind].replicated else KINDS[kind].world_size
    memory = "512KiB" if areas == 2 else "1MiB"
    setup = over_tiers(KINDS[kind], roots, memory)
    alone = [[number, *range(199)] for number in range(8)]
    damaged = roots[list(KINDS).index(kind) % 2]
    engine = live(setup, 7, max(STEPS // 3, 200), Rates(forced_reset=FORCED), root=damaged, alone=alone)
    loaded = total(engine, "kv_offload_hit_tokens_total", "fs")
    print(kind, dict(engine.happened), f"loaded {loaded:,.0f} tokens from fs")
    assert loaded > 0


def test_the_next_engine_reloads_its_prompts_from_the_tiers_of_all_hosts(roots: list[Path]) -> None:
    asked = prompts(4)
    for kind in ("two hosts", "three stages of a pipeline on three hosts"):
        setup = over_tiers(KINDS[kind], roots, "2MiB")
        first = boot(setup)
        assert ask_again(first, asked) == [0] * 4
        engine = restarted(first)
        try:
            assert ask_again(engine, asked) == [WHOLE] * 4
            assert value(engine, "kv_offload_hit_tokens_total", "fs") == 4 * WHOLE
            assert total(engine, "kv_offload_failures_total") == 0
            engine.manager._cache.publish_gauges()
            reads = [
                value(engine, "kv_offload_host_slowest_reads_total", str(host), "fs")
                for host in range(setup.hosts)
            ]
            assert sum(reads) > 0
            for host in range(setup.hosts):
                assert value(engine, "kv_offload_host_tier_bytes", str(host), "fs") > 0
                assert value(engine, "kv_offload_host_connected", str(host)) == 1
        finally:
            engine.shutdown()


@pytest.fixture(scope="module")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = s3_server.S3Server(tmp_path_factory.mktemp("s3"))
    try:
        server.start()
        yield server.endpoint
    finally:
        server.kill()


@pytest.fixture(params=["redis", "s3"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """The entry of a tier with a server for all hosts."""
    if request.param == "redis":
        with redis_server(tmp_path) as socket:
            yield {"type": "redis", "url": f"unix://{socket}"}
        return
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.SECRET)
    endpoint = request.getfixturevalue("s3_endpoint")
    yield {"type": "s3", "bucket": s3_server.BUCKET, "endpoint": endpoint, "prefix": tmp_path.name}


def test_every_byte_from_a_server_is_right(store: dict[str, Any]) -> None:
    alone = [[number, *range(199)] for number in range(8)]
    setup = over_tier(TWO, store, "512KiB")
    engine = live(setup, 7, max(STEPS // 3, 200), Rates(forced_reset=FORCED), alone=alone)
    loaded = total(engine, "kv_offload_hit_tokens_total", store["type"])
    print(dict(engine.happened), f"loaded {loaded:,.0f} tokens from {store['type']}")
    assert loaded > 0


def test_the_next_engine_reloads_from_a_server_until_a_reset(store: dict[str, Any]) -> None:
    asked = prompts(2)
    engine = boot(over_tier(TWO, store, "2MiB"))
    assert ask_again(engine, asked) == [0, 0]
    engine = restarted(engine)
    assert ask_again(engine, asked) == [WHOLE, WHOLE]
    assert value(engine, "kv_offload_hit_tokens_total", store["type"]) == 2 * WHOLE
    settle(engine)
    assert engine.reset(running=True)
    assert ask_again(engine, asked) == [0, 0]
    settle(engine)
    engine.shutdown()
    reader = boot(over_tier(TWO, {**store, "write_policy": "read_only"}, "2MiB"), engine.model_dir)
    assert ask_again(reader, asked) == [0, 0]
    reader.shutdown()
    engine = boot(engine.setup, engine.model_dir)
    try:
        assert ask_again(engine, asked) == [0, 0], "records of the engine that was reset"
        engine = restarted(engine)
        assert ask_again(engine, asked) == [WHOLE, WHOLE]
        assert total(engine, "kv_offload_failures_total") == 0
    finally:
        engine.shutdown()


@pytest.mark.skipif(MINOR != (0, 32), reason="starts Mooncake's processes: once is enough")
def test_the_next_engine_reloads_from_mooncake(tmp_path: Path) -> None:
    asked = prompts(2)
    with mooncake_store(tmp_path) as running:
        engine = boot(over_tier(TWO, {"type": "mooncake", "master": running.address}, "2MiB"))
        assert ask_again(engine, asked) == [0, 0]
        engine = restarted(engine)
        try:
            assert ask_again(engine, asked) == [WHOLE, WHOLE]
            assert value(engine, "kv_offload_hit_tokens_total", "mooncake") == 2 * WHOLE
            assert total(engine, "kv_offload_failures_total") == 0
        finally:
            engine.shutdown()


def test_a_redis_server_that_is_down_at_the_start_is_used_when_it_responds(tmp_path: Path) -> None:
    asked = prompts(2)
    setup = over_tier(TWO, {"type": "redis", "url": f"unix://{tmp_path / 's'}"}, "2MiB")
    engine = boot(setup)
    try:
        assert ask_again(engine, asked) == [0, 0]
        assert value(engine, "kv_offload_miss_tokens_total", "io_error") == 2 * WHOLE
        assert value(engine, "kv_offload_miss_tokens_total", "not_stored") == 0
        with redis_server(tmp_path):
            step_until(engine, lambda: engine.manager._cache.tier_stats(0)["writable"])
            assert ask_again(engine, prompts(2, seed=6)) == [0, 0]
            settle(engine)
            engine = restarted(engine)
            assert ask_again(engine, prompts(2, seed=6)) == [WHOLE, WHOLE]
            assert value(engine, "kv_offload_hit_tokens_total", "redis") == 2 * WHOLE
    finally:
        engine.shutdown()


def test_stores_with_different_epochs_are_reported_while_another_one_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    homes = [tmp_path / str(host) for host in range(3)]
    for home in homes:
        home.mkdir()
    original = specs_hosts.serve_tiers

    def elsewhere(agent: Any, hosts: Any, options: Any, *more: Any) -> Any:
        url = f"unix://{homes[hosts.own] / 's'}"
        tiers = tuple(tier.model_copy(update={"url": url}) for tier in options.secondary_tiers)
        return original(agent, hosts, options.model_copy(update={"secondary_tiers": tiers}), *more)

    monkeypatch.setattr(specs_worker, "serve_tiers", elsewhere)
    entry = {"type": "redis", "url": f"unix://{homes[0] / 's'}"}
    setup = over_tier(KINDS["three stages of a pipeline on three hosts"], entry, "2MiB")
    asked = prompts(2)
    with redis_server(homes[0]), redis_server(homes[1]):
        with redis_server(homes[2]):
            engine = boot(setup)
            assert ask_again(engine, asked) == [0, 0]
            settle(engine)
            engine.shutdown()
        with RedisClient(homes[1] / "s") as client:
            (key,) = client.ask("KEYS", "*:epoch")
            client.ask("SET", key, "b" * 32)
        caplog.clear()
        engine = boot(setup, engine.model_dir)
        try:
            assert ask_again(engine, asked) == [0, 0]
            log = [record.getMessage() for record in caplog.records]
            found = {finding.cause: finding.text for finding in from_log(log).findings}
            silent = found["store_does_not_respond"]
            assert re.search(
                r"on the host of rank 2 \(.+: cannot connect: .+\)\. The tier is used when", silent
            )
            assert "the stores of hosts 0 (rank 0), 1 (rank 1) respond" in found["different_epochs"]
            assert epochs_usable(engine) == [0, 0, 1]
            with redis_server(homes[2]):
                step_until(engine, lambda: engine.manager._cache.tier_stats(0)["writable"])
                assert ask_again(engine, asked) == [WHOLE, WHOLE], "chunks in host memory stay"
                assert ask_again(engine, prompts(2, seed=6)) == [0, 0]
                settle(engine)
                assert epochs_usable(engine) == [1, 1, 1]
                assert value(engine, "kv_offload_write_bytes_total", "redis") > 0
                assert value(engine, "kv_offload_hit_tokens_total", "redis") == 0, "of earlier epochs"
        finally:
            engine.shutdown()


def epochs_usable(engine: Engine) -> list[float]:
    engine.manager._cache.publish_gauges()
    return [
        value(engine, "kv_offload_host_tier_usable", str(host), "redis", "epoch")
        for host in range(engine.setup.hosts)
    ]


def test_one_directory_that_all_hosts_share_is_enough(tmp_path: Path) -> None:
    asked = prompts(4)
    engine = boot(over_tiers(TWO, [tmp_path / "shared"], "2MiB"))
    ask_again(engine, asked)
    engine = restarted(engine)
    try:
        assert ask_again(engine, asked) == [WHOLE] * 4
        parts = {
            json.loads(path.read_text())["settings"]["part"]
            for path in (tmp_path / "shared").glob("*/namespace.json")
        }
        assert parts == {"rank 0 of 2", "rank 1 of 2"}
    finally:
        engine.shutdown()


@pytest.mark.parametrize(("setup", "watches"), [(TWO, False), (replace(TWO, hosts=1), True)])
def test_removals_by_other_servers_are_watched_on_one_host_only(
    setup: Setup, watches: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, watched = specs_spec.KVOffloadSpec._watch_removals, []

    def watch(self: Any, tiers: Any, hosts: Any) -> bool:
        result = original(self, tiers, hosts)
        watched.extend(tier.watch_removals for tier in tiers)
        return result

    monkeypatch.setattr(specs_spec.KVOffloadSpec, "_watch_removals", watch)
    engine = boot(replace(over_tiers(setup, [tmp_path / "shared"], "2MiB"), events=True))
    try:
        assert watched == [watches]
        assert (engine.manager._waker is not None) is watches
    finally:
        engine.shutdown()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_without_its_records_makes_all_prompts_misses(lost: int, roots: list[Path]) -> None:
    asked = prompts(3)
    first = boot(over_tiers(TWO, roots, "2MiB"))
    ask_again(first, asked)
    settle(first)
    first.shutdown()
    shutil.rmtree(roots[lost])
    engine = boot(first.setup, first.model_dir)
    try:
        assert ask_again(engine, asked) == [0] * 3
        engine = restarted(engine)
        assert ask_again(engine, asked) == [WHOLE] * 3
    finally:
        engine.shutdown()


@pytest.mark.parametrize("host", [0, 1])
def test_a_damaged_part_is_one_miss_with_its_reason(host: int, roots: list[Path]) -> None:
    asked = prompts(1)
    first = boot(over_tiers(TWO, roots, "2MiB"))
    ask_again(first, asked)
    settle(first)
    first.shutdown()
    path = records_in(roots[host])[5]
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    engine = boot(first.setup, first.model_dir)
    try:
        (found,) = ask_again(engine, asked)
        assert found < WHOLE
        assert value(engine, "kv_offload_miss_tokens_total", "corrupt") == WHOLE - found
        assert value(engine, "kv_offload_failures_total", "fs", "read", "corrupt") == 1
        assert ask_again(engine, asked) == [WHOLE]
        settle(engine)
        assert [len(records_in(root)) for root in roots[:2]] == [WHOLE // 16] * 2
    finally:
        engine.shutdown()


def test_a_reset_forgets_the_records_of_all_hosts(roots: list[Path]) -> None:
    asked = prompts(2)
    engine = boot(over_tiers(TWO, roots, "2MiB"))
    ask_again(engine, asked)
    settle(engine)
    assert engine.reset(running=True)
    assert ask_again(engine, asked) == [0, 0]
    assert ask_again(engine, asked) == [WHOLE, WHOLE]
    engine = restarted(engine)
    try:
        assert ask_again(engine, asked) == [0, 0], "records of the engine that was reset"
        engine = restarted(engine)
        assert ask_again(engine, asked) == [WHOLE, WHOLE]
    finally:
        engine.shutdown()


def test_a_host_lost_during_reads_and_writes_of_tiers_delays_no_request(
    roots: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(4)
    asked = prompts(12)
    with linked(monkeypatch) as links:
        engine = boot(over_tiers(TWO, roots))  # less than these prompts need
        try:
            for turn in range(16):
                for number in range(3):
                    engine.add(f"t{turn}-{number}", rng.choice(asked), 4)
                for _ in range(rng.randrange(6)):
                    engine.step()
                if turn % 3 == 0:
                    links[0].cut()
                engine.drain()
                links[0].restore()
                step_until(engine, lambda: value(engine, "kv_offload_lost_hosts") == 0)
                assert engine.scheduler.reset_prefix_cache()
            step_until(engine, lambda: all(ask_again(engine, asked)))
            assert value(engine, "kv_offload_hit_tokens_total", "fs") > 0
            _check_at_rest(engine)
        finally:
            engine.shutdown()


@pytest.mark.parametrize("direction", ["to", "from"])
def test_a_cut_in_one_direction_delays_requests_only_until_the_host_is_lost(
    direction: str, roots: list[Path], monkeypatch: pytest.MonkeyPatch, impatient: Callable[[], None]
) -> None:
    impatient()
    asked = prompts(12)
    setup = over_tiers(TWO, roots)  # less host memory than these prompts need
    forever = {"lookup_timeout_ms": 1000 * PATIENCE_SECONDS}
    with linked(monkeypatch) as links:
        engine = boot(replace(setup, extra={**setup.extra, **forever}))
        try:
            ask_again(engine, asked)
            step_until(engine, lambda: all(ask_again(engine, asked)))
            links[0].hold(direction)
            ask_again(engine, asked)
            assert value(engine, "kv_offload_miss_tokens_total", "host_lost") > 0
            links[0].release()
            step_until(engine, lambda: value(engine, "kv_offload_lost_hosts") == 0)
            step_until(engine, lambda: all(ask_again(engine, asked)))
            settle(engine)
        finally:
            engine.shutdown()


def test_a_link_of_1_megabyte_per_second_is_enough(
    roots: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(12)
    with linked(monkeypatch) as links:
        engine = boot(over_tiers(TWO, roots))
        try:
            links[0].bytes_per_second = 1_000_000
            ask_again(engine, asked)
            step_until(engine, lambda: ask_again(engine, asked) == [WHOLE] * len(asked))
            settle(engine)
        finally:
            engine.shutdown()


def test_a_host_with_other_settings_of_tiers_is_refused_with_both_values(tmp_path: Path) -> None:
    tier = {"type": "fs", "root_dir": str(tmp_path), "max_bytes": "1GiB"}
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    base = {"cpu_bytes_to_use": "1GiB", "secondary_tiers": [tier]}
    tenants = {"tenants": {"a": {"share": 40}}}

    def options(extra: dict[str, Any]) -> OffloadConfig:
        return OffloadConfig.parse(extra)[0]

    plan = TierPlan(cast(Any, None), (), (), (), common_settings(options(base)))
    plan.refuse_other_settings(options({**base, "cpu_bytes_to_use": "2GiB"}))
    for other, text in (
        (
            {**base, "secondary_tiers": [{**tier, "encryption_key_file": str(key)}]},
            r"its encryption of tiers is \[True\] and that of the scheduler's host is \[False\]: start vLLM",
        ),
        ({**base, **tenants}, r"its list of tenants and shares is \[\['other', .* host is \[\]: start"),
        (
            {**base, "secondary_tiers": [{**tier, "write_policy": "read_only"}]},
            r"its write_policy read_only of tiers is \[True\] and that of the scheduler's host is \[False\]",
        ),
        ({**base, "secondary_tiers": []}, r"its list of tiers is \[\] .* host is \['fs'\]"),
    ):
        with pytest.raises(ValueError, match=text):
            plan.refuse_other_settings(options(other))


def test_a_host_without_the_key_of_a_tenant_is_refused(tmp_path: Path) -> None:
    tier = {
        "type": "fs",
        "root_dir": str(tmp_path),
        "max_bytes": "1GiB",
        "encryption_key_file": str(tmp_path / "key"),
    }

    def options(**tenant: str) -> OffloadConfig:
        settings = {"cpu_bytes_to_use": "1GiB", "secondary_tiers": [tier]}
        return OffloadConfig.parse({**settings, "tenants": {"a": {"share": 40, **tenant}}})[0]

    own = options(encryption_key_file=str(tmp_path / "key of a"))
    plan = TierPlan(cast(Any, None), (), (), (), common_settings(own))
    plan.refuse_other_settings(own)
    text = r"its encryption of tenants is \[False, False\] and that of .* host is \[False, True\]: start vLLM"
    with pytest.raises(ValueError, match=text):
        plan.refuse_other_settings(options())


def test_a_host_that_cannot_open_its_tier_is_named(
    roots: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    roots[1].write_text("not a directory")
    with pytest.raises(_core.ResourceError, match=r"the tiers of the host of rank 1 at .* cannot be used"):
        boot(over_tiers(TWO, roots))


def test_the_thread_of_the_tiers_ends_before_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    class Agent:
        is_closed = False

        def __init__(self) -> None:
            self.closed = threading.Event()

        def wait_for_tiers(self, seconds: float) -> None:
            self.closed.wait(seconds)

        def close(self) -> None:
            self.is_closed = True
            self.closed.set()

    at_exit: list[Any] = []
    monkeypatch.setattr(specs_hosts.atexit, "register", lambda *call: at_exit.append(call))
    agent = Agent()
    hosts = specs_hosts.Hosts(2, 1, 1)
    thread = specs_hosts.serve_tiers(cast(Any, agent), hosts, cast(Any, None), cast(Any, None))
    ((end, *arguments),) = at_exit
    assert thread.is_alive()
    end(*arguments)
    assert not thread.is_alive()


def test_a_host_that_does_not_announce_itself_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs_hosts, "HOSTS_DEADLINE_SECONDS", 0.2)
    monkeypatch.setattr(specs_hosts, "_rendezvous_store", HashStore)  # one for each rank
    with pytest.raises(
        _core.ResourceError, match=r"host 1 of this engine \(rank 1\) did not announce its address"
    ):
        boot(TWO)


def test_all_hosts_that_do_not_announce_themselves_are_named_after_one_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(specs_hosts, "HOSTS_DEADLINE_SECONDS", 1.0)
    waits: list[float] = []

    class Store:
        """Each wait lasts until its timeout."""

        def wait(self, keys: list[str], limit: timedelta) -> None:
            waits.append(limit.total_seconds())
            clock.append(clock[-1] + waits[-1])
            raise RuntimeError("Wait timeout")

    clock = [0.0]
    monkeypatch.setattr(specs_hosts, "time", SimpleNamespace(monotonic=lambda: clock[-1]))
    with pytest.raises(
        _core.ResourceError,
        match=r"host 1 of this engine \(ranks 2 to 3\), host 2 of this engine \(ranks 4 to 5\), "
        r"host 3 of this engine \(ranks 6 to 7\) did not announce their addresses within 1 s",
    ):
        specs_hosts._await_endpoints(Store(), "kv_offload/0/", specs_hosts.Hosts(4, 0, 2))
    assert waits == [1.0, specs_hosts.MIN_WAIT_SECONDS, specs_hosts.MIN_WAIT_SECONDS]


def test_a_host_that_announced_itself_is_used_after_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    store.set("kv_offload/0/2", "127.0.0.1 2 00")
    monkeypatch.setattr(specs_hosts, "HOSTS_DEADLINE_SECONDS", 0.2)
    with pytest.raises(_core.ResourceError, match=r"^host 1 of this engine \(rank 1\) did not announce"):
        specs_hosts._await_endpoints(store, "kv_offload/0/", specs_hosts.Hosts(3, 0, 1))
    store.set("kv_offload/0/1", "127.0.0.1 1 00")
    assert specs_hosts._await_endpoints(store, "kv_offload/0/", specs_hosts.Hosts(3, 0, 1)) == {
        1: "127.0.0.1 1 00",
        2: "127.0.0.1 2 00",
    }


def test_a_host_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs_hosts, "HOSTS_DEADLINE_SECONDS", 0.5)
    with linked(monkeypatch) as links:
        original = specs_hosts._await_endpoint

        def cut(*given: Any) -> str:
            endpoint = original(*given)
            links[0].cut()
            return endpoint

        monkeypatch.setattr(specs_hosts, "_await_endpoint", cut)
        with pytest.raises(
            _core.ResourceError, match="not all hosts of this engine joined: the host of rank 1"
        ):
            boot(TWO)


def test_other_settings_on_another_host_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Engine._start_rank

    def smaller(self: Engine, rank: int, *given: Any) -> Any:
        extra = self.config.kv_transfer_config.kv_connector_extra_config
        extra["cpu_bytes_to_use"] = "1MiB" if rank == 0 else "2MiB"
        return original(self, rank, *given)

    monkeypatch.setattr(Engine, "_start_rank", smaller)
    with pytest.raises(
        _core.ResourceError, match="cpu_bytes_to_use is 2097152 and that of this host is 1048576"
    ):
        boot(TWO)


def test_another_version_on_another_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = _core.HostAgent
    monkeypatch.setattr(
        _core,
        "HostAgent",
        lambda region, address, version: original(region, address=address, version="0.0.9"),
    )
    with pytest.raises(_core.ResourceError, match=r"has vllm-kv-offload 0\.0\.9 and this host"):
        boot(TWO)


@pytest.mark.parametrize("ranks_here", [1, 2])
def test_ranks_that_are_missing_are_named_with_what_to_do(
    ranks_here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specs_spec, "RANKS_DEADLINE_SECONDS", 0.2)

    monkeypatch.setattr(specs_spec, "connect_scheduler", lambda hosts, region: None)
    config = SimpleNamespace(
        extra_config=TWO.extra,
        engine_id=f"oracle-{uuid.uuid4()}",
        parallel=SimpleNamespace(world_size=2),
    )
    spec = object.__new__(specs_spec.KVOffloadSpec)
    spec.config = config
    spec._options = specs_spec.OffloadConfig.from_extra_config(TWO.extra)
    spec.replicated_layout = False
    rank_0 = _core.HostRegion.attach_worker(
        config.engine_id, 1 << 20, 2, 2, 0, [4096], "rank 0", local_ranks=ranks_here
    )
    with pytest.raises(_core.ResourceError, match="these have not attached") as caught:
        spec._attach()
    del rank_0
    text = str(caught.value)
    assert "1 (waited 0.2 s): check the logs of these ranks; the ranks must start" in text
    assert ("use --nnodes" in text) == (ranks_here == 2)
