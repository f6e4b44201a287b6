# SPDX-License-Identifier: Apache-2.0
"""Compares record I/O with the speed of the device, and measures how fast a root opens at start.

Baselines, in the same run and on the same path: the better of fio's libaio and io_uring with O_DIRECT (the
same bytes, one new file per record if the record size allows it, the same number in flight), and vLLM's batch
calls (vllm_fs_io.py), which compute no checksums. Our runs and vLLM's use the same memory, a file in /dev/shm
as in serving, because the placement of its pages decides half of the speed here. Each round runs all of them,
each time with another one first. A ratio is the median of the rounds' ratios, because the device's speed
varies more from minute to minute than the programs differ. Nothing is removed before a size is done: for
minutes after a removal, ext4 skips each freed inode whenever it creates a file, and neither a growing root
nor a full one (full_root.py) removes files.

    python benchmarks/fs_bench.py --program build/fs_bench --directory /path/on/the/disk
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from reporting import describe_machine, interval_of_median, write_results

ENGINES = ("libaio", "io_uring")
ALL = ("ours", "vllm", *ENGINES)
ROWS = 8  # host memory rows per thread


def file_system(directory: Path) -> str:
    """Returns the file system type of the directory."""
    command = ["stat", "-f", "-c", "%T", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def fio(directory: Path, engine: str, direction: str, record: int, total: int, in_flight: int) -> float:
    """Returns the bytes per second of a whole fio run, with one file per record."""
    jobs = [
        "fio",
        "--name=records",
        f"--directory={directory}",
        f"--rw={direction}",
        f"--bs={record}",
        f"--filesize={record}",
        f"--size={total}",
        f"--nrfiles={total // record}",
        "--file_service_type=sequential",
        "--openfiles=64",
        f"--iodepth={in_flight}",
        "--direct=1",
        "--fallocate=none",
        "--create_on_open=1" if direction == "write" else "--create_on_open=0",
        f"--ioengine={engine}",
        "--output-format=json",
    ]
    answer = subprocess.run(jobs, capture_output=True, text=True, timeout=120, check=True).stdout
    return float(json.loads(answer[answer.index("{") :])["jobs"][0][direction]["bw_bytes"])


def fill(memory: Path, size: int) -> None:
    """Writes ``size`` random bytes to the file ``memory``."""
    with memory.open("wb") as file:
        for start in range(0, size, 1 << 20):
            file.write(os.urandom(min(1 << 20, size - start)))


def check_space(directory: Path, total: int, rounds: int) -> None:
    """Exits the program if the files of one size do not fit."""
    needed, free = total * rounds * len(ALL) * 11 // 10, shutil.disk_usage(directory).free
    if needed > free:
        sys.exit(
            f"{needed / 2**30:.0f} GiB are needed below {directory} and {free / 2**30:.0f} are free; "
            f"give a smaller --total ({total} bytes now) or fewer --rounds ({rounds} now)"
        )


def measure(
    program: Path, directory: Path, record: int, total: int, threads: int, rounds: int
) -> dict[str, Any]:
    """Returns the medians of all programs, and our ratios to fio's better engine and to vLLM."""
    samples: dict[str, list[float]] = {}
    vllm_program = Path(__file__).parent / "vllm_fs_io.py"
    for done in range(rounds):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
            memory = Path(shared) / "rows"
            fill(memory, threads * ROWS * record)
            for name in (*ALL[done % len(ALL) :], *ALL[: done % len(ALL)]):
                at = Path(tempfile.mkdtemp(dir=directory))
                rates = {}
                if name in ENGINES:
                    for direction in ("write", "read"):
                        rates[direction] = fio(at, name, direction, record, total, threads)
                else:
                    start = (
                        [program, "io", at / "root"] if name == "ours" else [sys.executable, vllm_program, at]
                    )
                    words = [str(word) for word in (*start, record, total, threads, memory)]
                    answer = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
                    found = json.loads(answer.stdout.splitlines()[-1])
                    rates = {d: float(found[f"{d}_bytes_per_second"]) for d in ("write", "read")}
                for direction, rate in rates.items():
                    samples.setdefault(f"{name} {direction}", []).append(rate)
        print(f"  {record / 2**20:g} MiB, round {done + 1} of {rounds}", file=sys.stderr, flush=True)
    medians = {name: statistics.median(rates) for name, rates in samples.items()}
    result: dict[str, Any] = {"record_bytes": record, "threads": threads, "rounds": rounds}
    for direction in ("write", "read"):
        best = max(ENGINES, key=lambda engine: medians[f"{engine} {direction}"])
        ours = samples[f"ours {direction}"]
        ratios = {
            name: [mine / other for mine, other in zip(ours, samples[f"{name} {direction}"], strict=True)]
            for name in (best, "vllm")
        }
        result[direction] = {
            "ours": medians[f"ours {direction}"],
            **{engine: medians[f"{engine} {direction}"] for engine in ALL[1:]},
            "baseline": f"fio {best}",
            "ratio": statistics.median(ratios[best]),
            "ratio_interval": interval_of_median(ratios[best]),
            "times_vllm": statistics.median(ratios["vllm"]),
            "times_vllm_interval": interval_of_median(ratios["vllm"]),
            "samples": {engine: samples[f"{engine} {direction}"] for engine in ALL},
        }
    return result


