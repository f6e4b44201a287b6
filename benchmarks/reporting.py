# SPDX-License-Identifier: Apache-2.0
"""Output shared by all benchmarks: the machine, progress, and results as JSON and as a chart."""

from __future__ import annotations

import json
import os
import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
_BEGAN = time.monotonic()


def describe_machine() -> dict[str, Any]:
    """Returns ``name`` (short, usable in file names), ``text`` (one line), and the underlying values."""
    cpu = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3
    slug = re.sub(r"[^a-z0-9]+", "-", cpu.lower()).strip("-")
    return {
        "name": f"{slug}-{cores}core",
        "text": f"{cpu}, {cores} cores, {memory:.0f} GiB, Linux {platform.release()}",
        "cpu": cpu,
        "cores": cores,
        "memory_gib": round(memory, 1),
        "kernel": platform.release(),
    }


def echo(text: str) -> None:
    """Prints a progress line with the seconds since the start."""
    print(f"[{time.monotonic() - _BEGAN:6.1f} s] {text}", flush=True)


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95% confidence interval of the median (bootstrap)."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


def median_with_interval(ratios: Sequence[float]) -> dict[str, float]:
    """Returns the median of ``ratios`` and its interval, in the format of the results."""
    low, high = interval_of_median(ratios)
    return {"median": statistics.median(ratios), "low": low, "high": high}


def draw_bars(
    path: Path,
    bars: Sequence[tuple[str, float, str]],
    xlabel: str,
    title: str,
    marks: Mapping[float, str] | None = None,
) -> None:
    """Draws one horizontal bar per row, from the top. A row: label, value, text next to the bar.

    ``marks``: value -> color of dashed lines. They mark ratios, so the scale is then logarithmic.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.5 * len(bars) + 1.4))
    axes.barh([label for label, _, _ in bars], [value for _, value, _ in bars])
    for row, (_, value, text) in enumerate(bars):
        axes.text(value, row, f" {text}", va="center")
    for value, color in (marks or {}).items():
        axes.axvline(value, color=color, linewidth=1, linestyle="--")
    if marks:
        axes.set_xscale("log")
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel(xlabel)
    axes.set_title(f"{title}, {describe_machine()['name']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def read_results(name: str) -> dict[str, Any] | None:
    """Returns the results that ``write_results`` saved as ``name`` on this machine, or None."""
    path = RESULTS / f"{name}-{describe_machine()['name']}.json"
    return json.loads(path.read_text()) if path.exists() else None


def write_results(name: str, results: dict[str, Any], draw: Callable[[Path], None] | None = None) -> Path:
    """Saves ``results`` under results/ and returns their path. ``draw(path)`` saves a chart next to them."""
    machine = describe_machine()
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"{name}-{machine['name']}"
    written = stem.with_suffix(".new")  # an interruption here keeps the previous results
    # NaN and Infinity are not JSON: other programs cannot read them.
    written.write_text(json.dumps({"machine": machine, **results}, indent=2, allow_nan=False) + "\n")
    kept = written.replace(stem.with_suffix(".json"))
    echo(f"written: {kept}")
    if draw is None:
        return kept
    try:
        draw(stem.with_suffix(".png"))
    except ImportError as error:
        echo(f"not drawn: {error}")
    else:
        echo(f"drawn: {stem.with_suffix('.png')}")
    return kept
