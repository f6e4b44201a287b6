# SPDX-License-Identifier: Apache-2.0
"""Run by test_contract.py under each vLLM release: the worker, and the bytes that it copies."""

import inspect
import random
import re
from types import SimpleNamespace
from typing import Any

import adapter
import numpy as np
import pytest
import torch

adapter.use_specs()

from kv_offload.specs import KVOffloadSpec, worker  # noqa: E402
from kv_offload.specs.load_spec import RowLoadStoreSpec  # noqa: E402
from kv_offload.specs.worker import KVOffloadWorker  # noqa: E402
from vllm.v1.kv_offload import base  # noqa: E402

from contract.parts import blocks, kv_caches, offloading_config  # noqa: E402
from kv_offload.machine import no_copier  # noqa: E402

PAGE = 4096


def start(caches: Any, rank: int = 0, **options: Any) -> KVOffloadWorker:
    return KVOffloadSpec(offloading_config(rank=rank, **options)).get_worker(caches)


def rows(*numbers: int, groups: tuple[int, ...] = (), ticket: int = 1) -> RowLoadStoreSpec:
    return RowLoadStoreSpec(ticket, np.array(numbers, dtype=np.uint32), groups or (len(numbers),))


def finish(made: KVOffloadWorker, job_id: int) -> Any:
    made.wait({job_id})
    (result,) = made.get_finished()
    assert result.job_id == job_id
    return result


def test_the_worker_is_vllms() -> None:
    assert issubclass(KVOffloadWorker, base.OffloadingWorker)
    for name in ("submit_store", "submit_load", "get_finished", "wait", "shutdown"):
        theirs = list(inspect.signature(getattr(base.OffloadingWorker, name)).parameters)
        ours = list(inspect.signature(getattr(KVOffloadWorker, name)).parameters)
        assert ours[: len(theirs)] == theirs, name


def test_a_result_reports_bytes_and_seconds_and_always_success() -> None:
    made = start(kv_caches())
    assert made.submit_store(7, blocks([0, 1]), rows(0, 1)) is True
    result = finish(made, 7)
    assert isinstance(result, base.TransferResult)
    assert result.success is True
    assert result.transfer_size == 2 * PAGE
    assert result.transfer_time is not None
    assert result.transfer_time >= 0
    assert made.get_finished() == []
    made.shutdown()


def test_a_job_without_chunks_is_reported_too() -> None:
    made = start(kv_caches())
    assert made.submit_load(1, rows(groups=(0,)), blocks([], (0,))) is True
    assert finish(made, 1).success is True
    made.shutdown()


def test_waiting_for_finished_or_unknown_jobs_returns() -> None:
    made = start(kv_caches())
    made.wait({99})
    made.submit_store(1, blocks([0]), rows(0))
    made.wait({1, 99})
    made.wait({1})
    assert [result.job_id for result in made.get_finished()] == [1]
    made.shutdown()
    made.shutdown()


def test_an_expedited_load_is_a_load() -> None:
    caches = kv_caches()
    made = start(caches)
    made.submit_store(1, blocks([3]), rows(0))
    finish(made, 1)
    made.submit_load(2, rows(0, ticket=2), blocks([5]), expedited=True)
    finish(made, 2)
    assert (caches.tensors[0].tensor[5] == 3).all()
    made.shutdown()


