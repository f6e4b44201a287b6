# SPDX-License-Identifier: Apache-2.0
"""Measures how long a prompt takes to load over a slow link, raw and compressed.

    python benchmarks/lossy_link.py [--tokens 8192] [--rounds 5] [--link 100] [--computed 2048]

The K/V are those of payload_codec.py: SmolLM2-135M-Instruct on this repository's documentation, in bfloat16.
Its first --computed tokens are repeated up to --tokens; no codec uses the repetition, because each chunk of
64 tokens is a separate record. They are stored on a Redis server and in a bucket (SeaweedFS) behind a link
of --link MB/s. Each round loads the whole prompt into the empty host memory of a new cache, for each setting
of `compress` in turn, and compares the bytes (without loss), or leaves the loss to the codec's own checks.
The time is that from the first lookup until the last chunk can be loaded to the device. The baseline is
`none`. The target: with loss, at least 3 times as fast.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))

import numpy as np
from payload_codec import BLOCK, Model, text_of, weights_of_package
from redis_server import redis_server
from reporting import describe_machine, echo, write_results
from s3_server import ACCESS, BUCKET, SECRET, S3Server
from slow_link import SlowLink
from written_root import FACTS

from kv_offload import _core
from kv_offload.tiers.registry import parse_tier

WAYS = ("none", "zstd", "lossy:0.05", "lossy:0.05:0.125")
AIM = 3.0
CHUNK_BLOCKS = 4
GROUP = 7
WAIT_SECONDS = 600.0


class Engine:
    """A cache with an empty host memory over one tier."""

    def __init__(self, tier: Any, chunk_bytes: int, chunks: int, runs: tuple[int, int]) -> None:
        self._memory = tempfile.TemporaryDirectory(dir="/dev/shm")
        engine, size = uuid.uuid4().hex, (chunks + 8) * (chunk_bytes + 4096)
        facts: dict[str, Any] = {"num_areas": 1, "num_workers": 1, "shm_directory": self._memory.name}
        self._region = _core.HostRegion.attach_scheduler(engine, size, **facts)
        self._worker = _core.HostRegion.attach_worker(
            engine, size, rank=0, shard_bytes=[chunk_bytes], fingerprint="rank 0", **facts
        )
        self._region.wait_for_ranks(WAIT_SECONDS)
        spec = tier.spec("tier", None, FACTS)
        spec.elements = ["bfloat16"]
        spec.kv_runs = [runs]
        spec.accepted_errors = (0.5, 0.5)
        self._metrics = _core.Metrics()
        self._cache = _core.TieredCache(
            self._region,
            self._metrics,
            group_ids=[GROUP],
            tokens_per_chunk=[CHUNK_BLOCKS * BLOCK],
            shard_bytes=[[chunk_bytes]],
            tiers=[spec],
            load_policy="always",
            lookup_timeout_seconds=WAIT_SECONDS,
        )
        self._chunk_bytes = chunk_bytes

    def store(self, chunks: list[np.ndarray]) -> float:
        """Stores the chunks and waits until the tier has them. Returns raw / stored bytes."""
        request = self._cache.begin_request("w")
        keys = [_key(number) for number in range(len(chunks))]
        accepted, ticket, rows, *_ = self._cache.prepare_store(request, keys)
        if len(accepted) != len(keys):
            raise SystemExit(f"{len(accepted)} of {len(keys)} chunks fit")
        for row, chunk in zip(rows, chunks, strict=True):
            self._bytes_at(row)[:] = chunk
        self._worker.report(0, ticket, 0)
        self._cache.complete_store(accepted)
        self._cache.end_request(request)
        raw = len(chunks) * self._chunk_bytes
        self._step_until(lambda: self._metrics.value("kv_offload_write_bytes_total", ["tier"]) >= raw)
        self._cache.publish_gauges()
        return raw / self._metrics.value("kv_offload_write_record_bytes_total", ["tier"])

    def load(self, chunks: list[np.ndarray], exact: bool) -> float:
        """Returns the seconds from the first lookup until all chunks are in host memory."""
        begin = time.perf_counter()
        request = self._cache.begin_request("r")
        keys = [_key(number) for number in range(len(chunks))]
        # A list: each step looks up all chunks, as vLLM does.
        self._step_until(lambda: all([self._cache.lookup(request, key) == 1 for key in keys]))
        seconds = time.perf_counter() - begin
        ticket, rows, _ = self._cache.prepare_load(request, keys)
        for row, chunk in zip(rows, chunks, strict=True):
            if exact and not (self._bytes_at(row) == chunk).all():
                raise SystemExit("other bytes came back")
        self._worker.report(0, ticket, 0)
        self._cache.complete_load(keys)
        self._cache.end_request(request)
        return seconds

    def close(self) -> None:
        self._cache.close()
        self._memory.cleanup()

    def _bytes_at(self, row: Any) -> np.ndarray:
        at = int(row) * 4096
        view: np.ndarray = self._region.area(0)[at : at + self._chunk_bytes]
        return view

    def _step_until(self, done: Any) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            self._cache.end_step()
            if done():
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"not done in {WAIT_SECONDS:.0f} s: {self._cache.tier_stats(0)}")
            time.sleep(0.005)


def _key(number: int) -> bytes:
    return number.to_bytes(32, "little") + GROUP.to_bytes(4, "big")


def _run_link(target: str | tuple[str, int], bytes_per_second: int, pipe: Any) -> None:
    """Sends the port of a link, and keeps it until anything arrives."""
    with SlowLink(target, both_ways=True) as link:
        link.bytes_per_second = bytes_per_second
        pipe.send(link.port)
        with contextlib.suppress(EOFError):
            pipe.recv()


@contextlib.contextmanager
def link_to(target: str | tuple[str, int], bytes_per_second: int) -> Iterator[int]:
    """Yields the port of a link in a separate process, which does not share the reader's interpreter."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_link, args=(target, bytes_per_second, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join()


