# SPDX-License-Identifier: Apache-2.0
"""Measures how much faster a prompt is reloaded from a server or a bucket than recomputed.

    python benchmarks/remote_reload.py --tier redis|s3|mooncake|TYPE=PLACE|JSON [--tier ...] [--prompts 3]

Works like prompt_reload.py, with these tiers instead of the disk. For "redis", "s3" and "mooncake" alone it
starts a server; JSON is a table of secondary_tiers. The same place is also measured with LMCache if it is
installed (see lmcache_server.py), on S3 with vLLM's own object tier if NIXL is installed, and on Mooncake
with vLLM's own connector, which has no host memory. Records remain on servers that this benchmark did not
start, under a prefix of their own that it prints: `kv-offload purge` accepts it.

In all systems vLLM's processes sleep instead of spinning (see same_for_all.py); --spin turns this off.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import lmcache_server
from local_server import LocalServer, kv_transfer_config
from prompt_reload import HOST_BYTES, WAIT_SECONDS, Setup, Times, make_prompts, measure
from reporting import describe_machine, echo, write_results
from same_for_all import sleep_where_vllm_spins
from tier_places import OWN, entry_of
from tiny_model import make_model

OTHERS_WAIT_SECONDS = 30  # time for writes, for systems that do not report their end


class Remote:
    """A server below host memory, with its own memory.

    ``is_written``: returns True if that many records are written; None for systems that do not report it, for
    which we wait a fixed time.
    """

    def __init__(self, label: str, is_written: Callable[[LocalServer, int], bool] | None) -> None:
        self.label, self._is_written = label, is_written

    def wait_until_written(self, records: int, server: LocalServer) -> None:
        seconds = WAIT_SECONDS if self._is_written else OTHERS_WAIT_SECONDS
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up:
            server.ask([2] * 16, max_tokens=1)
            time.sleep(1)
            if self._is_written and self._is_written(server, records):
                return
        if self._is_written:
            raise TimeoutError(f"not all of {records} chunks are written after {seconds} s")

    def forget(self) -> None:
        pass


def vllm_objects(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of vLLM's own object tier at this place; credentials in the environment."""
    config = kv_transfer_config(HOST_BYTES)
    endpoint = str(entry.get("endpoint", ""))
    scheme, _, host = endpoint.partition("://")
    store = {"bucket": entry["bucket"], "endpoint_override": host, "scheme": scheme}
    config["kv_connector_extra_config"] |= {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "vllm_tiering_on_cpu",
        "secondary_tiers": [{"type": "obj", "prefix": f"{entry['prefix']}-vllm", "store_config": store}],
    }
    return config


def measure_ours(setup: Setup, entry: dict[str, Any]) -> Times:
    kind = entry["type"]

    def is_written(server: LocalServer, records: int) -> bool:
        return server.metric("kv_offload_write_seconds_count", tier=kind) >= records

    config = kv_transfer_config(HOST_BYTES, secondary_tiers=[entry])
    return measure(setup, f"kv_offload {kind}", config, Remote(kind, is_written))


