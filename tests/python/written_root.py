# SPDX-License-Identifier: Apache-2.0
"""A root that the core itself has written, for tests of the code that reads and repairs roots."""

import contextlib
import os
import time
from pathlib import Path

from live_root import records_in

from kv_offload.namespace import GroupIdentity, NamespaceIdentity

CHUNK = 64 << 10
KEYS = [bytes([number]) * 32 + bytes(4) for number in range(1, 6)]
FACTS = NamespaceIdentity(
    model={"name": "org/model", "revision": "c0ffee"},
    kv_dtype="bfloat16",
    kv_cache_layout="LBHNC",
    groups=(GroupIdentity(0, 16, 2, (CHUNK,)),),
    blocks_per_chunk=1,
    tokens_per_hash=16,
    hash_algorithm="sha256",
    hash_seed="00",
)


def write_root(path: Path, identity: NamespaceIdentity = FACTS, max_bytes: int = 1 << 30) -> Path:
    """Writes one record for each of KEYS into the root at ``path``, in the namespace of ``identity``. The
    first is the least recently used.
    """
    from kv_offload import _core as core

    engine = f"cli-{os.getpid()}-{path.parent.name}-{path.name}"
    size = 16 << 20
    worker = core.HostRegion.attach_worker(engine, size, 1, 1, 0, [CHUNK], "layout", huge_pages=False)
    region = core.HostRegion.attach_scheduler(engine, size, 1, 1, huge_pages=False)
    region.wait_for_ranks(240)
    tier = core.FsTier(
        root_dir=str(path),
        max_bytes=max_bytes,
        namespace_id=identity.namespace_id(),
        namespace_json=identity.readable_json(),
        op_timeout_seconds=240.0,
    )
    cache = core.TieredCache(
        region,
        core.Metrics(),
        group_ids=[0],
        tokens_per_chunk=[16],
        shard_bytes=[[CHUNK]],
        full_attention=[True],
        tiers=[tier],
    )
    request = cache.begin_request("r")
    accepted, ticket, rows, _, _ = cache.prepare_store(request, KEYS)
    assert accepted == KEYS
    for number, row in enumerate(rows):
        worker.area(0)[int(row) * 4096 :][:CHUNK] = number
    worker.report(0, ticket, 0)
    cache.complete_store(accepted)
    cache.end_request(request)
    deadline = time.monotonic() + 240
    while cache.tier_stats(0)["chunks"] < len(KEYS):
        cache.end_step()
        assert time.monotonic() < deadline, cache.tier_stats(0)
    cache.close()
    # Two threads wrote them in any order; from here on they are in the order of KEYS.
    now = time.time_ns()
    for number, key in enumerate(KEYS):
        for record in records_in(path / identity.namespace_id().hex(), key.hex()):
            with contextlib.suppress(FileNotFoundError):  # evicted by a concurrent watcher
                os.utime(record, ns=(now, now - (len(KEYS) - number) * 1_000_000))
    return path