@contextlib.contextmanager
def servers(work: Path, link_mb: int) -> Iterator[dict[str, dict[str, Any]]]:
    """Starts the servers. Yields the settings of their tiers, behind the link."""
    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET}
    bucket = S3Server(work)
    with contextlib.ExitStack() as stack:
        socket = stack.enter_context(redis_server(work, "--maxmemory", "6gb"))
        stack.callback(bucket.kill)
        bucket.start()
        host, port = bucket.endpoint.removeprefix("http://").split(":")
        ports = [
            stack.enter_context(link_to(target, link_mb * 1_000_000))
            for target in (str(socket), (host, int(port)))
        ]
        endpoint = f"http://127.0.0.1:{ports[1]}"
        slow = {"op_timeout_ms": 120_000}
        yield {
            "redis": {"type": "redis", "url": f"redis://127.0.0.1:{ports[0]}", **slow},
            "s3": {"type": "s3", "bucket": BUCKET, "endpoint": endpoint, **slow},
        }


def measure(settings: dict[str, Any], chunks: list[np.ndarray], runs: tuple[int, int], rounds: int) -> Any:
    """Returns for each setting of ``compress`` the ratio, the seconds, and the times as fast as raw."""
    place = "key_prefix" if settings["type"] == "redis" else "prefix"
    tiers = {
        way: parse_tier({**settings, "compress": way, place: f"bench-{number}"})
        for number, way in enumerate(WAYS)
    }
    ratios, seconds = {}, {way: [] for way in WAYS}  # type: dict[str, float], dict[str, list[float]]
    for way, tier in tiers.items():
        writer = Engine(tier, chunks[0].nbytes, len(chunks), runs)
        ratios[way] = writer.store(chunks)
        writer.close()
    for _ in range(rounds):
        for way, tier in tiers.items():
            reader = Engine(tier, chunks[0].nbytes, len(chunks), runs)
            seconds[way].append(reader.load(chunks, not way.startswith("lossy")))
            reader.close()
    rows = []
    for way in WAYS:
        pairs = [raw / own for raw, own in zip(seconds["none"], seconds[way], strict=True)]
        rows.append(
            {
                "tier": settings["type"],
                "compress": way,
                "ratio": ratios[way],
                "seconds": seconds[way],
                "times_as_fast": statistics.median(pairs),
            }
        )
        echo(
            f"{settings['type']}, {way}: ratio {ratios[way]:.2f}, {statistics.median(seconds[way]):.2f} s, "
            f"{rows[-1]['times_as_fast']:.2f} times as fast as raw ({min(pairs):.2f} to {max(pairs):.2f})"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--computed", type=int, default=2048, help="tokens that the model computes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--link", type=int, default=100, help="MB/s of the link to the servers")
    parser.add_argument("--try-out", action="store_true", help="do not store the results")
    options = parser.parse_args()
    echo(describe_machine()["text"])
    kv = Model(weights_of_package()).kv_of(text_of("docs", "*.md"), options.computed)
    computed = kv.reshape(len(kv) // CHUNK_BLOCKS, -1).view(np.uint8)
    number = options.tokens // (CHUNK_BLOCKS * BLOCK)
    chunks = [computed[i % len(computed)] for i in range(number)]
    run = kv[0, 0, 0].nbytes
    echo(f"{options.tokens} tokens, {sum(chunk.nbytes for chunk in chunks) / 1e6:.0f} MB in {number} records")
    rows = []
    with tempfile.TemporaryDirectory() as folder, servers(Path(folder), options.link) as tiers:
        for settings in tiers.values():
            rows += measure(settings, chunks, (run, run), options.rounds)
    met = {
        tier: any(
            row["times_as_fast"] >= AIM
            for row in rows
            if row["tier"] == tier and row["compress"].startswith("lossy")
        )
        for tier in ("redis", "s3")
    }
    if not options.try_out:
        write_results("lossy_link", {**vars(options), "rows": rows, "aim": AIM, "met": met})


if __name__ == "__main__":
    main()
