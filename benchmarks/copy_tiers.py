# SPDX-License-Identifier: Apache-2.0
"""Compares `kv-offload copy` with the speed of its two ends.

    python benchmarks/copy_tiers.py [--records 200] [--mib 2] [--rounds 5] [--link 100] [--directory DIR]

Fills a directory, a Redis server and a bucket (SeaweedFS) on this machine with the same random records, and
copies between them. Each round has three measurements per pair of tiers, in an order that changes, each in a
new process with eight threads:

- "read": all records of the source are read and verified, as `copy` reads them, and not written.
- "write": records in memory are written into an empty destination, as `copy` writes them.
- "copy": `kv-offload copy SRC DST` into an empty destination. Its time starts when the plan is complete; the
  time of the whole command is reported too.

Reports the speed of each and the ratio of "copy" to the slower of "read" and "write", with 95% confidence
intervals (bootstrap over the rounds). The target: at least 0.8. Pairs are measured without a limit, where all
three use the same cores, and with the servers behind a link of --link MB/s.

Without a limit it also reports the CPU time of "read" and "write", of the client and the server together,
and the best speed that a copy could have: all cores busy with that work alone, and not faster than the slower
end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))

import numpy as np
from redis_server import RedisClient, redis_server
from reporting import describe_machine, echo, median_with_interval, write_results
from s3_server import ACCESS, BUCKET, SECRET, S3Server
from slow_link import SlowLink
from written_root import FACTS

from kv_offload import _core
from kv_offload.config import tier_at
from kv_offload.copying import CopiedNamespace, open_importer, source_epoch

NAMESPACE = CopiedNamespace(FACTS.namespace_id().hex(), FACTS.readable_json())
JOBS = 8  # the default of kv-offload copy
AIM = 0.8
BOUND = 64 << 30  # of destinations that are directories
PAIRS = (
    ("directory", "directory"),
    ("directory", "redis"),
    ("redis", "directory"),
    ("directory", "s3"),
    ("s3", "directory"),
)
WAIT_SECONDS = 600.0


def fill(path: Path, records: int, record_bytes: int) -> None:
    """Writes records of random bytes into the directory at ``path``, as a server does."""
    group = 7
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        engine, size = uuid.uuid4().hex, 16 * record_bytes
        facts: dict[str, Any] = {"num_areas": 1, "num_workers": 1, "shm_directory": shm}
        region = _core.HostRegion.attach_scheduler(engine, size, **facts)
        worker = _core.HostRegion.attach_worker(
            engine, size, rank=0, shard_bytes=[record_bytes], fingerprint="rank 0", **facts
        )
        region.wait_for_ranks(WAIT_SECONDS)
        tier = _core.FsTier(
            root_dir=str(path),
            max_bytes=BOUND,
            namespace_id=FACTS.namespace_id(),
            namespace_json=FACTS.readable_json(),
            op_timeout_seconds=WAIT_SECONDS,
        )
        cache = _core.TieredCache(
            region,
            _core.Metrics(),
            group_ids=[group],
            tokens_per_chunk=[16],
            shard_bytes=[[record_bytes]],
            tiers=[tier],
        )
        draw = np.random.default_rng(0)
        deadline = time.monotonic() + WAIT_SECONDS
        for number in range(records):
            key = number.to_bytes(32, "little") + group.to_bytes(4, "big")
            request = cache.begin_request(f"r{number}")
            accepted, ticket, rows, *_ = cache.prepare_store(request, [key])
            at = int(rows[0]) * 4096
            region.area(0)[at : at + record_bytes] = draw.integers(0, 256, record_bytes, np.uint8)
            worker.report(0, ticket, 0)
            cache.complete_store(accepted)
            cache.end_request(request)
            while cache.tier_stats(0)["chunks"] <= number:
                cache.end_step()
                if time.monotonic() > deadline:
                    raise SystemExit(f"{path} was not filled in {WAIT_SECONDS:.0f} s")
                time.sleep(0.001)
        cache.close()


@dataclass
class Place:
    """A tier. ``clear`` empties it."""

    address: str
    clear: Callable[[], None]
    server: int = 0  # its process id; 0: none, or its CPU time is not counted


@contextlib.contextmanager
def places(work: Path, link_mb: int) -> Iterator[tuple[dict[str, Place], dict[str, Place]]]:
    """Starts the servers, and yields the tiers without a limit, and those with the servers behind a link."""
    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET}
    bucket = S3Server(work)
    with contextlib.ExitStack() as stack:
        socket = stack.enter_context(redis_server(work, "--maxmemory", "6gb"))
        client = RedisClient(socket)
        pid = int(client.ask("INFO", "server").partition(b"process_id:")[2].split()[0])
        stack.callback(bucket.kill)
        bucket.start()
        host, port = bucket.endpoint.removeprefix("http://").split(":")
        links = [
            stack.enter_context(SlowLink(target, both_ways=True))
            for target in (str(socket), (host, int(port)))
        ]
        for link in links:
            link.bytes_per_second = link_mb * 1_000_000
        directory = work / "copies"

        def s3(endpoint: str) -> Place:
            address = f"s3://{BUCKET}/bench?endpoint={endpoint}"
            return Place(address, lambda: purge(address), 0 if bucket.process is None else bucket.process.pid)

        def redis(address: str) -> Place:
            return Place(address, lambda: client.ask("FLUSHALL") and None, pid)

        plain = {
            "directory": Place(str(directory), lambda: shutil.rmtree(directory, ignore_errors=True)),
            "redis": redis(f"unix://{socket}"),
            "s3": s3(bucket.endpoint),
        }
        yield (
            plain,
            {
                **plain,
                "redis": redis(f"redis://127.0.0.1:{links[0].port}"),
                "s3": s3(f"http://127.0.0.1:{links[1].port}"),
            },
        )


def purge(address: str) -> None:
    root = tier_at(address).open_root(changes=True, given=address)
    root.use_record_sizes()
    root.remove(list(root.records(NAMESPACE.id)))


def copy_with_cli(source: str, destination: str) -> tuple[int, float, float]:
    """Returns the copied bytes, the seconds from the plan to the end, and no CPU time."""
    bound = [] if "://" in destination else ["--dst-max-bytes", str(BOUND)]
    program = Path(sys.executable).parent / "kv-offload"
    command = [str(program), "copy", source, destination, "--json", "-j", str(JOBS), *bound]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    if answer.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {answer.stdout}{answer.stderr}")
    report = json.loads(answer.stdout)
    return report["copied_bytes"], report["seconds"], 0.0


def record_of(answer: tuple[str, str, _core.WholeRecord | None]) -> _core.WholeRecord:
    kind, message, record = answer
    if record is None:
        raise SystemExit(f"a record cannot be read: {kind}, {message}")
    return record


def handles_of(root: Any) -> list[Any]:
    epoch = source_epoch(root, NAMESPACE.id)
    return [root.handle(record) for record in root.records(NAMESPACE.id) if str(record["epoch"]) == epoch]


def open_to_read(address: str) -> Any:
    root = tier_at(address).open_root(changes=False, given=address)
    root.use_record_sizes()
    return root


def read_all(address: str, _: str) -> tuple[int, float, float]:
    """Reads and verifies all records of a tier. Returns their bytes, the seconds and the CPU time."""
    handles = handles_of(open_to_read(address))
    of_thread = threading.local()

    def read(handle: Any) -> int:
        if not hasattr(of_thread, "root"):
            of_thread.root, of_thread.record = open_to_read(address), None
        of_thread.record = record_of(of_thread.root.read(NAMESPACE.id, handle, of_thread.record))
        return int(of_thread.record.size)

    began, busy = time.monotonic(), time.process_time()
    with ThreadPoolExecutor(JOBS) as pool:
        return sum(pool.map(read, handles)), time.monotonic() - began, time.process_time() - busy


def write_all(source: str, destination: str) -> tuple[int, float, float]:
    """Reads the records of ``source`` into memory, then writes them. Returns as ``read_all`` does."""
    root = open_to_read(source)
    records = [record_of(root.read(NAMESPACE.id, handle)) for handle in handles_of(root)]
    tier = tier_at(destination)
    importer = open_importer(tier, NAMESPACE, None if tier.bound_key is None else BOUND)
    try:
        began, busy = time.monotonic(), time.process_time()
        with ThreadPoolExecutor(JOBS) as pool:
            answers = list(pool.map(lambda record: importer.write(record, time.time()), records))
        importer.close()
        seconds, busy = time.monotonic() - began, time.process_time() - busy
    finally:
        importer.close()
    problems = [answer for answer in answers if answer[0] != "ok"]
    if problems:
        raise SystemExit(f"{destination}: {problems[0]}")
    return sum(record.size for record in records), seconds, busy


PARTS = {"read": read_all, "write": write_all, "copy": copy_with_cli}


def server_seconds(ends: Iterable[Place]) -> float:
    """Returns the CPU time of the servers until now."""
    ticks = 0
    for end in ends:
        if end.server:
            words = Path(f"/proc/{end.server}/stat").read_text().rpartition(")")[2].split()
            ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(part: str, filled: Path, source: Place, destination: Place) -> dict[str, float]:
    """Runs a part in a new process; returns {"bytes", "seconds", "busy" (CPU time), "whole"}."""
    # "write" reads its records from the filled directory before its time starts.
    arguments = [part, str(filled) if part == "write" else source.address, destination.address]
    began, busy = time.monotonic(), server_seconds((source, destination))
    answer = subprocess.run(
        [sys.executable, __file__, "--part", *arguments],
        capture_output=True,
        text=True,
        timeout=2 * WAIT_SECONDS,
        check=False,
    )
    if answer.returncode != 0:
        raise SystemExit(f"{' '.join(arguments)}: {answer.stdout}{answer.stderr}")
    count, seconds, own = json.loads(answer.stdout.splitlines()[-1])
    busy = own + server_seconds((source, destination)) - busy
    return {"bytes": count, "seconds": seconds, "busy": busy, "whole": time.monotonic() - began}


def run_pair(pair: tuple[str, str], tiers: dict[str, Place], filled: Path, rounds: int) -> dict[str, Any]:
    source, destination = pair
    # A tier cannot be both ends, so the filled directory is the source.
    origin = Place(str(filled), lambda: None) if source == "directory" else tiers[source]
    if source != "directory":
        copy_with_cli(str(filled), origin.address)
    target = tiers[destination]
    speeds: dict[str, list[float]] = {part: [] for part in PARTS}
    busy: dict[str, list[float]] = {part: [] for part in PARTS}  # CPU seconds per MB
    wholes = []
    for number in range(rounds):
        order = list(PARTS)
        random.Random(number).shuffle(order)
        for part in order:
            target.clear()
            figures = measure(part, filled, origin, target)
            speeds[part].append(figures["bytes"] / figures["seconds"] / 1e6)
            busy[part].append(figures["busy"] * 1e6 / figures["bytes"])
            if part == "copy":
                wholes.append(figures["whole"])
    target.clear()
    if source != "directory":
        tiers[source].clear()
    ratios = [
        copy / min(read, write)
        for read, write, copy in zip(speeds["read"], speeds["write"], speeds["copy"], strict=True)
    ]
    median = {part: statistics.median(values) for part, values in speeds.items()}
    cpu = {part: statistics.median(busy[part]) for part in ("read", "write")}
    cores = len(os.sched_getaffinity(0))
    best = min(median["read"], median["write"], cores / sum(cpu.values()))
    return {
        "megabytes_per_second": median,
        "cpu_seconds_per_gigabyte": {part: 1000 * seconds for part, seconds in cpu.items()},
        "best_megabytes_per_second": best,
        "all_megabytes_per_second": speeds,
        "command_seconds": statistics.median(wholes),
        "ratio": median_with_interval(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=200)
    parser.add_argument("--mib", type=int, default=2, help="size of a record")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--link", type=int, default=100, help="MB/s of the link to the servers; 0: without")
    parser.add_argument("--directory", type=Path, help="a directory of the disk to be used")
    parser.add_argument("--part", nargs=3, metavar=("PART", "SRC", "DST"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        part, source, destination = options.part
        print(json.dumps(PARTS[part](source, destination)))
        return
    results: dict[str, Any] = {
        "records": options.records,
        "record_mib": options.mib,
        "rounds": options.rounds,
    }
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        filled = Path(folder, "filled")
        fill(filled, options.records, options.mib << 20)
        echo(f"{options.records} records of {options.mib} MiB are in {filled}")
        with places(Path(folder), options.link) as (plain, linked):
            for name, tiers in (("no limit", plain), (f"{options.link} MB/s", linked)):
                if tiers is linked and not options.link:
                    continue
                for pair in PAIRS:
                    if tiers is linked and pair == ("directory", "directory"):
                        continue
                    found = run_pair(pair, tiers, filled, options.rounds)
                    results.setdefault(name, {})[f"{pair[0]} to {pair[1]}"] = found
                    speeds = ", ".join(
                        f"{part} {speed:.0f} MB/s" for part, speed in found["megabytes_per_second"].items()
                    )
                    ratio = found["ratio"]
                    if tiers is linked:  # the link itself takes CPU time here
                        del found["cpu_seconds_per_gigabyte"], found["best_megabytes_per_second"]
                    else:
                        speeds += f", best {found['best_megabytes_per_second']:.0f} MB/s"
                    echo(
                        f"{name}: {pair[0]} to {pair[1]}: {speeds}; copy / slower end "
                        f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}), aim {AIM}; "
                        f"whole command {found['command_seconds']:.1f} s"
                    )
    echo(describe_machine()["text"])
    write_results("copy_tiers", results)


if __name__ == "__main__":
    main()
