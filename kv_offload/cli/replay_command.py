# SPDX-License-Identifier: Apache-2.0
"""``kv-offload replay TRACE``: simulates the hits of caches of several sizes and policies."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kv_offload.cli.terminal import add_row, console, echo, escape, plain_errors, print_json, table
from kv_offload.traces import OPTIMUM, Setting, Speeds, read_trace
from kv_offload.traces import replay as replay_one

if TYPE_CHECKING:
    from kv_offload.replay.sessions import MergedTrace
    from kv_offload.traces import Trace


@plain_errors
def replay(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="File of requests or sessions, one JSON object per line, or directory of sessions.",
            show_default=False,
        ),
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BLOCKS",
            help="Capacity of host memory, or a share of what the trace needs, such as 50%. May be repeated.",
        ),
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
    active: Annotated[
        int, typer.Option(metavar="N", min=1, help="Sessions that are active at the same time.")
    ] = 32,
    max_gap: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="Shorten longer pauses of a session to this."),
    ] = 300,
    chunk: Annotated[
        int, typer.Option(metavar="BLOCKS", min=1, help="Blocks of a session's prompt per chunk.")
    ] = 8,
    hints: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="Hints that the requests of a session carry: none, one-bit (back within 30 s or not) or "
            "exact (time of return).",
        ),
    ] = "none",
    late_hints: Annotated[
        bool, typer.Option("--late-hints", help="The hints come at the end of the requests.")
    ] = False,
    prefetch: Annotated[
        bool,
        typer.Option(help="With hints and a disk: read prompts that are expected back before their return."),
    ] = True,
    wrong_hints: Annotated[
        float, typer.Option(metavar="SHARE", min=0, max=1, help="Share of wrong hints.")
    ] = 0,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Begin the sessions in a random order, and choose wrong hints. Without it: order of the "
            "trace, and seed 0 for hints.",
        ),
    ] = None,
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
    token_bytes: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="KV cache bytes of a token, to show the bytes moved and to include loads in TTFT.",
        ),
    ] = "0",
    prefill_speed: Annotated[
        float,
        typer.Option(metavar="TOKENS/S", min=1, help="Prefill speed. Each hit token saves 1/SPEED seconds."),
    ] = 10_000,
    load_speed: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes per second from host memory to the GPU.")
    ] = "10GiB",
    disk_speed: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes per second from the disk to host memory.")
    ] = "2GiB",
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", "-l", metavar="N", min=1, help="Replay only the first N requests, or N sessions."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the hit rate over the size of host memory (.png, .svg). Prints a text chart if "
            "matplotlib is not installed.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Replay requests or agent sessions against caches of other sizes.

    Uses the index and the eviction policies as a server does, without any memory or disk. Each line of a
    trace of requests is an object such as {"input_length": 1024, "hash_ids": [0, 1]}: the numbers of the
    prompt's blocks, equal numbers for equal prefixes. Mooncake publishes traces in this form. Sessions are in
    the weka format of kv-cache-tester and aiperf (a directory or file), or in a compact format. They run in a
    closed loop: when one of the active sessions ends, the next one begins. A block of the cache is then one
    chunk of --chunk blocks.

    Hits count from the start of each prompt up to its first missing block. The percentages of --host refer
    to the blocks in the prompts of the active sessions, averaged over the requests, or to the different
    blocks of a trace of requests. TTFT is estimated from the speeds; no request waits for another one. A
    kill empties host memory (not with --keep-host-memory) and keeps the disk. "recent after kill" is the hit
    rate of the last prompts before the kill, repeated after it; "hits after kill" is the hit rate of all
    later requests.

    \b
    Example:
      kv-offload replay trace.jsonl --host 5000 --host 20000 --disk 200000
      kv-offload replay trace.jsonl --host 500 --disk 10000 --policy prefix --kill-after 6000
      kv-offload replay sessions/ --active 64 --host 50% --host 100% --hints exact --token-bytes 128KiB

    Exit status: 0 replayed; 1 the trace cannot be read; 2 it is not a trace, or an option is not known.
    """
    from kv_offload.replay.formats import holds_sessions, read_sessions
    from kv_offload.replay.hints import HINTS, NONE, simulated_hints

    policies = _policies(policy)
    if hints not in HINTS:
        raise ValueError(f"--hints is {hints!r}: use {', '.join(HINTS)}")
    speeds = Speeds(
        prefill_speed, _bytes(token_bytes), _speed("load", load_speed), _speed("disk", disk_speed)
    )
    report: dict[str, Any]
    told = None
    read: Trace | MergedTrace
    if holds_sessions(trace):
        sessions = read_sessions(trace, limit)
        read = sessions.merge(active=active, max_gap=max_gap, chunk_blocks=chunk, seed=seed)
        core, needed = read.core, read.needed
        told = simulated_hints(read, hints, wrong_hints, seed or 0)
        report = {"sessions": len(sessions), "active": active, "max_gap_seconds": max_gap}
        report |= {"block_tokens": read.block_tokens, "needed_blocks": round(needed)}
        report |= {"hints": hints, "late_hints": late_hints, "wrong_hints": wrong_hints, "seed": seed}
        # The need is that of the active sessions, a small part of the trace. So the shares are large.
        shares = (25, 50, 75, 100)
    else:
        # Requests of such a trace belong to no session.
        if hints != NONE:
            raise ValueError(f"--hints is {hints!r}, but {trace} has no sessions: give a trace of sessions")
        read = read_trace(trace, limit)
        core, needed, report = read.to_core(), float(read.unique_blocks()), {}
        shares = (1, 5, 20, 50)
    if kill_after > len(core):
        raise ValueError(f"--kill-after is {kill_after:,}, the trace has {len(core):,} requests: lower it")
    report = {"requests": len(core), "blocks": read.blocks, "tokens": read.tokens, **report}
    report |= {"unique_blocks": read.unique_blocks(), "prefill_tokens_per_second": prefill_speed}
    rows: list[dict[str, Any]] = []
    for capacity in _capacities(host or [f"{share}%" for share in shares], needed):
        for name in policies:
            setting = Setting(
                name,
                capacity,
                disk,
                disk_policy,
                write_policy,
                kill_after,
                recent,
                keep_host_memory,
                prefetch,
            )
            row = replay_one(core, read, setting, speeds, told, late_hints)
            rows.append(row | {"of_needed": capacity / needed if needed else None})
    if as_json:
        print_json({"trace": report, "replays": rows})
    else:
        _print(trace, report, rows, kill_after > 0, speeds.token_bytes > 0)
    if plot is not None:
        _plot(rows, plot, trace.stem, "sessions" in report)


