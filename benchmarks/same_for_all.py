# SPDX-License-Identifier: Apache-2.0
"""The common setup of compared servers, so that only the connector differs.

It covers their environment and configuration, waiting for the end of writes before the next server gets a
request, and CPU accounting.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from local_server import LocalServer, kv_transfer_config

SYSTEMS = ("none", "kv_offload", "vllm")
BLOCK = 128
SPINS = "1000"  # the plugin's value for its own ranks
TICKS = os.sysconf("SC_CLK_TCK")
QUIET_SECONDS, QUIET_SHARE = 0.4, 0.1  # quiet: at most this share of one core for so long

SLEEP_INSTEAD = """\
import os, time

os.sched_yield = lambda: time.sleep(0.0002)
"""


def environment(spins: str = SPINS) -> dict[str, str]:
    """Returns the environment of a server with one rank on CPU.

    ``spins``: GOMP_SPINCOUNT; empty: each server's connector decides.

    vLLM keeps one core free for its scheduler, and one more if there is a connector, unless no core would be
    left (its ompmultiprocessing.py). With two cores, a server with a connector computes on both and a server
    without one on a single core. Here all servers compute on all cores.

    Idle OpenMP threads then take the cores from the rest of the server unless they spin only briefly. This
    plugin limits spinning for its own ranks (``openmp_wait``); here the limit applies to all servers.

    The benchmarks' directory is importable, for vllm_tiering_on_cpu, and so are the entries of the current
    PYTHONPATH. vLLM's usage reports are off.
    """
    importable = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "PYTHONPATH": os.pathsep.join(filter(None, importable)),
        "DO_NOT_TRACK": "1",
        **({"GOMP_SPINCOUNT": spins} if spins else {}),
    }


def connector(
    name: str, size: str, root: Path | None, max_bytes: int | str = "8GiB"
) -> dict[str, Any] | None:
    """Returns the ``--kv-transfer-config`` of one of SYSTEMS; None for "none".

    Host memory has ``size`` ("64MiB"). Below it, ``root`` holds up to ``max_bytes`` ("vllm": no limit);
    without ``root``, host memory is the only tier.
    """
    if name == "none":
        return None
    config = kv_transfer_config(size, root, max_bytes)
    if name == "vllm":
        extra = config["kv_connector_extra_config"]
        extra |= {"spec_name": "CpuTieringSpec", "spec_module_path": "vllm_tiering_on_cpu"}
        extra["cpu_bytes_to_use"] = int(size.removesuffix("MiB")) * 1024**2  # vLLM accepts only numbers
        for tier in extra.get("secondary_tiers", ()):
            del tier["max_bytes"]  # its tier has no size limit
    return config


def cpu_by_thread(server: LocalServer) -> dict[str, float]:
    """Returns the CPU seconds of all live threads of the server, by thread name."""
    seconds: dict[str, float] = defaultdict(float)
    for process in server.processes():
        for stat in Path(f"/proc/{process.pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):
                before, _, after = stat.read_text().rpartition(")")
                fields = after.split()
                seconds[before.partition("(")[2]] += (int(fields[11]) + int(fields[12])) / TICKS
    return seconds


def wait_until_quiet(servers: Iterable[LocalServer]) -> None:
    """Waits until none of the servers computes, so that the next request is measured alone.

    vLLM's processes spin for a second after their last message (its SpinCondition), on cores that the next
    server needs. Raises TimeoutError after 30 s.
    """
    servers = list(servers)
    deadline, busiest = time.monotonic() + 30, float("inf")
    while busiest > QUIET_SHARE * QUIET_SECONDS:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"a server, asked nothing, still takes {busiest / QUIET_SECONDS:.0%} of a core"
            )
        before = [cpu_by_thread(server) for server in servers]
        time.sleep(QUIET_SECONDS)
        busiest = max(
            sum(grown(cpu_by_thread(server), then).values())
            for server, then in zip(servers, before, strict=True)
        )


def mean_cpu_by_thread(played: Sequence[Mapping[str, Any]], least: float = 0.01) -> dict[str, float]:
    """Returns the mean CPU seconds by thread over rounds with a ``cpu`` entry each.

    The busiest thread is first; threads below ``least`` seconds are omitted.
    """
    seconds: dict[str, float] = defaultdict(float)
    for one in played:
        for thread, used in one["cpu"].items():
            seconds[thread] += used / len(played)
    busy = {thread: round(used, 3) for thread, used in seconds.items() if used >= least}
    return dict(sorted(busy.items(), key=lambda pair: -pair[1]))


def add_spins(parser: argparse.ArgumentParser) -> None:
    """Adds the option ``--spins``; see environment()."""
    parser.add_argument(
        "--spins", default=SPINS, help='GOMP_SPINCOUNT of all servers; "": as each is started on its own'
    )


def grown(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Returns the positive differences of the counters, rounded to 0.001."""
    more = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {name: round(value, 3) for name, value in more.items() if value > 0}


def bytes_below(root: Path) -> int:
    total = 0
    for folder, _, files in os.walk(root):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def wait_for_writes(root: Path, least: int) -> float:
    """Waits until ``root`` has ``least`` more bytes and none was added for 0.5 s. Returns the seconds."""
    began, last, since = time.perf_counter(), -1, time.perf_counter()
    while time.perf_counter() - began < 30:
        now = bytes_below(root)
        if now != last:
            last, since = now, time.perf_counter()
        elif now >= least and time.perf_counter() - since > 0.5:
            return since - began
        time.sleep(0.02)
    raise RuntimeError(f"{root} holds {last} bytes after 30 s; at least {least} were expected")


def sleep_where_vllm_spins(directory: Path) -> None:
    """Makes all servers that are started from now on sleep where vLLM would spin.

    ``directory`` must be empty and must exist as long as the servers run.

    vLLM's processes spin with sched_yield while they wait for each other. On two cores that can leave no CPU
    to reader threads, or to a store on the same machine, for seconds (docs/troubleshooting.md), and would
    dominate the comparison. This plugin makes them sleep during its loads; here they always sleep, in all
    systems.
    """
    (directory / "sitecustomize.py").write_text(SLEEP_INSTEAD)
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(directory), before)))
