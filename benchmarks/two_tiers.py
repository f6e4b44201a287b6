# SPDX-License-Identifier: Apache-2.0
"""Measures hits and writes of host memory with a disk below it, and the hits after a kill.

Reports for each pair of capacities and each rule (write policy, the disk's eviction policy, and whether host
memory outlives a kill): blocks hit, records written, and records declined because they are worth less than
the records that they would evict. For kills after several fractions of the trace, it also reports the hit
rate of the last 50 prompts and of the whole rest of the trace. Host memory evicts by prefix. Baselines: a
disk that evicts by LRU, one cache with the sum of both capacities, and an optimum that knows the future.

    python benchmarks/two_tiers.py [TRACE.jsonl] [--shape agents] [--second-half]
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from reporting import echo, write_results
from synthetic_traces import BLOCK_TOKENS, SHAPES, make
from trace_replay import CONVERSATIONS

from kv_offload.traces import OPTIMUM, Setting, Speeds, Trace, read_trace, replay

CELLS = ((500, 2_500), (500, 10_000), (2_000, 10_000), (5_000, 5_000))  # host memory, disk
# Write policy, the disk's eviction policy, True if host memory outlives a kill.
RULES = (
    ("write_through", "lru", False),
    ("write_through", "prefix", False),
    ("on_evict", "lru", False),
    ("on_evict", "prefix", False),
    ("on_evict", "prefix", True),
)
SPEEDS = Speeds(prefill=10_000)


def measured(
    trace: Trace, core: Any, host: int, disk: int, rule: tuple[str, str, bool], kills: list[float]
) -> Any:
    """Measures one rule in one cell, without and with kills."""
    write_policy, policy, kept = rule
    setting = Setting("prefix", host, disk, policy, write_policy, keep_host_memory=kept)
    began = time.monotonic()
    row = replay(core, trace, setting, SPEEDS)
    row |= {
        "write_policy": write_policy,
        "keep_host_memory": kept,
        "seconds": time.monotonic() - began,
        "kills": [],
    }
    for share in kills:
        after = int(share * len(trace.prompts))
        killed = replay(core, trace, replace(setting, kill_after=after), SPEEDS)
        row["kills"].append(
            {
                "after": after,
                "records": killed["killed_with"],
                "recent_hit_ratio": killed["recent_hits"] / killed["recent_blocks"],
                "hit_ratio_after": killed["hits_after"] / killed["blocks_after"],
            }
        )
    return row


def name_of(row: dict[str, Any]) -> str:
    return f"{row['write_policy']}/{row['tier_policy']}" + ("/kept" if row["keep_host_memory"] else "")


def mean(row: dict[str, Any], figure: str) -> float:
    return statistics.fmean(kill[figure] for kill in row["kills"])


def draw(results: dict[str, Any], path: Path) -> None:
    """Plots blocks hit against records written, one line per cell, and the hits after a kill."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for host, disk in CELLS:
        rows = [
            r
            for r in results["rows"]
            if (r["host_blocks"], r["tier_blocks"]) == (host, disk) and "kills" in r
        ]
        label = f"{host:,} + {disk:,}"
        hits = [100 * row["hit_ratio"] for row in rows]
        left.plot([row["written"] / 1000 for row in rows], hits, "o", label=label)
        right.plot([100 * mean(row, "hit_ratio_after") for row in rows], hits, "o", label=label)
        for row, y in zip(rows, hits, strict=True):
            name = name_of(row)
            left.annotate(name, (row["written"] / 1000, y), fontsize=6)
    left.set(xlabel="records written, thousands", ylabel="blocks hit, %")
    right.set(xlabel="blocks hit after a kill, %", ylabel="blocks hit, %")
    left.legend(fontsize=8, title="host + disk, blocks")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.suptitle(f"{results['trace']}: {results['requests']:,} requests, {results['blocks']:,} blocks")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", nargs="?", type=Path, default=CONVERSATIONS)
    parser.add_argument("--shape", choices=SHAPES, help="a synthetic trace instead")
    parser.add_argument("--seed", type=int, default=1, help="of the synthetic trace")
    parser.add_argument("--second-half", action="store_true", help="only that, by requests")
    parser.add_argument(
        "--kills", type=float, nargs="+", default=[0.2, 0.4, 0.6, 0.8], help="shares of the trace"
    )
    options = parser.parse_args()
    if options.shape:
        prompts = make(options.shape, seed=options.seed)
        trace = Trace(prompts, BLOCK_TOKENS * sum(map(len, prompts)))
        name = f"{options.shape}-{options.seed}"
    else:
        trace = read_trace(options.trace)
        name = options.trace.stem
    if options.second_half:
        trace = Trace(trace.prompts[len(trace.prompts) // 2 :], 0)
        name += "-second-half"
    core = trace.to_core()
    echo(
        f"{name}: {len(trace.prompts):,} requests, {trace.blocks:,} blocks, {trace.unique_blocks():,} unique"
    )
    rows: list[dict[str, Any]] = []
    for host, disk in CELLS:
        for rule in RULES:
            row = measured(trace, core, host, disk, rule, options.kills)
            rows.append(row)
            echo(
                f"host {host:>6,}, disk {disk:>6,}, {name_of(row):20}: {row['hit_ratio']:.1%} hit, "
                f"{row['written']:>7,} written, {row['tier_declined']:>7,} declined; "
                f"after a kill {mean(row, 'recent_hit_ratio'):.0%} of the last prompts, "
                f"{mean(row, 'hit_ratio_after'):.1%} hit"
            )
        for policy in ("prefix", OPTIMUM):  # one cache with both capacities
            rows.append(
                replay(core, trace, Setting(policy, host + disk), SPEEDS) | {"one_cache_of": [host, disk]}
            )
            echo(f"one cache of {host + disk:>6,} blocks, {policy}: {rows[-1]['hit_ratio']:.1%} hit")
    results = {
        "trace": name,
        "requests": len(trace.prompts),
        "blocks": trace.blocks,
        "unique_blocks": trace.unique_blocks(),
        "rows": rows,
    }
    write_results(f"two_tiers-{name}", results, lambda path: draw(results, path))


if __name__ == "__main__":
    main()
