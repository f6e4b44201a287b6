# SPDX-License-Identifier: Apache-2.0
"""csrc/bindings/bind_cache.cc: the manager's methods over a real region."""

import gc
import weakref

import numpy as np
import pytest
from small_core import GROUP, SHARD_BYTES, attach, key, keys, make_cache, store

from kv_offload import _core

MISS, HIT, PENDING, RETRY = range(4)


@pytest.fixture
def region(tmp_path):
    return attach(tmp_path)


@pytest.fixture
def cache(region):
    cache = make_cache(region[0])
    yield cache
    cache.close()


def test_a_stored_chunk_is_a_hit_and_loads_from_its_row(cache, region):
    worker = region[1][0]
    request = cache.begin_request("r")
    wanted = keys(3)
    assert [cache.lookup(request, k) for k in wanted] == [MISS] * 3
    accepted, ticket, rows, group_rows, evicted = cache.prepare_store(request, wanted, depths=[0, 1, 2])
    assert accepted == wanted
    assert rows.dtype == np.uint32
    assert rows.shape == (3,)
    assert (group_rows, evicted) == ((3,), [])
    worker.report(0, ticket, 0)
    cache.complete_store(accepted)
    cache.end_step()
    assert [cache.lookup(request, k) for k in wanted] == [HIT] * 3
    _, loaded, loaded_rows = cache.prepare_load(request, wanted)
    assert loaded.tolist() == rows.tolist()
    assert loaded_rows == (3,)
    assert cache.load_source(wanted[0]) == -1
    cache.complete_load(set(wanted))
    cache.end_request(request)


def test_accepted_keys_are_the_objects_that_were_offered(cache):
    wanted = keys(2)
    accepted = cache.prepare_store(cache.begin_request("r"), tuple(wanted))[0]
    assert all(a is w for a, w in zip(accepted, wanted, strict=True))


def test_a_failed_copy_never_becomes_a_hit(cache, region):
    request = cache.begin_request("r")
    accepted, ticket, *_ = cache.prepare_store(request, keys(2))
    region[1][0].report(0, ticket, 0b1)
    cache.complete_store(accepted)
    cache.end_step()
    assert cache.lookup(request, accepted[0]) == MISS


def test_evicted_keys_are_reported(cache, region):
    capacity = cache.stats()["capacity_bytes"] // SHARD_BYTES
    request = cache.begin_request("r")
    first = keys(capacity)
    assert store(cache, region[1][0], request, first) == first
    cache.end_step()
    other = cache.begin_request("s")
    *_, evicted = cache.prepare_store(other, keys(1, first=10_000))
    assert len(evicted) == 1
    assert cache.lookup(other, evicted[0]) == MISS
    assert evicted[0] in first


def test_events_name_keys_medium_and_owner(region):
    cache = make_cache(region[0], keep_events=True)
    stored = store(cache, region[1][0], cache.begin_request("r"), keys(2))
    ((told, storage, removed, owner),) = cache.take_events()
    assert sorted(told) == sorted(stored)
    assert (storage, removed, owner) == (False, False, "")
    assert cache.take_events() == []


def test_stats_are_plain_numbers(cache, region):
    store(cache, region[1][0], cache.begin_request("r"), keys(2))
    stats = cache.stats()
    assert stats["resident_chunks"] == 2
    assert stats["resident_bytes"] == 2 * SHARD_BYTES
    assert stats["requests"] == 1
    with pytest.raises(ValueError, match="tier 0"):
        cache.tier_stats(0)


def test_a_reset_invalidates_everything(cache, region):
    request = cache.begin_request("r")
    (stored,) = store(cache, region[1][0], request, keys(1))
    cache.reset()
    assert cache.lookup(cache.begin_request("s"), stored) == MISS
    assert not cache.has_pending_work()


def test_gauges_are_published_into_the_metrics(region):
    metrics = _core.Metrics()
    cache = make_cache(region[0], metrics)
    cache.publish_gauges()
    assert metrics.value("kv_offload_tier_capacity_bytes", ["cpu"]) == region[0].area_bytes


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"shard_bytes": [[1, 2]]}, "2 entries: the region has 1 areas"),
        ({"group_ids": [1, 2]}, "2 group_ids, 1 tokens_per_chunk"),
        ({"load_policy": "sometimes"}, 'load_policy="sometimes".*auto, always, never'),
        ({"eviction_policy": "random"}, "random.*lru"),
        ({"lookup_timeout_seconds": -1.0}, "lookup_timeout_seconds=-1"),
        ({"lookup_timeout_seconds": float("nan")}, "lookup_timeout_seconds=nan"),
        ({"shard_bytes": [[1 << 40]]}, "cpu_bytes_to_use"),
        ({"tiers": [None]}, "None.*TierSpec"),
    ],
)
def test_an_invalid_argument_is_refused_by_name(region, change, match):
    with pytest.raises(ValueError, match=match):
        make_cache(region[0], **change)


def test_a_request_has_its_own_load_policy(cache):
    cache.begin_request("r", load_policy="never", priority=3, skip_store=True)
    with pytest.raises(ValueError, match="load_policy"):
        cache.begin_request("r", load_policy="sometimes")


@pytest.mark.parametrize("bad", [b"", b"abcd", b"x" * 48])
def test_a_key_of_a_bad_length_is_a_value_error(cache, bad):
    request = cache.begin_request("r")
    with pytest.raises(ValueError, match=str(len(bad))):
        cache.lookup(request, bad)
    with pytest.raises(ValueError, match=str(len(bad))):
        cache.prepare_store(request, [key(1), bad])


@pytest.mark.parametrize("bad", ["text", None, 3, bytearray(36)])
def test_a_key_that_is_not_bytes_is_a_type_error(cache, bad):
    with pytest.raises(TypeError):
        cache.lookup(cache.begin_request("r"), bad)
    with pytest.raises(TypeError):
        cache.complete_load([bad])


def test_each_key_has_one_depth(cache):
    with pytest.raises(ValueError, match="1 depths for 2 keys"):
        cache.prepare_store(cache.begin_request("r"), keys(2), depths=[1])


def test_a_request_that_was_never_begun_is_a_value_error(cache):
    with pytest.raises(ValueError, match="12345"):
        cache.lookup(12345, key(1))
    with pytest.raises(ValueError, match="12345"):
        cache.prepare_load(12345, [key(1)])


def test_required_arguments_must_not_be_none(region):
    facts = {"group_ids": [GROUP], "tokens_per_chunk": [16], "shard_bytes": [[SHARD_BYTES]]}
    with pytest.raises(TypeError):
        _core.TieredCache(None, _core.Metrics(), **facts)
    with pytest.raises(TypeError):
        _core.TieredCache(region[0], None, **facts)


def test_the_cache_keeps_region_and_metrics_alive(tmp_path):
    cache = make_cache(attach(tmp_path)[0], _core.Metrics())
    gc.collect()
    cache.prepare_store(cache.begin_request("r"), keys(3))
    cache.publish_gauges()
    cache.end_step()


def test_close_may_be_called_twice(cache):
    cache.close()
    cache.close()


def test_a_dropped_cache_is_freed(region):
    class Owner:
        pass

    owner = Owner()
    owner.cache = make_cache(region[0])
    owner.lookup = owner.cache.make_lookup((0, 1, 2, 3), lambda context, owner=owner: 0)
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
