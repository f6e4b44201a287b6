# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's ``bench serve`` over more prefixes than fit in host memory: a first pass and later passes.

    python benchmarks/bench_serve.py [--rounds 5] [--prefixes 8] [--prefix 3072] [--size 128MiB]

Serves one generated model with vLLM on CPU in three servers that run at the same time: without a connector,
with this one, and with vLLM's TieringOffloadingSpec (with the memcpy worker of vllm_tiering_on_cpu.py,
because its own worker does not support CPU). The latter two have a disk below their host memory. Each round
uses new prefixes from vLLM's data set ``prefix_repetition`` and sends the same requests in four passes. Pass
`new` computes the prefixes and evicts those of earlier rounds from host memory; `first` is the first pass
that reuses them, followed by `second` and `third`. In each pass the servers take turns in random order. A
server gets requests only after all servers have finished writing.

Reports for each pass: its duration, the median TTFT, the mean time per output token after the first, and the
CPU seconds of the server's threads; with ratios to vLLM's tiering in the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from local_server import LocalServer
from reporting import describe_machine, draw_bars, echo, median_with_interval, write_results
from same_for_all import (
    BLOCK,
    SYSTEMS,
    add_spins,
    connector,
    cpu_by_thread,
    environment,
    grown,
    mean_cpu_by_thread,
    wait_for_writes,
    wait_until_quiet,
)
from tiny_model import make_model

from kv_offload.exposition import Page

PASSES = ("new", "first", "second", "third")
FIGURES = {  # key in vLLM's result -> our label, unit
    "duration": ("all of it", "s"),
    "median_ttft_ms": ("median first token", "ms"),
    "mean_tpot_ms": ("mean token after it", "ms"),
}
COUNTERS = {  # counter -> the label that distinguishes its values
    "kv_offload_decisions_total": "choice",
    "kv_offload_hit_tokens_total": "tier",
    "kv_offload_miss_tokens_total": "reason",
}
SUFFIX = 64  # tokens of a request after the shared prefix


