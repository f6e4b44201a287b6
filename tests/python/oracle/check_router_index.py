# SPDX-License-Identifier: Apache-2.0
"""Run by test_router_index.py under each vLLM release: an index that is rebuilt from KV events alone.

The index equals the listing of host memory and of every tier, and a request for an advertised prefix loads
it.
"""

import random
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import adapter
import pytest

adapter.use_specs()

import toy_tier  # noqa: E402
from kv_offload.specs.events import _TrackerState  # noqa: E402
from live_root import paths_in, records_in  # noqa: E402
from redis_server import command as redis_command  # noqa: E402
from redis_server import redis_server  # noqa: E402
from vllm.distributed import kv_events  # noqa: E402
from vllm.v1.core.sched.interface import PauseState  # noqa: E402
from vllm.v1.kv_offload import base  # noqa: E402

from oracle.check_oracle import (  # noqa: E402
    FORCED,
    FULL,
    HYBRID,
    STATES,
    Setup,
    _check_at_rest,
    boot,
    with_disk,
)
from oracle.check_tiers import toy, with_tiers  # noqa: E402
from oracle.drive import Driver, Rates  # noqa: E402
from oracle.engine import Engine  # noqa: E402
from oracle.idle import IdleLoop  # noqa: E402

DESCRIBING = {"self_describing_kv_events": True}
SMALL = "128KiB"  # host memory evicts
SERVER_BYTES = str(2 << 20)  # maxmemory of a Redis server; 1 MiB of it has no records
WAIT_SECONDS = 240
SETTLE_SECONDS = 30


def described(setup: Setup, blocks: int = 1, **extra: Any) -> Setup:
    extra = {**setup.extra, **DESCRIBING, "blocks_per_chunk": blocks, "cpu_bytes_to_use": SMALL, **extra}
    return replace(setup, events=True, extra=extra)


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


