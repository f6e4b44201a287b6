# SPDX-License-Identifier: Apache-2.0
"""``kv-offload config``: the JSON of ``--kv-transfer-config``."""

import json
import shlex
from typing import Annotated, Any

import typer

from kv_offload.cli.terminal import PROBLEM, echo, fail, plain_errors


def transfer_config(extra: dict[str, Any]) -> dict[str, Any]:
    """Returns vLLM's KV transfer configuration with ``extra`` as the part of this plugin."""
    from kv_offload.names import SPEC_MODULE, SPEC_NAME

    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": SPEC_NAME, "spec_module_path": SPEC_MODULE} | extra,
    }


@plain_errors
def config(
    cpu: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Host memory for the whole engine, all ranks together: 32GiB. Default: a quarter of the "
            "available memory.",
        ),
    ] = None,
    disk: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIRECTORY", help="A tier on disk: its directory. May be repeated: fastest first."
        ),
    ] = None,
    disk_size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE",
            help="Hard limit of the --disk at the same position: 500GiB. Default: half of the sum of the "
            "free space and what the directory already holds.",
        ),
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE=PLACE|JSON",
            help="A tier of any type, slower than every --disk. May be repeated: fastest first.",
        ),
    ] = None,
    write_policy: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="Chunks to write to the tiers: write_through (all), on_evict (those that host memory "
            "evicts), reuse:N (at their Nth request; reduces SSD wear), read_only (none: other servers "
            "fill the tier).",
        ),
    ] = None,
    fsync: Annotated[
        str | None,
        typer.Option(
            metavar="MODE",
            help="After a power failure, records may be torn or missing (none), only missing (data), or "
            "neither (full).",
        ),
    ] = None,
    o_direct: Annotated[
        str | None, typer.Option(metavar="MODE", help="Bypass the page cache: auto, on or off.")
    ] = None,
    read_threads: Annotated[
        int | None, typer.Option(metavar="N", help="Reader threads of each tier.")
    ] = None,
    write_threads: Annotated[
        int | None, typer.Option(metavar="N", help="Writer threads of each tier.")
    ] = None,
    load_policy: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY", help="auto (load where that is faster than computing), always or never."
        ),
    ] = None,
    blocks_per_chunk: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="vLLM blocks in a chunk. Larger chunks make larger records and coarser hits."
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            help="Each process serves its own /metrics: the scheduler on PORT, rank r on PORT+1+r.",
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=JSON",
            help="Set any other key: --set lookup_timeout_ms=2000. May be repeated.",
        ),
    ] = None,
    shell: Annotated[
        bool, typer.Option("--shell", help="Print the whole --kv-transfer-config option, quoted for a shell.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the JSON alone, on one line. This is the default.")
    ] = False,
) -> None:
    """Write the JSON for vllm serve --kv-transfer-config, checked.

    Without options the configuration has host memory only: a quarter of the available memory.
    Directories are written as absolute paths. Sizes need a unit: KiB, MiB, GiB,
    TiB or Ki, Mi, Gi, Ti (powers of 1024), KB, MB, GB, TB or K, M, G, T (powers of 1000).

    kv-offload doctor checks whether this machine can serve the configuration.

    \b
    Example:
      vllm serve MODEL --kv-transfer-config "$(kv-offload config --cpu 32GiB --disk /var/cache/kv)"

    Exit status: 0 written; 1 too little memory is available; 2 the configuration is invalid.
    """
    from kv_offload.config import OffloadConfig

    if shell and as_json:
        fail("--shell and --json cannot be used together", 2)
    bounds = disk_size or []
    if len(bounds) > len(disk or []):
        fail(f"{len(bounds)} --disk-size for {len(disk or [])} --disk; give each size after its --disk", 2)
    # The parser of the configuration checks the other values. Its errors name keys, these name options.
    _check_sizes([("--cpu", cpu), *(("--disk-size", bound) for bound in bounds)])
    options = {
        "write_policy": write_policy,
        "fsync": fsync,
        "o_direct": o_direct,
        "n_read_threads": read_threads,
        "n_write_threads": write_threads,
    }
    tiers = _tiers(disk or [], bounds, tier or [])
    _add_to_tiers(tiers, {key: value for key, value in options.items() if value is not None})
    extra: dict[str, Any] = {"cpu_bytes_to_use": cpu or _share_of_memory()}
    if tiers:
        extra["secondary_tiers"] = tiers
    for key, value in (
        ("load_policy", load_policy),
        ("blocks_per_chunk", blocks_per_chunk),
        ("metrics_port", metrics_port),
    ):
        if value is not None:
            extra[key] = value
    extra |= dict(_setting(text) for text in setting or [])
    parsed, notes = OffloadConfig.parse(extra)
    # The printed configuration may be used in another directory: relative paths become absolute.
    for given, made in zip(extra.get("secondary_tiers") or [], parsed.secondary_tiers, strict=True):
        given.update(made.portable())
    for note in notes:
        echo(f"note: {note}")
    text = json.dumps(transfer_config(extra))
    typer.echo(f"--kv-transfer-config {shlex.quote(text)}" if shell else text)


def _tiers(disks: list[str], bounds: list[str], others: list[str]) -> list[dict[str, Any]]:
    """Returns the entries of secondary_tiers, the disks first."""
    from kv_offload.tiers.registry import entry_at, kind_of_tier, kinds

    kind = kind_of_tier("disk")
    sizes = [*bounds, *[None] * (len(disks) - len(bounds))]
    tiers = [kind.entry(place, size) for place, size in zip(disks, sizes, strict=True)]
    for text in others:
        if not text.startswith("{"):
            name, equals, _ = text.partition("=")
            if not equals or name not in kinds():
                known = ", ".join(kinds())
                fail(f"--tier {name} is neither TYPE=PLACE (types: {known}) nor a JSON object", 2)
            tiers.append(entry_at(text))
            continue
        try:
            tiers.append(json.loads(text))
        except ValueError as error:
            fail(f"--tier {text} is not JSON: {error}", 2)
    return tiers


def _add_to_tiers(tiers: list[dict[str, Any]], given: dict[str, Any]) -> None:
    """Adds each option to the tiers whose type has it."""
    from kv_offload.tiers.registry import kinds

    for key, value in given.items():
        types = {name for name, kind in kinds().items() if key in kind.model_fields}
        having = [tier for tier in tiers if str(tier.get("type")) in types]
        if not having:
            fail(f"{key} is a tier option, but no tier here accepts it: give --disk or --tier", 2)
        for tier in having:
            tier.setdefault(key, value)


def _check_sizes(given: list[tuple[str, str | None]]) -> None:
    """The options by their own names; the configuration knows them as keys."""
    from kv_offload.sizes import parse_byte_size

    for option, text in given:
        try:
            parse_byte_size(text or "0")
        except ValueError as error:
            fail(f"{option}: {error}", 2)


def _share_of_memory() -> str:
    """Returns a quarter of the host memory that is available here, in whole GiB or MiB."""
    from kv_offload.machine import host_memory
    from kv_offload.sizes import format_bytes

    available, limited_by = host_memory()
    size = available // 4
    unit = "GiB" if size >= 1 << 30 else "MiB"
    count = size >> (30 if unit == "GiB" else 20)
    if count == 0:
        fail(f"{format_bytes(available)} of host memory available ({limited_by}); give --cpu", PROBLEM)
    echo(f"note: --cpu {count}{unit}, a quarter of {format_bytes(available)} ({limited_by})")
    return f"{count}{unit}"


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        fail(f"--set {text}: write KEY=VALUE", 2)
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value  # a word needs no quotes
