# SPDX-License-Identifier: Apache-2.0
"""A small real core: a region of one rank, a cache over it, and keys."""

import uuid
from pathlib import Path
from typing import Any

from kv_offload import _core

GROUP = 7  # vLLM's group id, the last four bytes of a key
SHARD_BYTES = 8192
TOKENS = 16
MIB = 1 << 20


def key(number: int, group: int = GROUP) -> bytes:
    return number.to_bytes(32, "big")[::-1] + group.to_bytes(4, "big")


def keys(count: int, first: int = 1) -> list[bytes]:
    return [key(number) for number in range(first, first + count)]


def attach(shm: Path, num_bytes: int = MIB, workers: int = 1) -> tuple[Any, list[Any]]:
    """Attaches the scheduler's region and the workers' regions, in one process."""
    engine = uuid.uuid4().hex
    facts: dict[str, Any] = {"num_areas": workers, "num_workers": workers, "shm_directory": str(shm)}
    scheduler = _core.HostRegion.attach_scheduler(engine, num_bytes, **facts)
    attached = [
        _core.HostRegion.attach_worker(
            engine, num_bytes, rank=rank, shard_bytes=[SHARD_BYTES], fingerprint=f"rank {rank}", **facts
        )
        for rank in range(workers)
    ]
    scheduler.wait_for_ranks(240.0)
    return scheduler, attached


def make_cache(region: Any, metrics: Any | None = None, **options: Any) -> Any:
    given: dict[str, Any] = {
        "group_ids": [GROUP],
        "tokens_per_chunk": [TOKENS],
        "shard_bytes": [[SHARD_BYTES] * region.num_areas],
    }
    return _core.TieredCache(region, metrics or _core.Metrics(), **{**given, **options})


def store(cache: Any, worker: Any, request: int, wanted: list[bytes]) -> list[bytes]:
    """Stores chunks from the cache's point of view: reports the ticket. Returns the accepted keys."""
    accepted, ticket, *_ = cache.prepare_store(request, wanted)
    worker.report(0, ticket, 0)
    cache.complete_store(accepted)
    return list(accepted)
