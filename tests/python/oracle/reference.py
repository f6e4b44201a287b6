# SPDX-License-Identifier: Apache-2.0
"""A manager that keeps all chunks that vLLM offers, and a worker that copies as vLLM's own does.

The worker places blocks by vLLM's rule (gpu_worker.py): consecutively, from the slot of the first listed
block. This is wrong where vLLM left out a block in between; the runner then detects wrong bytes, and these
tokens do not count as found. A reference engine records that and continues.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from kv_offload.specs.compat import (
    LookupResult,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
    load_sources,
)
from kv_offload.specs.load_spec import RowLoadStoreSpec

from oracle.engine import Engine, Setup
from oracle.runner import WrongBytes


class KeepsAll:
    """Replaces our manager; rows are numbers, and each key keeps its row permanently."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.rows: dict[bytes, int] = {}
        self.stored: set[bytes] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        pass

    def on_schedule_end(self, context: Any) -> None:
        pass

    def has_pending_work(self) -> bool:
        return False

    def take_events(self) -> tuple[Any, ...]:
        return ()

    def get_stats(self) -> None:
        return None

    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        sources = load_sources()
        return None if sources is None else sources[0]

    def lookup(self, key: bytes, req_context: Any) -> Any:
        if key in self.stored:
            return LookupResult.HIT
        return LookupResult.HIT_PENDING if key in self.rows else LookupResult.MISS

    def prepare_store(self, keys: Any, req_context: Any) -> Any:
        new = [key for key in keys if key not in self.rows]
        for key in new:
            self.rows[key] = len(self.rows)
        return PrepareStoreOutput(new, self._spec(new), [])

    def complete_store(self, keys: Any, req_context: Any, success: bool = True) -> None:
        self.stored.update(keys)

    def prepare_load(self, keys: Any, req_context: Any) -> RowLoadStoreSpec:
        return self._spec(keys)

    def complete_load(self, keys: Any, req_context: Any) -> None:
        pass

    def _spec(self, keys: Any) -> RowLoadStoreSpec:
        return RowLoadStoreSpec(0, np.array([self.rows[key] for key in keys], dtype=np.uint32), ())


class CopiesAsVllm:
    """Replaces our worker; copies synchronously."""

    def __init__(self, inner: Any, rank: int, blocks_per_chunk: int) -> None:
        self.inner, self.blocks_per_chunk = inner, blocks_per_chunk
        self.runner: Any = None  # the runner that owns the caches; set after the engine has started
        self.kept: dict[tuple[int, int], list[np.ndarray]] = {}  # (row, slot) -> bytes of each layer
        self.finished: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for layers, block, place in self._pairs(src_spec, dst_spec):
            self.kept[place] = [words[block].copy() for words, _ in layers]
        return self._done(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        for layers, block, place in self._pairs(dst_spec, src_spec):
            for (words, _), found in zip(layers, self.kept.get(place, ()), strict=False):
                words[block] = found
        return self._done(job_id)

    def _pairs(self, blocks: Any, rows: Any) -> Any:
        first_id = first_row = 0
        for group, (size, index) in enumerate(zip(blocks.group_sizes, blocks.block_indices, strict=True)):
            skipped = index % self.blocks_per_chunk if size else 0
            for number in range(size):
                row, slot = divmod(skipped + number, self.blocks_per_chunk)
                place = (int(rows.rows[first_row + row]), slot)
                yield self.runner.layers[group], int(blocks.block_ids[first_id + number]), place
            first_id += size
            first_row += -(-(size + skipped) // self.blocks_per_chunk) if size else 0

    def _done(self, job_id: int) -> bool:
        self.finished.append(TransferResult(job_id, True, 1, 0.001))
        return True

    def get_finished(self) -> list[Any]:
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass


def reference_engine(setup: Setup, boot: Callable[[Setup], Engine]) -> Engine:
    """Returns an engine that finds every possible chunk. ``runner.wrong``: requests with wrong bytes."""
    blocks = int(setup.extra.get("blocks_per_chunk", 1))
    engine = boot(
        replace(
            setup,
            wrap_manager=KeepsAll,
            wrap_worker=lambda worker, rank: CopiesAsVllm(worker, rank, blocks),
        )
    )
    for _, connector, runner in engine.ranks:
        connector.connector_worker.worker.runner = runner
        runner.wrong = set()
        runner.check = _noting(runner, runner.check, lambda request_id, *_: request_id)
        runner._check_states = _noting(runner, runner._check_states, lambda request_id, *_: request_id)
    return engine


def _noting(runner: Any, check: Callable[..., None], name_of: Callable[..., str]) -> Callable[..., None]:
    def noting(*arguments: Any) -> None:
        try:
            check(*arguments)
        except WrongBytes:
            runner.wrong.add(name_of(*arguments))

    return noting