def test_the_padding_between_pages_is_unchanged() -> None:
    caches = kv_caches(page=512, stride=768)
    backing = caches.tensors[0].tensor.as_strided((8, 768), (768, 1))
    backing[:, 512:] = 77
    made = start(caches)
    made.submit_store(1, blocks([2]), rows(0))
    finish(made, 1)
    made.submit_load(2, rows(0, ticket=2), blocks([6]))
    finish(made, 2)
    assert (backing[6, :512] == 2).all()
    assert (backing[:, 512:] == 77).all()
    made.shutdown()


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_whole_and_partial_chunks_are_loaded_unchanged(blocks_per_chunk: int, seed: int) -> None:
    """Three groups with different page sizes, chunks at random places; loads start late and end early."""
    rng = random.Random(seed)
    pages, num_blocks = (512, 4096, 1024), 24
    tensors = [torch.randint(-128, 127, (num_blocks, page), dtype=torch.int8) for page in pages]
    caches = base.CanonicalKVCaches(
        tensors=[base.CanonicalKVCacheTensor(t, page) for t, page in zip(tensors, pages, strict=True)],
        group_data_refs=[
            [base.CanonicalKVCacheRef(0, pages[0]), base.CanonicalKVCacheRef(1, pages[1])],
            [base.CanonicalKVCacheRef(2, pages[2])],
            [base.CanonicalKVCacheRef(0, pages[0])],
        ],
    )
    made = start(caches, groups=3, blocks_per_chunk=blocks_per_chunk)
    refs = [[0, 1], [2], [0]]
    before = [tensor.clone() for tensor in tensors]
    chunks = [rng.randrange(1, 4), rng.randrange(0, 4), rng.randrange(0, 2)]
    sources = [rng.sample(range(num_blocks), count * blocks_per_chunk) for count in chunks]
    pages_a_row = -(-max(sum(pages[ref] for ref in group) for group in refs) * blocks_per_chunk // PAGE)
    places = [number * pages_a_row for number in rng.sample(range(12), sum(chunks))]
    flat = [block for group in sources for block in group]
    sizes = tuple(len(group) for group in sources)
    starts = tuple(blocks_per_chunk * rng.randrange(3) for _ in chunks)
    made.submit_store(1, blocks(flat, sizes, starts), rows(*places, groups=tuple(chunks)))
    finish(made, 1)

    wanted: list[list[int]] = []
    late: list[int] = []
    for group in sources:
        skip = rng.randrange(blocks_per_chunk) if group else 0
        early = rng.randrange(blocks_per_chunk) if len(group) > blocks_per_chunk else 0
        wanted.append(group[skip : len(group) - early])
        late.append(skip)
    for tensor in tensors:
        tensor.fill_(0)
    spare = list(range(num_blocks))
    rng.shuffle(spare)
    # groups 0 and 2 share tensor 0, so their blocks must not overlap
    targets = [[spare.pop() for _ in group] for group in wanted]
    made.submit_load(
        2,
        rows(*places, groups=tuple(chunks), ticket=2),
        blocks(
            [block for group in targets for block in group],
            tuple(len(group) for group in targets),
            tuple(start + skip for start, skip in zip(starts, late, strict=True)),
        ),
    )
    finish(made, 2)
    for group, refs_of_group in enumerate(refs):
        for source, target in zip(wanted[group], targets[group], strict=True):
            for ref in refs_of_group:
                assert torch.equal(tensors[ref][target], before[ref][source])
    touched = {(ref, block) for group, ids in enumerate(targets) for block in ids for ref in refs[group]}
    for ref, tensor in enumerate(tensors):
        for block in range(num_blocks):
            assert (ref, block) in touched or not tensor[block].any()
    made.shutdown()


def test_each_rank_reports_and_uses_only_its_area() -> None:
    first, second = kv_caches(), kv_caches()
    second.tensors[0].tensor.add_(100)
    engine = offloading_config(world_size=2).engine_id
    workers = [
        start(caches, rank, world_size=2, engine_id=engine) for rank, caches in enumerate((first, second))
    ]
    manager = KVOffloadSpec(offloading_config(world_size=2, engine_id=engine)).get_manager()
    for made in workers:
        made.submit_store(1, blocks([1, 2]), rows(0, 1))
        finish(made, 1)
    for made, caches in zip(workers, (first, second), strict=True):
        made.submit_load(2, rows(1, 0, ticket=2), blocks([5, 6]))
        finish(made, 2)
        tensor = caches.tensors[0].tensor
        assert torch.equal(tensor[5], tensor[2])
        assert torch.equal(tensor[6], tensor[1])
        made.shutdown()
    manager.shutdown()


def test_the_worker_keeps_the_cache_alive() -> None:
    import gc
    import weakref

    caches = kv_caches()
    tensor = weakref.ref(caches.tensors[0].tensor)
    made = start(caches)
    del caches
    gc.collect()
    assert tensor() is not None
    made.shutdown()


def test_progress_is_logged_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="vllm.kv_offload.specs.worker")
    now = [0.0]
    progress = worker.progress_logger(0.0, clock=lambda: now[0])
    for done in range(10):
        now[0] = float(done)
        progress(done << 30, 10 << 30)
    assert [record.getMessage() for record in caplog.records] == [
        f"preparing host memory: {done}.0 GiB of 10.0 GiB" for done in (3, 6, 9)
    ]


def test_a_cache_on_an_unsupported_device_is_refused_with_the_supported_ones() -> None:
    with pytest.raises(ValueError, match="on meta; supported are cpu and cuda"):
        worker.choose_copier([torch.empty(1, device="meta")])


def test_a_gpu_without_a_copier_is_refused_with_the_message_of_doctor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kv_offload._core.cuda_unavailable_reason", lambda: "no library")
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.raises(ValueError, match=re.escape(no_copier("cuda:0", "no library"))):
        worker.choose_copier([on_gpu])
