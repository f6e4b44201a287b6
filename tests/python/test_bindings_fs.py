# SPDX-License-Identifier: Apache-2.0
"""csrc/backends/fs/bind_fs.cc: an fs tier under a cache, and its root read and repaired afterwards."""

import os
import threading
import time
from pathlib import Path

import pytest
from live_root import used_bytes
from small_core import SHARD_BYTES, attach, keys, make_cache, store
from written_root import write_root

from kv_offload import _core

NAMESPACE = bytes(range(32))
JSON = '{"model": "small"}'
MISS, HIT, PENDING, RETRY = range(4)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


def tier(root, **options):
    given = {"root_dir": str(root), "max_bytes": 64 << 20, "namespace_id": NAMESPACE, "namespace_json": JSON}
    given["op_timeout_seconds"] = 240.0
    return _core.FsTier(**{**given, **options})


@pytest.fixture
def region(tmp_path):
    (tmp_path / "shm").mkdir()
    return attach(tmp_path / "shm")


def step_until(cache, done):
    """Steps the scheduler, with pauses for the tier's threads, until ``done()``."""
    pause = threading.Event()
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        cache.end_step()
        if done():
            return
        pause.wait(0.005)
    pytest.fail(f"the tier was not done after 240 s: {cache.tier_stats(0)}")


@pytest.fixture
def recorded(root, region):
    """Yields a root with three records, closed."""
    cache = make_cache(region[0], tiers=[tier(root)])
    wanted = store(cache, region[1][0], cache.begin_request("r"), keys(3))
    step_until(cache, lambda: cache.tier_stats(0)["chunks"] == 3)
    cache.close()
    return wanted


def test_a_new_cache_loads_chunks_from_the_root(root, region, recorded):
    cache = make_cache(region[0], tiers=[tier(root)], load_policy="always", lookup_timeout_seconds=240.0)
    request = cache.begin_request("r")
    step_until(cache, lambda: all(cache.lookup(request, k) == HIT for k in recorded))
    assert cache.load_source(recorded[0]) == 0
    # lookups may hit before the scan is complete
    step_until(cache, lambda: cache.tier_stats(0)["scan_complete"])
    stats = cache.tier_stats(0)
    assert stats["name"] == "fs"
    assert stats["chunks"] == 3
    assert stats["bytes"] >= 3 * SHARD_BYTES
    assert stats["scan_complete"] is True
    cache.close()


@pytest.mark.parametrize("compress", ["none", "zstd"])
def test_records_are_counted_with_their_size_on_disk(root, region, compress):
    metrics = _core.Metrics()
    spec = tier(root)
    spec.compress = compress
    cache = make_cache(region[0], metrics, tiers=[spec])
    store(cache, region[1][0], cache.begin_request("r"), keys(3))
    step_until(cache, lambda: cache.tier_stats(0)["chunks"] == 3)
    cache.publish_gauges()
    cache.close()
    on_disk = sum(record["bytes"] for record in _core.FsRoot(str(root)).records())
    assert metrics.value("kv_offload_write_record_bytes_total", ["fs"]) == on_disk
    assert metrics.value("kv_offload_write_bytes_total", ["fs"]) == 3 * SHARD_BYTES
    assert metrics.value("kv_offload_stored_bytes_total", []) == 3 * SHARD_BYTES
    assert (on_disk < 3 * (SHARD_BYTES + 4096)) == (compress == "zstd")


def test_a_root_is_read_without_a_cache(root, recorded):
    facts = _core.FsRoot(str(root)).stat()
    assert facts["records"] == 3
    assert facts["temporaries"] == 0
    (space,) = facts["namespaces"]
    assert space["id"] == NAMESPACE.hex()
    assert space["json"] == JSON
    assert space["records"] == 3
    assert 0 < space["oldest"] <= space["newest"]
    assert space["open"] is False


def test_records_are_listed_one_by_one(root, recorded):
    records = list(_core.FsRoot(str(root)).records())
    assert sorted(r["key"] for r in records) == sorted(k.hex() for k in recorded)
    for record in records:
        assert record["namespace"] == NAMESPACE.hex()
        assert Path(record["path"]).stat().st_size == record["bytes"]
        assert record["mtime"] > 1.7e9
    with pytest.raises(ValueError, match="ff"):
        _core.FsRoot(str(root)).records("ff" * 32)


