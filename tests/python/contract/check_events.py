# SPDX-License-Identifier: Apache-2.0
"""Run by test_contract.py under each vLLM release: the KV events of our tiers, as vLLM's subscribers get
them.

Our events pass through the connector's tracker and vLLM's msgpack types, as on their way to a router.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapter
import msgspec
import pytest
from vllm.distributed import kv_events
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import events as tracker_module
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload import base
from vllm.v1.request import Request

adapter.use_specs()

from kv_offload.specs import compat  # noqa: E402
from kv_offload.specs.events import AdvertisedChunks, TierEvents, describe_chunks  # noqa: E402

from contract.check_manager import Engine  # noqa: E402
from contract.parts import TOKENS_PER_BLOCK, keys  # noqa: E402

WAIT_SECONDS = 240


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm_config: Any) -> Iterator[Engine]:
    monkeypatch.setattr(compat, "block_hash_seed", lambda _: ("0", False))
    tiers: list[dict[str, Any]] = [
        {"type": "fs"},
        {"type": "fs"},
        {"type": "fs", "enable_kv_events": False},
    ]
    for number, tier in enumerate(tiers):
        tier |= {"root_dir": str(tmp_path / str(number)), "max_bytes": "16MiB"}
    made = Engine(events=True, secondary_tiers=tiers, model_id="model")
    yield made
    made.stop()


def received(events: list[Any]) -> list[Any]:
    """Decodes the published events as a subscriber does."""
    tracker = OffloadingEventsTracker(
        base.OffloadingKVEventsConfig(enable_kv_cache_events=True, self_describing_kv_events=False)
    )
    batch = kv_events.KVEventBatch(ts=0.0, events=list(tracker.take_events(events)))
    sent = msgspec.msgpack.Encoder().encode(batch)
    return list(msgspec.msgpack.Decoder(type=kv_events.KVEventBatch).decode(sent).events)


def test_chunks_on_several_tiers_are_stored_once_per_medium(engine: Engine) -> None:
    engine.store(keys(1, 2), engine.request())
    ends = time.monotonic() + WAIT_SECONDS
    pause = threading.Event()
    told: dict[str, list[Any]] = {"CPU": [], "STORAGE": []}
    while (
        any(len(blocks) < 2 for blocks in told.values()) or engine.manager._cache.tier_stats(2)["chunks"] < 2
    ):
        assert time.monotonic() < ends, told
        engine.end_step()
        for event in received(list(engine.manager.take_events())):
            assert isinstance(event, kv_events.BlockStored)
            assert (event.group_idx, event.ownership) == (3, None)
            assert event.locality == (None if event.medium == "CPU" else "LOCAL")
            told[event.medium] += event.block_hashes
        pause.wait(0.005)
    assert sorted(told["CPU"]) == sorted(told["STORAGE"])
    assert len(set(told["CPU"])) == 2


def test_removed_events_name_the_medium_of_the_chunk() -> None:
    gone = [compat.make_event(keys(1), removed=True, on_storage=True, locality="REMOTE")]
    (event,) = received(gone)
    assert isinstance(event, kv_events.BlockRemoved)
    assert (event.medium, event.locality, event.ownership) == ("STORAGE", "REMOTE", None)


class Tracked:
    """vLLM's tracker with one chunk of two blocks."""

    def __init__(self) -> None:
        describe_chunks(whole=False)
        config = base.OffloadingKVEventsConfig(enable_kv_cache_events=True, self_describing_kv_events=True)
        self.tracker = OffloadingEventsTracker(config)
        (self.key,) = keys(1)

    def store(self) -> None:
        """Records the chunk as vLLM does when it starts a store."""
        self.tracker._pending_event_metadata[self.key] = tracker_module._OffloadEventMetadata(
            block_hashes=(b"1" * 32, b"2" * 32),
            parent_block_hash=None,
            token_ids=(7,) * 32,
            block_size=16,
            lora_id=None,
            lora_name=None,
            extra_keys=None,
            group_idx=3,
            kv_cache_spec=tracker_module.OffloadingEventGroupSpec("full_attention", None),
            active_residencies={(base.Medium.CPU, None)},
        )

    def publish(self, *, removed: bool) -> Any:
        (event,) = self.publish_all([compat.make_event([self.key], removed=removed)])
        return event

    def publish_all(self, events: Iterable[Any]) -> list[Any]:
        return list(self.tracker.take_events(events))


