# SPDX-License-Identifier: Apache-2.0
"""vLLM's own TieringOffloadingSpec on the CPU platform, for comparison.

Its manager, region and file-system tier are unchanged. Only the worker, which supports only GPUs, is replaced
by one that copies with memcpy in a thread. prompt_reload.py uses it through ``spec_module_path``.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemcpyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies whole blocks between the cache tensors and the region, one job after the other in one thread.

    It uses numpy. A copy by torch would create OpenMP threads for this thread. There would then be more
    OpenMP threads than cores, and OpenMP would let the compute threads spin less than in the other servers.
    """

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._region = region
        self._refs = kv_caches.group_data_refs
        self._device = [cache.tensor.numpy() for cache in kv_caches.tensors]
        self._host = [
            region.create_next_worker_view(cache.page_size_bytes).numpy() for cache in kv_caches.tensors
        ]
        self._pool = ThreadPoolExecutor(1)
        self._jobs: dict[int, Future[TransferResult]] = {}

    def _copy(self, job: int, blocks: Any, chunks: np.ndarray, store: bool) -> TransferResult:
        began, moved, first = time.perf_counter(), 0, 0
        for group, size in enumerate(blocks.group_sizes):
            ids, rows = blocks.block_ids[first : first + size], chunks[first : first + size]
            first += size
            for ref in self._refs[group]:
                device, host, page = (
                    self._device[ref.tensor_idx],
                    self._host[ref.tensor_idx],
                    ref.page_size_bytes,
                )
                for block, row in zip(ids.tolist(), rows.tolist(), strict=True):
                    one, other = device[block, :page], host[row, :page]
                    np.copyto(other if store else one, one if store else other)
                moved += page * size
        return TransferResult(job, True, moved, time.perf_counter() - began)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._jobs[job_id] = self._pool.submit(self._copy, job_id, src_spec, dst_spec.block_ids, True)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._jobs[job_id] = self._pool.submit(self._copy, job_id, dst_spec, src_spec.block_ids, False)
        return True

    def get_finished(self) -> list[TransferResult]:
        done = [job for job, future in self._jobs.items() if future.done()]
        return [self._jobs.pop(job).result() for job in done]

    def wait(self, job_ids: set[int]) -> None:
        for job in job_ids & self._jobs.keys():
            self._jobs[job].result()

    def shutdown(self) -> None:
        self._pool.shutdown()
        self._host.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """TieringOffloadingSpec with MemcpyWorker."""

    _worker: OffloadingWorker | None

    def _uses_shared_region(self) -> bool:
        return True

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            assert self.blocks_per_chunk == 1
            assert all(torch.int8 == cache.tensor.dtype for cache in kv_caches.tensors)
            # As in TieringOffloadingSpec.create_worker: no barrier. With one, the scheduler would map another
            # region.
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = MemcpyWorker(kv_caches, region)
        return self._worker
