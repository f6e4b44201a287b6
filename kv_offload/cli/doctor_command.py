# SPDX-License-Identifier: Apache-2.0
"""``kv-offload doctor``: checks whether a server can start here, or how a running one is doing."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kv_offload.cli.terminal import (
    OK,
    PROBLEM,
    USAGE,
    console,
    escape,
    fail,
    plain_errors,
    print_json,
    sentence,
    table,
)

if TYPE_CHECKING:
    from kv_offload.cli.doctor_checks import Check
    from kv_offload.tiers.base import TierConfig

_COLOURS = {"ok": "green", "note": "yellow", "refused": "bold red"}


@plain_errors
def doctor(
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="URL", help="Check this running server instead of this machine.", show_default=False
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON|@FILE",
            help="The value of --kv-transfer-config, or its kv_connector_extra_config alone. @FILE reads a "
            "file.",
        ),
    ] = None,
    root: Annotated[
        list[str] | None,
        typer.Option(metavar="ROOT", help="Also check this directory, or TYPE=PLACE. May be repeated."),
    ] = None,
    kv_offloading_size: Annotated[
        float | None,
        typer.Option(
            "--kv-offloading-size",
            min=0.0,
            metavar="GIB",
            help="The value of vLLM's --kv-offloading-size, which overwrites parts of --config.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        int, typer.Option(min=1, metavar="N", help="Worker processes of the engine, to check metrics_port.")
    ] = 1,
    hosts: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Hosts of the engine; each needs an equal part of cpu_bytes_to_use. With more than one, "
            "settings that need all ranks on one host are refused.",
        ),
    ] = 1,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure the speed of disks and of copies.")
    ] = True,
    measure_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes to write to each disk for the measurement.")
    ] = "256MiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Check whether this machine can serve, or how a server is doing.

    Without URL: version, device, memory, ports, disks, and the effective settings.
    Allocates no host memory for serving and evicts nothing. To measure a disk it writes temporary records and
    removes them; in a directory that has records it stays within max_bytes. With URL: the server's tiers,
    their failures and the misses by reason, from its metrics.

    Where vLLM is installed, its own parser checks the configuration, which takes some seconds. The
    configuration is refused if vLLM would not start with it, or would start without this plugin.

    \b
    Examples:
      kv-offload doctor --config "$(kv-offload config --cpu 32GiB --disk /var/cache/kv)"
      kv-offload doctor http://gpu-7:8000

    Exit status: 0 the machine can serve, or the server serves; 1 something would be refused, or the server
    cannot be reached; 2 wrong usage.
    """
    from kv_offload.sizes import parse_byte_size

    if url is not None:
        if config is not None or root:
            fail("URL checks a running server, --config and --root this machine: give one of them", USAGE)
        found, plan = _check_server(url)
    else:
        if kv_offloading_size is not None and config is None:
            fail("--kv-offloading-size needs --config: without it, vLLM uses its own spec", USAGE)
        options = DoctorOptions(
            config, kv_offloading_size, root or [], ranks, hosts, measure, parse_byte_size(measure_size)
        )
        found, plan = _check_machine(options)
    if as_json:
        print_json(_as_json(found, plan))
    else:
        _print(found, plan)
    raise typer.Exit(PROBLEM if any(check.state == "refused" for check in found) else OK)


def _check_server(url: str) -> "tuple[list[Check], list[tuple[str, str, bool]]]":
    """Checks a running server from its metrics, which do not include its settings."""
    from kv_offload.cli.server import metrics_url, scrape
    from kv_offload.cli.server_checks import server_checks

    address = metrics_url(url)
    return server_checks(address, scrape(address)), []


@dataclass(frozen=True)
class DoctorOptions:
    """The requested checks of this machine."""

    config: str | None
    offloading_gib: float | None
    roots: list[str]
    ranks: int
    hosts: int
    measure: bool
    total: int  # bytes that a measurement may write