def test_the_removal_of_a_reset_names_every_block_of_a_chunk() -> None:
    tracked = Tracked()
    tracked.store()
    stored = tracked.publish(removed=False)
    assert len(stored.block_hashes) == 2
    tracked.tracker.reset()
    assert tracked.publish(removed=True).block_hashes == stored.block_hashes


def test_a_chunk_that_is_stored_again_with_the_removal_of_a_reset_keeps_its_tokens() -> None:
    tracked = Tracked()
    tracked.store()
    stored = tracked.publish(removed=False)
    tracked.tracker.reset()
    tracked.store()
    assert tracked.publish(removed=True).block_hashes == stored.block_hashes
    assert tracked.publish(removed=False).token_ids == [7] * 32


def test_a_second_reset_keeps_every_block_of_the_removals() -> None:
    tracked = Tracked()
    tracked.store()
    stored = tracked.publish(removed=False)
    tracked.tracker.reset()
    tracked.tracker.reset()
    assert tracked.publish(removed=True).block_hashes == stored.block_hashes
    assert tracked.tracker._pending_event_metadata == {}


def test_a_store_during_a_reset_does_not_outlive_the_removals_of_the_reset() -> None:
    tracked = Tracked()
    tracked.store()
    tracked.tracker.reset()
    assert list(tracked.tracker.take_events([])) == []
    tracked.store()
    tracked.publish(removed=False)
    tracked.publish(removed=True)
    assert tracked.tracker._pending_event_metadata == {}


def test_the_removal_from_a_server_that_evicts_silently_names_every_block() -> None:
    tracked, advertised = Tracked(), AdvertisedChunks(TIERS, list)
    tracked.store()
    for sign, tier in [("+", ""), ("+", "redis"), ("-", "")]:
        (event,) = tracked.publish_all(advertised.translate([([tracked.key], tier != "", sign == "-", tier)]))
        assert len(event.block_hashes) == 2, (sign, tier)
    assert tracked.tracker._pending_event_metadata == {}
    changes = [([tracked.key], True, True, "redis"), ([tracked.key], False, False, "")]
    (event,) = tracked.publish_all(advertised.translate(changes))  # the read chunk has no tokens yet
    assert isinstance(event, kv_events.BlockRemoved)
    assert len(event.block_hashes) == 2
    assert tracked.tracker._pending_event_metadata == {}


