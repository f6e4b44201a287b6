# SPDX-License-Identifier: Apache-2.0
"""``kv-offload replay TRACE``: simulates the hits of caches of several sizes and policies."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kv_offload.cli.terminal import add_row, console, escape, plain_errors, print_json, table
from kv_offload.traces import OPTIMUM, Setting, read_trace
from kv_offload.traces import replay as replay_one


@plain_errors
def replay(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", help="File of requests, one JSON object per line.", show_default=False
        ),
    ],
    host: Annotated[
        list[int] | None,
        typer.Option(metavar="BLOCKS", min=1, help="Capacity of host memory. May be repeated."),
    ] = None,
    disk: Annotated[
        int, typer.Option(metavar="BLOCKS", min=0, help="Capacity of a disk tier below host memory.")
    ] = 0,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY",
            help=f"lru, prefix, or {OPTIMUM} (knows the future). Default: all.",
        ),
    ] = None,
    disk_policy: Annotated[
        str, typer.Option(metavar="POLICY", help="Eviction policy of the disk.")
    ] = "prefix",
    write_policy: Annotated[
        str,
        typer.Option(metavar="POLICY", help="Write policy of the disk: write_through, on_evict or reuse:N."),
    ] = "write_through",
    kill_after: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Simulate a kill and restart after N requests; 0: none."),
    ] = 0,
    recent: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Number of requests before the kill whose prompts are looked up after it.",
        ),
    ] = 50,
    keep_host_memory: Annotated[
        bool, typer.Option("--keep-host-memory", help="Keep host memory across the kill.")
    ] = False,
    block_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="KV cache bytes of a block, to show the bytes written.")
    ] = "0",
    prefill_speed: Annotated[
        float,
        typer.Option(metavar="TOKENS/S", min=1, help="Prefill speed. Each hit token saves 1/SPEED seconds."),
    ] = 10_000,
    limit: Annotated[
        int | None,
        typer.Option("--limit", "-l", metavar="N", min=1, help="Replay only the first N requests."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Replay a trace of requests against caches of other sizes.

    Uses the index and the eviction policies as a server does, without any memory or disk. Each line is an
    object such as {"input_length": 1024, "hash_ids": [0, 1]}: the numbers of the prompt's blocks, equal
    numbers for equal prefixes. Mooncake publishes traces in this form. Hits count from the start of each
    prompt up to its first missing block. A kill empties host memory (not with --keep-host-memory) and keeps
    the disk. "recent after kill" is the hit rate of the last prompts before the kill, repeated after it;
    "hits after kill" is the hit rate of all later requests.

    \b
    Example:
      kv-offload replay trace.jsonl --host 5000 --host 20000 --disk 200000
      kv-offload replay trace.jsonl --host 500 --disk 10000 --policy prefix --kill-after 6000

    Exit status: 0 replayed; 1 the trace cannot be read; 2 it is not a trace, or an option is not known.
    """
    from kv_offload.sizes import format_bytes, parse_byte_size
    from kv_offload.tiers.base import EVICTION_POLICIES

    policies = policy or [*EVICTION_POLICIES, OPTIMUM]
    for name in policies:
        if name not in (*EVICTION_POLICIES, OPTIMUM):
            raise ValueError(f"policy {name!r} is not known: use {', '.join((*EVICTION_POLICIES, OPTIMUM))}")
    size = parse_byte_size(block_bytes)
    read = read_trace(trace, limit)
    if kill_after > len(read.prompts):
        raise ValueError(
            f"--kill-after is {kill_after:,}, the trace has {len(read.prompts):,} requests: lower it"
        )
    core = read.to_core()
    unique = read.unique_blocks()
    capacities = host or [max(1, round(unique * share)) for share in (0.01, 0.05, 0.2, 0.5)]
    rows: list[dict[str, Any]] = []
    for capacity in capacities:
        for name in policies:
            setting = Setting(
                name, capacity, disk, disk_policy, write_policy, kill_after, recent, keep_host_memory
            )
            row = replay_one(core, read, setting, prefill_speed)
            row["written_bytes"] = None if row["written"] is None else row["written"] * size
            rows.append(row)
    report = {
        "requests": len(read.prompts),
        "blocks": read.blocks,
        "unique_blocks": unique,
        "tokens": read.tokens,
        "prefill_tokens_per_second": prefill_speed,
    }
    if as_json:
        print_json({"trace": report, "replays": rows})
        return
    out = console()
    out.print(
        f"[bold]{escape(str(trace))}[/bold]: {report['requests']:,} requests, {report['blocks']:,} blocks "
        f"({unique:,} different), {report['tokens']:,} tokens"
    )
    sizes = ("host\nblocks", "disk\nblocks")
    columns = ["hits", "hit\ntokens", "from\ndisk", "saved\nprefill", "written"]
    if kill_after:
        columns += ["recent\nafter kill", "hits\nafter kill"]
    shown = table("", *sizes, "policy", *columns, right=(*sizes, *columns))
    for row in rows:
        written = "-" if row["written"] is None else f"{row['written']:,}"
        if size and row["written"] is not None:
            written = format_bytes(row["written_bytes"])
        add_row(
            shown,
            f"{row['host_blocks']:,}",
            f"{row['tier_blocks']:,}",
            row["policy"],
            f"{row['hit_ratio']:.1%}",
            f"{row['hit_tokens']:,}",
            "-" if row["policy"] == OPTIMUM else f"{row['tier_hits']:,}",
            f"{row['saved_prefill_seconds']:,.0f} s",
            written,
            *(
                [_share(row, "recent_hits", "recent_blocks"), _share(row, "hits_after", "blocks_after")]
                if kill_after
                else []
            ),
        )
    out.print(shown)


def _share(row: dict[str, Any], part: str, whole: str) -> str:
    return f"{row[part] / row[whole]:.1%}" if row[whole] else "-"
