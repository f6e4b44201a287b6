# SPDX-License-Identifier: Apache-2.0
"""Measures how much storing a prompt slows down running requests.

    python benchmarks/decode_during_writes.py [--rounds 10] [--prompt 4096] [--tokens 64]

Serves one generated model with vLLM on CPU in four servers that run at the same time: without a connector,
with this one and host memory only, with this one and a disk, and with vLLM's TieringOffloadingSpec and a disk
(with the worker of vllm_tiering_on_cpu.py, because its own worker does not support CPU). There is one request
at a time. In each round every server gets the same new prompt and then generates tokens, so that the prompt's
blocks are copied to host memory and written to disk during decoding. The order of the servers changes from
round to round. A server gets a request only after all earlier writes are done and no other server computes.

Reports the inter-token latency (ITL) per round, and ratios within a round: to the server without a connector,
and of this connector with a disk to the same without a disk. ITL is reported over all tokens of a response,
over the first eight, which coincide with the copies and the first writes, and as a maximum. Also reports the
CPU seconds of the server's threads by name, per round.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from local_server import LocalServer, kv_transfer_config
from reporting import describe_machine, draw_bars, echo, median_with_interval, write_results
from same_for_all import (
    BLOCK,
    add_spins,
    bytes_below,
    connector,
    cpu_by_thread,
    environment,
    mean_cpu_by_thread,
    wait_for_writes,
    wait_until_quiet,
)
from tiny_model import make_model

SYSTEMS = ("none", "host", "kv_offload", "vllm")
FIRST = 8  # tokens


def token_times(server: LocalServer, prompt: Sequence[int], tokens: int) -> list[float]:
    """Returns the seconds from the request to each token of a greedy response."""
    body = {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    with contextlib.closing(connection):
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {reply.read()[:500]!r}")
        times = []
        for line in reply:
            text = line.decode().removeprefix("data:").strip()
            if text and text != "[DONE]" and json.loads(text).get("choices"):
                times.append(time.perf_counter() - began)
    return times


def play(server: LocalServer, root: Path, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    before, had = cpu_by_thread(server), bytes_below(root)
    times = token_times(server, prompt, tokens)
    if len(times) < tokens // 2:
        raise RuntimeError(f"{tokens} tokens were asked for, they came in {len(times)} pieces")
    written = wait_for_writes(root, had + 1) if root.exists() else 0.0
    cpu = {name: seconds - before.get(name, 0.0) for name, seconds in cpu_by_thread(server).items()}
    gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
    return {
        "first_token": times[0],
        "all": statistics.fmean(gaps),
        "first": statistics.fmean(gaps[:FIRST]),
        "longest": max(gaps),
        "written_after_answer": written,
        "written_bytes": bytes_below(root) - had,
        "cpu": {name: round(seconds, 3) for name, seconds in cpu.items() if seconds > 0},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--prompt", type=int, default=4096, help="tokens")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--size", default="1024MiB", help="of host memory, in MiB")
    parser.add_argument("--kind", default="large", help="model of examples/tiny_model.py")
    add_spins(parser)
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--directory", type=Path, help="where the tiers are; default: a temporary one")
    arguments = parser.parse_args()
    echo(describe_machine()["text"])
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.only}
    with (
        tempfile.TemporaryDirectory(dir=arguments.directory, prefix="decode-during-") as directory,
        contextlib.ExitStack() as running,
    ):
        model = make_model(Path(directory) / "model", arguments.kind)
        longest = arguments.prompt + arguments.tokens + BLOCK
        servers, roots = {}, {name: Path(directory) / f"root-{name}" for name in arguments.only}
        for name in arguments.only:
            echo(f"{name}: starting")
            servers[name] = running.enter_context(
                LocalServer(
                    model,
                    Path(directory) / f"{name}.log",
                    blocks=longest // BLOCK + 3,
                    kv_transfer=kv_transfer_config(arguments.size)
                    if name == "host"
                    else connector(name, arguments.size, roots[name]),
                    max_model_len=longest,
                    environment=environment(arguments.spins),
                )
            )
        make = random.Random(7)
        for number in range(-2, arguments.rounds):
            prompt = [make.randrange(2, 2048) for _ in range(arguments.prompt)]
            for name in make.sample(arguments.only, len(arguments.only)):
                wait_until_quiet(servers.values())
                taken = play(servers[name], roots[name], prompt, arguments.tokens)
                if number >= 0:  # negative rounds are warm-up: vLLM compiles helpers
                    rounds[name].append(taken)
    report(rounds, arguments)


def report(rounds: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> None:
    results: dict[str, Any] = {}
    for name, played in rounds.items():
        results[name] = {"rounds": played, "cpu_seconds": mean_cpu_by_thread(played, least=0.002)}
        echo(f"{name}: CPU seconds a round by thread: {results[name]['cpu_seconds']}")
        for what in ("first_token", "all", "first", "longest"):
            values = [one[what] for one in played]
            line = f"{name}: {what}: {statistics.median(values) * 1e3:.2f} ms"
            for other in ("none", "host") if name == "kv_offload" else ("none",):
                if other not in rounds or other == name:
                    continue
                found = median_with_interval(
                    [one[what] / their[what] for one, their in zip(played, rounds[other], strict=True)]
                )
                results[name][f"{what}_of_{other}"] = found
                line += f", {found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f}) of {other}"
            echo(line)
        written = statistics.fmean(one["written_bytes"] for one in played) / 2**20
        after = statistics.median(one["written_after_answer"] for one in played)
        echo(f"{name}: {written:.0f} MiB written a round, done {after:.2f} s after the answer")
    if tuple(arguments.only) != SYSTEMS:
        return
    bars = []
    for name in SYSTEMS[1:]:
        for what, label in (("all", "all tokens"), ("first", f"first {FIRST} tokens")):
            ratio = results[name][f"{what}_of_none"]["median"]
            bars.append((f"{name}, {label}", ratio, f"{ratio:.3f}x"))
    parameters = {
        name: getattr(arguments, name) for name in ("rounds", "prompt", "tokens", "size", "kind", "spins")
    }
    write_results(
        "decode_during_writes",
        {"parameters": parameters, "results": results},
        lambda path: draw_bars(path, bars, "time per token, of no connector", "decoding during writes"),
    )


if __name__ == "__main__":
    main()
