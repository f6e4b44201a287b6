"""How much faster is a prompt reloaded than computed again?

    python benchmarks/prompt_reload.py [--tokens 8192] [--prompts 3] [--tier redis=URL] [--tier s3=BUCKET]

Serves a model made on the spot with vLLM on CPU and asks prompts of 8K tokens: computed, reloaded from host
memory after vLLM's own cache lost them, reloaded from disk after a restart. Without a connector, with this
one, and with vLLM's TieringOffloadingSpec (with the memcpy worker of vllm_tiering_on_cpu.py: its own refuses
CPU). All in one run on one machine; times are whole requests for one token, medians over the prompts. The
files of both disk tiers are dropped from the page cache before the restart.

``--tier``, as often as wanted: the same with this tier in place of the disk (KIND=PLACE, a table of
secondary_tiers as JSON, or "redis", "s3" and "mooncake" alone for a server that is started here), against
computing. At the same place also LMCache, where it is installed (lmcache_beside.py tells how), at one of S3
vLLM's own tier of objects, where NIXL is installed, and at one of Mooncake vLLM's own connector, which has no
host memory of its own. Results are kept apart. On a server that is not started here records stay, under a
prefix of their own, which is told: `kv-offload purge` takes it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import lmcache_beside
from local_server import Answer, LocalServer, difference, kv_transfer_config
from reporting import describe_machine, draw_bars, say, write_results
from same_for_all import environment
from tier_places import OWN, entry_of
from tiny_model import make_model

BLOCK = 128
HOST_BYTES = 2 * 1024**3
WAIT_SECONDS, OTHERS_WAIT_SECONDS = 180, 30  # for what was computed to be written
SYSTEMS = ("none", "kv_offload", "vllm")


@dataclass
class Times:
    """Seconds of each prompt; tokens that were not computed, in the reloading runs."""

    compute: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    disk: list[float] = field(default_factory=list)
    host_tokens: list[int] = field(default_factory=list)
    disk_tokens: list[int] = field(default_factory=list)
    worst_difference: float = 0.0  # of log-probabilities, reloaded against computed; bfloat16 rounding: 0.04

    def medians(self) -> dict[str, float]:
        rows = {"compute": self.compute, "host": self.host, "disk": self.disk}
        return {name: statistics.median(values) for name, values in rows.items() if values}


@dataclass(frozen=True)
class Setup:
    model: Path
    directory: Path
    prompts: list[list[int]]
    more_environment: dict[str, str] = field(default_factory=dict)

    def serve(self, name: str, kv_transfer: dict[str, Any] | None) -> LocalServer:
        tokens = len(self.prompts[0])
        return LocalServer(
            self.model,
            self.directory / f"{name}.log",
            blocks=tokens // BLOCK + 8,  # one prompt: the next pushes it out
            kv_transfer=kv_transfer,
            max_model_len=tokens + BLOCK,
            environment=environment() | self.more_environment,
        )

    def ask_all(self, server: LocalServer, what: str) -> list[Answer]:
        answers: list[Answer] = []
        for number, prompt in enumerate(self.prompts, 1):
            answers.append(server.ask(prompt, max_tokens=1))
            reloaded = answers[-1].cached_tokens
            say(f"  {what}, prompt {number}: {answers[-1].seconds:.3f} s, {reloaded} tokens reloaded")
        return answers


def connector(name: str, root: Path | None) -> dict[str, Any] | None:
    if root is None:
        return None
    if name == "kv_offload":
        return kv_transfer_config(HOST_BYTES, root, "8GiB")
    config = kv_transfer_config(HOST_BYTES, root)
    extra = config["kv_connector_extra_config"]
    extra |= {"spec_name": "CpuTieringSpec", "spec_module_path": "vllm_tiering_on_cpu"}
    del extra["secondary_tiers"][0]["max_bytes"]  # it knows no bound
    return config


class Directory:
    """A disk below host memory."""

    label = "disk"

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()

    def wait_until_written(self, records: int, server: LocalServer) -> None:
        """Until it has as many files of a chunk's size as there are chunks, and no longer grows."""
        deadline, before = time.monotonic() + WAIT_SECONDS, -1
        while time.monotonic() < deadline:
            found = sum(1 for path in self.root.rglob("*") if path.is_file() and path.stat().st_size > 65536)
            if found >= records and found == before:
                return
            before = found
            server.ask([2] * 16, max_tokens=1)
            time.sleep(1)
        raise TimeoutError(f"{before} of {records} chunks are on disk after {WAIT_SECONDS} s")

    def forget(self) -> None:
        """What it has is no longer in memory."""
        drop_from_page_cache(self.root)


