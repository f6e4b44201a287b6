# SPDX-License-Identifier: Apache-2.0
"""Replays recorded agent sessions with aiperf against servers with different caches.

    python benchmarks/agent_servers.py --aiperf VENV/bin/aiperf --lmcache DIRECTORY [--rounds 5] [--count 9]

Serves a generated model with vLLM on CPU: without a connector, with vLLM's TieringOffloadingSpec (with the
memcpy worker of vllm_tiering_on_cpu.py, because its own worker does not support CPU), with LMCache's server,
and with this plugin, with and without hints. All have the same host memory, a share of what the active
sessions need, and no tier below it. All servers run at the same time and take turns; the order rotates.

The sessions are scaled down (scaled_sessions.py) and keep their pauses, shortened. Each round replays
different sessions, the same for all systems. A proxy (hint_proxy.py) in front of each server adds the hints,
and only forwards for the other systems. Any failed request aborts the benchmark.

aiperf and LMCache need other versions of packages that vLLM also uses: install aiperf into a separate virtual
environment, and LMCache as lmcache_server.py describes.

Reports TTFT and total time, with ratios to no connector in the same round, and the share of prompt tokens
that were loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from agent_sessions import SESSIONS
from hint_proxy import HintProxy
from lmcache_server import LMCacheServer
from local_server import LocalServer
from multi_turn import ratio, warm_up
from reporting import describe_machine, echo, write_results
from same_for_all import BLOCK, add_spins, connector, environment, wait_until_quiet
from scaled_sessions import MODEL, Scale, Session, choose, needed_tokens, write_weka
from tiny_model import SHAPES, make_model

from kv_offload.exposition import Page

NONE, VLLM, LMCACHE, OURS, HINTS = SYSTEMS = ("none", "vllm", "lmcache", "kv_offload", "kv_offload-hints")
NAMES = {
    NONE: "no connector",
    VLLM: "vLLM's tiering",
    LMCACHE: "LMCache's server",
    OURS: "this plugin",
    HINTS: "this plugin, with hints",
}
FIGURES = {  # ours -> name in aiperf's result, statistic
    "ttft_p50": ("time_to_first_token", "p50"),
    "ttft_p95": ("time_to_first_token", "p95"),
    "total": ("benchmark_duration", "avg"),
}
SECONDS = {"time_to_first_token": ("ms", 1e-3), "benchmark_duration": ("sec", 1.0)}
COUNTERS = {
    "prompt": "vllm:prompt_tokens_total",
    "gpu_hits": "vllm:prefix_cache_hits_total",
    "loaded": "vllm:external_prefix_cache_hits_total",
}
OUTCOMES = "kv_offload_hints_total"
COMPARED = (*((system, NONE) for system in SYSTEMS[1:]), (OURS, VLLM), (OURS, LMCACHE), (HINTS, OURS))
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
TEMPLATE_TOKENS = 8  # of each message, at most
# aiperf starts sessions at this rate while fewer than --active run. Without a rate, its loop does not sleep.
SESSIONS_PER_SECOND = 50
TIMEOUT_SECONDS = 900


@dataclass(frozen=True)
class Running:
    """A server and the proxy in front of it."""

    server: LocalServer
    proxy: HintProxy


def kv_bytes_per_token(kind: str) -> int:
    """Returns the bytes of KV cache of a token of a model of examples/tiny_model.py."""
    shape = SHAPES[kind]
    return int(2 * shape.layers * shape.kv_heads * shape.head_dim * shape.dtype.itemsize)


def longest_tokens(sessions: Sequence[Session], block_tokens: int = 64) -> int:
    """Returns the tokens of the longest request, its answer included."""
    return max(
        len(turn.ids) * block_tokens + turn.answer + TEMPLATE_TOKENS * 2 * (number + 1)
        for session in sessions
        for number, turn in enumerate(session.turns)
    )


def kv_transfer(system: str, mib: int) -> dict[str, Any] | None:
    """Returns the connector of a system with `mib` MiB of host memory and no other tier."""
    if system == LMCACHE:
        return LMCacheServer(None, mib * 1024**2).kv_transfer
    return connector({HINTS: OURS}.get(system, system), f"{mib}MiB", None)


@contextlib.contextmanager
def running(system: str, model: Path, plan: Plan, arguments: argparse.Namespace) -> Iterator[Running]:
    """Starts the server of a system, and its proxy."""
    template = model / "chat_template.jinja"
    template.write_text(TEMPLATE)
    more = environment(arguments.spins)
    if system == LMCACHE:
        more["PYTHONPATH"] = os.pathsep.join((more["PYTHONPATH"], str(arguments.lmcache.resolve())))
    server = LocalServer(
        model,
        model.parent / f"{system}.log",
        blocks=plan.blocks,
        kv_transfer=kv_transfer(system, plan.mib),
        max_model_len=plan.longest,
        environment=more,
        arguments=("--chat-template", str(template)),
    )
    with server, HintProxy(server.port, hints=system == HINTS) as proxy:
        warm_up(server)
        yield Running(server, proxy)


def counts(server: LocalServer) -> dict[str, float]:
    """Returns tokens so far, and hints by outcome."""
    page = Page(server.get("/metrics"))
    hints = {
        f"hints_{name}": page.sum(OUTCOMES, outcome=name) for name in page.values_of(OUTCOMES, "outcome")
    }
    return {name: page.sum(counter) for name, counter in COUNTERS.items()} | hints


def command(
    aiperf: Path, port: int, traces: Path, out: Path, sessions: int, active: int, seed: int
) -> list[str]:
    """Returns aiperf's command, for a directory with the model. aiperf accepts only a relative tokenizer."""
    words = [str(aiperf), "profile", "-m", MODEL, "--url", f"http://127.0.0.1:{port}"]
    words += ["--endpoint-type", "chat", "--streaming", "--tokenizer", "./model"]
    words += ["--input-file", str(traces), "--custom-dataset-type", "weka_trace"]
    words += ["--num-sessions", str(sessions), "--dataset-sampling-strategy", "sequential"]
    words += ["--concurrency", str(active), "--request-rate", str(SESSIONS_PER_SECOND)]
    words += ["--arrival-pattern", "constant", "--random-seed", str(seed)]
    words += ["--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"]
    words += ["--workers-max", "1", "--ui", "none", "--no-server-metrics", "--no-gpu-telemetry"]
    return [*words, "--output-artifact-dir", str(out)]


