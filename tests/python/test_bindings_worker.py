# SPDX-License-Identifier: Apache-2.0
"""csrc/bindings/bind_worker.cc: copies between a cache tensor and the region."""

import gc
import weakref

import numpy as np
import pytest
from small_core import SHARD_BYTES, attach, key, keys, make_cache

from kv_offload import _core

BLOCKS = 16


@pytest.fixture
def region(tmp_path):
    return attach(tmp_path)


def make_worker(region, tensor, **options):
    given = {
        "copier": "host",
        "tensors": [(tensor.ctypes.data, tensor.shape[0], tensor.strides[0])],
        "groups": [[(0, SHARD_BYTES)]],
        "blocks_per_chunk": 1,
        "area": 0,
        "keep_alive": tensor,
    }
    return _core.RankWorker(region[1][0], 0, _core.Metrics(), **{**given, **options})


@pytest.fixture
def tensor():
    return np.random.default_rng(1).integers(0, 256, (BLOCKS, SHARD_BYTES), np.uint8)


def finish(worker, job):
    worker.wait([job])
    ((done, num_bytes, seconds),) = worker.poll()
    assert done == job
    assert seconds >= 0
    return num_bytes


@pytest.mark.parametrize("ids", [np.int32, np.int64])
def test_a_block_is_loaded_unchanged(region, tensor, ids):
    cache = make_cache(region[0])
    request = cache.begin_request("r")
    worker = make_worker(region, tensor)
    before = tensor.copy()
    accepted, ticket, rows, group_rows, _ = cache.prepare_store(request, keys(2))
    worker.submit(1, ticket, True, np.array([3, 5], ids), [2], [0], rows, group_rows)
    assert finish(worker, 1) == 2 * SHARD_BYTES
    cache.complete_store(accepted)
    cache.end_step()
    assert cache.lookup(request, accepted[0]) == 1

    tensor[:] = 0
    ticket, rows, group_rows = cache.prepare_load(request, accepted)
    worker.submit(2, ticket, False, np.array([5, 3], ids), [2], [0], rows, group_rows, expedited=True)
    assert finish(worker, 2) == 2 * SHARD_BYTES
    assert (tensor[5] == before[3]).all()
    assert (tensor[3] == before[5]).all()
    assert not tensor[4].any()


def test_an_inconsistent_job_still_ends_and_is_never_a_hit(region, tensor):
    cache = make_cache(region[0])
    request = cache.begin_request("r")
    worker = make_worker(region, tensor)
    accepted, ticket, rows, group_rows, _ = cache.prepare_store(request, [key(1)])
    worker.submit(1, ticket, True, np.array([BLOCKS], np.int32), [1], [0], rows, group_rows)
    finish(worker, 1)
    assert region[0].result(ticket) & 1
    cache.complete_store(accepted)
    cache.end_step()
    assert cache.lookup(request, accepted[0]) == 0


@pytest.mark.parametrize("bad", [np.array([0.0]), np.array([0], np.uint8), np.array(["0"])])
def test_block_ids_are_int32_or_int64(region, tensor, bad):
    with pytest.raises(TypeError, match="int32 or int64"):
        make_worker(region, tensor).submit(1, 1, True, bad, [1], [0], np.array([0], np.uint32), [1])


def test_rows_are_uint32(region, tensor):
    with pytest.raises(TypeError, match="uint32"):
        make_worker(region, tensor).submit(
            1, 1, True, np.array([0], np.int32), [1], [0], np.array([0], np.int32), [1]
        )


def test_strided_ids_are_read_correctly(region, tensor):
    worker = make_worker(region, tensor)
    ids = np.array([1, 99, 2, 99], np.int32)[::2]
    rows = np.array([0, 77, 2, 77], np.uint32)[::2]
    worker.submit(1, 1, True, ids, [2], [0], rows, [2])
    assert finish(worker, 1) == 2 * SHARD_BYTES
    assert (region[0].area(0)[2 * 4096 :][:SHARD_BYTES] == tensor[2]).all()


def test_waiting_for_unknown_jobs_returns(region, tensor):
    worker = make_worker(region, tensor)
    worker.wait({1, 2, 3})
    worker.wait([])
    assert worker.poll() == []


def test_the_worker_keeps_the_tensor_alive(region):
    class Tensor(np.ndarray):
        pass

    tensor = np.zeros((BLOCKS, SHARD_BYTES), np.uint8).view(Tensor)
    gone = weakref.ref(tensor)
    worker = make_worker(region, tensor)
    del tensor
    gc.collect()
    assert gone() is not None
    worker.close()
    worker.close()
    del worker
    gc.collect()
    assert gone() is None


def test_the_worker_names_its_copier(region, tensor):
    assert "host" in make_worker(region, tensor).describe()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"copier": "tpu"}, ValueError, 'copier="tpu".*host, cuda'),
        ({"area": 1}, ValueError, "area 1"),
        ({"groups": [[(1, SHARD_BYTES)]]}, ValueError, "tensor|page"),
        ({"groups": [[(0, SHARD_BYTES + 1)]]}, ValueError, "tensor|page"),
        ({"threads": 0}, ValueError, "thread"),
    ],
)
def test_an_invalid_argument_is_refused_by_name(region, tensor, change, error, match):
    with pytest.raises(error, match=match):
        make_worker(region, tensor, **change)


def test_without_cuda_there_is_a_reason(region, tensor):
    reason = _core.cuda_unavailable_reason()
    if not reason:
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(_core.ResourceError):
        make_worker(region, tensor, copier="cuda", device=0)
    with pytest.raises(_core.ResourceError, match="no CUDA copier"):
        _core.describe_cuda_copier()


def test_the_copier_can_be_measured():
    assert _core.measure_copy(4 << 20, 1) > 0
    with pytest.raises(ValueError, match="total_bytes"):
        _core.measure_copy(0, 1)