def ask_all(server: LocalServer, model: Path, seed: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Runs ``vllm bench serve`` once and returns its result."""
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    options = {
        "base-url": f"http://127.0.0.1:{server.port}",
        "model": "tiny",
        "tokenizer": model,
        "dataset-name": "prefix_repetition",
        "prefix-repetition-prefix-len": arguments.prefix,
        "prefix-repetition-suffix-len": SUFFIX,
        "prefix-repetition-num-prefixes": arguments.prefixes,
        "prefix-repetition-output-len": arguments.tokens,
        "num-prompts": arguments.requests,
        "max-concurrency": arguments.clients,
        "seed": seed,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        result = asyncio.run(
            main_async(parser.parse_args([*words, "--ignore-eos", "--temperature", "0", "--disable-tqdm"]))
        )
    if result["completed"] != arguments.requests:
        raise RuntimeError(
            f"{result['completed']} of {arguments.requests} requests came back\n{said.getvalue()}"
        )
    return {name: float(result[name]) for name in FIGURES}


def counts(server: LocalServer) -> dict[str, float]:
    """Returns our connector's counters so far; an empty dict for other connectors."""
    page = Page(server.get("/metrics"))
    found = {}
    for counter, label in COUNTERS.items():
        for value in page.values_of(counter, label):
            short = counter.removeprefix("kv_offload_").removesuffix("_total")
            found[f"{short} {value}"] = page.sum(counter, **{label: value})
    return found


def play(server: LocalServer, model: Path, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    counted, cpu = counts(server), cpu_by_thread(server)
    taken: dict[str, Any] = ask_all(server, model, seed, arguments)
    return taken | {
        "cpu": grown(cpu_by_thread(server), cpu),
        "counted": grown(counts(server), counted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefixes", type=int, default=8)
    parser.add_argument("--prefix", type=int, default=3072, help="tokens")
    parser.add_argument("--requests", type=int, default=32, help="in a pass")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--clients", type=int, default=4, help="requests at once")
    parser.add_argument("--size", default="128MiB", help="of host memory, in MiB")
    parser.add_argument("--kind", default="small", help="model of examples/tiny_model.py")
    add_spins(parser)
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--directory", type=Path, help="where the tiers are; default: a temporary one")
    arguments = parser.parse_args()
    echo(describe_machine()["text"])
    rounds: dict[str, dict[str, list[dict[str, Any]]]] = {
        name: {which: [] for which in PASSES} for name in arguments.only
    }
    with (
        tempfile.TemporaryDirectory(dir=arguments.directory, prefix="bench-serve-") as directory,
        contextlib.ExitStack() as running,
    ):
        model = make_model(Path(directory) / "model", arguments.kind)
        # Some prompts become longer than requested when they are decoded and encoded again.
        longest = arguments.prefix + SUFFIX + arguments.tokens + 2 * BLOCK
        servers, roots = {}, {name: Path(directory) / f"root-{name}" for name in arguments.only}
        for name in arguments.only:
            echo(f"{name}: starting")
            servers[name] = running.enter_context(
                LocalServer(
                    model,
                    Path(directory) / f"{name}.log",
                    blocks=arguments.clients * (longest // BLOCK + 1) + 2,
                    kv_transfer=connector(name, arguments.size, roots[name]),
                    max_model_len=longest,
                    environment=environment(arguments.spins),
                )
            )
        make = random.Random(7)
        for number in range(-1, arguments.rounds):
            for which in PASSES:
                for name in make.sample(arguments.only, len(arguments.only)):
                    wait_until_quiet(servers.values())
                    taken = play(servers[name], model, number + 100, arguments)
                    for other, root in roots.items():
                        if other != "none":
                            wait_for_writes(root, 1)
                    if number >= 0:  # negative rounds are warm-up: vLLM compiles helpers
                        rounds[name][which].append(taken)
                        echo(f"round {number}, {which}, {name}: {taken['duration']:.2f} s")
    report(rounds, arguments)


def report(rounds: dict[str, dict[str, list[dict[str, Any]]]], arguments: argparse.Namespace) -> None:
    results: dict[str, Any] = {}
    bars = []
    for name, passes in rounds.items():
        results[name] = {}
        for which, played in passes.items():
            kept = {"rounds": played, "cpu_seconds": mean_cpu_by_thread(played)}
            parts = []
            for figure, (label, unit) in FIGURES.items():
                values = [one[figure] for one in played]
                text = f"{label} {statistics.median(values):.2f} {unit}"
                if name == "kv_offload" and "vllm" in rounds:
                    others = rounds["vllm"][which]
                    found = median_with_interval(
                        [one[figure] / other[figure] for one, other in zip(played, others, strict=True)]
                    )
                    kept[f"{figure}_of_vllm"] = found
                    ratio = found["median"]
                    text += f" ({ratio:.2f} of vLLM's tiering, {found['low']:.2f} to {found['high']:.2f})"
                    if figure == "duration":
                        bars.append((f"pass {which}", ratio, f"{ratio:.2f}x"))
                parts.append(text)
            counted: dict[str, float] = defaultdict(float)
            for one in played:
                for what, value in one["counted"].items():
                    counted[what] += value / len(played)
            results[name][which] = kept
            echo(f"{name}, {which}: {'; '.join(parts)}")
            echo(f"{name}, {which}: CPU seconds by thread: {kept['cpu_seconds']}")
            if counted:
                echo(f"{name}, {which}: counted a pass: {dict(counted)}")
    if tuple(arguments.only) != SYSTEMS:
        return
    names = ("rounds", "prefixes", "prefix", "requests", "tokens", "clients", "size", "kind", "spins")
    write_results(
        "bench_serve",
        {"parameters": {name: getattr(arguments, name) for name in names}, "results": results},
        lambda path: draw_bars(path, bars, "time of a pass, of vLLM's tiering", "vllm bench serve"),
    )


if __name__ == "__main__":
    main()