class RouterIndex:
    """What a subscriber knows about one engine.

    Unlike routers, it keeps chunks when vLLM clears its own cache, so chunks that a reset invalidates must be
    removed one by one.
    """

    def __init__(self, engine: Engine) -> None:
        self.held: dict[str, set[tuple[int, bytes]]] = {"CPU": set(), "STORAGE": set()}
        self.children: dict[bytes | None, dict[Any, bytes]] = {}
        self.engine = engine
        engine.scheduler.kv_event_publisher = self
        configs = engine.scheduler.connector.connector_scheduler.config.kv_group_configs
        self.windows = {
            group.group_idx for group in configs if group.sliding_window_size_in_chunks is not None
        }

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            medium = getattr(event, "medium", None)
            if medium not in self.held:
                continue
            assert getattr(event, "ownership", None) is None, "Dynamo drops events with an ownership"
            assert event.locality != "REMOTE", "Dynamo drops events of remote storage"
            named = {(event.group_idx, block) for block in event.block_hashes}
            if isinstance(event, kv_events.BlockRemoved):
                assert len(named) == len(event.block_hashes)
                assert named <= self.held[medium], "a removed block was not stored"
                self.held[medium] -= named
                continue
            assert not named & self.held[medium], "a block was stored twice"
            self.held[medium] |= named
            assert event.token_ids or event.group_idx in self.windows, "a router cannot place the block"
            if event.token_ids:
                (block,) = event.block_hashes
                assert event.block_size == len(event.token_ids)
                unit = (tuple(event.token_ids), tuple(map(tuple, event.extra_keys or ())))
                self.children.setdefault(event.parent_block_hash, {})[unit] = block

    def shutdown(self) -> None:
        pass

    def keys(self, medium: str) -> set[bytes]:
        """Returns the keys of the advertised chunks, and of those that are withheld until vLLM has their
        tokens: prefetched ones.
        """
        held = tuple(self.held[medium])  # another thread may change it
        tracker = self.engine.scheduler.connector.connector_scheduler._events_tracker
        state = getattr(tracker, "kv_offload_state", _TrackerState())
        withheld = tuple(state._withheld.get(base.Medium[medium], ()))
        return {bytes(base.make_offload_key(block, group)) for group, block in held}.union(withheld)

    def advertised(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Returns the length of the longest prefix of ``tokens`` that all groups have, in tokens."""
        configs = self.engine.scheduler.connector.connector_scheduler.config.kv_group_configs
        size = configs[0].tokens_per_chunk
        parent, chain, longest = None, [], 0
        for end in range(size, len(tokens) + 1, size):
            extra = ((salt,),) if salt and end == size else ()
            parent = self.children.get(parent, {}).get((tuple(tokens[end - size : end]), extra))
            if parent is None:
                break
            chain.append(parent)
            if all(self._has(config, chain) for config in configs):
                longest = end
        return longest

    def _has(self, config: Any, chain: list[bytes]) -> bool:
        window = config.sliding_window_size_in_chunks
        needed = chain if window is None else chain[-window:]
        return all(
            any((config.group_idx, block) in blocks for blocks in self.held.values()) for block in needed
        )


def keys_in(root: Path) -> set[bytes]:
    """Returns the keys of the records under ``root``. Those of an epoch before a reset are still removed."""
    epochs = [found for path in paths_in(root) if (found := re.match(r"g(\d+)\b", path.name))]
    newest = max(int(epoch[1]) for epoch in epochs)
    records = [path for path in records_in(root) if path.parent.parent.name == f"g{newest}"]
    return {bytes.fromhex(record.name.split(".")[0]) for record in records}


def keys_on(server: Path) -> set[bytes]:
    """Returns the keys of the records on the Redis server at this socket, if no engine was reset."""
    words = ["redis-cli", "-s", str(server), "--raw", "KEYS", "*"]
    names = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout.split()
    return {bytes.fromhex(name.rpartition(":")[2]) for name in names if not name.endswith(":epoch")}


def check_listing(
    index: RouterIndex,
    root: Path | None = None,
    shelf: dict[str, Any] | None = None,
    server: Path | None = None,
) -> None:
    """Checks that the index is the listing of host memory and of each tier.

    Waits for files that are still being removed, for notices of the Redis ``server``, and for their events.
    """
    cache = index.engine.manager._cache
    stored = None if root is None and server is None else (lambda: keys_in(root) if root else keys_on(server))
    pause, ends = threading.Event(), time.monotonic() + SETTLE_SECONDS
    while stored is not None and index.keys("STORAGE") != stored() and time.monotonic() < ends:
        pause.wait(0.01)
        index.engine.step_idle()
    assert cache.absent(list(index.keys("CPU"))) == []
    assert len(index.keys("CPU")) == cache.stats()["resident_chunks"]
    if stored is not None:
        assert index.keys("STORAGE") == stored()
    if root is not None:
        assert len(index.keys("STORAGE")) == cache.tier_stats(0)["chunks"]
    if shelf is not None:
        assert len(index.keys("STORAGE")) == toy_tier.extension().records(shelf["server"])


def check_hits(index: RouterIndex, driver: Driver, requests: int) -> int:
    """Requests advertised prefixes; returns the number of their tokens."""
    engine, rng, asked = index.engine, driver.rng, 0
    for number in range(requests):
        some = rng.sample(driver.histories, min(8, len(driver.histories)))
        tokens, salt = max(some, key=lambda history: index.advertised(*history))
        assert engine.scheduler.reset_prefix_cache()
        longest = index.advertised(tokens, salt)
        assert longest <= len(tokens)
        # vLLM computes at least one token, so the prompt continues after the advertised prefix.
        prompt = [*tokens[:longest], rng.randrange(1000)]
        name = f"advertised-{number}"
        engine.add(name, prompt, 1, salt)
        engine.drain()
        _check_at_rest(engine)
        _, _, runner = engine.ranks[0]
        assert runner.sequences[name].found >= longest, f"{longest} tokens were advertised"
        asked += longest
    return asked


def lives(
    setup: Setup,
    seed: int,
    root: Path | None = None,
    shelf: dict[str, Any] | None = None,
    server: Path | None = None,
) -> int:
    """Runs an engine through random requests, evictions and resets; returns the advertised tokens it hit."""
    engine = boot(setup)
    index = RouterIndex(engine)
    # The shelf and the server keep the records from before a reset, which only their epoch makes invalid.
    rates = Rates(reset=0.01, forced_reset=FORCED) if shelf is server is None else Rates(reset=0)
    driver = Driver(engine, seed, rates)
    hits = 0
    for _ in range(4):
        driver.run(120)
        _check_at_rest(engine)
        engine.step_idle()
        if server is not None:  # any command, even of a client that lists the keys, may make it evict
            redis_command(server, "CONFIG", "SET", "maxmemory", "0")
        check_listing(index, root, shelf, server)
        hits += check_hits(index, driver, 6)
        check_listing(index, root, shelf, server)
        if server is not None:
            redis_command(server, "CONFIG", "SET", "maxmemory", SERVER_BYTES)
    print(dict(driver.happened), f"{hits} advertised tokens hit")
    engine.shutdown()
    return hits


KINDS = {"full attention": FULL, "hybrid": HYBRID, "states": replace(STATES, retention=64)}


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_index_of_host_memory_and_a_directory_is_exact(kind: str, blocks: int, tmp_path: Path) -> None:
    root = tmp_path / "root"
    setup = with_disk(described(KINDS[kind], blocks), root, max_bytes="2MiB")
    assert lives(setup, 100 + blocks, root=root) > 0


@pytest.mark.parametrize("blocks", [1, 4])
def test_the_index_of_a_tier_that_evicts_silently_is_exact(blocks: int) -> None:
    shelf = toy()
    assert lives(with_tiers(described(FULL, blocks), shelf), 200 + blocks, shelf=shelf) > 0


@pytest.mark.parametrize("blocks", [1, 2])
def test_the_index_of_a_redis_server_that_evicts_is_exact(blocks: int, tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", SERVER_BYTES, "--maxmemory-policy", "allkeys-lru") as server:
        setup = with_tiers(described(FULL, blocks), {"type": "redis", "url": f"unix://{server}"})
        assert lives(setup, 250 + blocks, server=server) > 0
        info = redis_command(server, "INFO", "stats").decode()
        assert int(re.search(r"evicted_keys:(\d+)", info)[1]) > 0  # type: ignore[index]


def test_a_reset_of_an_idle_server_is_published_without_a_request() -> None:
    engine = boot(described(FULL))
    index = RouterIndex(engine)
    engine.add("r", [token % 1000 for token in range(100)], 1)
    engine.drain()
    assert index.held["CPU"]
    connector = engine.scheduler.connector.connector_scheduler
    assert not connector.has_pending_push_work()
    assert engine.reset(running=False)
    assert connector.has_pending_push_work()
    while connector.has_pending_push_work():
        engine.step_idle()
    assert not index.held["CPU"]
    engine.shutdown()


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_chunk_is_advertised_for_its_own_salt_only(blocks: int) -> None:
    engine = boot(described(FULL, blocks))
    index = RouterIndex(engine)
    tokens = [token % 1000 for token in range(100)]
    engine.add("r", tokens, 1, "tenant")
    engine.drain()
    assert index.advertised(tokens) == 0
    assert index.advertised(tokens, "tenant") == 96
    engine.shutdown()


class BlockIndex:
    """What llm-d's index keeps of the events: one description per hash, on all media.

    It counts the stores and removals of a hash on each medium, and drops a block whose parent is unknown.
    """

    def __init__(self, engine: Engine) -> None:
        self.described: dict[bytes, Any] = {}
        self.stored: Counter[tuple[str, bytes]] = Counter()
        self.media: Counter[str] = Counter()
        engine.scheduler.kv_event_publisher = self

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            if isinstance(event, kv_events.AllBlocksCleared):
                continue
            if isinstance(event, kv_events.BlockRemoved):
                for block in event.block_hashes:
                    self.stored[event.medium, block] -= 1
                    assert self.stored[event.medium, block] >= 0, "a removed block was not stored"
                continue
            assert len(event.token_ids) == event.block_size * len(event.block_hashes)
            parent = event.parent_block_hash
            assert parent is None or parent in self.described, "llm-d drops a block without its parent"
            extra = event.extra_keys or [None] * len(event.block_hashes)
            for number, block in enumerate(event.block_hashes):
                start = number * event.block_size
                tokens = tuple(event.token_ids[start : start + event.block_size])
                description = (parent, tokens, tuple(extra[number] or ()))
                assert self.described.setdefault(block, description) == description, event.medium
                self.stored[event.medium, block] += 1
                self.media[event.medium] += 1
                parent = block

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize("blocks", [1, 4])
def test_all_media_describe_a_block_alike_if_events_name_blocks(blocks: int, tmp_path: Path) -> None:
    setup = described(FULL, blocks, kv_events_unit="block")
    engine = boot(with_disk(setup, tmp_path / "root", max_bytes="2MiB"))
    index = BlockIndex(engine)
    Driver(engine, 300 + blocks, Rates(reset=0.01, forced_reset=FORCED)).run(300)
    _check_at_rest(engine)
    engine.step_idle()
    print(dict(index.media))
    assert min(index.media[medium] for medium in ("GPU", "CPU", "STORAGE")) > 20
    held = engine.manager._cache.stats()["resident_chunks"] * blocks
    assert sum(count for (medium, _), count in index.stored.items() if medium == "CPU") == held
    engine.shutdown()


def prompts(engine: Engine, name: str, seed: int, count: int) -> None:
    """Sends unrelated prompts, and waits for the writes of their chunks."""
    rng = random.Random(seed)
    for number in range(count):
        engine.add(f"{name}-{number}", [rng.randrange(1000) for _ in range(200)], 1)
        engine.drain()
        while engine.manager._cache.tier_stats(0)["queued_writes"]:
            engine.step_idle()
    engine.step_idle()


def until(exact: Callable[[], bool]) -> Iterator[str]:
    """Yields the one request to an idle server, once its subscriber knows everything."""
    pause, ends = threading.Event(), time.monotonic() + WAIT_SECONDS
    while not exact():
        if time.monotonic() > ends:
            return
        pause.wait(0.01)
    yield "exact"


def test_an_idle_server_publishes_evictions_by_another_server(tmp_path: Path) -> None:
    root = tmp_path / "root"
    setup = with_disk(described(FULL), root, max_bytes="1MiB")
    idle = boot(setup)
    index = RouterIndex(idle)
    prompts(idle, "idle", 1, 10)
    other = boot(setup, idle.model_dir)
    prompts(other, "other", 2, 40)
    before = index.keys("STORAGE")
    assert before - keys_in(root), "the other server evicted nothing"

    loop = IdleLoop(idle, until(lambda: index.keys("STORAGE") <= keys_in(root)))
    assert loop.next() == "exact"
    assert loop.steps < 100, "an idle server must not keep stepping"
    for _ in range(2):  # the waker may have seen the last removals while a step took them
        idle.step_idle()
    assert not idle.manager.has_pending_work(), "an idle server must not keep stepping"
    assert index.keys("STORAGE") == before & keys_in(root), "only evicted chunks were removed"
    for engine in (idle, other):
        engine.shutdown()


def test_a_paused_server_publishes_removals_after_it_resumes(tmp_path: Path) -> None:
    root = tmp_path / "root"
    setup = with_disk(described(FULL), root, max_bytes="1MiB")
    paused = boot(setup)
    index = RouterIndex(paused)
    prompts(paused, "idle", 1, 10)
    other = boot(setup, paused.model_dir)
    prompts(other, "other", 2, 40)
    before = index.keys("STORAGE")
    woken = threading.Event()

    def source() -> Iterator[str]:
        assert woken.wait(WAIT_SECONDS)
        yield "resume"
        yield from until(lambda: index.keys("STORAGE") <= keys_in(root))

    paused.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    loop = IdleLoop(paused, source(), on_message=woken.set)
    assert loop.next() == "resume"
    assert loop.steps == 0, "a paused server must not step"
    assert index.keys("STORAGE") == before
    paused.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert loop.next() == "exact"
    for engine in (paused, other):
        engine.shutdown()
