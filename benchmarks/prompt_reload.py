# SPDX-License-Identifier: Apache-2.0
"""Measures how much faster a prompt is reloaded than recomputed.

    python benchmarks/prompt_reload.py [--tokens 8192] [--prompts 3]

Serves a generated model with vLLM on CPU and sends 8K-token prompts in three cases: computed, reloaded from
host memory after vLLM's own cache evicted them, and reloaded from disk after a restart. The systems are:
without a connector, with this one, and with vLLM's TieringOffloadingSpec (with the memcpy worker of
vllm_tiering_on_cpu.py, because its own worker does not support CPU). All run on one machine in one run. Times
are whole requests for one token, medians over the prompts. The files of both disk tiers are dropped from the
page cache before the restart. remote_reload.py uses servers and buckets instead of the disk.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from local_server import Answer, LocalServer, difference, kv_transfer_config
from reporting import describe_machine, draw_bars, echo, write_results
from same_for_all import BLOCK, environment
from tiny_model import make_model

HOST_BYTES = 2 * 1024**3
WAIT_SECONDS = 180  # timeout for writing the computed chunks
SYSTEMS = ("none", "kv_offload", "vllm")


@dataclass
class Times:
    """Seconds per prompt; for reloads also the tokens that were not computed."""

    compute: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    disk: list[float] = field(default_factory=list)
    host_tokens: list[int] = field(default_factory=list)
    disk_tokens: list[int] = field(default_factory=list)
    worst_difference: float = 0.0  # of log-probabilities, reloaded vs. computed; bfloat16 rounding: 0.04

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
            blocks=tokens // BLOCK + 8,  # room for one prompt: the next one evicts it
            kv_transfer=kv_transfer,
            max_model_len=tokens + BLOCK,
            environment=environment() | self.more_environment,
        )

    def ask_all(self, server: LocalServer, what: str) -> list[Answer]:
        answers: list[Answer] = []
        for number, prompt in enumerate(self.prompts, 1):
            answers.append(server.ask(prompt, max_tokens=1))
            reloaded = answers[-1].cached_tokens
            echo(f"  {what}, prompt {number}: {answers[-1].seconds:.3f} s, {reloaded} tokens reloaded")
        return answers


def connector(name: str, root: Path | None) -> dict[str, Any] | None:
    if root is None:
        return None
    if name == "kv_offload":
        return kv_transfer_config(HOST_BYTES, root, "8GiB")
    config = kv_transfer_config(HOST_BYTES, root)
    extra = config["kv_connector_extra_config"]
    extra |= {"spec_name": "CpuTieringSpec", "spec_module_path": "vllm_tiering_on_cpu"}
    del extra["secondary_tiers"][0]["max_bytes"]  # vLLM's tier has no size limit
    return config


def wait_until_written(root: Path, records: int, server: LocalServer) -> None:
    """Waits until ``root`` has one file of a chunk's size per record and no longer grows."""
    deadline, before = time.monotonic() + WAIT_SECONDS, -1
    while time.monotonic() < deadline:
        found = sum(1 for path in root.rglob("*") if path.is_file() and path.stat().st_size > 65536)
        if found >= records and found == before:
            return
        before = found
        server.ask([2] * 16, max_tokens=1)
        time.sleep(1)
    raise TimeoutError(f"{before} of {records} chunks are on disk after {WAIT_SECONDS} s")


class Directory:
    """A disk below host memory."""

    label = "disk"

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()

    def wait_until_written(self, records: int, server: LocalServer) -> None:
        wait_until_written(self.root, records, server)

    def forget(self) -> None:
        """Drops its records from the page cache."""
        drop_from_page_cache(self.root)


class Place(Protocol):
    """A tier below host memory."""

    label: str

    def wait_until_written(self, records: int, server: LocalServer) -> None:
        """Waits until the computed chunks are written: at least ``records`` records."""

    def forget(self) -> None:
        """Drops its records from memory."""


def measure(setup: Setup, name: str, kv_transfer: dict[str, Any] | None, place: Place | None) -> Times:
    """Computes all prompts. With a connector, reloads them from host memory and after a restart."""
    times = Times()
    echo(f"{name}: starting")
    with setup.serve(name, kv_transfer) as server:
        warm_up(server, setup)
        computed = setup.ask_all(server, f"{name}: compute")
        assert not any(answer.cached_tokens for answer in computed), "the first time must be computed"
        times.compute = [answer.seconds for answer in computed]
        if place is None:
            return times
        host = setup.ask_all(server, f"{name}: from host memory")
        prompts = len(setup.prompts) + 1  # including the warm-up prompt
        place.wait_until_written(prompts * (len(setup.prompts[0]) // BLOCK), server)
    place.forget()
    echo(f"{name}: starting again")
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
    echo(f"{name}: answers reloaded differ from those computed by at most {times.worst_difference:.4f}")
    return times


def make_prompts(count: int, tokens: int) -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(2, 2048) for _ in range(tokens)] for _ in range(count)]


def warm_up(server: LocalServer, setup: Setup) -> None:
    """Makes vLLM compile its helpers. The first prompt is shorter than a block, so it is never stored."""
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--only", choices=SYSTEMS, action="append", help="for trying out: nothing is written")
    parser.add_argument("--kind", default="large", help="model of examples/tiny_model.py")
    parser.add_argument("--directory", type=Path, help="where the tiers are; default: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="prompt-reload-") as name:
        directory = Path(name).resolve()
        model = make_model(directory / "model", arguments.kind)
        setup = Setup(model, directory, make_prompts(arguments.prompts, arguments.tokens))
        results = {}
        for name in arguments.only or SYSTEMS:
            place = None if name == "none" else Directory(directory / name)
            root = None if place is None else place.root
            results[name] = measure(setup, name, connector(name, root), place)
    medians = {name: times.medians() for name, times in results.items()}
    if arguments.only:
        return
    baseline = medians["none"]["compute"]
    echo(f"machine: {describe_machine()['text']}")
    echo(f"{arguments.tokens} tokens, computed without a connector: {baseline:.2f} s")
    for name in SYSTEMS[1:]:
        for kind, seconds in medians[name].items():
            echo(f"  {name:10} {kind:8} {seconds:7.3f} s   {baseline / seconds:6.1f}x")
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
