# SPDX-License-Identifier: Apache-2.0
"""Compares the hits of agent sessions with and without hints about their return.

Replays recorded sessions through the core's index and policies in a closed loop, at several sizes of host
memory. The baseline is LRU without hints, on the same trace.

    python benchmarks/agent_sessions.py [SESSIONS.jsonl] [--active 32] [--late-hints | --disk]

With --disk, host memory has a quarter of the need and is above disks of several sizes. Prompts that a hint
expects back are read from the disk before their return, or not. Loads take time, of 128 KiB per token.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from reporting import echo, write_results

from kv_offload.replay.formats import read_sessions
from kv_offload.replay.hints import EXACT, NONE, ONE_BIT, simulated_hints
from kv_offload.replay.sessions import MergedTrace
from kv_offload.traces import Setting, Speeds, replay

ROOT = Path(__file__).resolve().parent.parent
SESSIONS = ROOT.parent / "shared" / "data" / "agent_sessions.jsonl"
SHARES = (0.25, 0.5, 0.75)
# Policy, hints, share of wrong ones.
ROWS = (
    ("lru", NONE, 0.0),
    ("prefix", NONE, 0.0),
    ("lru", ONE_BIT, 0.0),
    ("lru", EXACT, 0.0),
    ("prefix", EXACT, 0.0),
    ("lru", EXACT, 0.2),
    ("lru", EXACT, 1.0),
)


HOST_SHARE = 0.25
DISK_SHARES = (0.75, 1.5, 3.0)
TOKEN_BYTES = 128 << 10
# Hints, share of wrong ones, whether to prefetch.
DISK_ROWS = (
    (NONE, 0.0, False),
    (EXACT, 0.0, False),
    (EXACT, 0.0, True),
    (EXACT, 0.2, True),
    (EXACT, 1.0, True),
)


def in_memory(trace: MergedTrace, late_hints: bool) -> list[dict[str, Any]]:
    rows = []
    for policy, hints, wrong in ROWS:
        told = simulated_hints(trace, hints, wrong)
        found = []
        for share in SHARES:
            setting = Setting(policy, round(share * trace.needed))
            row = replay(trace.core, trace, setting, Speeds(10_000), told, late_hints)
            found.append(row)
            rows.append(row | {"share": share, "hints": hints, "wrong": wrong})
        shown = ", ".join(f"{row['hit_ratio']:.1%}" for row in found)
        echo(f"{policy:7} {hints:8} {wrong:4.0%} wrong: {shown}")
    return rows


def above_disk(trace: MergedTrace) -> list[dict[str, Any]]:
    rows = []
    for hints, wrong, prefetch in DISK_ROWS:
        told = simulated_hints(trace, hints, wrong)
        for share in DISK_SHARES:
            blocks = round(HOST_SHARE * trace.needed), round(share * trace.needed)
            setting = Setting("prefix", *blocks, prefetch=prefetch)
            row = replay(trace.core, trace, setting, Speeds(10_000, TOKEN_BYTES), told)
            rows.append(row | {"disk_share": share, "hints": hints, "wrong": wrong, "prefetch": prefetch})
            echo(
                f"{hints:8} {wrong:4.0%} wrong, prefetch {prefetch:d}, disk {share:4.0%}: "
                f"{row['hit_ratio']:.1%} hits, {row['tier_hits'] / row['hit_blocks']:.1%} from disk, TTFT "
                f"{row['ttft_p50_seconds']:.2f} s and {row['ttft_p95_seconds']:.1f} s, "
                f"{row['prefetched_used']:,} of {row['prefetched']:,} prefetched used"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sessions", nargs="?", type=Path, default=SESSIONS)
    parser.add_argument("--active", type=int, default=32)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--late-hints", action="store_true", help="hints come at the end of the requests")
    kind.add_argument("--disk", action="store_true", help="host memory is above a disk")
    arguments = parser.parse_args()
    sessions = read_sessions(arguments.sessions)
    trace = sessions.merge(active=arguments.active)
    results: dict[str, Any] = {
        "trace": arguments.sessions.stem,
        "sessions": len(sessions),
        "requests": len(trace.core),
        "active": arguments.active,
        "late_hints": arguments.late_hints,
        "needed_chunks": round(trace.needed),
        "rows": above_disk(trace) if arguments.disk else in_memory(trace, arguments.late_hints),
    }
    name = "-disk" if arguments.disk else "-late" if arguments.late_hints else ""
    write_results("agent_sessions" + name, results)


if __name__ == "__main__":
    main()
