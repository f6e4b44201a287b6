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
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.v1.kv_offload import base

adapter.use_specs()

from kv_offload.specs import compat  # noqa: E402

from contract.check_manager import Engine  # noqa: E402
from contract.parts import keys  # noqa: E402

WAIT_SECONDS = 240


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm_config: Any) -> Iterator[Engine]:
    monkeypatch.setattr(compat, "block_hash_seed", lambda _: ("0", False))
    tiers: list[dict[str, Any]] = [
        {"type": "fs"},
        {"type": "fs", "locality": "REMOTE"},
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


def test_stored_events_name_the_medium_as_vllm_does(engine: Engine) -> None:
    engine.store(keys(1, 2), engine.request())
    events: list[Any] = []
    ends = time.monotonic() + WAIT_SECONDS
    pause = threading.Event()
    wanted = {("CPU", None, None), ("STORAGE", "LOCAL", "fs"), ("STORAGE", "REMOTE", "fs-2")}
    told: dict[Any, set[Any]] = {}
    while set(told) != wanted or any(len(hashes) < 2 for hashes in told.values()):
        assert time.monotonic() < ends, told
        engine.end_step()
        events += engine.manager.take_events()
        told = {}
        for event in received(events):
            assert isinstance(event, kv_events.BlockStored)
            assert event.group_idx == 3
            told.setdefault((event.medium, event.locality, event.ownership), set()).update(event.block_hashes)
        pause.wait(0.005)
    assert len(set(map(frozenset, told.values()))) == 1, "the three events must name the same two blocks"


def test_removed_events_name_the_medium_of_the_chunk(engine: Engine) -> None:
    gone = [compat.make_event(keys(1), removed=True, tier="fs-2", locality="REMOTE")]
    (event,) = received(gone)
    assert isinstance(event, kv_events.BlockRemoved)
    assert (event.medium, event.locality, event.ownership) == ("STORAGE", "REMOTE", "fs-2")