@contextlib.contextmanager
def inside(directory: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def measure_lmcache(setup: Setup, entry: dict[str, Any]) -> Times | None:
    """Measures LMCache. Returns None if it is not installed or does not support this place."""
    kind = entry["type"]
    if not lmcache_server.is_installed():
        echo(f"LMCache {kind}: not measured, as LMCache is not installed")
        return None
    try:
        server = lmcache_server.LMCacheServer(entry, HOST_BYTES)
    except ValueError as error:
        echo(f"LMCache {kind}: not measured, as {error}")
        return None
    place = Remote(kind, lambda _, records: server.has_written())
    with inside(setup.directory):
        model = lmcache_server.model_named(entry, setup.model, setup.directory)
        return measure(replace(setup, model=model), f"LMCache {kind}", server.kv_transfer, place)


def measure_objects(setup: Setup, entry: dict[str, Any]) -> Times | None:
    """Measures vLLM's own object tier. Returns None if NIXL is not installed."""
    if importlib.util.find_spec("nixl") is None:
        echo("vllm obj: not measured, as NIXL is not installed")
        return None
    # vLLM's tier reads NIXL's telemetry, which is off by default: without it the first transfer ends the
    # engine.
    with_telemetry = replace(setup, more_environment={"NIXL_TELEMETRY_ENABLE": "y"})
    return measure(with_telemetry, "vllm obj", vllm_objects(entry), Remote("obj", None))


def measure_mooncake_connector(setup: Setup, entry: dict[str, Any]) -> Times:
    """Measures vLLM's own connector, which copies directly between vLLM's cache and Mooncake."""
    config = setup.directory / "mooncake.json"
    config.write_text(
        json.dumps(
            {
                "metadata_server": entry.get("metadata", "P2PHANDSHAKE"),
                "master_server_address": entry["master"],
                "protocol": entry.get("protocol", "tcp"),
                "mode": "standalone-store",
                "global_segment_size": 0,
                "local_buffer_size": "64MB",
            }
        )
    )
    connector = {
        "kv_connector": "CpuMooncakeStoreConnector",
        "kv_connector_module_path": "vllm_mooncake_on_cpu",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cache_prefix": f"{entry['key_prefix']}-vllm"},
    }
    told = replace(setup, more_environment={"MOONCAKE_CONFIG_PATH": str(config), "VLLM_HOST_IP": "127.0.0.1"})
    return measure(told, "vllm mooncake", connector, Remote("mooncake", None))


def measure_tiers(setup: Setup, entries: list[dict[str, Any]]) -> dict[str, Times]:
    found: dict[str, Times | None] = {"none": measure(setup, "none", None, None)}
    for entry in entries:
        kind = entry["type"]
        found[f"kv_offload {kind}"] = measure_ours(setup, entry)
        found[f"LMCache {kind}"] = measure_lmcache(setup, entry)
        if kind == "s3":
            found["vllm obj"] = measure_objects(setup, entry)
        if kind == "mooncake":
            found["vllm mooncake"] = measure_mooncake_connector(setup, entry)
    return {name: times for name, times in found.items() if times is not None}


def tell(results: dict[str, Times], arguments: argparse.Namespace) -> None:
    """Prints the results, and saves them unless this is a trial run."""
    medians = {name: times.medians() for name, times in results.items()}
    baseline = medians["none"]["compute"]
    echo(f"machine: {describe_machine()['text']}")
    echo(f"{arguments.tokens} tokens, computed without a connector: {baseline:.2f} s")
    for name, rows in medians.items():
        if "disk" in rows:
            echo(f"  {name:18} after a restart {rows['disk']:7.3f} s   {baseline / rows['disk']:6.1f}x")
    if arguments.dry:
        return
    write_results(
        "remote_reload",
        {
            "tokens": arguments.tokens,
            "model": arguments.kind,
            "vllm_spins": arguments.spin,
            "seconds": {name: asdict(times) for name, times in results.items()},
            "ratio_to_recompute": {
                name: baseline / rows["disk"] for name, rows in medians.items() if "disk" in rows
            },
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tier", action="append", required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--kind", default="large", help="model of examples/tiny_model.py")
    parser.add_argument("--directory", type=Path, help="for logs and the model; default: a temporary one")
    parser.add_argument("--spin", action="store_true", help="vLLM as it is")
    parser.add_argument("--dry", action="store_true", help="for trying out: nothing is kept")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=arguments.directory, prefix="remote-reload-") as name,
        contextlib.ExitStack() as stack,
    ):
        directory = Path(name).resolve()
        if not arguments.spin:
            (directory / "site").mkdir()
            sleep_where_vllm_spins(directory / "site")
        model = make_model(directory / "model", arguments.kind)
        setup = Setup(model, directory, make_prompts(arguments.prompts, arguments.tokens))
        places = [stack.enter_context(OWN[tier]()) if tier in OWN else tier for tier in arguments.tier]
        results = measure_tiers(setup, [entry_of(place) for place in places])
    tell(results, arguments)


if __name__ == "__main__":
    main()
