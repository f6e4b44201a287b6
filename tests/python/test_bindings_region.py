# SPDX-License-Identifier: Apache-2.0
"""csrc/bindings/bind_region.cc"""

import gc
import threading
import uuid

import numpy as np
import pytest
from small_core import MIB, SHARD_BYTES, attach, make_cache

from kv_offload import _core


def test_scheduler_and_worker_see_the_same_bytes(tmp_path):
    scheduler, (worker,) = attach(tmp_path)
    assert scheduler.num_areas == 1
    assert scheduler.area_bytes == MIB
    worker.area(0)[12345] = 42
    area = scheduler.area(0)
    assert area.dtype == np.uint8
    assert area.shape == (MIB,)
    assert area[12345] == 42


def test_a_worker_sees_whether_a_request_waits(tmp_path):
    _, (worker,) = attach(tmp_path)
    assert worker.fetching is False


def test_an_area_outlives_the_last_name_of_its_region(tmp_path):
    area = attach(tmp_path)[0].area(0)
    gc.collect()
    area[:] = 5
    assert int(area.sum()) == 5 * MIB


def test_the_scheduler_receives_the_geometry_of_a_rank(tmp_path):
    scheduler, _ = attach(tmp_path, workers=2)
    assert scheduler.geometry(1) == ([SHARD_BYTES], "rank 1")


@pytest.mark.parametrize("index", [1, 64])
def test_a_missing_area_is_a_value_error(tmp_path, index):
    scheduler, _ = attach(tmp_path)
    with pytest.raises(ValueError, match=str(index)):
        scheduler.area(index)
    with pytest.raises(ValueError, match=str(index)):
        scheduler.prefault(index, 1)


def test_missing_ranks_are_named_after_the_wait(tmp_path):
    region = _core.HostRegion.attach_scheduler(uuid.uuid4().hex, MIB, 2, 2, str(tmp_path))
    with pytest.raises(_core.ResourceError, match=r"0, 1 \(waited 0\.3 s\)"):
        region.wait_for_ranks(0.3)
    with pytest.raises(ValueError, match="timeout_seconds=-1"):
        region.wait_for_ranks(-1)


def test_the_wait_releases_the_gil_and_ends_when_the_rank_attaches(tmp_path):
    engine = uuid.uuid4().hex
    region = _core.HostRegion.attach_scheduler(engine, MIB, 1, 1, str(tmp_path))
    failure = []

    def wait():
        try:
            region.wait_for_ranks(60)
        except Exception as error:
            failure.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    worker = _core.HostRegion.attach_worker(engine, MIB, 1, 1, 0, [SHARD_BYTES], "", str(tmp_path))
    waiting.join(60)
    assert not waiting.is_alive()
    assert failure == []
    del worker


def test_a_region_larger_than_the_machine_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(_core.ResourceError, match="cpu_bytes_to_use"):
        _core.HostRegion.attach_scheduler(uuid.uuid4().hex, 1 << 50, 1, 1, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_prefault_reports_its_progress(tmp_path):
    _, (worker,) = attach(tmp_path, 8 * MIB)
    seen = []
    worker.prefault(0, 2, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (8 * MIB, 8 * MIB)
    worker.prefault(0, 1)


def test_an_exception_of_the_progress_callback_ends_prefault(tmp_path):
    _, (worker,) = attach(tmp_path, 8 * MIB)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worker.prefault(0, 2, stop)


def test_a_ticket_is_pending_until_every_rank_reported(tmp_path):
    scheduler, workers = attach(tmp_path, workers=2)
    assert scheduler.result(1) is None
    workers[0].report(0, 1, 0)
    assert scheduler.result(1) is None
    workers[1].report(1, 1, 0b10)
    assert scheduler.result(1) == 0b10


def test_headroom_names_its_limit(tmp_path):
    available, limited_by = _core.memory_headroom(str(tmp_path))
    assert available > 0
    assert limited_by


def test_a_kept_region_is_listed_until_its_memory_is_needed(tmp_path):
    facts = {"num_areas": 1, "num_workers": 1, "shm_directory": str(tmp_path), "keep_for": "model"}

    def start(engine):
        worker = _core.HostRegion.attach_worker(engine, MIB, rank=0, shard_bytes=[], fingerprint="", **facts)
        return worker, _core.HostRegion.attach_scheduler(engine, MIB, **facts)

    worker, scheduler = start("first")
    cache = make_cache(scheduler, keep_identity="weights")
    assert cache.stats()["is_kept"]
    ((name, _, is_held),) = _core.region_files(str(tmp_path))
    assert is_held
    del worker, scheduler, cache
    gc.collect()
    ((same, taken, is_held),) = _core.region_files(str(tmp_path))
    assert (same, is_held) == (name, False)
    assert 0 < taken < 2 * MIB
    assert _core.sweep_leftovers(str(tmp_path)) == []


def test_nothing_is_left_to_sweep_after_all_have_attached(tmp_path):
    scheduler, _ = attach(tmp_path)
    assert scheduler.swept == []
    assert _core.sweep_leftovers(str(tmp_path)) == []
