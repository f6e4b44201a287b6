# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of writing a record to a full directory, where each record replaces another.

Baseline, in the same run, on the same path and with as many threads: plain system calls that remove the
oldest file, write a new one with O_DIRECT and rename it, without a checksum. Each round runs both, in
alternating order. A ratio is the median of the rounds' ratios.

    python benchmarks/full_root.py --program build/fs_bench --directory /path/on/the/disk
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fs_bench import ROWS, file_system, fill
from reporting import describe_machine, interval_of_median, write_results

WAYS = {"ours": "full", "plain": "replace"}  # name -> command of the program


def measure(
    program: Path, directory: Path, record: int, total: int, threads: int, rounds: int
) -> dict[str, Any]:
    """Returns the medians of both, and their ratio."""
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    for done in range(rounds):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
            memory = Path(shared) / "rows"
            fill(memory, threads * ROWS * record)
            for way in list(WAYS)[:: 1 if done % 2 == 0 else -1]:
                with tempfile.TemporaryDirectory(dir=directory) as scratch:
                    words = (program, WAYS[way], Path(scratch) / "root", record, total, threads, memory)
                    answer = subprocess.run(
                        [str(word) for word in words], capture_output=True, text=True, timeout=300, check=True
                    )
                found = json.loads(answer.stdout)
                rates[way].append(float(found["write_bytes_per_second"]))
                cpu[way].append(float(found["cpu_seconds_per_record"]))
        print(f"  {record / 2**20:g} MiB, round {done + 1} of {rounds}", file=sys.stderr, flush=True)
    ratios = [ours / plain for ours, plain in zip(rates["ours"], rates["plain"], strict=True)]
    return {
        "record_bytes": record,
        "total_bytes": total,
        "threads": threads,
        "rounds": rounds,
        "write_bytes_per_second": {way: statistics.median(samples) for way, samples in rates.items()},
        "cpu_seconds_per_record": {way: statistics.median(samples) for way, samples in cpu.items()},
        "ratio": statistics.median(ratios),
        "ratio_interval": interval_of_median(ratios),
        "samples": rates,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", type=Path, required=True, help="the built fs_bench")
    parser.add_argument("--directory", type=Path, required=True, help="a directory on the disk to measure")
    parser.add_argument("--total", type=int, default=1 << 29, help="bytes of the directory")
    parser.add_argument("--threads", type=int, default=4, help="in flight")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.5, 2, 8], help="records, MiB")
    parser.add_argument("--name", default="full_root", help="of the result file")
    options = parser.parse_args()
    results: dict[str, Any] = {"filesystem": file_system(options.directory), "sizes": []}
    print(f"{describe_machine()['text']}, {results['filesystem']}", file=sys.stderr)
    for size in options.sizes:
        found = measure(
            options.program,
            options.directory,
            int(size * 2**20),
            options.total,
            options.threads,
            options.rounds,
        )
        results["sizes"].append(found)
        rate, cpu = found["write_bytes_per_second"], found["cpu_seconds_per_record"]
        low, high = found["ratio_interval"]
        print(
            f"{size:>4g} MiB into a full directory: {rate['ours'] / 1e9:.2f} GB/s, plain remove and create "
            f"{rate['plain'] / 1e9:.2f}, ratio {found['ratio']:.2f} (95%: {low:.2f} to {high:.2f}); "
            f"CPU a record {cpu['ours'] * 1e6:.0f} us, plain {cpu['plain'] * 1e6:.0f}",
            flush=True,
        )
    write_results(options.name, results)


if __name__ == "__main__":
    main()
