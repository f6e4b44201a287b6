# SPDX-License-Identifier: Apache-2.0
"""Measures how long the next request of a session waits for its prompt, with and without a prefetch.

    python benchmarks/prefetch.py [--rounds 20] [--chunks 16] [--kib 256] [--directory DIR]

Runs one cache on a directory, in one process and without vLLM. In each round a session stores its prompt,
other prompts evict it from host memory, and the session returns: the measured time begins with the first
lookup and ends when all chunks can be loaded. In every other round, a prefetch hint precedes the return by as
long as the reads take. They take up to a second, because a prefetch evicts only chunks that are expected
later, and the other prompts were all used within the last second. Steps of the scheduler are 0.2 ms apart.
The page cache is not dropped; the tier reads with O_DIRECT where the file system supports it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import uuid

from reporting import describe_machine, echo, write_results

from kv_offload import _core

HIT, TOKENS = 1, 16
STEP_SECONDS = 0.0002
GIVE_UP_SECONDS = 120


class Engine:
    """A cache with one rank, which is reduced to its job reports."""

    def __init__(self, directory: str, rows: int, row_bytes: int) -> None:
        engine, size = f"benchmark-{uuid.uuid4()}", rows * row_bytes
        self.worker = _core.HostRegion.attach_worker(engine, size, 1, 1, 0, [row_bytes], "{}")
        self.region = _core.HostRegion.attach_scheduler(engine, size, 1, 1)
        self.region.wait_for_ranks(10)
        tier = _core.FsTier(
            root_dir=directory, max_bytes=64 * size, namespace_id=bytes(32), namespace_json="{}"
        )
        self.cache = _core.TieredCache(
            self.region,
            _core.Metrics(),
            group_ids=[0],
            tokens_per_chunk=[TOKENS],
            shard_bytes=[[row_bytes]],
            full_attention=[True],
            tiers=[tier],
            load_policy="always",
            lookup_timeout_seconds=60.0,
        )

    def turn(self, prompt: list[bytes], session: bytes = b"", family: int = 0) -> None:
        """Stores a prompt, in parts, and waits until each part is on the tier."""
        request = self.cache.begin_request("turn", family=family)
        for first in range(0, len(prompt), 8):
            until = time.monotonic() + GIVE_UP_SECONDS
            part = prompt[first : first + 8]
            depths = [TOKENS * (first + place + 1) for place in range(len(part))]
            accepted, ticket, *_ = self.cache.prepare_store(request, part, depths)
            if accepted != part:
                raise RuntimeError("no row is free for a part of a prompt")
            self.worker.report(0, ticket, 0)
            self.cache.complete_store(accepted)
            self.step()
            while self.cache.tier_stats(0)["queued_writes"]:
                self.check(until)
                self.step()
            self.step()  # rows of the writes are free from now on
        if session:
            self.cache.end_turn(request, session, 0, [])
        self.cache.end_request(request)

    def step(self) -> None:
        self.cache.end_step()
        time.sleep(STEP_SECONDS)

    @staticmethod
    def check(until: float) -> None:
        if time.monotonic() > until:
            raise TimeoutError("the tier did not make progress")


def keys(count: int) -> list[bytes]:
    return [uuid.uuid4().bytes * 2 + bytes(4) for _ in range(count)]


def wait_of(engine: Engine, prompt: list[bytes]) -> float:
    """Returns the seconds from the first lookup until all chunks can be loaded."""
    until = time.monotonic() + GIVE_UP_SECONDS
    request = engine.cache.begin_request("return", family=1)
    began = time.perf_counter()
    while [engine.cache.lookup(request, key) for key in prompt] != [HIT] * len(prompt):
        engine.check(until)
        engine.step()
    seconds = time.perf_counter() - began
    ticket, *_ = engine.cache.prepare_load(request, prompt)
    engine.worker.report(0, ticket, 0)
    engine.cache.complete_load(prompt)
    engine.step()
    engine.cache.end_request(request)
    return seconds


def measure(directory: str, rounds: int, chunks: int, row_bytes: int) -> dict[str, list[float]]:
    rows = 8 * chunks + 8  # an eighth is for the prefetched chunks of one client
    engine = Engine(directory, rows, row_bytes)
    taken: dict[str, list[float]] = {"without": [], "with": [], "reads": []}
    for number in range(2 * rounds):
        prompt, session = keys(chunks), uuid.uuid4().bytes
        engine.turn(prompt, session, family=1)
        running = engine.cache.begin_request("running")
        while engine.cache.absent(prompt) != prompt:
            engine.turn(keys(8))
        if number % 2:
            began = time.perf_counter()
            assert engine.cache.apply_hints([("prefetch", session, b"", 0.0, 0)]) == ["accepted"]
            until = time.monotonic() + GIVE_UP_SECONDS
            while engine.cache.absent(prompt):
                engine.check(until)
                engine.step()
            engine.cache.end_request(running)  # without this a read may run at the first lookup
            while engine.cache.tier_stats(0)["queued_reads"]:
                engine.check(until)
                engine.step()
            taken["reads"].append(time.perf_counter() - began)
        else:
            engine.cache.end_request(running)
        taken["with" if number % 2 else "without"].append(wait_of(engine, prompt))
    engine.cache.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="of each variant")
    parser.add_argument("--chunks", type=int, default=16, help="of the session's prompt")
    parser.add_argument("--kib", type=int, default=256, help="of a chunk")
    parser.add_argument("--directory", help="of the records; default: a temporary one")
    parser.add_argument("--dry", action="store_true", help="for trying out: nothing is written")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory, ignore_cleanup_errors=True) as directory:
        taken = measure(directory, arguments.rounds, arguments.chunks, arguments.kib * 1024)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    for name, median in medians.items():
        low, high = min(taken[name]), max(taken[name])
        echo(f"{name:8} median {median * 1e3:8.2f} ms, {low * 1e3:.2f} to {high * 1e3:.2f} ms")
    echo(f"with / without: {medians['with'] / medians['without']:.3f}")
    echo(f"machine: {describe_machine()['text']}")
    if not arguments.dry:
        given = {name: getattr(arguments, name) for name in ("rounds", "chunks", "kib")}
        write_results("prefetch", given | {"seconds": taken, "medians": medians})


if __name__ == "__main__":
    main()
