# SPDX-License-Identifier: Apache-2.0
"""``kv-offload bench ROOT``: compares a tier and memory copies on this machine with their raw speed."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kv_offload.cli.config_command import transfer_config
from kv_offload.cli.terminal import (
    OK,
    PROBLEM,
    USAGE,
    add_row,
    console,
    escape,
    fail,
    plain_errors,
    print_json,
    rate,
    table,
)

if TYPE_CHECKING:
    from kv_offload.tiers.base import TierConfig

# Typical bytes per token of current models, used without --model.
TOKEN_BYTES = (32 << 10, 70_272, 128 << 10, 320 << 10)
MARGIN = 1.2  # a tier pays off if loading is this much faster than computing


@plain_errors
def bench(
    root: Annotated[
        str,
        typer.Argument(
            metavar="ROOT",
            help="Place of the tier: a directory, or TYPE=PLACE for another type.",
            show_default=False,
        ),
    ],
    measure_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes to write there, and to copy.")
    ] = "512MiB",
    threads: Annotated[int, typer.Option(min=1, metavar="N", help="Threads of the host copier.")] = 2,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Plan for this model, given as for kv-offload size.")
    ] = None,
    kv_dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Same as vLLM's --kv-cache-dtype.")] = "auto",
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", "-t", min=1, metavar="N", help="Ranks of the engine.")
    ] = 1,
    prefill: Annotated[
        float | None,
        typer.Option(
            metavar="TOKENS/S",
            min=1,
            help="Prefill speed of the model here: report whether a tier there pays off.",
        ),
    ] = None,
    cpu: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Also print a configuration with this much host memory."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure a tier and memory copies against their raw speed.

    The raw speeds are those of plain system calls in the same place, and of memcpy. Writes temporary files
    below ROOT, or its nearest parent that exists, and removes them. In a directory with records it stays
    within the limit of the directory and evicts nothing. If the directory is full, or a server has it open,
    measure another directory on the same file system. The plan shows, for several sizes of a token, how many
    tokens per second a request loads. It is an estimate: load_policy auto measures the real speed while it
    serves. With --prefill the plan also shows whether a tier there pays off, and whether it
    can write everything that is computed or should write chunks at their second request (write_policy
    reuse:2).

    \b
    Examples:
      kv-offload bench /var/cache/kv
      kv-offload bench /mnt/nvme/kv --model /models/Llama-3.1-8B --prefill 8000 --cpu 32GiB --json

    Exit status: 0 measured, and with --prefill: a tier here pays off; 1 it does not, or nothing can be
    written there; 2 wrong usage.
    """
    from kv_offload.cli.models import find_model
    from kv_offload.cli.size_command import chosen_dtype
    from kv_offload.config import tier_at
    from kv_offload.sizes import parse_byte_size

    if prefill is not None and model is None:
        fail("--prefill is the speed of one model: give --model as well", USAGE)
    shape = find_model(model) if model else None
    total = parse_byte_size(measure_size)
    tier = tier_at(root)
    refused = tier.problems()
    if refused:
        fail(refused[0], PROBLEM)
    with console(stderr=True).status("measuring") as status:
        status.update(f"measuring {tier.label()}")
        speeds = _speeds(tier, threads, total)
    report: dict[str, Any] = {"root": tier.place, "speeds": speeds}
    if shape is None:
        report["plan"] = [token_plan(speeds, size) for size in TOKEN_BYTES]
    else:
        dtype = chosen_dtype(shape, kv_dtype)
        size = shape.bytes_per_token(dtype, tensor_parallel)
        report["plan"] = [token_plan(speeds, size, prefill) | {"model": shape.name, "kv_dtype": dtype}]
    verdict = report["plan"][0]
    if cpu is not None:
        report["config"] = suggested_config(tier, parse_byte_size(cpu), verdict)
    if as_json:
        print_json(report)
    else:
        _print(report, prefill)
    raise typer.Exit(OK if verdict.get("tier_pays", True) else PROBLEM)


