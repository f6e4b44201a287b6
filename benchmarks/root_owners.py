# SPDX-License-Identifier: Apache-2.0
"""Measures writes to a full directory with other owners' records, and how many of those stay usable.

``dead``: writes to a full root that holds records of a namespace that no server has open, compared with
writes to a full root of the writer's own records. Both alternate in one process. "unqueued" is wall time
without the time in which the thread waited for a core, so other programs disturb it little.

``models``: two servers with different models on one full root. The baseline is one server on a root of half
the size. "held" is the part of a server's share that its records use. "usable" is the part of its records
that can be loaded because no earlier chunk is missing.

If ``--before`` names the same program built from another commit, the builds take turns.

    python benchmarks/root_owners.py --program build/root_owners --directory /path/on/the/disk
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fs_bench import file_system
from reporting import describe_machine, echo, read_results, write_results

Lines = list[dict[str, Any]]


def run(program: Path, command: str, directory: Path, *words: object) -> Lines:
    """Runs the program and returns the lines that it printed."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        call = [str(program), command, f"{scratch}/{command}", *map(str, words)]
        answer = subprocess.run(call, capture_output=True, text=True, timeout=3600)
    if answer.returncode != 0:
        raise SystemExit(f"{' '.join(call)}: status {answer.returncode}\n{answer.stderr}")
    return [json.loads(line) for line in answer.stdout.splitlines()]


def summary(values: Iterable[float]) -> dict[str, Any]:
    samples = list(values)
    return {
        "median": statistics.median(samples),
        "least": min(samples),
        "most": max(samples),
        "samples": samples,
    }


def measure_dead(program: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the figures of each batch, and the ratios of the two roots."""
    lines = run(
        program,
        "dead",
        options.directory,
        options.leaves,
        options.files,
        options.record_bytes,
        options.writes,
        options.batches,
    )
    figures: dict[str, list[float]] = defaultdict(list)
    for own, dead in zip(lines[::2], lines[1::2], strict=True):
        for part in (
            "mean_cpu_ms",
            "median_cpu_ms",
            "mean_ms",
            "median_ms",
            "p99_ms",
            "most_ms",
            "mean_unqueued_ms",
            "median_unqueued_ms",
        ):
            figures[f"own, {part}"].append(own[part])
            figures[f"dead, {part}"].append(dead[part])
            figures[f"dead against own, {part}"].append(dead[part] / own[part])
        for line in (own, dead):
            figures[f"{line['root']}, refused"].append(line["refused"])
            figures[f"{line['root']}, evicted bytes per write"].append(line["evicted_bytes_per_write"])
    return figures


def measure_models(program: Path, options: argparse.Namespace) -> tuple[dict[str, list[float]], Lines]:
    """Returns the figures of the last quarter of the samples, and all samples."""
    lines = run(
        program,
        "models",
        options.directory,
        options.seconds,
        options.max_bytes,
        options.model_record,
        options.per_second,
        options.prompt,
    )
    figures: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        if line["second"] < options.seconds * 3 / 4:
            continue
        figures[f"{line['server']}, held of its share"].append(line["bytes"] / line["share_bytes"])
        figures[f"{line['server']}, usable of its records"].append(line["usable"] / max(line["records"], 1))
        figures[f"{line['server']}, refused of its writes"].append(line["refused"] / line["chunks"])
        figures[f"{line['server']}, root of its bound"].append(line["root_bytes"] / line["max_bytes"])
    return figures, lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", type=Path, required=True, help="the built root_owners")
    parser.add_argument("--before", type=Path, help="the same, built from another commit")
    parser.add_argument("--before-commit", default="", help="which commit, for the results")
    parser.add_argument("--directory", type=Path, required=True, help="a directory on the disk to measure")
    parser.add_argument("--only", choices=("dead", "models"), help="keeps the other's results")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--leaves", type=int, default=64, help="leaf directories of a root")
    parser.add_argument("--files", type=int, default=1200, help="records in each of them")
    parser.add_argument("--record-bytes", type=int, default=4096, help="payload of a record (dead)")
    parser.add_argument("--writes", type=int, default=1000, help="in a batch")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=320, help="of the simulated clock (models)")
    parser.add_argument("--max-bytes", type=int, default=512 << 20, help="of the shared root")
    parser.add_argument("--model-record", type=int, default=60 << 10, help="payload of a record (models)")
    parser.add_argument("--per-second", type=int, default=48, help="chunks that each server writes (models)")
    parser.add_argument("--prompt", type=int, default=400, help="chunks of a prompt (models)")
    parser.add_argument("--name", default="root_owners", help="of the result file")
    options = parser.parse_args()
    builds = {"now": options.program} | ({"before": options.before} if options.before else {})
    results = (read_results(options.name) or {}) if options.only else {}
    results.pop("machine", None)
    echo(f"{describe_machine()['text']}, {file_system(options.directory)}")
    for command in [options.only] if options.only else ["dead", "models"]:
        samples: dict[str, dict[str, list[float]]] = {build: defaultdict(list) for build in builds}
        curves: dict[str, list[Lines]] = {build: [] for build in builds}
        for repetition in range(options.repetitions):
            for build in list(builds)[:: 1 if repetition % 2 == 0 else -1]:
                if command == "dead":
                    found = measure_dead(builds[build], options)
                else:
                    found, lines = measure_models(builds[build], options)
                    curves[build].append(lines)
                for name, values in found.items():
                    samples[build][name] += values
                echo(f"{command}, repetition {repetition + 1} of {options.repetitions}, {build}")
        figures = {
            build: {name: summary(values) for name, values in of.items()} for build, of in samples.items()
        }
        for build, of in figures.items():
            for name, part in of.items():
                echo(
                    f"{command}, {build}, {name}: {part['median']:.4g} "
                    f"({part['least']:.4g} to {part['most']:.4g})"
                )
        results[command] = {
            "filesystem": file_system(options.directory),
            "repetitions": options.repetitions,
            "before_commit": options.before_commit,
            "options": {
                name: value
                for name, value in vars(options).items()
                if isinstance(value, int) and not isinstance(value, bool)
            },
            "figures": figures,
        } | ({"samples": curves} if command == "models" else {})
        write_results(options.name, dict(results))


if __name__ == "__main__":
    main()
