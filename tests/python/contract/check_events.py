# SPDX-License-Identifier: Apache-2.0
"""Run by test_contract.py under each vLLM release: the KV events of our tiers, as vLLM's subscribers get
them.

Our events pass through the connector's tracker and vLLM's msgpack types, as on their way to a router.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adapter
import msgspec
import pytest
from vllm.distributed import kv_events
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import events as tracker_module
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.v1.kv_offload import base

adapter.use_specs()

from kv_offload.specs import compat  # noqa: E402
from kv_offload.specs.events import AdvertisedChunks, TierEvents, describe_chunks  # noqa: E402

from contract.check_manager import Engine  # noqa: E402
from contract.parts import keys  # noqa: E402

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
        (event,) = self.tracker.take_events([compat.make_event([self.key], removed=removed)])
        return event


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
    advertised, key = AdvertisedChunks(TIERS), b"k"
    assert changed(advertised, ("+", "fs", key), ("+", "redis", key)) == [(False, "STORAGE", "LOCAL", {key})]
    assert changed(advertised, ("-", "redis", key)) == []
    assert changed(advertised, ("-", "fs", key)) == [(True, "STORAGE", "LOCAL", {key})]
    assert changed(advertised, ("-", "fs", key)) == []


def test_a_chunk_that_another_tier_still_has_is_stored_again_under_its_attributes() -> None:
    advertised, key = AdvertisedChunks(TIERS), b"k"
    changed(advertised, ("+", "fs", key), ("+", "redis", key))
    (stored,) = [event for event in advertised.translate([([key], True, True, "fs")]) if not event.removed]
    assert (stored.locality, stored.removal_expected) == (None, False), "a server that evicts silently"
    assert changed(advertised, ("-", "redis", key)) == [(True, "STORAGE", None, {key})]


def test_storage_of_this_host_replaces_remote_storage() -> None:
    advertised, key = AdvertisedChunks(TIERS), b"k"
    changed(advertised, ("+", "far", key))
    expected = [(True, "STORAGE", "REMOTE", {key}), (False, "STORAGE", "LOCAL", {key})]
    assert changed(advertised, ("+", "fs", key)) == expected
    assert changed(advertised, ("+", "far", key), ("-", "far", key)) == []


def test_a_record_that_is_written_again_is_stored_once() -> None:
    advertised, key = AdvertisedChunks(TIERS), b"k"
    assert len(changed(advertised, ("+", "redis", key), ("+", "redis", key), ("-", "redis", key))) == 2


def test_a_reset_removes_every_chunk_before_later_changes() -> None:
    advertised, key = AdvertisedChunks(TIERS), b"k"
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
    advertised, key = AdvertisedChunks(TIERS), b"k"
    assert told(advertised.found([key])) == [(False, "CPU", None, {key})]
    assert told(advertised.found([key])) == []


def test_chunks_on_a_server_that_evicts_silently_are_limited() -> None:
    advertised = AdvertisedChunks(TIERS, max_unconfirmed=2)
    keys = [b"1", b"2", b"3"]
    assert changed(advertised, *(("+", "redis", key) for key in keys))[-1] == (True, "STORAGE", None, {b"1"})
    bounded = AdvertisedChunks({"fs": TierEvents("LOCAL")}, max_unconfirmed=2)
    assert len(changed(bounded, *(("+", "fs", key) for key in keys))) == 3


def test_tiers_without_events_are_ignored() -> None:
    assert changed(AdvertisedChunks(TIERS), ("+", "other", b"k"), ("-", "other", b"k")) == []
