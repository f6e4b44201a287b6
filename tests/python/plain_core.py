"""The core as plain as it can be written: what the adapter's tests and the byte oracle run without a build.

Same names and shapes as ``kv_offload._core``, one process, host memory only, least recently used. Copies are
late on purpose: a job runs when it is waited for, or by chance when the worker is polled.
"""

import ctypes
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

PAGE = 4096


class ResourceError(RuntimeError):
    pass


def _pages(size: int) -> int:
    return -(-size // PAGE)


class Metrics:
    """Counters and gauges by (name, labels), and their changes."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[str, ...]], float] = {}
        self.changes: list[tuple[str, str, tuple[str, ...], Any]] = []

    def add(self, name: str, labels: Sequence[str], increase: float = 1) -> None:
        key = (name, tuple(labels))
        self.values[key] = self.values.get(key, 0) + increase
        self.changes.append((name, "counter", tuple(labels), increase))

    def set(self, name: str, labels: Sequence[str], value: float) -> None:
        self.values[(name, tuple(labels))] = value
        self.changes.append((name, "gauge", tuple(labels), value))

    def observe(self, name: str, labels: Sequence[str], value: float) -> None:
        self.changes.append((name, "histogram", tuple(labels), [value]))

    def value(self, name: str, labels: Sequence[str] = ()) -> float:
        return self.values.get((name, tuple(labels)), 0.0)

    def drain(self) -> list[tuple[str, str, tuple[str, ...], Any]]:
        changes, self.changes = self.changes, []
        return changes

    def expose(self, address: str) -> None:
        self.address = address


class HostRegion:
    """Areas in ordinary memory, found by engine_id within this process."""

    engines: ClassVar[dict[str, "HostRegion"]] = {}

    def __init__(self, size: int, num_areas: int, num_workers: int) -> None:
        self.num_areas, self.num_workers = num_areas, num_workers
        self.area_bytes = size // num_areas // PAGE * PAGE
        self.areas = [np.zeros(self.area_bytes, dtype=np.uint8) for _ in range(num_areas)]
        self.ranks: dict[int, tuple[list[int], str]] = {}
        self.reports: dict[int, list[int]] = {}  # ticket -> failed groups, one entry per report
        self.swept: list[str] = []

    @classmethod
    def _attach(cls, engine_id: str, size: int, num_areas: int, num_workers: int) -> "HostRegion":
        return cls.engines.setdefault(engine_id, cls(size, num_areas, num_workers))

    @classmethod
    def attach_scheduler(
        cls, engine_id: str, size: int, num_areas: int, num_workers: int, **_: Any
    ) -> "HostRegion":
        return cls._attach(engine_id, size, num_areas, num_workers)

    @classmethod
    def attach_worker(
        cls,
        engine_id: str,
        size: int,
        num_areas: int,
        num_workers: int,
        rank: int,
        shard_bytes: Sequence[int],
        fingerprint: str,
        **_: Any,
    ) -> "HostRegion":
        region = cls._attach(engine_id, size, num_areas, num_workers)
        region.ranks[rank] = (list(shard_bytes), fingerprint)
        return region

    def wait_for_ranks(self, timeout_seconds: float) -> None:
        missing = [rank for rank in range(self.num_workers) if rank not in self.ranks]
        if missing:
            raise ResourceError(f"ranks {missing} did not attach in {timeout_seconds:g} s")

    def geometry(self, rank: int) -> tuple[list[int], str]:
        return self.ranks[rank]

    def prefault(self, index: int, threads: int, progress: Any = None) -> None:
        if progress is not None:
            progress(self.area_bytes, self.area_bytes)

    def report(self, rank: int, ticket: int, failed_groups: int) -> None:
        self.reports.setdefault(ticket, []).append(failed_groups)

    def result(self, ticket: int, reporters: int) -> int | None:
        reports = self.reports.get(ticket, [])
        if len(reports) < reporters:
            return None
        failed = 0
        for groups in reports:
            failed |= groups
        return failed


@dataclass
class Chunk:
    row: int
    group: int
    ticket: int
    resident: bool = False
    pins: int = 0


@dataclass
class TieredCache:
    """Host memory only; rows of one size; the least recently used chunk goes first."""

    region: HostRegion
    metrics: Metrics
    group_ids: Sequence[int]
    tokens_per_chunk: Sequence[int]
    shard_bytes: Sequence[Sequence[int]]
    full_attention: Sequence[bool] = ()
    tiers: Sequence[Any] = ()
    eviction_policy: str = "lru"
    load_policy: str = "auto"
    lookup_deadline_seconds: float = 5.0
    keep_events: bool = False
    chunks: "OrderedDict[bytes, Chunk]" = field(default_factory=OrderedDict)
    requests: dict[int, dict[str, Any]] = field(default_factory=dict)
    quarantine: list[tuple[int, int, int]] = field(default_factory=list)  # row, ticket, reporters
    loads: list[tuple[int, list[int]]] = field(default_factory=list)
    events: list[tuple[list[bytes], bool, bool, str]] = field(default_factory=list)
    closed: int = 0

    def __post_init__(self) -> None:
        self.row_pages = max(_pages(size) for shards in self.shard_bytes for size in shards)
        count = self.region.area_bytes // PAGE // self.row_pages
        if count == 0:
            raise ValueError("the region does not hold one row")
        self.free = [index * self.row_pages for index in range(count)]
        self.position = {group: index for index, group in enumerate(self.group_ids)}
        self.next_ticket, self.next_request = 1, 0

    # requests
    def begin_request(self, request_id: str, **options: Any) -> int:
        self.next_request += 1
        self.requests[self.next_request] = {"id": request_id, **options}
        return self.next_request

    def end_request(self, request: int) -> None:
        del self.requests[request]

    # lookup and load
    def make_lookup(self, results: Sequence[Any], handle_of: Callable[[Any], int]) -> Callable[..., Any]:
        return lambda key, context: results[self.lookup(handle_of(context), key)]

    def forget_context(self) -> None:
        pass

    def lookup(self, request: int, key: bytes) -> int:
        chunk = self.chunks.get(key)
        if chunk is None or not self.requests[request].get("load_from_cpu", True):
            self.metrics.add("kv_offload_miss_tokens_total", ("not_stored",), self.tokens_per_chunk[0])
            return 0
        self.chunks.move_to_end(key)
        return 1 if chunk.resident else 2

    def load_source(self, key: bytes) -> int:
        return -1

    def _transfer(self, keys: Sequence[bytes]) -> tuple[np.ndarray, tuple[int, ...]]:
        groups = [0] * len(self.group_ids)
        for key in keys:
            groups[self.chunks[key].group] += 1
        return np.array([self.chunks[key].row for key in keys], dtype=np.uint32), tuple(groups)

    def _ticket(self) -> int:
        self.next_ticket += 1
        return self.next_ticket

    def prepare_load(self, request: int, keys: Sequence[bytes]) -> tuple[int, np.ndarray, tuple[int, ...]]:
        for key in keys:
            assert self.chunks[key].resident
            self.chunks[key].pins += 1
        ticket = self._ticket()
        rows, groups = self._transfer(keys)
        self.loads.append((ticket, rows.tolist()))
        return ticket, rows, groups

    def complete_load(self, keys: Collection[bytes]) -> None:
        for key in keys:
            self.chunks[key].pins -= 1

    # store
    def _allocate(self, keep: set[bytes]) -> tuple[int | None, bytes | None]:
        if self.free:
            return self.free.pop(), None
        for key, chunk in self.chunks.items():
            if chunk.resident and chunk.pins == 0 and key not in keep:
                del self.chunks[key]
                self._event(key, removed=True)
                return chunk.row, key
        return None, None

    def prepare_store(
        self, request: int, keys: Sequence[bytes], depths: Sequence[int] | None = None
    ) -> tuple[list[bytes], int, np.ndarray, tuple[int, ...], list[bytes]]:
        accepted: list[bytes] = []
        evicted: list[bytes] = []
        ticket = self._ticket()
        new = [] if self.requests[request].get("skip_store") else [k for k in keys if k not in self.chunks]
        for key in new:
            row, victim = self._allocate(set(keys))
            if row is None:
                break
            if victim is not None:
                evicted.append(victim)
            self.chunks[key] = Chunk(row, self.position[int.from_bytes(key[-4:], "big")], ticket)
            accepted.append(key)
        rows, groups = self._transfer(accepted)
        return accepted, ticket, rows, groups, evicted

    def complete_store(self, keys: Collection[bytes], success: bool = True) -> None:
        for key in keys:
            chunk = self.chunks.get(key)
            if chunk is None or chunk.resident:
                continue
            failed = self.region.result(chunk.ticket, self.region.num_areas)
            if success and failed is not None and not failed >> chunk.group & 1:
                chunk.resident = True
                self._event(key, removed=False)
            else:
                del self.chunks[key]
                self.free.append(chunk.row)

    def _event(self, key: bytes, removed: bool) -> None:
        if self.keep_events:
            self.events.append(([key], False, removed, "cpu"))

    # step and reset
    def end_step(self) -> None:
        held = []
        for row, ticket, reporters in self.quarantine:
            if self.region.result(ticket, reporters) is None:
                held.append((row, ticket, reporters))
            else:
                self.free.append(row)
        self.quarantine = held
        workers = self.region.num_workers
        self.loads = [load for load in self.loads if self.region.result(load[0], workers) is None]

    def has_pending_work(self) -> bool:
        return False

    def reset(self) -> None:
        loading = {row: ticket for ticket, rows in self.loads for row in rows}
        for key, chunk in self.chunks.items():
            if not chunk.resident:
                self.quarantine.append((chunk.row, chunk.ticket, self.region.num_areas))
            elif chunk.row in loading:
                self.quarantine.append((chunk.row, loading[chunk.row], self.region.num_workers))
            else:
                self.free.append(chunk.row)
            self._event(key, removed=True)
        self.chunks.clear()
        self.loads.clear()

    def take_events(self) -> list[tuple[list[bytes], bool, bool, str]]:
        events, self.events = self.events, []
        return events

    def publish_gauges(self) -> None:
        resident = sum(chunk.resident for chunk in self.chunks.values())
        self.metrics.set("kv_offload_tier_chunks", ("cpu",), resident)

    def stats(self) -> dict[str, int]:
        return {"resident_chunks": sum(chunk.resident for chunk in self.chunks.values())}

    def close(self) -> None:
        self.closed += 1


def _memory(address: int, size: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=np.uint8)


@dataclass
class Job:
    job_id: int
    ticket: int
    store: bool
    block_ids: np.ndarray
    group_sizes: Sequence[int]
    block_indices: Sequence[int]
    rows: np.ndarray
    group_rows: Sequence[int]


class RankWorker:
    """Copies block by block with numpy."""

    rng = random.Random(0)

    def __init__(
        self,
        region: HostRegion,
        rank: int,
        metrics: Metrics,
        *,
        copier: str,
        tensors: Sequence[tuple[int, int, int]],
        groups: Sequence[Sequence[tuple[int, int]]],
        blocks_per_chunk: int,
        area: int,
        threads: int = 2,
        device: int = -1,
        keep_alive: Any = None,
    ) -> None:
        self.region, self.rank, self.keep_alive = region, rank, keep_alive
        self.tensors, self.groups, self.blocks_per_chunk = tensors, groups, blocks_per_chunk
        self.area = region.areas[area]
        self.pending: list[Job] = []
        self.finished: list[tuple[int, int, float]] = []
        self.closed = False

    def submit(self, *arguments: Any) -> None:
        *job, _expedited = arguments
        self.pending.append(Job(*job))

    def poll(self) -> list[tuple[int, int, float]]:
        while self.pending and self.rng.random() < 0.4:
            self._run(self.pending.pop(0))
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids: Collection[int]) -> None:
        for job in [job for job in self.pending if job.job_id in job_ids]:
            self.pending.remove(job)
            self._run(job)

    def _run(self, job: Job) -> None:
        size, failed, block, row = 0, 0, 0, 0
        for group, refs in enumerate(self.groups):
            count, rows = job.group_sizes[group], (job.group_rows[group] if job.group_rows else 0)
            skip = job.block_indices[group] % self.blocks_per_chunk
            if job.store and count != rows * self.blocks_per_chunk:
                failed |= 1 << group
            else:
                for index in range(count):
                    place = skip + index
                    offset = int(job.rows[row + place // self.blocks_per_chunk]) * PAGE
                    at = place % self.blocks_per_chunk
                    size += self._copy(job, refs, int(job.block_ids[block + index]), offset, at)
            block, row = block + count, row + rows
        self.region.report(self.rank, job.ticket, failed)
        self.finished.append((job.job_id, size, 0.001))

    def _copy(self, job: Job, refs: Sequence[tuple[int, int]], block_id: int, row: int, at: int) -> int:
        block_bytes = sum(page for _, page in refs)
        offset = row + at * block_bytes
        for tensor, page in refs:
            address, num_blocks, stride = self.tensors[tensor]
            assert 0 <= block_id < num_blocks
            cache = _memory(address + block_id * stride, page)
            shard = self.area[offset : offset + page]
            if job.store:
                shard[:] = cache
            else:
                cache[:] = shard
            offset += page
        return block_bytes

    def describe(self) -> str:
        return "plain"

    def close(self) -> None:
        self.closed = True


def as_module() -> Any:
    """Something to stand for ``kv_offload._core`` in sys.modules."""
    names = ("ResourceError", "Metrics", "HostRegion", "TieredCache", "RankWorker")
    module = SimpleNamespace(is_plain=True, **{name: globals()[name] for name in names})
    module.cuda_unavailable_reason = lambda: "no CUDA here"
    info = SimpleNamespace(
        name="kv_offload_info",
        type="gauge",
        documentation="",
        labels=("version", "namespace"),
        buckets=(),
        worker=False,
    )
    module.metric_definitions = lambda: [info]
    return module
