# SPDX-License-Identifier: Apache-2.0
"""Measures how soon one server hits records that another server has stored.

    python benchmarks/visibility.py [--records 500] [--kib 2048] [--tier redis=URL | --tier JSON ...]

Runs two caches, A and B, on one store server, in one process and without vLLM. Without ``--tier`` it uses a
redis-server and SeaweedFS on this machine, one after the other. For each record it measures the time from the
end of A's store (from then on A hits it) until B hits it, with the bytes verified in B's host memory. There
are two variants of B: in one, B looks up the record when A has written it; in the other, B looks it up
repeatedly from the start, so that its latest result was a miss. Steps of both schedulers are 0.2 ms apart.
Records remain on servers that this benchmark did not start, under a prefix of their own that it prints:
`kv-offload purge` accepts it.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
import uuid
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from reporting import describe_machine, echo, write_results
from tier_places import OWN, entry_of

from kv_offload import _core
from kv_offload.tiers.registry import parse_tier

HIT, MISS = 1, 0
STEP_SECONDS = 0.0002
ROWS = 64


class Engine:
    """A cache with one rank, which is reduced to its job reports."""

    def __init__(self, entry: dict[str, Any], row_bytes: int) -> None:
        engine, size = f"benchmark-{uuid.uuid4()}", ROWS * row_bytes
        self.worker = _core.HostRegion.attach_worker(engine, size, 1, 1, 0, [row_bytes], "{}")
        self.region = _core.HostRegion.attach_scheduler(engine, size, 1, 1)
        self.region.wait_for_ranks(10)
        self.metrics = _core.Metrics()
        tier = parse_tier(entry)
        self.kind = tier.type
        identity: Any = SimpleNamespace(namespace_id=lambda: bytes(32))
        self.cache = _core.TieredCache(
            self.region,
            self.metrics,
            group_ids=[0],
            tokens_per_chunk=[16],
            shard_bytes=[[row_bytes]],
            tiers=[tier.make_spec(tier.type, None, identity)],
            load_policy="always",
            lookup_timeout_seconds=60.0,
        )

    def store(self, key: bytes) -> None:
        request = self.cache.begin_request("a")
        _, ticket, *_ = self.cache.prepare_store(request, [key])
        self.worker.report(0, ticket, 0)
        self.cache.complete_store([key])
        self.cache.end_request(request)

    def written_bytes(self) -> float:
        return self.metrics.value("kv_offload_write_bytes_total", [self.kind])


@dataclass
class Taken:
    """Seconds from the end of A's store, per record."""

    written: list[float] = field(default_factory=list)  # A knows that the server has it
    hit: list[float] = field(default_factory=list)  # B hit it, first looked up after A's write
    hit_when_asked_before: list[float] = field(default_factory=list)


def hit_by(reader: Engine, writer: Engine, key: bytes, give_up: float) -> None:
    """Looks the key up until it hits, with a new request after each miss.

    Raises TimeoutError at ``give_up``.
    """
    request = reader.cache.begin_request("b")
    while (answer := reader.cache.lookup(request, key)) != HIT:
        if answer == MISS:
            reader.cache.end_request(request)
            request = reader.cache.begin_request("b")
        if time.perf_counter() > give_up:
            raise TimeoutError(f"not hit after a minute: {reader.cache.tier_stats(0)}")
        for engine in (writer, reader):
            engine.cache.end_step()
        time.sleep(STEP_SECONDS)
    reader.cache.end_request(request)


def measure(entry: dict[str, Any], records: int, row_bytes: int) -> Taken:
    writer, reader = Engine(entry, row_bytes), Engine(entry, row_bytes)
    taken = Taken()
    for number in range(2 * records):
        key = uuid.uuid4().bytes * 2 + bytes(4)
        before = writer.written_bytes()
        began = time.perf_counter()
        writer.store(key)
        if number % 2 == 0:
            while writer.written_bytes() == before:
                if time.perf_counter() > began + 60:
                    raise TimeoutError(f"not written after a minute: {writer.cache.tier_stats(0)}")
                writer.cache.end_step()
                time.sleep(STEP_SECONDS)
            taken.written.append(time.perf_counter() - began)
        hit_by(reader, writer, key, began + 60)
        seconds = time.perf_counter() - began
        (taken.hit if number % 2 == 0 else taken.hit_when_asked_before).append(seconds)
    for engine in (writer, reader):
        engine.cache.close()
    return taken


def percentiles(values: list[float]) -> dict[str, float]:
    parts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": parts[49], "p99": parts[98], "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=500)
    parser.add_argument("--kib", type=int, default=2048, help="of a record")
    parser.add_argument("--tier", action="append", help="TYPE=PLACE or JSON; may be repeated")
    parser.add_argument("--dry", action="store_true", help="for trying out: nothing is written")
    arguments = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    with contextlib.ExitStack() as stack:
        places = arguments.tier or [stack.enter_context(own()) for own in OWN.values()]
        for place in places:
            entry = entry_of(place)
            taken = measure(entry, arguments.records, arguments.kib * 1024)
            results[entry["type"]] = {name: percentiles(values) for name, values in vars(taken).items()}
            for name, found in results[entry["type"]].items():
                p50, p99 = found["p50"] * 1e3, found["p99"] * 1e3
                echo(f"{entry['type']:6} {name:22} p50 {p50:7.2f} ms, p99 {p99:7.2f} ms")
    echo(f"machine: {describe_machine()['text']}")
    if not arguments.dry:
        write_results(
            "visibility", {"records": arguments.records, "record_kib": arguments.kib, "seconds": results}
        )


if __name__ == "__main__":
    main()