def _speeds(tier: "TierConfig", threads: int, total: int) -> dict[str, dict[str, float]]:
    """Returns, per operation, our bytes per second, the measured limit, and their ratio."""
    from kv_offload.cli import doctor_checks
    from kv_offload.raw_speed import raw_copy

    ours = tier.measure(total)
    limit = tier.raw_speed(total)
    if ours is None or limit is None:
        fail(f"{tier.label()}: this command cannot measure a tier of this type", PROBLEM)
    if ours.figures is None:
        fail(f"{tier.place}: {ours.text}", PROBLEM)
    copy = doctor_checks.copy_speed(threads, min(total, 256 << 20)).figures or {}
    pairs = {
        verb: (ours.figures[f"{verb}_bytes_per_second"], limit[f"{verb}_bytes_per_second"])
        for verb in ("write", "read")
    }
    pairs["copy"] = (copy["bytes_per_second"], raw_copy(min(total, 256 << 20), threads))
    return {
        name: {"bytes_per_second": speed, "limit_bytes_per_second": raw, "ratio": speed / raw}
        for name, (speed, raw) in pairs.items()
    }


def token_plan(
    speeds: dict[str, dict[str, float]], token_bytes: float, prefill: float | None = None
) -> dict[str, Any]:
    """Converts speeds to tokens/s for ``token_bytes``; with ``prefill`` (tokens/s), whether a tier pays
    off."""
    from kv_offload.cli.size_command import break_even

    read = speeds["read"]["bytes_per_second"]
    write = speeds["write"]["bytes_per_second"]
    plan: dict[str, Any] = {
        "bytes_per_token": token_bytes,
        "tier_tokens_per_second": read / token_bytes,
        "memory_tokens_per_second": speeds["copy"]["bytes_per_second"] / token_bytes,
    }
    if prefill is not None:
        needed = break_even(token_bytes, prefill)
        plan |= {
            "prefill_tokens_per_second": prefill,
            "break_even_bytes_per_second": needed,
            "tier_pays": read >= MARGIN * needed,
            "write_policy": "write_through" if write >= needed else "reuse:2",
        }
    return plan


def suggested_config(tier: "TierConfig", cpu_bytes: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Returns the --kv-transfer-config for the plan; without a tier if it does not pay off."""
    from kv_offload.config import OffloadConfig
    from kv_offload.machine import tier_bounds

    extra: dict[str, Any] = {"cpu_bytes_to_use": cpu_bytes}
    if plan.get("tier_pays", True):
        (bound,) = tier_bounds(OffloadConfig(cpu_bytes_to_use=cpu_bytes, secondary_tiers=(tier,)))
        entry = tier.entry(tier.place, bound)
        if plan.get("write_policy", "write_through") != "write_through":
            entry["write_policy"] = plan["write_policy"]
        extra["secondary_tiers"] = [entry]
    return transfer_config(extra)


def _print(report: dict[str, Any], prefill: float | None) -> None:
    from kv_offload.sizes import format_bytes

    out = console()
    out.print(report["root"], markup=False)
    speeds = table("", "what", "here", "raw", "ratio", right=("here", "raw", "ratio"))
    for name, row in report["speeds"].items():
        add_row(
            speeds,
            name,
            rate(row["bytes_per_second"]),
            rate(row["limit_bytes_per_second"]),
            f"{row['ratio']:.2f}",
        )
    out.print(speeds)
    plan = table(
        "\nload speed of a request",
        "bytes per token",
        "tokens/s from tier",
        "from host memory",
        right=("bytes per token", "tokens/s from tier", "from host memory"),
    )
    for row in report["plan"]:
        add_row(
            plan,
            format_bytes(int(row["bytes_per_token"])),
            f"{row['tier_tokens_per_second']:,.0f}",
            f"{row['memory_tokens_per_second']:,.0f}",
        )
    out.print(plan)
    if prefill is not None:
        out.print(_verdict(report["plan"][0]))
    if "config" in report:
        out.print("\n--kv-transfer-config", escape(json.dumps(report["config"])), soft_wrap=True)


def _verdict(plan: dict[str, Any]) -> str:
    factor = plan["tier_tokens_per_second"] / plan["prefill_tokens_per_second"]
    policy = {
        "write_through": "it can write everything that is computed (write_policy write_through)",
        "reuse:2": "it cannot write everything that is computed: write_policy reuse:2",
    }[plan["write_policy"]]
    if plan["tier_pays"]:
        return f"\na tier here pays off: loading is {factor:.1f} times as fast as computing; {policy}"
    return (
        f"\na tier here does not pay off: loading is {factor:.2f} times as fast as computing, and must be "
        f"at least {MARGIN:g} times as fast; use host memory alone"
    )