def _policies(chosen: list[str] | None) -> list[str]:
    from kv_offload.tiers.base import EVICTION_POLICIES

    known = [*EVICTION_POLICIES, OPTIMUM]
    for name in chosen or ():
        if name not in known:
            raise ValueError(f"policy {name!r} is not known: use {', '.join(known)}")
    return chosen or known


def _bytes(size: str) -> int:
    """Parses a size that may be far below 1 MiB."""
    from kv_offload.sizes import parse_byte_size

    return int(size) if size.isdecimal() else parse_byte_size(size)


def _speed(name: str, size: str) -> float:
    speed = _bytes(size)
    if speed == 0:
        raise ValueError(f"--{name}-speed is {size!r}; give bytes per second, such as 10GiB")
    return float(speed)


def _capacities(sizes: list[str], needed: float) -> list[int]:
    """Parses blocks, and shares of what is needed."""
    found = []
    for size in sizes:
        share = size.removesuffix("%")
        try:
            blocks = float(share) / 100 * needed if share != size else float(int(size))
        except ValueError:
            blocks = 0.0
        if not 0 < blocks < 2**32:
            raise ValueError(f"--host is {size!r}; give at least 1 block, or a share such as 50%")
        found.append(max(1, round(blocks)))
    return found


def _print(trace: Path, report: dict[str, Any], rows: list[dict[str, Any]], kill: bool, moved: bool) -> None:
    from kv_offload.sizes import format_bytes

    out = console()
    out.print(
        f"[bold]{escape(str(trace))}[/bold]: {report['requests']:,} requests, {report['blocks']:,} blocks "
        f"({report['unique_blocks']:,} different), {report['tokens']:,} tokens"
    )
    if "sessions" in report:
        out.print(
            f"{report['sessions']:,} sessions, {report['active']:,} active: they need "
            f"{report['needed_blocks']:,} blocks of {report['block_tokens']:,.0f} tokens. "
            f"Hints: {report['hints']}, {report['wrong_hints']:.0%} wrong."
        )
    sizes = ("host\nblocks", "of\nneed", "disk\nblocks")
    columns = ["hits", "hit\ntokens", "from\ndisk", "saved\nprefill", "TTFT\np50", "TTFT\np95", "written"]
    if moved:
        columns += ["loaded", "stored", "read"]
    if kill:
        columns += ["recent\nafter kill", "hits\nafter kill"]
    shown = table("", *sizes, "policy", *columns, right=(*sizes, *columns))

    def size(row: dict[str, Any], name: str) -> str:
        return "-" if row[f"{name}_bytes"] is None else format_bytes(row[f"{name}_bytes"])

    for row in rows:
        cells = [
            f"{row['host_blocks']:,}",
            f"{row['of_needed']:.0%}",
            f"{row['tier_blocks']:,}",
            row["policy"],
            f"{row['hit_ratio']:.1%}",
            f"{row['hit_tokens']:,}",
            "-" if row["policy"] == OPTIMUM else f"{row['tier_hits']:,}",
            f"{row['saved_prefill_seconds']:,.0f} s",
            _seconds(row["ttft_p50_seconds"]),
            _seconds(row["ttft_p95_seconds"]),
            size(row, "written") if moved else "-" if row["written"] is None else f"{row['written']:,}",
        ]
        if moved:
            cells += [size(row, "loaded"), size(row, "stored"), size(row, "read")]
        if kill:
            cells += [_share(row, "recent_hits", "recent_blocks"), _share(row, "hits_after", "blocks_after")]
        add_row(shown, *cells)
    out.print(shown)


def _plot(rows: list[dict[str, Any]], path: Path, title: str, of_sessions: bool) -> None:
    from kv_offload.replay import chart

    drawn = chart.curves(rows)
    if chart.draw(drawn, path, title, "chunks" if of_sessions else "blocks"):
        return
    echo("matplotlib is not installed, so the chart is text: pip install matplotlib")
    typer.echo(chart.text(drawn), err=True)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _share(row: dict[str, Any], part: str, whole: str) -> str:
    return f"{row[part] / row[whole]:.1%}" if row[whole] else "-"
