"""What every benchmark here prints and keeps: the machine, progress, results as JSON and as a picture."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
_BEGAN = time.monotonic()


def describe_machine() -> dict[str, Any]:
    """name: short, usable in file names; text: one line; and the figures it is made of."""
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


def say(text: str) -> None:
    """A line of progress with the seconds since the start."""
    print(f"[{time.monotonic() - _BEGAN:6.1f} s] {text}", flush=True)


def write_results(name: str, results: dict[str, Any], draw: Callable[[Path], None] | None = None) -> None:
    """Keeps ``results`` (and the picture that ``draw`` saves at the path it is given) under results/."""
    machine = describe_machine()
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"{name}-{machine['name']}"
    stem.with_suffix(".json").write_text(json.dumps({"machine": machine, **results}, indent=2) + "\n")
    say(f"written: {stem.with_suffix('.json')}")
    if draw is not None:
        draw(stem.with_suffix(".png"))
        say(f"drawn: {stem.with_suffix('.png')}")
