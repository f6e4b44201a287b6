# SPDX-License-Identifier: Apache-2.0
"""Compares sessions that return from disk, with and without hints, with those that return from host memory.

    python benchmarks/return_from_disk.py [--sessions 10] [--turns 10] [--tokens 2048] [--slot 1.5]

Serves one generated model with vLLM on CPU in three servers that run at the same time: "host" has host memory
for all sessions, "disk" and "hinted" for half of them, and a disk for all. The sessions of "hinted" send
`resume_in` with each turn. Every session continues once per cycle, at times that are fixed in advance, and no
two requests run at the same time: a cycle has one slot per session, and a slot one request per server, in an
order that changes. vLLM's own cache holds one session, so the others are loaded.

A turn has the prompt of the previous turn and a few more tokens, and one output token, so the time of the
request is its TTFT. A turn "returns from disk" if the disk had most of its prompt when the session paused: in
"hinted" the report of the response says how many tokens were read from the disk, prefetched or not.

Reports p50 and p95 of the TTFT of each server, for "hinted" only of the turns that return from disk, and the
ratios to "host" with 95% confidence intervals (bootstrap over the turns).
"""

from __future__ import annotations

import argparse
import contextlib
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
from reporting import describe_machine, echo, write_results
from same_for_all import BLOCK, environment
from tiny_model import make_model

SERVERS = ("host", "disk", "hinted")
MIB_OF_TOKEN = 16 / 1024  # of the model "large"
WARM_UP_CYCLES = 2  # the first stores all sessions; in the second, first uses and hints take effect
MORE_TOKENS = 16  # per turn
REPORTING = {
    "kv_connector": "ReportingConnector",
    "kv_connector_module_path": "kv_offload.specs.connector",
}


