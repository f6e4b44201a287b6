# SPDX-License-Identifier: Apache-2.0
"""``kv-offload size``: how large a model's KV cache is, and how fast a tier must be to pay off."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kv_offload.cli.doctor_command import read_config
from kv_offload.cli.terminal import add_row, console, escape, plain_errors, print_json, rate, table

if TYPE_CHECKING:
    from kv_offload.model_shape import ModelShape
    from kv_offload.sizing import Geometry

PREFILL_SPEEDS = (1_000.0, 5_000.0, 10_000.0, 20_000.0, 50_000.0)


@plain_errors
def size(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model directory, a config.json, or a name on the Hugging Face hub.",
            show_default=False,
        ),
    ],
    kv_dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="Same as vLLM's --kv-cache-dtype: auto, bfloat16, fp8, ...")
    ] = "auto",
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", "-t", min=1, metavar="N", help="Ranks of the engine.")
    ] = 1,
    block_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens of a vLLM block: 16 on GPU, 128 on CPU.")
    ] = 16,
    blocks_per_chunk: Annotated[
        int, typer.Option(min=1, metavar="N", help="vLLM blocks per chunk, as in the configuration.")
    ] = 1,
    cpu: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Also show how many tokens host memory of this size holds."),
    ] = None,
    disk_size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE", help="Also show how many tokens a disk tier of this size holds. May be repeated."
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(metavar="JSON|@FILE", help="Take the tiers from this value of --kv-transfer-config."),
    ] = None,
    prefill: Annotated[
        list[float] | None,
        typer.Option(
            metavar="TOKENS/S",
            min=0,
            help="Prefill speed of one request with this model on this machine. May be repeated.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show how large a model's KV cache is, and when loading pays off.

    Reads config.json only: no weights, no vLLM. A name such as ORG/NAME is looked for in the local Hugging
    Face cache; its config.json is downloaded only where huggingface_hub is installed and not set offline.
    The break-even bandwidth is the speed at which loading a prompt takes as long as computing it: a slower
    tier does not pay off. Measure a disk with kv-offload bench. Layers with a state (Mamba, linear attention)
    are counted with one state per chunk: the most that can be stored.

    \b
    Examples:
      kv-offload size /models/Llama-3.1-8B --cpu 32GiB --disk-size 500GiB
      kv-offload size config.json -t 8 --kv-dtype fp8 --prefill 12000 --json

    Exit status: 0 sized; 1 the model cannot be found; 2 the model or an option cannot be understood.
    """
    from kv_offload.cli.models import find_model
    from kv_offload.model_shape import DTYPE_BYTES
    from kv_offload.sizing import GIB

    shape = find_model(model)
    dtype = chosen_dtype(shape, kv_dtype)
    geometry = shape.geometry(dtype, tensor_parallel, block_size, blocks_per_chunk)
    tiers = _tiers(geometry, cpu, disk_size or [], config)
    speeds = prefill or list(PREFILL_SPEEDS)
    per_token = shape.bytes_per_token(dtype, tensor_parallel)
    dtypes = list(dict.fromkeys([shape.dtype, dtype, "fp8"]))
    report: dict[str, Any] = {
        "model": shape.name,
        "dtype": shape.dtype,
        "kv_dtype": dtype,
        "tensor_parallel": tensor_parallel,
        "tokens_per_chunk": geometry.groups[0].tokens_per_chunk,
        "tokens_per_block": shape.block_size(dtype, tensor_parallel, block_size),
        "groups": [
            {
                "name": group.name,
                "layers": group.layers,
                "bytes_per_token": {name: group.bytes_per_token(name, tensor_parallel) for name in dtypes},
            }
            for group in shape.groups
        ],
        "states": [
            {
                "name": state.name,
                "layers": state.layers,
                "bytes": {name: state.state_bytes(DTYPE_BYTES, name) for name in dtypes},
            }
            for state in shape.states
        ],
        "bytes_per_token": {name: shape.bytes_per_token(name, tensor_parallel) for name in dtypes},
        "largest_record_bytes": geometry.largest_record_bytes,
        "tokens_per_gib": {
            "memory": geometry.tokens_in_memory(GIB),
            "disk": geometry.tokens_on_tier(GIB),
        },
        "tiers": tiers,
        "break_even": [
            {"prefill_tokens_per_second": speed, "bytes_per_second": break_even(per_token, speed)}
            for speed in speeds
        ],
        "notes": [
            *shape.notes,
            *_small_tiers(tiers),
            *shape.long_chunks(dtype, tensor_parallel, block_size, blocks_per_chunk),
        ],
    }
    if as_json:
        print_json(report)
    else:
        _print(report)


