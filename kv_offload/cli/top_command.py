# SPDX-License-Identifier: Apache-2.0
"""``kv-offload top URL``: the activity of a running server's tiers, from its /metrics."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kv_offload.cli.server import PREFIX, metrics_url, scrape
from kv_offload.cli.terminal import OK, add_row, console, plain_errors, print_json, rate, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kv_offload.exposition import Page


@plain_errors
def top(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Address of the server or of its metrics page.")
    ] = "http://127.0.0.1:8000/metrics",
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.05, metavar="SECONDS", help="Time between two updates.")
    ] = 2,
    once: Annotated[bool, typer.Option("--once", help="Show one interval and exit, for scripts.")] = False,
    count: Annotated[
        int, typer.Option(min=0, metavar="N", help="Exit after N intervals; 0: run until Ctrl-C.")
    ] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON for each interval.")
    ] = False,
) -> None:
    """Show a running server live: tiers, hits, speeds, misses.

    Reads the server's /metrics every few seconds. Rates cover the last interval and all engines of the
    server. On a terminal the page is redrawn until Ctrl-C; otherwise each interval is printed below the
    previous one. read and write count record bytes as stored, after compression. kv-offload why explains
    misses.

    \b
    Examples:
      kv-offload top http://gpu-7:8000
      kv-offload top http://gpu-7:8000 --once --json | jq .hit_rate

    Exit status: 0 shown; 1 the server cannot be reached, or its page has no metrics of KVOffloadSpec.
    """
    from rich.live import Live
    from rich.text import Text

    address = metrics_url(url)
    before, then = scrape(address), time.monotonic()
    turns = 1 if once else count
    out = console()
    live = Live(console=out, auto_refresh=False) if out.is_terminal and not as_json else None
    try:
        if live:
            live.start()
        turn = 0
        while turns == 0 or turn < turns:
            time.sleep(interval)
            turn += 1
            try:
                page, now = scrape(address), time.monotonic()
            except OSError as error:
                if live is None:
                    raise
                live.update(Text(f"{address}: {error}"), refresh=True)  # the server may be restarting
                continue
            figures = compare(before, page, now - then)
            before, then = page, now
            if as_json:
                print_json({"time": time.time()} | figures, indent=None)
            elif live:
                live.update(view(address, figures), refresh=True)
            else:
                out.print(view(address, figures))
    except KeyboardInterrupt:
        pass
    finally:
        if live:
            live.stop()
    raise typer.Exit(OK)


def compare(before: "Page", page: "Page", seconds: float) -> dict[str, Any]:
    """Returns the changes between two scrapes ``seconds`` apart, and the current state."""

    def grown(name: str, **labels: str) -> float:
        now, then = page.sum(PREFIX + name, **labels), before.sum(PREFIX + name, **labels)
        return now if now < then else now - then  # the server restarted

    def per_second(name: str, **labels: str) -> float:
        return grown(name, **labels) / seconds

    def total(name: str, **labels: str) -> float:
        return page.sum(PREFIX + name, **labels)

    def mean(name: str, tier: str) -> float | None:
        ended = grown(f"{name}_count", tier=tier)
        return grown(f"{name}_sum", tier=tier) / ended if ended else None

    def share(part: float, rest: float) -> float | None:
        return part / (part + rest) if part + rest else None

    tiers = {
        tier: {
            "bytes": total("tier_bytes", tier=tier),
            "capacity_bytes": total("tier_capacity_bytes", tier=tier),
            "chunks": total("tier_chunks", tier=tier),
            "hit_tokens": total("hit_tokens_total", tier=tier),
            "hit_tokens_per_second": per_second("hit_tokens_total", tier=tier),
            "read_bytes_per_second": per_second("read_record_bytes_total", tier=tier),
            "write_bytes_per_second": per_second("write_record_bytes_total", tier=tier),
            "read_seconds": mean("read_seconds", tier),
            "write_seconds": mean("write_seconds", tier),
            "evicted_bytes_per_second": per_second("evicted_bytes_total", tier=tier),
            "dropped_bytes_per_second": per_second("dropped_bytes_total", tier=tier),
            "queue_depth": total("queue_depth", tier=tier),
            "oldest_op_seconds": page.max(PREFIX + "oldest_op_seconds", tier=tier),
            "failures": total("failures_total", tier=tier),
        }
        for tier in page.values_of(PREFIX + "tier_capacity_bytes", "tier")
    }
    misses = {
        reason: {
            "tokens": total("miss_tokens_total", reason=reason),
            "tokens_per_second": per_second("miss_tokens_total", reason=reason),
        }
        for reason in page.values_of(PREFIX + "miss_tokens_total", "reason")
    }
    tenants = {
        tenant: {
            "bytes": total("tenant_bytes", tenant=tenant),
            "share_bytes": total("tenant_share_bytes", tenant=tenant),
            "tiers": {
                tier: {
                    "bytes": total("tenant_tier_bytes", tenant=tenant, tier=tier),
                    "share_bytes": total("tenant_tier_share_bytes", tenant=tenant, tier=tier),
                }
                for tier in page.values_of(PREFIX + "tenant_tier_share_bytes", "tier")
            },
            "hit_rate": share(
                grown("tenant_hit_tokens_total", tenant=tenant),
                grown("tenant_miss_tokens_total", tenant=tenant),
            ),
            "hit_rate_since_start": share(
                total("tenant_hit_tokens_total", tenant=tenant),
                total("tenant_miss_tokens_total", tenant=tenant),
            ),
            "hit_tokens_per_second": per_second("tenant_hit_tokens_total", tenant=tenant),
            "read_bytes_per_second": per_second("tenant_read_bytes_total", tenant=tenant),
            "write_bytes_per_second": per_second("tenant_write_bytes_total", tenant=tenant),
            "evicted_bytes_per_second": per_second("tenant_evicted_bytes_total", tenant=tenant),
        }
        for tenant in page.values_of(PREFIX + "tenant_share_bytes", "tenant")
    }
    hosts = {
        host: {
            "connected": page.min(PREFIX + "host_connected", host=host) > 0,
            "tiers": {
                tier: {
                    "bytes": total("host_tier_bytes", host=host, tier=tier),
                    "capacity_bytes": total("host_tier_capacity_bytes", host=host, tier=tier),
                    "usable": page.min(PREFIX + "host_tier_usable", host=host, tier=tier) > 0,
                    "read_bytes_per_second": page.min(
                        PREFIX + "host_read_bytes_per_second", host=host, tier=tier
                    ),
                    "slowest_reads": grown("host_slowest_reads_total", host=host, tier=tier),
                    "failures": total("host_failures_total", host=host, tier=tier),
                }
                for tier in page.values_of(PREFIX + "host_tier_capacity_bytes", "tier")
            },
        }
        for host in page.values_of(PREFIX + "host_connected", "host")
    }
    decisions = page.values_of(PREFIX + "decisions_total", "choice")
    return {
        "seconds": seconds,
        "info": page.labels(PREFIX + "info"),
        "hit_rate": share(grown("hit_tokens_total"), grown("miss_tokens_total")),
        "hit_rate_since_start": share(total("hit_tokens_total"), total("miss_tokens_total")),
        "stored_tokens_per_second": per_second("stored_tokens_total"),
        "saved_seconds": total("saved_seconds_total"),
        "saved_seconds_per_second": per_second("saved_seconds_total"),
        "tiers": tiers,
        "neighbours": {
            "engines": total("neighbours"),
            "own_numbers": [
                number
                for number in page.values_of(PREFIX + "shared_memory_info", "neighbour")
                if total("shared_memory_info", neighbour=number)
            ],
            "hit_tokens_per_second": per_second("hit_tokens_total", tier="neighbour"),
            "hit_tokens_per_second_by_number": {
                number: per_second("neighbour_hit_tokens_total", neighbour=number)
                for number in page.values_of(PREFIX + "neighbour_hit_tokens_total", "neighbour")
            },
            "borrowed_chunks": total("borrowed_chunks"),
            "lent_chunks": total("lent_chunks"),
        },
        "lost_hosts": total("lost_hosts"),
        "hosts": hosts,
        "misses": misses,
        "tenants": tenants,
        "decisions": {choice: total("decisions_total", choice=choice) for choice in decisions},
    }


def view(address: str, figures: dict[str, Any]) -> "RenderableType":
    """Returns the page for display."""
    from rich.console import Group
    from rich.text import Text

    from kv_offload.sizes import format_bytes

    parts: list[RenderableType] = [Text(_headline(address, figures))]
    amounts = ("held", "of", "full", "chunks")
    held = table("", "tier", *amounts, right=amounts)
    for name, tier in figures["tiers"].items():
        add_row(
            held,
            name,
            format_bytes(int(tier["bytes"])),
            format_bytes(int(tier["capacity_bytes"])),
            # A capacity of 0 is unknown.
            _percent(tier["bytes"] / tier["capacity_bytes"] if tier["capacity_bytes"] else None),
            f"{tier['chunks']:,.0f}",
        )
    speeds = ("hits/s", "read", "write", "latency", "queue", "oldest", "failed")
    traffic = table("", "tier", *speeds, right=speeds)
    for name, tier in figures["tiers"].items():
        latency = tier["read_seconds"]
        add_row(
            traffic,
            name,
            f"{tier['hit_tokens_per_second']:,.0f}",
            rate(tier["read_bytes_per_second"]),
            rate(tier["write_bytes_per_second"]),
            "-" if latency is None else f"{latency * 1000:.1f} ms",
            f"{tier['queue_depth']:.0f}",
            f"{tier['oldest_op_seconds']:.1f} s",
            f"{tier['failures']:.0f}",
        )
    parts += [held, Text(), traffic]
    # Tables and lines of features that the server does not use are left out.
    if figures["tenants"]:
        columns = ("held", "share", "hit rate", "hits/s", "read", "write", "evicted")
        tenants = table("\ntenants", "tenant", *columns, right=columns)
        for name, tenant in figures["tenants"].items():
            add_row(
                tenants,
                name,
                format_bytes(int(tenant["bytes"])),
                format_bytes(int(tenant["share_bytes"])),
                _percent(tenant["hit_rate"]),
                f"{tenant['hit_tokens_per_second']:,.0f}",
                rate(tenant["read_bytes_per_second"]),
                rate(tenant["write_bytes_per_second"]),
                rate(tenant["evicted_bytes_per_second"]),
            )
        parts.append(tenants)
        sizes = ("held", "share")
        on_tiers = table("\ntenants on tiers", "tenant", "tier", *sizes, right=sizes)
        for name, tenant in figures["tenants"].items():
            for tier, sums in tenant["tiers"].items():
                held_there, of_it = format_bytes(int(sums["bytes"])), format_bytes(int(sums["share_bytes"]))
                add_row(on_tiers, name, tier, held_there, of_it)
        if on_tiers.row_count:
            parts.append(on_tiers)
    if (near := figures["neighbours"])["engines"]:
        own = f" (this engine is number {', '.join(near['own_numbers'])})" if near["own_numbers"] else ""
        each = [
            f"{rate:,.0f} from {number}" for number, rate in near["hit_tokens_per_second_by_number"].items()
        ]
        parts.append(
            Text(
                f"\nneighbours: {near['engines']:.0f}{own}; {near['hit_tokens_per_second']:,.0f} hits/s"
                f"{' (' + ', '.join(each) + ')' if each else ''}, "
                f"{near['borrowed_chunks']:,.0f} chunks borrowed, {near['lent_chunks']:,.0f} lent"
            )
        )
    parts += _hosts(figures)
    misses = table("\nmisses", "reason", "tokens/s", "tokens", right=("tokens/s", "tokens"))
    by_rate = sorted(
        figures["misses"].items(), key=lambda item: (-item[1]["tokens_per_second"], -item[1]["tokens"])
    )
    for reason, miss in by_rate:
        # Reasons that never occurred are left out.
        if miss["tokens"]:
            add_row(misses, reason, f"{miss['tokens_per_second']:,.0f}", f"{miss['tokens']:,.0f}")
    parts.append(misses if misses.row_count else Text("\nno misses"))
    if figures["decisions"]:
        counts = ", ".join(f"{choice} {number:,.0f}" for choice, number in figures["decisions"].items())
        parts.append(Text(f"\ndecisions: {counts}"))
    return Group(*parts)


def _hosts(figures: dict[str, Any]) -> "list[RenderableType]":
    """Returns a table of the hosts of an engine on several hosts, and a line if some are lost."""
    from rich.text import Text

    from kv_offload.sizes import format_bytes

    parts: list[RenderableType] = []
    columns = ("held", "of", "speed", "slowest", "failed")
    hosts = table("\nhosts", "host", "state", "tier", *columns, right=columns)
    for host, figure in figures["hosts"].items():
        if not figure["connected"]:
            add_row(hosts, host, "lost", *["-"] * (1 + len(columns)))
            continue
        if not figure["tiers"]:
            add_row(hosts, host, "connected", *["-"] * (1 + len(columns)))
        for name, tier in figure["tiers"].items():
            add_row(
                hosts,
                host,
                "connected" if tier["usable"] else "out of service",
                name,
                format_bytes(int(tier["bytes"])),
                format_bytes(int(tier["capacity_bytes"])),
                rate(tier["read_bytes_per_second"]) if tier["read_bytes_per_second"] else "-",
                f"{tier['slowest_reads']:,.0f}",
                f"{tier['failures']:,.0f}",
            )
    if hosts.row_count:
        parts.append(hosts)
    if lost := figures["lost_hosts"]:
        parts.append(
            Text(f"\nlost hosts: {lost:.0f}; nothing is loaded or stored until all hosts are connected")
        )
    return parts


def _headline(address: str, figures: dict[str, Any]) -> str:
    known = figures["info"][0] if figures["info"] else {}
    said = [f"{key} {known[key]}" for key in ("version", "namespace", "copier") if known.get(key)]
    now, ever = _percent(figures["hit_rate"]), _percent(figures["hit_rate_since_start"])
    return (
        f"{address}  {'  '.join(said)}\n"
        f"hit rate {now} now, {ever} since start; {figures['stored_tokens_per_second']:,.0f} tokens/s stored"
        f"; {figures['saved_seconds']:,.1f} s of prefill saved"
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"