def _check_machine(options: DoctorOptions) -> "tuple[list[Check], list[tuple[str, str, bool]]]":
    """Returns the results of all checks of this machine, and the effective settings."""
    from kv_offload.cli import doctor_checks as checks
    from kv_offload.cli.config_checks import Judged, judge
    from kv_offload.config import OffloadConfig, tier_at

    judged = Judged([])
    status = console(stderr=True).status("checking this machine")
    if options.config is not None:
        given = read_config(options.config)
        with status:
            status.update("checking: vLLM's parser")
            judged = judge(given, options.offloading_gib, options.hosts)
    parsed, ranks, measure, total = judged.config, options.ranks, options.measure, options.total
    found = list(judged.checks)
    tiers = list(judged.tiers.secondary_tiers if judged.tiers else ())
    tiers += [tier_at(place) for place in options.roots]
    planned_checks: list[tuple[str, Callable[[], Iterable[Check]]]] = [
        ("software", checks.software),
        ("device", lambda: [checks.device()]),
        ("memory", lambda: [checks.memory(parsed, options.hosts)]),
        ("host memory regions", checks.regions),
    ]
    if options.hosts > 1:
        planned_checks.append(("hosts", checks.connections))
    if parsed is not None:
        planned_checks.append(("metrics port", partial(checks.metrics_port, parsed, ranks)))
        planned_checks.append(("tenants", partial(checks.tenants, parsed)))
    for tier in tiers:
        planned_checks.append((tier.label(), partial(_tier, tier, options.hosts, measure, total)))
    if measure:
        threads = parsed.copy_threads if parsed else OffloadConfig.model_fields["copy_threads"].default
        planned_checks.append(("copy", lambda: [checks.copy_speed(threads, total)]))
    with status:
        for name, check in planned_checks:
            status.update(f"asking: {name}")
            found += _run_check(name, check)
    return found, checks.plan(parsed) if parsed else []


def _tier(tier: "TierConfig", hosts: int, measure: bool, total: int) -> "list[Check]":
    from kv_offload.cli import doctor_checks as checks

    found = checks.place(tier, hosts)
    if measure and all(check.state != "refused" for check in found):
        found += checks.speed(tier, total)
    return found


def _run_check(name: str, check: "Callable[[], Iterable[Check]]") -> "list[Check]":
    """Runs a check. A check that fails becomes a result, and the other checks still run."""
    from kv_offload.cli.doctor_checks import Check

    try:
        return list(check())
    except ImportError as error:
        return [Check(name, "refused", f"the C++ core cannot be loaded: {error}")]
    except (OSError, RuntimeError, ValueError) as error:
        return [Check(name, "refused", sentence(error))]


def read_config(text: str) -> dict[str, Any]:
    """Parses a JSON object, or the JSON file named after ``@``."""
    from kv_offload.vllm_verdict import read_json

    source = "--config"
    if text.startswith("@"):
        source = text[1:]
        text = Path(source).read_text(encoding="utf-8")
    try:
        value = read_json(text)
    except ValueError as error:
        fail(f"{source} is not JSON: {error}", USAGE)
    if not isinstance(value, dict):
        fail(f"{source} is not a JSON object", USAGE)
    extra = value.get("kv_connector_extra_config", value)
    if not isinstance(extra, dict):
        fail(f"{source}: kv_connector_extra_config is not a JSON object", USAGE)
    return value


def _as_json(found: "list[Check]", plan: list[tuple[str, str, bool]]) -> dict[str, Any]:
    return {
        "ok": not any(check.state == "refused" for check in found),
        "checks": [
            {"name": check.name, "state": check.state, "text": check.text} | (check.figures or {})
            for check in found
        ],
        "plan": {name: {"value": value, "given": given} for name, value, given in plan},
    }


def _print(found: "list[Check]", plan: list[tuple[str, str, bool]]) -> None:
    out = console()
    answers = table("", "state", "asked", "answer", fold=("asked", "answer"))
    answers.show_header = False
    for check in found:
        answers.add_row(f"[{_COLOURS[check.state]}]{check.state}[/]", escape(check.name), escape(check.text))
    out.print(answers)
    if plan:
        out.print()
        settings = table("effective plan", "setting", "value", "", fold=("value",))
        for name, value, given in plan:
            settings.add_row(escape(name), escape(value), "" if given else "[dim]default[/]")
        out.print(settings)