def chosen_dtype(shape: "ModelShape", given: str) -> str:
    """Returns the cache dtype for ``--kv-dtype``. Raises ValueError listing the possible ones."""
    from kv_offload.model_shape import DTYPE_BYTES

    if given == "auto":
        return shape.dtype
    if given not in DTYPE_BYTES:
        raise ValueError(f"--kv-dtype {given} is not known; possible: auto, {', '.join(DTYPE_BYTES)}")
    return given


def break_even(bytes_per_token: float, tokens_per_second: float) -> float:
    """Returns the bytes per second below which computing a token is faster than loading it."""
    return bytes_per_token * tokens_per_second


def _tiers(
    geometry: "Geometry", cpu: str | None, disks: list[str], config: str | None
) -> list[dict[str, Any]]:
    from kv_offload.config import OffloadConfig
    from kv_offload.config_compat import own_extra_config
    from kv_offload.machine import tier_bounds
    from kv_offload.sizes import parse_byte_size
    from kv_offload.tiers.registry import kind_of_tier, labels_of

    sizes: list[tuple[str, int | None]] = []
    if cpu is not None:
        sizes.append(("cpu", parse_byte_size(cpu)))
    labels = labels_of([str(kind_of_tier("disk").model_fields["type"].default)] * len(disks))
    sizes += zip(labels, map(parse_byte_size, disks), strict=True)
    if config is not None:
        if sizes:
            raise ValueError("--config already names the tiers: leave out --cpu and --disk-size")
        parsed, _ = OffloadConfig.parse(own_extra_config(read_config(config))[0])
        sizes.append(("cpu", parsed.cpu_bytes_to_use))
        sizes += zip(parsed.tier_names(), tier_bounds(parsed), strict=True)
    return [
        {
            "name": name,
            "bytes": size,
            "tokens": geometry.tokens_in_memory(size) if name == "cpu" else geometry.tokens_on_tier(size),
        }
        if size is not None
        else {"name": name, "bytes": None, "tokens": None}  # its server limits itself
        for name, size in sizes
    ]


def _small_tiers(tiers: list[dict[str, Any]]) -> list[str]:
    from kv_offload.machine import small_tier_notes

    memory = next((tier["bytes"] for tier in tiers if tier["name"] == "cpu"), 0)
    bounded = [tier for tier in tiers if tier["name"] != "cpu" and tier["bytes"] is not None]
    return [note for tier in bounded for note in small_tier_notes(tier["name"], tier["bytes"], memory)]


def _print(report: dict[str, Any]) -> None:
    from kv_offload.sizes import format_bytes

    out = console()
    dtypes = list(report["bytes_per_token"])
    ranks = f", {report['tensor_parallel']} ranks" if report["tensor_parallel"] > 1 else ""
    out.print(
        f"[bold]{escape(report['model'])}[/bold]: a token takes "
        f"{format_bytes(report['bytes_per_token'][report['kv_dtype']])} in {report['kv_dtype']}{ranks}; "
        f"{report['tokens_per_gib']['memory']:,} tokens/GiB of host memory, "
        f"{report['tokens_per_gib']['disk']:,} on disk "
        f"(chunks of {report['tokens_per_chunk']} tokens, records up to "
        f"{format_bytes(report['largest_record_bytes'])})"
    )
    for note in report["notes"]:
        out.print(f"note: {note}", style="yellow", markup=False)
    groups = table("\nbytes per token", "kind", "layers", *dtypes, right=("layers", *dtypes), fold=("kind",))
    for group in report["groups"]:
        cells = [f"{group['bytes_per_token'][name]:,}" for name in dtypes]
        add_row(groups, group["name"], str(group["layers"]), *cells)
    # A sum of one row would repeat it.
    if len(report["groups"]) > 1:
        add_row(groups, "all", "", *[f"{report['bytes_per_token'][name]:,}" for name in dtypes])
    out.print(groups)
    for state in report["states"]:
        size = format_bytes(state["bytes"][report["kv_dtype"]])
        out.print(
            f"and {state['layers']} layers with a {state['name']} of {size} each, one per block; vLLM "
            f"uses blocks of {report['tokens_per_block']:,} tokens so that a state fits",
            markup=False,
        )
    if report["tiers"]:
        tiers = table("\ntokens per tier", "tier", "bytes", "tokens", right=("bytes", "tokens"))
        for tier in report["tiers"]:
            # A server limits its own size, so the capacity of its tier is unknown.
            known = tier["bytes"] is not None
            size = format_bytes(tier["bytes"]) if known else "-"
            add_row(tiers, tier["name"], size, f"{tier['tokens']:,}" if known else "-")
        out.print(tiers)
    pays = table("\nloading pays off above", "prefill", "a tier must deliver", right=("prefill",))
    for row in report["break_even"]:
        add_row(pays, f"{row['prefill_tokens_per_second']:,.0f} tokens/s", rate(row["bytes_per_second"]))
    out.print(pays)