def percentile(values: Sequence[float], share: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


def ratio_with_interval(values: Sequence[float], base: Sequence[float], share: float) -> dict[str, float]:
    """Returns the ratio of two percentiles, and its 95% confidence interval (bootstrap over both)."""
    draw = random.Random(0)

    def ratio(above: Sequence[float], below: Sequence[float]) -> float:
        return percentile(above, share) / percentile(below, share)

    drawn = ((draw.choices(values, k=len(values)), draw.choices(base, k=len(base))) for _ in range(2000))
    ratios = sorted(ratio(*both) for both in drawn)
    return {"ratio": ratio(values, base), "low": ratios[50], "high": ratios[-51]}


def config(name: str, root: Path, sessions: int, tokens: int) -> dict[str, Any]:
    mib = sessions * tokens * MIB_OF_TOKEN
    size = round(mib * 1.3 if name == "host" else mib / 2)
    # Loaded however fast this machine computes: the benchmark compares the sources of a load.
    made = kv_transfer_config(f"{size}MiB", root, "8GiB", load_policy="always")
    return made | REPORTING


def play_turn(
    server: LocalServer, prompt: Sequence[int], session: str, resume_in: float | None
) -> dict[str, Any]:
    """Returns {"seconds", "fs", "cpu", "computed"}: the TTFT, and where the tokens came from."""
    actions = [] if resume_in is None else [{"type": "resume_in", "seconds": resume_in}]
    hints = {"version": 1, "session": session, "actions": actions}
    body = {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": {"kv_offload_hints": hints},
    }
    began = time.perf_counter()
    reply = server.post("/v1/completions", body, 300)
    seconds = time.perf_counter() - began
    report = reply["kv_transfer_params"]["kv_offload"]
    rejected = [hint for hint in report.get("hints", ()) if hint["outcome"] in ("rejected", "missing")]
    if rejected:
        raise RuntimeError(f"hints were not executed: {rejected}")
    hits = report["hit_tokens"]
    return {
        "seconds": seconds,
        "fs": hits.get("fs", 0),
        "cpu": hits.get("cpu", 0),
        "computed": sum(report["miss_tokens"].values()),
    }


def play(
    servers: dict[str, LocalServer], sessions: int, turns: int, tokens: int, slot: float
) -> dict[str, list[dict[str, Any]]]:
    make = random.Random(7)
    prompts = [[make.randrange(2, 2048) for _ in range(tokens)] for _ in range(sessions)]
    played: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
    part = slot / len(servers)
    began = time.perf_counter()
    late = 0
    for cycle in range(turns + WARM_UP_CYCLES):
        for number, prompt in enumerate(prompts):
            prompt += [make.randrange(2, 2048) for _ in range(MORE_TOKENS)]
            # The same order in each cycle, so that every pause is one cycle.
            order = random.Random(number).sample(list(servers), len(servers))
            for place, name in enumerate(order):
                starts = began + (cycle * sessions + number) * slot + place * part
                late += time.perf_counter() > starts
                time.sleep(max(0.0, starts - time.perf_counter()))
                pause = sessions * slot if name == "hinted" else None
                turn = play_turn(servers[name], prompt, f"session-{number}", pause)
                if cycle >= WARM_UP_CYCLES:
                    played[name].append(turn)
        echo(f"cycle {cycle}: {late} requests late so far")
        if cycle < WARM_UP_CYCLES:
            began, late = time.perf_counter() - (cycle + 1) * sessions * slot, 0
    if late > sessions * turns * len(servers) // 20:
        raise RuntimeError(f"{late} requests were late: give more time with --slot")
    return played


def report(played: dict[str, list[dict[str, Any]]], tokens: int) -> dict[str, Any]:
    kept = {
        "host": [turn for turn in played["host"] if turn["cpu"] > tokens // 2],
        "disk": [turn for turn in played["disk"] if turn["fs"] > tokens // 2],
        "hinted": [turn for turn in played["hinted"] if turn["fs"] > tokens // 2],
    }
    results: dict[str, Any] = {}
    base = [turn["seconds"] for turn in kept["host"]]
    for name, turns in kept.items():
        seconds = [turn["seconds"] for turn in turns]
        if len(seconds) < 10:
            raise RuntimeError(f"{name}: only {len(seconds)} of {len(played[name])} turns are of the kind")
        results[name] = {"turns": len(played[name]), "kept": len(seconds), "seconds": seconds}
        line = f"{name:7} {len(seconds):3} of {len(played[name])} turns"
        for label, share in (("p50", 0.5), ("p95", 0.95)):
            found = ratio_with_interval(seconds, base, share)
            results[name][label] = {"seconds": percentile(seconds, share), "of_host": found}
            line += (
                f"; {label} {percentile(seconds, share) * 1e3:.1f} ms, {found['ratio']:.2f} "
                f"({found['low']:.2f} to {found['high']:.2f}) of host"
            )
        echo(line)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=10)
    parser.add_argument("--turns", type=int, default=10, help="of each session, after the warm-up")
    parser.add_argument("--tokens", type=int, default=2048, help="of the first prompt of a session")
    parser.add_argument("--slot", type=float, default=1.5, help="seconds; one request per server each")
    parser.add_argument("--directory", type=Path, help="where the tiers are; default: a temporary one")
    parser.add_argument("--dry", action="store_true", help="for trying out: nothing is written")
    arguments = parser.parse_args()
    machine = describe_machine()["text"]
    echo(machine)
    longest = arguments.tokens + (arguments.turns + WARM_UP_CYCLES) * MORE_TOKENS + BLOCK
    with (
        tempfile.TemporaryDirectory(dir=arguments.directory, prefix="return-from-disk-") as directory,
        contextlib.ExitStack() as running,
    ):
        model = make_model(Path(directory) / "model", "large")
        servers = {}
        for name in SERVERS:
            echo(f"{name}: starting")
            servers[name] = running.enter_context(
                LocalServer(
                    model,
                    Path(directory) / f"{name}.log",
                    blocks=longest // BLOCK + 3,
                    kv_transfer=config(name, Path(directory) / name, arguments.sessions, longest),
                    max_model_len=longest,
                    environment=environment(),
                )
            )
            for _ in range(2):  # vLLM compiles helpers during the first requests
                servers[name].ask([random.randrange(2, 2048) for _ in range(4 * BLOCK)], max_tokens=4)
        played = play(servers, arguments.sessions, arguments.turns, arguments.tokens, arguments.slot)
    results = report(played, arguments.tokens)
    if not arguments.dry:
        given = {name: getattr(arguments, name) for name in ("sessions", "turns", "tokens", "slot")}
        write_results("return_from_disk", {"parameters": given, "results": results})


if __name__ == "__main__":
    main()
