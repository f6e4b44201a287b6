# SPDX-License-Identifier: Apache-2.0
"""Compares eviction policies by their hits on a request trace.

Replays the trace through the core's index and policies, at several capacities of host memory and of a tier
below it. Baselines, on the same trace: the core's LRU, vLLM's own manager with its lru and arc policies, and
the optimum that knows the future. Hits are counted from the left of each prompt.

    python benchmarks/trace_replay.py [TRACE.jsonl] [--shape agents]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from reporting import echo, write_results
from synthetic_traces import BLOCK_TOKENS, SHAPES, make

from kv_offload.traces import OPTIMUM, Setting, Speeds, Trace, read_trace, replay

ROOT = Path(__file__).resolve().parent.parent
CONVERSATIONS = ROOT.parent / "shared" / "data" / "conversation_trace.jsonl"
CAPACITIES = (1_000, 2_500, 5_000, 10_000, 20_000, 35_000, 50_000)
OURS = ("lru", "prefix")
VLLM = ("lru", "arc")
PAIRS = (("lru", "lru"), ("prefix", "lru"), ("prefix", "prefix"))  # host, disk


def vllm_hits(trace: Trace, policy: str, capacity: int) -> int:
    """Returns the blocks hit by vLLM's own manager with one of its policies."""
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    manager = CPUOffloadingManager(capacity, cache_policy=policy)
    hits = 0
    for number, prompt in enumerate(trace.prompts):
        keys = [make_offload_key(block.to_bytes(16, "big"), 0) for block in prompt]
        context = ReqContext(req_id=str(number))
        for position, key in enumerate(keys):
            context.set_offload_key_position(key, position)
        manager.on_new_request(context)
        found = 0
        while found < len(keys) and manager.lookup(keys[found], context) is LookupResult.HIT:
            found += 1
        hits += found
        if found:
            manager.prepare_load(keys[:found], context)
            manager.complete_load(keys[:found], context)
        output = manager.prepare_store(keys, context)
        if output is not None:  # None: not everything fits, so nothing is stored
            manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)
    return hits


def host_rows(trace: Trace, core: Any, capacity: int, speed: float, with_vllm: bool) -> list[dict[str, Any]]:
    rows = [replay(core, trace, Setting(policy, capacity), Speeds(speed)) for policy in (*OURS, OPTIMUM)]
    for policy in VLLM if with_vllm else ():
        hits = vllm_hits(trace, policy, capacity)
        tokens = hits * trace.block_tokens
        rows.append(
            {
                "policy": f"vllm {policy}",
                "host_blocks": capacity,
                "tier_blocks": 0,
                "hit_blocks": hits,
                "hit_ratio": hits / trace.blocks,
                "hit_tokens": round(tokens),
                "saved_prefill_seconds": tokens / speed,
            }
        )
    baseline = rows[0]["hit_blocks"]
    for row in rows:
        row["of_lru"] = row["hit_blocks"] / baseline if baseline else None
    shown = ", ".join(f"{row['policy']} {row['hit_ratio']:.1%}" for row in rows)
    echo(f"host {capacity:>6,}: {shown}; prefix/lru {rows[2]['of_lru'] or 0:.3f}")
    return rows


def tier_rows(trace: Trace, core: Any, host: int, tier: int, speed: float) -> list[dict[str, Any]]:
    rows = []
    for write_policy in ("write_through", "on_evict", "reuse:2"):
        for policy, below in PAIRS:
            row = replay(core, trace, Setting(policy, host, tier, below, write_policy), Speeds(speed))
            row["write_policy"] = write_policy
            rows.append(row)
        shown = ", ".join(
            f"{row['policy']}/{row['tier_policy']} {row['hit_ratio']:.1%} ({row['written']:,} written)"
            for row in rows[-len(PAIRS) :]
        )
        echo(f"host {host:>6,}, disk {tier:>6,}, {write_policy:8}: {shown}")
    rows.append(replay(core, trace, Setting(OPTIMUM, host, tier), Speeds(speed)))
    return rows


def draw(results: dict[str, Any], path: Path) -> None:
    """Plots the hit rate against capacity, and relative to LRU."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for policy in dict.fromkeys(row["policy"] for row in results["host"]):
        rows = [row for row in results["host"] if row["policy"] == policy]
        style = "k--" if policy == OPTIMUM else "o-" if policy == "prefix" else ".-"
        sizes = [row["host_blocks"] for row in rows]
        left.plot(sizes, [100 * row["hit_ratio"] for row in rows], style, label=policy)
        if policy != OPTIMUM:
            right.plot(sizes, [row["of_lru"] for row in rows], style, label=policy)
    for axis in (left, right):
        axis.set(xscale="log", xlabel="host memory, blocks")
        axis.grid(alpha=0.3)
    left.set(ylabel="blocks hit, %", ylim=(0, None))
    right.set(ylabel="hits / hits of LRU")
    left.legend(fontsize=8)
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
    parser.add_argument("--capacities", type=int, nargs="+", default=list(CAPACITIES), help="blocks")
    parser.add_argument("--tier-factor", type=int, default=8, help="disk blocks for one of memory")
    parser.add_argument("--prefill-speed", type=float, default=10_000, help="tokens/s")
    parser.add_argument("--without-vllm", action="store_true", help="leave its policies out")
    options = parser.parse_args()
    if options.shape:
        prompts = make(options.shape, seed=options.seed)
        trace = Trace(prompts, BLOCK_TOKENS * sum(map(len, prompts)))
        name = f"{options.shape}-{options.seed}"
    else:
        trace = read_trace(options.trace)
        name = options.trace.stem
    core = trace.to_core()
    echo(
        f"{name}: {len(trace.prompts):,} requests, {trace.blocks:,} blocks, {trace.unique_blocks():,} unique"
    )
    results: dict[str, Any] = {
        "trace": name,
        "requests": len(trace.prompts),
        "blocks": trace.blocks,
        "unique_blocks": trace.unique_blocks(),
        "prefill_tokens_per_second": options.prefill_speed,
        "host": [],
        "host_and_disk": [],
    }
    for capacity in options.capacities:
        results["host"] += host_rows(trace, core, capacity, options.prefill_speed, not options.without_vllm)
    for capacity in options.capacities[:3]:
        tier = options.tier_factor * capacity
        results["host_and_disk"] += tier_rows(trace, core, capacity, tier, options.prefill_speed)
    write_results(f"trace_replay-{name}", results, lambda path: draw(results, path))


if __name__ == "__main__":
    main()