class Remote:
    """A server below host memory, whose memory is its own.

    ``is_written``: as many records as this are; None for those who do not tell, who are given a time.
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


Place = Directory | Remote


def measure(setup: Setup, name: str, kv_transfer: dict[str, Any] | None, place: Place | None) -> Times:
    """Computes all prompts; with a connector reloads them from host memory and, restarted, from below it."""
    times = Times()
    say(f"{name}: starting")
    with setup.serve(name, kv_transfer) as server:
        warm_up(server, setup)
        computed = setup.ask_all(server, f"{name}: compute")
        assert not any(answer.cached_tokens for answer in computed), "the first time must be computed"
        times.compute = [answer.seconds for answer in computed]
        if place is None:
            return times
        host = setup.ask_all(server, f"{name}: from host memory")
        prompts = len(setup.prompts) + 1  # that of the warm-up, too
        place.wait_until_written(prompts * (len(setup.prompts[0]) // BLOCK), server)
    place.forget()
    say(f"{name}: starting again")
    with setup.serve(name, kv_transfer) as server:
        warm_up(server, setup)
        disk = setup.ask_all(server, f"{name}: from {place.label}")
    times.host, times.host_tokens = [each.seconds for each in host], [each.cached_tokens for each in host]
    times.disk, times.disk_tokens = [each.seconds for each in disk], [each.cached_tokens for each in disk]
    whole = len(setup.prompts[0]) - BLOCK  # vLLM computes a prompt's last token itself
    if "kv_offload" in name and min(times.disk_tokens) < whole:
        raise RuntimeError(
            f"{name}: {times.disk_tokens} tokens were reloaded; each prompt has {whole} that can be"
        )
    times.worst_difference = max(map(difference, computed * 2, host + disk))
    say(f"{name}: answers reloaded differ from those computed by at most {times.worst_difference:.4f}")
    return times


def warm_up(server: LocalServer, setup: Setup) -> None:
    """vLLM compiles its helpers at the first request; one block is too short to be stored and found again."""
    server.ask([2] * (BLOCK - 1), max_tokens=4)
    server.ask([random.randrange(2, 2048) for _ in setup.prompts[0]], max_tokens=1)


def drop_from_page_cache(root: Path) -> None:
    os.sync()
    for path in root.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def draw(path: Path, medians: dict[str, dict[str, float]], tokens: int) -> None:
    baseline = medians["none"]["compute"]
    rows = [("computed, no connector", baseline)]
    for name, label in (("kv_offload", "kv_offload"), ("vllm", "vLLM tiering")):
        for kind, what in (("host", "host memory"), ("disk", "disk, after restart")):
            if name in medians:
                rows.append((f"{label}: {what}", medians[name][kind]))
    draw_bars(
        path,
        [(label, seconds, f"{seconds:.2f} s ({baseline / seconds:.0f}x)") for label, seconds in rows],
        "seconds to the first token",
        f"A prompt of {tokens} tokens",
    )


# ---- tiers beyond the host


def vllm_objects(entry: dict[str, Any]) -> dict[str, Any]:
    """vLLM's own tier of objects at the same place, with its keys from the environment."""
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
    """None where it is not installed, or cannot be given this place."""
    kind = entry["type"]
    if not lmcache_beside.is_installed():
        say(f"LMCache {kind}: not measured, as LMCache is not installed")
        return None
    try:
        server = lmcache_beside.LMCacheServer(entry, HOST_BYTES)
    except ValueError as error:
        say(f"LMCache {kind}: not measured, as {error}")
        return None
    place = Remote(kind, lambda _, records: server.has_written())
    with inside(setup.directory):
        model = lmcache_beside.model_named(entry, setup.model, setup.directory)
        return measure(replace(setup, model=model), f"LMCache {kind}", server.kv_transfer, place)