def read_result(found: Mapping[str, Any], requests: int) -> dict[str, float]:
    """Returns the figures of aiperf's result in seconds. Raises RuntimeError if any request failed."""
    succeeded = int(found.get("request_count", {}).get("avg", 0))
    failed = int(found.get("error_request_count", {}).get("avg", 0))
    if failed or succeeded != requests or found.get("was_cancelled") or found.get("error_summary"):
        raise RuntimeError(
            f"aiperf: {succeeded} of {requests} requests succeeded, {failed} failed: "
            f"{json.dumps(found.get('error_summary'))[:500]}"
        )
    for name, (unit, _) in SECONDS.items():
        if found[name]["unit"] != unit:
            raise RuntimeError(f"aiperf: {name} is in {found[name]['unit']!r}, not in {unit!r}")
    return {name: found[theirs][value] * SECONDS[theirs][1] for name, (theirs, value) in FIGURES.items()}


def replay(
    cell: Running, sessions: Sequence[Session], traces: Path, arguments: argparse.Namespace, seed: int
) -> dict[str, float]:
    """Runs aiperf once and returns the figures. Raises RuntimeError if anything failed."""
    requests = sum(len(session.turns) for session in sessions)
    out = traces.parent / f"{traces.name}-{cell.proxy.port}"
    # Offline, aiperf looks for tokenizers only in the cache of the hub.
    online = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    cell.proxy.expect(sessions)
    before = counts(cell.server)
    done = subprocess.run(
        command(arguments.aiperf, cell.proxy.port, traces, out, len(sessions), arguments.active, seed),
        cwd=traces.parent, env=online, text=True, timeout=TIMEOUT_SECONDS,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    result = out / "profile_export_aiperf.json"
    if done.returncode or not result.exists() or cell.proxy.failures or cell.proxy.left:
        raise RuntimeError(
            f"aiperf ended with {done.returncode}; {cell.proxy.left} turns were not requested; failures: "
            f"{cell.proxy.failures[:5]}\n{done.stdout[-3000:]}"
        )
    figures = read_result(json.loads(result.read_text()), requests)
    after = counts(cell.server)
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    hints = {name: value for name, value in grown.items() if name.startswith("hints_")}
    if (cell.proxy.hints and not hints.get("hints_accepted")) or hints.get("hints_rejected"):
        raise RuntimeError(f"the server did not accept the hints: {hints}")
    return figures | grown | {"requests": requests}


def rotated(systems: Sequence[str], number: int) -> list[str]:
    """Returns the order of the systems in a round: each begins as often as the others."""
    first = number % len(systems)
    return [*systems[first:], *systems[:first]]


def summarize(rounds: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Returns medians, hit rates and the ratios of COMPARED: median and 95% confidence interval."""
    systems = {
        system: {
            "rounds": list(played),
            "median": {name: statistics.median(one[name] for one in played) for name in FIGURES},
            "loaded": sum(one["loaded"] for one in played) / sum(one["prompt"] for one in played),
            "gpu_hits": sum(one["gpu_hits"] for one in played) / sum(one["prompt"] for one in played),
        }
        for system, played in rounds.items()
    }
    ratios = {
        f"{system} to {other}": {name: ratio(rounds[system], rounds[other], name) for name in FIGURES}
        for system, other in COMPARED
        if system in rounds and other in rounds
    }
    return {"systems": systems, "times_as_fast": ratios}


def cell_text(found: Mapping[str, float]) -> str:
    """Returns a ratio with its interval, in bold if it is below 1."""
    text = f"{found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f})"
    return f"**{text}**" if found["median"] < 1 else text


def tables(summary: Mapping[str, Any]) -> str:
    """Returns the tables of docs/benchmarks/agent-servers.md."""
    lines = [
        "| system | TTFT, median | TTFT, 95th percentile | total time | loaded | GPU cache |",
        "|---" * 6 + "|",
    ]
    for system, found in summary["systems"].items():
        times = " | ".join(f"{found['median'][name]:.2f} s" for name in FIGURES)
        lines.append(f"| {NAMES[system]} | {times} | {found['loaded']:.0%} | {found['gpu_hits']:.0%} |")
    lines += [
        "",
        "| system | compared with | TTFT, median | TTFT, 95th percentile | total time |",
        "|---" * 5 + "|",
    ]
    for pair, found in summary["times_as_fast"].items():
        system, _, other = pair.partition(" to ")
        times = " | ".join(cell_text(found[name]) for name in FIGURES)
        lines.append(f"| {NAMES[system]} | {NAMES[other]} | {times} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="measured ones; 0: only the first, for trying out"
    )
    parser.add_argument("--count", type=int, default=9, help="sessions in a round")
    parser.add_argument("--active", type=int, default=8, help="sessions at the same time")
    parser.add_argument("--turns", type=int, default=Scale.turns, help="of a session")
    parser.add_argument("--scale", type=float, default=Scale.blocks, help="divisor of prompts and answers")
    parser.add_argument(
        "--share", type=float, default=2 / 3, help="host memory, of the active sessions' need"
    )
    parser.add_argument("--kind", default="large", help="model of examples/tiny_model.py")
    parser.add_argument("--sessions", type=Path, default=SESSIONS, help="recorded sessions, compact format")
    parser.add_argument("--aiperf", type=Path, required=True, help="aiperf's program")
    parser.add_argument("--lmcache", type=Path, help="the directory that LMCache is installed in")
    add_spins(parser)
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--directory", type=Path, help="for model, traces and logs; default: a temporary one")
    parser.add_argument("--dry", action="store_true", help="for trying out: nothing is written")
    arguments = parser.parse_args()
    if LMCACHE in arguments.only and arguments.lmcache is None:
        parser.error(f"give --lmcache DIRECTORY, or --only without {LMCACHE}")
    arguments.aiperf = arguments.aiperf.resolve()
    return arguments


@dataclass
class Plan:
    """The parameters shared by all systems. Round 0 is not measured: it fills the caches."""

    rounds: list[list[Session]]
    traces: list[Path]
    needed_tokens: list[float]
    mib: int  # of host memory
    blocks: int  # of vLLM's own cache
    longest: int  # tokens of a request

    @classmethod
    def make(cls, directory: Path, scale: Scale, arguments: argparse.Namespace) -> Plan:
        recorded = [json.loads(line) for line in arguments.sessions.read_text().splitlines()]
        rounds = [choose(recorded, arguments.count, number, scale) for number in range(arguments.rounds + 1)]
        traces = [write_weka(one, directory / f"round{number}") for number, one in enumerate(rounds)]
        needs = [needed_tokens(trace, arguments.active, scale.max_pause, BLOCK) for trace in traces]
        need_bytes = statistics.mean(needs) * kv_bytes_per_token(arguments.kind)
        longest = max(map(longest_tokens, rounds)) + BLOCK
        mib = round(arguments.share * need_bytes / 1024**2)
        return cls(rounds, traces, needs, mib, longest // BLOCK + 2, longest)


def main() -> None:
    arguments = parse()
    echo(describe_machine()["text"])
    scale = Scale(arguments.scale, turns=arguments.turns)
    taken: dict[str, list[dict[str, float]]] = {system: [] for system in arguments.only}
    with (
        tempfile.TemporaryDirectory(dir=arguments.directory, prefix="agent-servers-") as name,
        contextlib.ExitStack() as stack,
    ):
        directory = Path(name).resolve()
        plan = Plan.make(directory, scale, arguments)
        echo(
            f"the active sessions need {statistics.mean(plan.needed_tokens):.0f} tokens; host memory "
            f"{plan.mib} MiB, vLLM's own cache {plan.blocks * BLOCK} tokens"
        )
        model = make_model(directory / "model", arguments.kind)
        cells = {}
        for system in arguments.only:
            echo(f"{system}: starting")
            cells[system] = stack.enter_context(running(system, model, plan, arguments))
        echo("all started")
        for number, sessions in enumerate(plan.rounds):
            for system in rotated(arguments.only, number):
                wait_until_quiet(cell.server for cell in cells.values())
                began = time.monotonic()
                one = replay(cells[system], sessions, plan.traces[number], arguments, seed=number)
                seconds = time.monotonic() - began
                echo(
                    f"round {number}, {system}: TTFT {one['ttft_p50']:.2f} s and {one['ttft_p95']:.2f} s, "
                    f"total {one['total']:.1f} s ({seconds:.0f} s with aiperf's start), loaded "
                    f"{one['loaded'] / one['prompt']:.0%}, GPU cache {one['gpu_hits'] / one['prompt']:.0%}"
                )
                if number > 0:
                    taken[system].append(one)
            if number > 0 and not arguments.dry and tuple(arguments.only) == SYSTEMS:
                keep(taken, arguments, scale, plan)
    if arguments.rounds:
        print(tables(summarize(taken)))


def keep(
    taken: dict[str, list[dict[str, float]]], arguments: argparse.Namespace, scale: Scale, plan: Plan
) -> None:
    """Writes the results of the rounds so far."""
    names = ("rounds", "count", "active", "share", "kind", "spins")
    sizes = {name: getattr(plan, name) for name in ("needed_tokens", "mib", "blocks", "longest")}
    parameters = {name: getattr(arguments, name) for name in names} | {"scale": asdict(scale)} | sizes
    write_results("agent_servers", {"parameters": parameters, **summarize(taken)})


if __name__ == "__main__":
    main()