def measure_start(program: Path, directory: Path, records: int) -> dict[str, Any]:
    """Returns the seconds until a root with ``records`` records is open, answers lookups, and is complete."""
    print(f"  start with {records} records", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        command = [str(program), "start", str(Path(scratch) / "root"), str(records)]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        found: dict[str, Any] = json.loads(answer.stdout)
    return found


def draw(results: dict[str, Any], path: Path) -> None:
    """Plots throughput against record size, for ours, vLLM's and fio's engines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, direction in zip(axes, ("write", "read"), strict=True):
        sizes = [entry["record_bytes"] / 2**20 for entry in results["io"]]
        labels = {"ours": "kv_offload (checksums on)", "vllm": "vLLM's fs.io (no checksums)"}
        for name in ALL:
            label = labels.get(name, f"fio {name}")
            axis.plot(sizes, [entry[direction][name] / 1e9 for entry in results["io"]], "o-", label=label)
        axis.set(title=direction, xlabel="record, MiB", xscale="log")
        axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="GB/s", ylim=(0, None))
    axes[1].legend()
    in_flight = results["io"][0]["threads"]
    figure.suptitle(f"fs tier: {describe_machine()['text']}, {results['filesystem']}, {in_flight} in flight")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", type=Path, required=True, help="the built fs_bench")
    parser.add_argument("--directory", type=Path, required=True, help="a directory on the disk to measure")
    parser.add_argument("--total", type=int, default=1 << 30, help="bytes per measurement")
    parser.add_argument("--threads", type=int, default=4, help="in flight, at least 2")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.5, 1, 2, 4, 8], help="records, MiB")
    parser.add_argument("--start", type=int, nargs="*", default=[100_000, 1_000_000], help="records at start")
    parser.add_argument("--name", default="fs_bench", help="of the result files")
    options = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio is the baseline and is not installed: apt install fio")
    results: dict[str, Any] = {"filesystem": file_system(options.directory), "io": [], "start": []}
    print(f"{describe_machine()['text']}, {results['filesystem']}", file=sys.stderr)
    for size in options.sizes:
        record = int(size * 2**20)
        check_space(options.directory, options.total, options.rounds)
        with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
            found = measure(
                options.program, Path(scratch), record, options.total, options.threads, options.rounds
            )
        results["io"].append(found)
        for direction in ("write", "read"):
            entry = found[direction]
            low, high = entry["ratio_interval"]
            vllm_low, vllm_high = entry["times_vllm_interval"]
            print(
                f"{size:>4g} MiB {direction:5}: {entry['ours'] / 1e9:6.2f} GB/s; {entry['baseline']} "
                f"{entry[entry['baseline'].split()[1]] / 1e9:6.2f}, ratio {entry['ratio']:.2f} "
                f"(95%: {low:.2f} to {high:.2f}); vLLM {entry['vllm'] / 1e9:6.2f}, "
                f"ratio {entry['times_vllm']:.2f} (95%: {vllm_low:.2f} to {vllm_high:.2f})",
                flush=True,
            )
    for records in options.start:
        found = measure_start(options.program, options.directory, records)
        results["start"].append(found)
        print(
            f"start with {records} records: open {found['open_seconds'] * 1e3:.1f} ms, first answer "
            f"{found['first_lookup_seconds'] * 1e3:.1f} ms, complete {found['complete_seconds']:.2f} s, "
            f"in order of use {found['ordered_seconds']:.2f} s ({found['cpu_seconds']:.2f} s of CPU), "
            f"4096 lookups {found['lookup_4096_seconds'] * 1e3:.2f} ms",
            flush=True,
        )
    write_results(options.name, results, (lambda path: draw(results, path)) if results["io"] else None)


if __name__ == "__main__":
    main()