@pytest.mark.parametrize("whole", [False, True])
def test_a_part_of_a_chunk_is_described_as_a_chunk_is(whole: bool) -> None:
    tracker = Tracked().tracker
    describe_chunks(whole=whole)
    hasher = get_hash_fn_by_name("sha256")
    init_none_hash(hasher)
    prompt = Request(
        request_id="prompt",
        prompt_token_ids=list(range(32)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt="tenant",
        block_hasher=get_request_block_hasher(4, hasher),
    )
    group = SimpleNamespace(
        group_idx=3,
        sliding_window_size_in_chunks=None,
        hashes_per_chunk=4,
        tokens_per_chunk=16,
        tokens_per_block=16,
        kv_event_group_spec=tracker_module.OffloadingEventGroupSpec("full_attention", None),
    )
    key = base.make_offload_key(prompt.block_hashes[1], 3)
    tracker.record_partial_store(prompt, group, 8, key)
    (event,) = tracker.take_events([compat.make_event([key], removed=False)])
    assert event.token_ids == list(range(8))
    assert event.block_size == (8 if whole else 4)
    assert len(event.block_hashes) == (1 if whole else 2)
    assert event.extra_keys == [("tenant",)] + ([] if whole else [None])
    later = base.make_offload_key(prompt.block_hashes[5], 3)
    tracker.record_partial_store(prompt, group, 24, later)
    (event,) = tracker.take_events([compat.make_event([later], removed=False)])
    assert event.token_ids == list(range(16, 24))
    assert event.extra_keys is None


# ---- vLLM's tracker on the events of our manager


class Described:
    """A manager, vLLM's tracker, and a subscriber that refuses events without tokens."""

    rows = 8

    def __init__(self, **options: Any) -> None:
        hasher = get_hash_fn_by_name("sha256")
        init_none_hash(hasher)
        self.engine = Engine(
            events=True,
            self_describing_kv_events=True,
            kv_events_unit="block",
            eviction_policy="lru",
            cpu_bytes_to_use=f"{self.rows * 4096}B",
            model_id="model",
            **options,
        )
        config = base.OffloadingKVEventsConfig(enable_kv_cache_events=True, self_describing_kv_events=True)
        self.tracker = OffloadingEventsTracker(config)
        self.group = SimpleNamespace(
            group_idx=3,
            sliding_window_size_in_chunks=None,
            hashes_per_chunk=1,
            tokens_per_chunk=TOKENS_PER_BLOCK,
            tokens_per_block=TOKENS_PER_BLOCK,
            kv_event_group_spec=tracker_module.OffloadingEventGroupSpec("full_attention", None),
        )
        self.prompt = Request(
            request_id="prompt",
            prompt_token_ids=list(range(3 * self.rows * TOKENS_PER_BLOCK)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=get_request_block_hasher(TOKENS_PER_BLOCK, hasher),
        )
        self.keys = [bytes(base.make_offload_key(block, 3)) for block in self.prompt.block_hashes]
        self.held: Counter[tuple[str, bytes]] = Counter()
        self.requests = 0

    def offer(self, chunks: Sequence[int]) -> tuple[Any, Any]:
        """Begins a store of a new request, as vLLM does; returns (its context, what was accepted)."""
        self.requests += 1
        context = self.engine.request(f"r{self.requests}")
        output = self.engine.offer([self.keys[chunk] for chunk in chunks], context)
        for key in output.keys_to_store:
            self.tracker.record_store(self.prompt, self.group, self.keys.index(key), key)
        return context, output

    def finish(self, context: Any, output: Any, *, success: bool = True) -> None:
        self.engine.copy(output, list(range(len(output.keys_to_store))))
        self.engine.manager.complete_store(set(output.keys_to_store), context, success)

    def store(self, chunks: Sequence[int]) -> None:
        self.finish(*self.offer(chunks))
        self.publish()

    def refill(self) -> tuple[Any, Any, bytes]:
        """Begins a store that evicts its own last chunk; returns (context, accepted, key of this chunk)."""
        self.store(range(self.rows))
        context, output = self.offer([*range(self.rows, 2 * self.rows - 1), self.rows - 1])
        (key,) = set(output.keys_to_store) & set(output.evicted_keys)
        return context, output, key

    def publish(self) -> list[Any]:
        """Publishes the events since the last call, as in each step; returns them."""
        published = list(self.tracker.take_events(self.engine.manager.take_events()))
        for event in published:
            change = -1 if isinstance(event, kv_events.BlockRemoved) else 1
            for block in event.block_hashes:
                self.held[event.medium, block] += change
                assert self.held[event.medium, block] in (0, 1), "not stored once and removed once"
            if change > 0:
                assert len(event.token_ids) == TOKENS_PER_BLOCK, "a router cannot place the block"
        return published

    def check(self, chunks: int) -> None:
        """Checks that the subscriber and vLLM's payloads have the chunks in host memory, and no others."""
        advertised = [block for (medium, block), held in self.held.items() if medium == "CPU" and held]
        cache = self.engine.manager._cache
        assert cache.absent(base.make_offload_key(block, 3) for block in advertised) == []
        assert len(advertised) == cache.stats()["resident_chunks"] == chunks
        assert set(self.tracker._pending_event_metadata) == {
            base.make_offload_key(block, 3) for block in advertised
        }


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> Iterator[Described]:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    monkeypatch.setattr(compat, "block_hash_seed", lambda _: ("0", False))
    made = Described()
    yield made
    made.engine.stop()


def test_a_chunk_that_is_evicted_and_stored_again_keeps_its_tokens(described: Described) -> None:
    context, output, key = described.refill()
    removed = {block for event in described.publish() for block in event.block_hashes}
    assert removed
    assert base.get_offload_block_hash(key) not in removed
    described.finish(context, output)
    described.publish()
    described.check(described.rows)
    described.store(range(2 * described.rows, 3 * described.rows))  # evicts the chunk
    described.check(described.rows)


def test_a_chunk_whose_second_store_fails_is_removed_once(described: Described) -> None:
    context, output, _ = described.refill()
    described.publish()
    described.finish(context, output, success=False)
    described.publish()
    described.check(0)


def test_a_chunk_that_is_stored_again_during_a_reset_is_removed_once(described: Described) -> None:
    context, output, key = described.refill()
    described.publish()
    described.engine.manager.reset_cache()
    described.tracker.reset()
    described.publish()
    assert not +described.held
    described.engine.copy(output, list(range(len(output.keys_to_store))))  # vLLM drops the result
    described.engine.end_step()
    described.publish()
    described.check(0)
    described.engine.lookup([key], context)
    described.store([described.keys.index(key)])
    described.check(1)


def test_a_store_that_completed_before_a_reset_is_not_published_after_it(described: Described) -> None:
    described.finish(*described.offer([0, 1]))
    described.engine.manager.reset_cache()
    described.tracker.reset()
    assert list(described.engine.manager.take_events()) == []
    described.engine.end_step()
    assert list(described.engine.manager.take_events()) == []
    described.check(0)


def test_a_chunk_that_was_found_but_not_loaded_leaves_no_payload(described: Described) -> None:
    manager = described.engine.manager
    manager._options = replace(manager._options, fixed_weights=True)
    described.store(range(described.rows))
    manager.reset_cache()  # keeps the chunks; they are not advertised until they are loaded
    described.tracker.reset()
    described.publish()
    described.tracker.record_lookup(described.prompt, described.group, 0, described.keys[0])
    request = described.engine.request("next")
    described.engine.lookup(described.keys, request)
    described.store(range(described.rows, 2 * described.rows))
    described.check(described.rows)


def test_a_payload_is_dropped_when_the_read_of_an_ended_request_fails(
    described: Described, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, reading = described.keys[0], {described.keys[0]}
    core = SimpleNamespace(
        take_events=list, absent=lambda keys: [each for each in keys if each not in reading]
    )
    described.tracker.record_lookup(described.prompt, described.group, 0, key)
    with monkeypatch.context() as patch:
        patch.setattr(described.engine.manager, "_cache", core)
        described.engine.manager._unstored.append(key)  # the request has ended
        assert described.publish() == []
        assert list(described.tracker._pending_event_metadata) == [key]
        reading.clear()
        assert described.publish() == []
        assert described.tracker._pending_event_metadata == {}
        assert described.engine.manager._unstored == []


def test_the_payload_of_an_advertised_chunk_is_kept_and_not_checked_again(described: Described) -> None:
    described.store([0])
    described.engine.manager._unstored.append(described.keys[0])  # a request that waited for it has ended
    assert described.publish() == []
    assert described.engine.manager._unstored == []
    described.check(1)


def test_without_tokens_no_payload_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(events=True, model_id="model")
    engine.store(keys(1), engine.request())
    engine.manager._loaded += keys(1, 2)  # the second is in the memory of another engine
    (event,) = engine.manager.take_events()
    assert (event.keys, event.removed) == (keys(1), False)
    with monkeypatch.context() as patch:
        core = SimpleNamespace(take_events=lambda: [(keys(2), False, True, "")], absent=list)
        patch.setattr(engine.manager, "_cache", core)
        assert list(engine.manager.take_events()) == []
    engine.stop()


class Reads:
    """Events of chunks that host memory reads from a tier, without their payloads at first."""

    def __init__(self, described: Described) -> None:
        self.described, self.key = described, described.keys[1]

    def events(
        self, change: str = "", key: bytes | None = None, tier: str = ""
    ) -> list[tuple[str, str, int]]:
        """Publishes a change, "+" or "-"; returns (type, medium, number of tokens) of each event."""
        events = []
        if change:
            events = [compat.make_event([key or self.key], removed=change == "-", on_storage=tier != "")]
        return [
            (type(event).__name__, event.medium, len(getattr(event, "token_ids", ())))
            for event in self.described.tracker.take_events(events)
        ]

    def find(self, *, partial: bool = False) -> None:
        """Records the payload, as vLLM does if a request finds the chunk; ``partial``: as a part of one."""
        tracker, prompt, group = self.described.tracker, self.described.prompt, self.described.group
        if partial:
            tracker.record_partial_lookup(prompt, group, 2 * TOKENS_PER_BLOCK, self.key)
        else:
            tracker.record_lookup(prompt, group, 1, self.key)


@pytest.mark.parametrize("partial", [False, True])
def test_a_chunk_that_was_read_is_published_when_vllm_has_its_tokens(
    described: Described, partial: bool
) -> None:
    reads = Reads(described)
    assert reads.events("+") == []
    assert reads.events("+", tier="fs") == []
    reads.find(partial=partial)
    assert reads.events() == [("BlockStored", "CPU", 16), ("BlockStored", "STORAGE", 16)]
    assert reads.events() == []
    assert reads.events("-") == [("BlockRemoved", "CPU", 0)]
    assert reads.events("-", tier="fs") == [("BlockRemoved", "STORAGE", 0)]
    assert described.tracker._pending_event_metadata == {}
    assert reads.events("+", described.keys[2]) == []
    forms = described.tracker.kv_offload_state._forms
    assert [form.medium.name for form in forms] == ["CPU", "STORAGE"], "equal stores share their attributes"


def test_the_removal_of_a_chunk_cancels_its_store_on_that_medium(described: Described) -> None:
    reads = Reads(described)
    assert reads.events("+") == []
    assert reads.events("+", tier="fs") == []
    assert reads.events("-") == []
    reads.find()
    assert reads.events("-", tier="fs") == [("BlockStored", "STORAGE", 16), ("BlockRemoved", "STORAGE", 0)]
    assert reads.events() == []


def test_a_reset_cancels_what_was_to_be_published(described: Described) -> None:
    reads = Reads(described)
    reads.events("+")
    reads.find()
    described.tracker.reset()
    assert reads.events("-") == []
    reads.find()
    assert reads.events() == []


def test_chunks_of_windows_are_published_without_tokens(described: Described) -> None:
    reads = Reads(described)
    (first, second) = keys(1, 2, group=4)
    window = SimpleNamespace(**vars(described.group) | {"group_idx": 4, "sliding_window_size_in_chunks": 2})
    assert reads.events("+", first) == []
    described.tracker.record_store(described.prompt, window, 1, second)
    assert reads.events() == [("BlockStored", "CPU", 0)]
    assert reads.events("+", second) == [("BlockStored", "CPU", 0)]
    assert reads.events("-", first) == [("BlockRemoved", "CPU", 0)]
    assert reads.events("+") == []


# ---- what subscribers believe


TIERS = {
    "fs": TierEvents("LOCAL"),
    "redis": TierEvents(None, evicts_silently=True),
    "far": TierEvents("REMOTE"),
}
Told = list[tuple[bool, str, str | None, set[bytes]]]


def told(events: Any) -> Told:
    """Returns (removed, medium, locality, keys) of each event."""
    return [
        (
            event.removed,
            event.medium.name,
            None if event.locality is None else event.locality.value,
            set(event.keys),
        )
        for event in events
    ]


def changed(advertised: AdvertisedChunks, *changes: tuple[str, str, bytes]) -> Told:
    """Returns the events for changes such as ("+", "fs", key); "" is host memory."""
    return told(advertised.translate([([key], tier != "", sign == "-", tier) for sign, tier, key in changes]))


def test_a_chunk_is_on_storage_until_the_last_tier_loses_it() -> None:
    advertised, key = AdvertisedChunks(TIERS, list), b"k"
    assert changed(advertised, ("+", "fs", key), ("+", "redis", key)) == [(False, "STORAGE", "LOCAL", {key})]
    assert changed(advertised, ("-", "redis", key)) == []
    assert changed(advertised, ("-", "fs", key)) == [(True, "STORAGE", "LOCAL", {key})]
    assert changed(advertised, ("-", "fs", key)) == []


def test_a_chunk_that_another_tier_still_has_is_stored_again_under_its_attributes() -> None:
    advertised, key = AdvertisedChunks(TIERS, list), b"k"
    changed(advertised, ("+", "fs", key), ("+", "redis", key))
    (stored,) = [event for event in advertised.translate([([key], True, True, "fs")]) if not event.removed]
    assert (stored.locality, stored.removal_expected) == (None, False), "a server that evicts silently"
    assert changed(advertised, ("-", "redis", key)) == [(True, "STORAGE", None, {key})]


def test_storage_of_this_host_replaces_remote_storage() -> None:
    advertised, key = AdvertisedChunks(TIERS, list), b"k"
    changed(advertised, ("+", "far", key))
    expected = [(True, "STORAGE", "REMOTE", {key}), (False, "STORAGE", "LOCAL", {key})]
    assert changed(advertised, ("+", "fs", key)) == expected
    assert changed(advertised, ("+", "far", key), ("-", "far", key)) == []


def test_a_record_that_is_written_again_is_stored_once() -> None:
    advertised, key = AdvertisedChunks(TIERS, list), b"k"
    assert len(changed(advertised, ("+", "redis", key), ("+", "redis", key), ("-", "redis", key))) == 2


def test_a_reset_removes_every_chunk_before_later_changes() -> None:
    advertised, key = AdvertisedChunks(TIERS, list), b"k"
    changed(advertised, ("+", "", key), ("+", "fs", key))
    advertised.withdraw_all()
    assert advertised.has_withdrawals()
    assert changed(advertised, ("-", "", key), ("+", "", key)) == [
        (True, "CPU", None, {key}),
        (True, "STORAGE", "LOCAL", {key}),
        (False, "CPU", None, {key}),
    ]
    assert not advertised.has_withdrawals()
    advertised.withdraw_all()
    advertised.withdraw_all()
    assert changed(advertised) == [(True, "CPU", None, {key})]


def test_a_loaded_chunk_is_advertised_again_after_a_reset_that_kept_it() -> None:
    advertised, key = AdvertisedChunks(TIERS, list), b"k"
    assert told(advertised.found([key])) == [(False, "CPU", None, {key})]
    assert told(advertised.found([key])) == []


def test_chunks_on_a_server_that_evicts_silently_are_limited() -> None:
    advertised = AdvertisedChunks(TIERS, list, max_unconfirmed=2)
    keys = [b"1", b"2", b"3"]
    assert changed(advertised, *(("+", "redis", key) for key in keys))[-1] == (True, "STORAGE", None, {b"1"})
    bounded = AdvertisedChunks({"fs": TierEvents("LOCAL")}, list, max_unconfirmed=2)
    assert len(changed(bounded, *(("+", "fs", key) for key in keys))) == 3


def test_tiers_without_events_are_ignored() -> None:
    assert changed(AdvertisedChunks(TIERS, list), ("+", "other", b"k"), ("-", "other", b"k")) == []


def test_a_chunk_that_is_being_filled_again_stays_advertised() -> None:
    filling, asked = {b"k"}, set[bytes]()

    def absent(keys: Iterable[bytes]) -> list[bytes]:
        asked.update(keys)
        return [key for key in keys if key not in filling]

    advertised = AdvertisedChunks(TIERS, absent)
    changed(advertised, ("+", "", b"k"), ("+", "", b"l"))
    assert changed(advertised, ("-", "", b"k"), ("-", "", b"l")) == [(True, "CPU", None, {b"l"})]
    assert changed(advertised) == []
    assert changed(advertised, ("+", "", b"k")) == []
    asked.clear()
    assert changed(advertised) == []
    assert not asked, "it has returned"
    assert changed(advertised, ("-", "", b"k")) == []
    filling.clear()
    assert changed(advertised) == [(True, "CPU", None, {b"k"})]
    assert changed(advertised) == []


def test_a_reset_removes_a_chunk_that_is_being_filled_again_once() -> None:
    advertised = AdvertisedChunks(TIERS, lambda keys: [])
    changed(advertised, ("+", "", b"k"), ("-", "", b"k"))
    advertised.withdraw_all()
    assert changed(advertised) == [(True, "CPU", None, {b"k"})]
    assert changed(advertised, ("-", "", b"k")) == []


def test_a_chunk_that_returned_to_host_memory_keeps_its_tokens_after_its_tier_lost_it() -> None:
    tracked, advertised = Tracked(), AdvertisedChunks(TIERS, list)
    tracked.store()
    changes = [("+", ""), ("+", "fs"), ("-", ""), ("+", ""), ("-", "fs"), ("+", "fs"), ("-", ""), ("-", "fs")]
    for sign, tier in changes:
        events = advertised.translate([([tracked.key], tier != "", sign == "-", tier)])
        (event,) = tracked.publish_all(events)
        assert len(event.block_hashes) == 2, (sign, tier)
    assert tracked.tracker._pending_event_metadata == {}
