# SPDX-License-Identifier: Apache-2.0
"""Measures how long single calls block the scheduler thread.

The cases are: host memory with two row sizes, the end of a long request, and the lock of an index of a
million records. Baselines in the same run: rows of one size, a request with a tenth of the reads, an index
with a tenth of the records, and the same program built from another commit if ``--before`` names it. Builds
take turns. All times are CPU time of the calling thread.

    python benchmarks/scheduler_calls.py --program build/scheduler_calls [--before OTHER/scheduler_calls]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from reporting import describe_machine, echo, write_results

Samples = dict[str, list[float]]


def run(program: Path, *words: object) -> list[dict[str, Any]]:
    """Runs the program and returns its output lines as JSON objects."""
    command = [str(program), *map(str, words)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True)
    return [json.loads(line) for line in answer.stdout.splitlines()]


def measure(program: Path, rounds: int, reads: Sequence[int], records: Sequence[int]) -> dict[str, float]:
    """Returns the figures of one repetition by name, times in milliseconds."""
    figures: dict[str, float] = {}
    seconds = defaultdict(list)
    for line in run(program, "rows", rounds):
        seconds[line["sizes"]].append(line["seconds"] * 1e3)
    for sizes, values in seconds.items():
        figures[f"prepare_store, row sizes: {sizes}"] = statistics.median(values)
    figures["prepare_store, two sizes against one"] = statistics.median(
        two / one for one, two in zip(seconds["one"], seconds["two"], strict=True)
    )
    for count in reads:
        (line,) = run(program, "end", count)
        for part in ("", "end_step_", "first_"):
            figures[f"end_request, {part}reads: {count}"] = line[f"{part}seconds"] * 1e3
    for count in records:
        for line in run(program, "index", count):
            if "phase" in line:
                figure = figures.setdefault(name := f"longest hold, {line['phase']}, records: {count}", 0)
                figures[name] = max(figure, line["longest_seconds"] * 1e3)
            elif "call" in line:
                figure = figures.setdefault(name := f"{line['call']}, records: {count}", 0)
                figures[name] = max(figure, line["seconds"] * 1e3)
            else:
                what = "present" if line["contains"] else "absent"
                figures[f"contains, {what}, ns, records: {count}"] = line["ns"]
    return figures


def summary(values: Iterable[float]) -> dict[str, Any]:
    samples = list(values)
    return {
        "median": statistics.median(samples),
        "least": min(samples),
        "most": max(samples),
        "samples": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", type=Path, required=True, help="the built scheduler_calls")
    parser.add_argument("--before", type=Path, help="the same, built from another commit")
    parser.add_argument("--before-commit", default="", help="which commit, for the results")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=31, help="of prepare_store")
    parser.add_argument("--reads", type=int, nargs="+", default=[3_000, 30_000])
    parser.add_argument("--records", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--name", default="scheduler_calls", help="of the result file")
    options = parser.parse_args()
    builds = {"now": options.program} | ({"before": options.before} if options.before else {})
    echo(describe_machine()["text"])
    samples: dict[str, Samples] = {build: defaultdict(list) for build in builds}
    for repetition in range(options.repetitions):
        for build in list(builds)[:: 1 if repetition % 2 == 0 else -1]:
            found = measure(builds[build], options.rounds, options.reads, options.records)
            for name, value in found.items():
                samples[build][name].append(value)
            echo(f"repetition {repetition + 1} of {options.repetitions}, {build}")
    results: dict[str, Any] = {
        "unit": "CPU milliseconds of the calling thread, unless a figure says otherwise",
        "host_memory": "12 GiB of address space; no row was touched",
        "repetitions": options.repetitions,
        "before_commit": options.before_commit,
        "figures": {},
    }
    for name in samples["now"]:
        figure = {build: summary(of[name]) for build, of in samples.items() if name in of}
        line = ", ".join(
            f"{build} {part['median']:.4g} ({part['least']:.4g} to {part['most']:.4g})"
            for build, part in figure.items()
        )
        if "before" in figure:
            ratios = [
                now / before
                for now, before in zip(samples["now"][name], samples["before"][name], strict=True)
            ]
            figure["now_against_before"] = summary(ratios)
            line += f", ratio {statistics.median(ratios):.3g}"
        results["figures"][name] = figure
        echo(f"{name}: {line}")
    write_results(options.name, results)


if __name__ == "__main__":
    main()