def test_a_damaged_record_is_found_and_removed(root, recorded):
    opened = _core.FsRoot(str(root))
    path = Path(next(opened.records())["path"])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    seen = []
    (damage,) = opened.verify(progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (3, 3)
    assert damage["path"] == str(path)
    assert damage["kind"] == "corrupt"
    assert damage["message"]
    assert damage["removed"] is False
    (mended,) = opened.verify(repair=True)
    assert mended["removed"] is True
    assert not path.exists()
    assert opened.verify() == []


def test_an_exception_of_the_progress_callback_ends_verify(root, recorded):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _core.FsRoot(str(root)).verify(progress=stop)


def test_purge_removes_all_records(root, recorded):
    opened = _core.FsRoot(str(root))
    records, num_bytes = opened.purge()
    assert records == 3
    assert num_bytes >= 3 * SHARD_BYTES
    assert list(opened.records()) == []


def test_another_directory_is_no_root(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        _core.FsRoot(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"namespace_id": b"short"}, "namespace_id has 5 bytes: give 32"),
        ({"fsync": "often"}, 'fsync="often".*none, data, full'),
        ({"o_direct": "maybe"}, 'o_direct="maybe".*auto, on, off'),
        ({"write_policy": "later"}, 'write_policy="later".*write_through, on_evict, reuse:N'),
        ({"write_policy": "reuse:N"}, "reuse:N with N from 1 to 127"),
        ({"write_policy": "reuse:0"}, "reuse:N with N from 1 to 127"),
        ({"write_policy": "reuse:128"}, "reuse:N with N from 1 to 127"),
        ({"write_policy": "reuse:2x"}, "reuse:N with N from 1 to 127"),
        ({"op_timeout_seconds": -1}, "op_timeout_seconds=-1"),
    ],
)
def test_an_invalid_option_is_refused_by_name(root, change, match):
    with pytest.raises(ValueError, match=match):
        tier(root, **change)


def test_valid_options_are_accepted(root):
    for policy in ("write_through", "on_evict", "reuse:1", "reuse:127"):
        tier(root, write_policy=policy, fsync="full", o_direct="off", n_read_threads=1)
    assert not root.exists()


def test_a_root_that_cannot_be_created_is_a_resource_error(tmp_path, region):
    (tmp_path / "file").write_text("")
    with pytest.raises(_core.ResourceError, match=str(tmp_path / "file")):
        make_cache(region[0], tiers=[tier(tmp_path / "file")])


def test_the_disk_can_be_probed(tmp_path):
    figures = _core.probe_disk(str(tmp_path), 4 << 20, 1 << 20)
    assert set(figures) == {"o_direct", "write_bytes_per_second", "read_bytes_per_second"}
    assert figures["write_bytes_per_second"] > 0
    assert figures["read_bytes_per_second"] > 0
    assert list(tmp_path.iterdir()) == []


def test_usage_comes_from_the_ledger_or_is_counted_if_the_ledger_is_damaged(tmp_path):
    root = write_root(tmp_path / "root")
    counted = used_bytes(root)
    (root / "foreign").write_bytes(os.urandom(1 << 20))
    recorded = _core.directory_usage(str(root))
    assert counted <= recorded < counted + (1 << 20), "the ledger must not include the new file"
    ledger = root / "ledger"
    before = (ledger.stat().st_mtime_ns, ledger.read_bytes())
    # in place: the pages of a replaced file may wait for the disk
    with ledger.open("r+b", buffering=0) as file:
        for position, byte in enumerate(before[1]):
            os.pwrite(file.fileno(), bytes([byte ^ 1]), position)
            assert _core.directory_usage(str(root)) == used_bytes(root) >= counted + (1 << 20), position
            os.pwrite(file.fileno(), bytes([byte]), position)
    assert _core.directory_usage(str(root)) == recorded
    for length in (0, 8, len(before[1]) - 1):
        ledger.write_bytes(before[1][:length])
        assert _core.directory_usage(str(root)) == used_bytes(root)
    ledger.unlink()
    assert _core.directory_usage(str(root)) == used_bytes(root)
    assert not ledger.exists(), "a query must not create the root"


def test_a_missing_root_uses_no_space_and_is_not_created(tmp_path):
    assert _core.directory_usage(str(tmp_path / "none")) == 0
    assert list(tmp_path.iterdir()) == []