def measure_objects(setup: Setup, entry: dict[str, Any]) -> Times | None:
    """None where NIXL is not installed."""
    if importlib.util.find_spec("nixl") is None:
        say("vllm obj: not measured, as NIXL is not installed")
        return None
    # Its tier reads NIXL's telemetry, which is off unless asked for: the engine would end at the first transfer.
    with_telemetry = replace(setup, more_environment={"NIXL_TELEMETRY_ENABLE": "y"})
    return measure(with_telemetry, "vllm obj", vllm_objects(entry), Remote("obj", None))


def measure_mooncake_connector(setup: Setup, entry: dict[str, Any]) -> Times:
    """vLLM's own connector, which stores to Mooncake from its cache and loads into it."""
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


def tell_tiers(results: dict[str, Times], arguments: argparse.Namespace) -> None:
    """Says it, and keeps it unless it was only tried out."""
    medians = {name: times.medians() for name, times in results.items()}
    baseline = medians["none"]["compute"]
    say(f"machine: {describe_machine()['text']}")
    say(f"{arguments.tokens} tokens, computed without a connector: {baseline:.2f} s")
    for name, rows in medians.items():
        if "disk" in rows:
            say(f"  {name:18} after a restart {rows['disk']:7.3f} s   {baseline / rows['disk']:6.1f}x")
    if arguments.dry:
        return
    write_results(
        "prompt_reload-remote",
        {
            "tokens": arguments.tokens,
            "model": arguments.kind,
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
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--only", choices=SYSTEMS, action="append", help="for trying out: nothing is written")
    parser.add_argument("--kind", default="large", help="model of examples/tiny_model.py")
    parser.add_argument("--directory", type=Path, help="where the tiers are; default: a temporary one")
    parser.add_argument("--tier", action="append", help="in place of the disk; see above")
    parser.add_argument("--dry", action="store_true", help="with --tier, for trying out: nothing is written")
    arguments = parser.parse_args()
    generator = random.Random(0)
    prompts = [
        [generator.randrange(2, 2048) for _ in range(arguments.tokens)] for _ in range(arguments.prompts)
    ]
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="prompt-reload-") as name:
        directory = Path(name).resolve()
        setup = Setup(make_model(directory / "model", arguments.kind), directory, prompts)
        if arguments.tier:
            with contextlib.ExitStack() as stack:
                places = [
                    stack.enter_context(OWN[tier]()) if tier in OWN else tier for tier in arguments.tier
                ]
                found = measure_tiers(setup, [entry_of(place) for place in places])
            tell_tiers(found, arguments)
            return
        results = {}
        for name in arguments.only or SYSTEMS:
            place = None if name == "none" else Directory(directory / name)
            results[name] = measure(setup, name, connector(name, place and place.root), place)
    medians = {name: times.medians() for name, times in results.items()}
    if arguments.only:
        return
    baseline = medians["none"]["compute"]
    say(f"machine: {describe_machine()['text']}")
    say(f"{arguments.tokens} tokens, computed without a connector: {baseline:.2f} s")
    for name in SYSTEMS[1:]:
        for kind, seconds in medians[name].items():
            say(f"  {name:10} {kind:8} {seconds:7.3f} s   {baseline / seconds:6.1f}x")
    write_results(
        "prompt_reload",
        {
            "tokens": arguments.tokens,
            "model": arguments.kind,
            "seconds": {name: asdict(times) for name, times in results.items()},
            "ratio_to_recompute": {
                name: {kind: baseline / seconds for kind, seconds in rows.items()}
                for name, rows in medians.items()
            },
        },
        lambda path: draw(path, medians, arguments.tokens),
    )


if __name__ == "__main__":
    main()
