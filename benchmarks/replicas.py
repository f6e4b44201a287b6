# SPDX-License-Identifier: Apache-2.0
"""Measures the benefit of shared records or shared host memory if conversations move between replicas.

    python benchmarks/replicas.py [--rounds 3] [--sessions 8] [--turns 5] [--clients 2] [--only NAME ...]
    python benchmarks/replicas.py --memory-only --replicas 4 --mib 256     share_host_memory

Serves a generated model with vLLM on CPU. Clients play conversations (see multi_turn.py: a turn's prompt is
the whole session so far and a new question). Each turn is sent to a replica drawn from a seeded generator:
the same turn is sent to the same replica in all settings except "one", "sticky" and "hashed".

    one        one server with a directory, the cores and the memory of all replicas
    apart      replicas, each with its own directory: the baseline
    sticky     the same replicas, but all turns of a conversation use one replica, and the conversations that
               are played at the same time use different ones
    hashed     the same, but each conversation uses one random replica: two conversations may share a core, as
               turns may in the settings below (only with --memory-only)
    memory     replicas that share their host memory (only with --memory-only)
    directory  replicas that share a directory
    redis, s3  replicas that share a server on this machine (redis-server, SeaweedFS)

With --memory-only no setting has a tier below host memory.

All servers run all the time. The settings take turns in each round, and each round uses new conversations. A
replica computes on its share of the cores, at least one. The tiers below host memory share this machine's
cores, memory and disk. Token counts come from the servers' own counters.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from local_server import LocalServer, kv_transfer_config
from multi_turn import Loop, percentile, play, warm_up
from reporting import describe_machine, draw_bars, echo, write_results
from same_for_all import BLOCK, environment
from tier_places import OWN, entry_of
from tiny_model import make_model

from kv_offload.exposition import Page

LOOP = Loop("chat", shared=0, first=1024, more=256, answer=16)
BASELINE = "apart"
SETTINGS = ("one", BASELINE, "sticky", "hashed", "memory", "directory", "redis", "s3")
IN_MEMORY = ("one", BASELINE, "sticky", "hashed", "memory")
SERVERS_OF = {"sticky": BASELINE, "hashed": BASELINE}  # settings without their own servers
SETTLE_SECONDS = 120

HITS, MISSES = "kv_offload_hit_tokens_total", "kv_offload_miss_tokens_total"
DECISIONS, SOURCES = "kv_offload_decisions_total", "vllm:prompt_tokens_by_source_total"
COMPARED = ("total_seconds", "first_token_p50", "first_token_p90", "computed_tokens")  # to the baseline
COUNTED = {HITS: "tier", MISSES: "reason", DECISIONS: "choice", SOURCES: "source"}


@dataclass
class Round:
    """Results of one setting in one round. All token counts are prompt tokens."""

    total_seconds: float
    first_token_seconds: list[float]
    prompt_tokens: int
    computed_tokens: int
    device_tokens: int  # hits in vLLM's own cache
    hit_tokens: dict[str, int]  # by the tier that served them
    miss_tokens: dict[str, int]  # by reason
    decisions: dict[str, int]

    def figures(self) -> dict[str, float]:
        return {
            "total_seconds": self.total_seconds,
            "first_token_p50": percentile(self.first_token_seconds, 0.5),
            "first_token_p90": percentile(self.first_token_seconds, 0.9),
            "computed_tokens": self.computed_tokens,
            "all_hit_tokens": sum(self.hit_tokens.values()),
            "reused_share": 1 - self.computed_tokens / self.prompt_tokens,  # includes vLLM's own cache
        }


def counters(servers: Sequence[LocalServer]) -> dict[str, dict[str, float]]:
    """Returns the counters summed over all servers: metric -> label value -> count."""
    pages = [Page(server.get("/metrics")) for server in servers]
    return {
        metric: {
            value: sum(page.sum(metric, **{label: value}) for page in pages)
            for value in sorted({value for page in pages for value in page.values_of(metric, label)})
        }
        for metric, label in COUNTED.items()
    }


def grown(servers: Sequence[LocalServer], before: dict[str, dict[str, float]]) -> dict[str, dict[str, int]]:
    """Returns the counts since ``before``, without zeros."""
    return {
        metric: {
            value: int(count - before[metric].get(value, 0))
            for value, count in found.items()
            if count != before[metric].get(value, 0)
        }
        for metric, found in counters(servers).items()
    }


def settle(servers: Sequence[LocalServer]) -> None:
    """Waits until no server has pending writes. Sends requests, because idle servers publish no metrics."""
    for server in servers:
        give_up, quiet = time.monotonic() + SETTLE_SECONDS, 0
        while quiet < 10:
            if time.monotonic() > give_up:
                raise TimeoutError(f"still writing after {SETTLE_SECONDS} s\n{server.log_tail()}")
            server.ask([7] * 16, max_tokens=1)
            quiet = quiet + 1 if server.metric("kv_offload_queue_depth", op="write") == 0 else 0
            time.sleep(0.1)


def router(name: str, servers: Sequence[LocalServer], seed: int) -> Callable[[int, int], LocalServer]:
    """Returns the routing function of a setting; the same for all but ``one``, ``sticky`` and ``hashed``."""

    def route(session: int, turn: int) -> LocalServer:
        if name == "sticky":
            return servers[session % len(servers)]
        if name == "hashed":
            return random.Random(f"{seed} {session}").choice(servers)
        return random.Random(f"{seed} {session} {turn}").choice(servers)

    return route


def conversations(name: str, number: int) -> int:
    """Returns the seed of a round's conversations: settings that use the same servers have different ones."""
    shared = (BASELINE, *SERVERS_OF)
    return len(shared) * number + (shared.index(name) if name in SERVERS_OF else 0)


def play_round(name: str, servers: Sequence[LocalServer], arguments: argparse.Namespace, seed: int) -> Round:
    before = counters(servers)
    taken = play(
        router(name, servers, seed), LOOP, arguments.sessions, arguments.turns, arguments.clients, seed
    )
    found = grown(servers, before)
    sources = found[SOURCES]
    if sum(sources.values()) != taken.prompt_tokens:
        raise RuntimeError(f"{name}: {taken.prompt_tokens} tokens were sent, vLLM counts {sources}")
    settle(servers)
    return Round(
        total_seconds=taken.total,
        first_token_seconds=taken.first_tokens,
        prompt_tokens=taken.prompt_tokens,
        computed_tokens=sources.get("local_compute", 0),
        device_tokens=sources.get("local_cache_hit", 0),
        hit_tokens=found[HITS],
        miss_tokens=found[MISSES],
        decisions=found[DECISIONS],
    )


# ---- servers


class Setup:
    """The model, and the configuration of its servers."""

    def __init__(self, directory: Path, arguments: argparse.Namespace) -> None:
        self.directory, self.clients = directory, arguments.clients
        self.replicas, self.memory_only = arguments.replicas, arguments.memory_only
        self.replica_bytes = arguments.mib * 1024**2
        self.model = make_model(directory / "model", arguments.kind)
        self.longest = LOOP.first + (arguments.turns - 1) * (LOOP.more + LOOP.answer) + LOOP.answer

    def servers(self, name: str, tier: dict[str, Any] | None) -> list[LocalServer]:
        """Returns the servers of one setting, not started.

        ``tier``: the tier below host memory; None: a directory for each server.
        """
        cores = sorted(os.sched_getaffinity(0))
        if name == "one":
            config = self._config(self.replicas, tier or self._disk(name))
            return [self._server(name, self.replicas, cores, config)]
        extra = {"share_host_memory": True} if name == "memory" else {}
        servers = []
        for number in range(self.replicas):
            label = f"{name}-{number}"
            mine = cores[number :: self.replicas] or [cores[number % len(cores)]]
            config = self._config(1, tier or self._disk(label), **extra)
            servers.append(self._server(label, 1, mine, config))
        return servers

    def _disk(self, label: str) -> dict[str, Any]:
        return {"type": "fs", "root_dir": str(self.directory / f"kv-{label}"), "max_bytes": "8GiB"}

    def shared_disk(self) -> dict[str, Any]:
        return self._disk("shared")

    def _config(self, replicas: int, tier: dict[str, Any], **extra: Any) -> dict[str, Any]:
        if not self.memory_only:
            extra["secondary_tiers"] = [tier]
        return kv_transfer_config(replicas * self.replica_bytes, **extra)

    def _server(self, label: str, replicas: int, mine: list[int], config: dict[str, Any]) -> LocalServer:
        return LocalServer(
            self.model,
            self.directory / f"{label}.log",
            blocks=replicas * (self.clients * (self.longest // BLOCK + 2) + 2),
            kv_transfer=config,
            max_model_len=self.longest + BLOCK,
            environment=environment() | {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, mine))},
        )


def start(server: LocalServer) -> None:
    server.start()
    warm_up(server)


def prepare(names: Sequence[str], setup: Setup, stack: contextlib.ExitStack) -> dict[str, list[LocalServer]]:
    """Starts the servers of all settings and returns them by setting. ``stack`` ends them."""
    found: dict[str, list[LocalServer]] = {}
    for name in dict.fromkeys(SERVERS_OF.get(name, name) for name in names):
        tier = setup.shared_disk() if name == "directory" else None
        if name in OWN:
            tier = entry_of(stack.enter_context(OWN[name]()))
        found[name] = setup.servers(name, tier)
    servers = [server for each in found.values() for server in each]
    for server in servers:
        stack.callback(server.stop)
    echo(f"starting {len(servers)} servers")
    with ThreadPoolExecutor(2) as pool:
        starting = [pool.submit(start, server) for server in servers]
        try:
            for each in starting:
                each.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    settle(servers)
    return {name: found[SERVERS_OF.get(name, name)] for name in names}


# ---- results


def summary(rounds: dict[str, list[Round]]) -> dict[str, Any]:
    """Returns per setting: its rounds, their medians, and ratios to the baseline in the same round."""
    results: dict[str, Any] = {}
    for name, taken in rounds.items():
        figures = [each.figures() for each in taken]
        results[name] = {
            "median": {key: statistics.median(each[key] for each in figures) for key in figures[0]},
            "rounds": [asdict(one) | each for one, each in zip(taken, figures, strict=True)],
        }
        if BASELINE in rounds:
            pairs = list(zip(figures, (each.figures() for each in rounds[BASELINE]), strict=True))
            ratios = {key: [mine[key] / base[key] for mine, base in pairs] for key in COMPARED}
            results[name]["against_apart"] = ratios
            results[name]["median_against_apart"] = {
                key: statistics.median(values) for key, values in ratios.items()
            }
    return results


def tell(results: dict[str, Any]) -> None:
    echo(f"machine: {describe_machine()['text']}")
    for name, result in results.items():
        median = result["median"]
        text = (
            f"{name:10} all of it {median['total_seconds']:5.1f} s, first token "
            f"{median['first_token_p50']:.2f} and {median['first_token_p90']:.2f} s, "
            f"computed {median['computed_tokens']:6.0f} tokens, hit {median['all_hit_tokens']:6.0f}"
        )
        if "against_apart" in result:
            ratios = result["against_apart"]["total_seconds"]
            text += f"; time against {BASELINE}: " + ", ".join(f"{ratio:.2f}" for ratio in ratios)
        echo(text)


def draw(path: Path, results: dict[str, Any]) -> None:
    bars = []
    for name, result in results.items():
        median = result["median"]
        text = f"{median['total_seconds']:.1f} s, {median['computed_tokens'] / 1000:.0f},000 computed"
        bars.append((name, median["total_seconds"], text))
    draw_bars(path, bars, "seconds for all conversations of a round", "Conversations that move")


def keep(rounds: dict[str, list[Round]], arguments: argparse.Namespace) -> None:
    results = summary(rounds)
    kept = ("sessions", "turns", "clients", "kind", "replicas", "memory_only")
    parameters = {key: getattr(arguments, key) for key in kept}
    parameters |= {"loop": asdict(LOOP), "replica_bytes": arguments.mib * 1024**2}
    write_results(
        "replicas-memory" if arguments.memory_only else "replicas",
        {"parameters": parameters, "results": results},
        lambda path: draw(path, results),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=2)
    # 64: a quarter of the size of a round's conversations
    parser.add_argument("--mib", type=int, default=64, help="host memory of a replica")
    parser.add_argument("--memory-only", action="store_true", help="no tiers below host memory")
    parser.add_argument("--kind", default="large", help="model of examples/tiny_model.py")
    parser.add_argument("--only", choices=SETTINGS, action="append", help="may be repeated")
    parser.add_argument("--dry", action="store_true", help="for trying out: nothing is written")
    parser.add_argument("--directory", type=Path, help="where the directories are; default: a temporary one")
    arguments = parser.parse_args()
    settings = (
        IN_MEMORY
        if arguments.memory_only
        else tuple(name for name in SETTINGS if name not in ("hashed", "memory"))
    )
    names = [name for name in settings if not arguments.only or name in arguments.only]
    echo(describe_machine()["text"])
    rounds: dict[str, list[Round]] = {name: [] for name in names}
    with (
        tempfile.TemporaryDirectory(dir=arguments.directory, prefix="replicas-") as directory,
        contextlib.ExitStack() as stack,
    ):
        servers = prepare(names, Setup(Path(directory), arguments), stack)
        for number in range(arguments.rounds):
            for name in names if number % 2 == 0 else names[::-1]:
                seed = conversations(name, number)
                taken = play_round(name, servers[name], arguments, seed)
                rounds[name].append(taken)
                echo(
                    f"round {number + 1}, {name:10} {taken.total_seconds:5.1f} s, computed "
                    f"{taken.computed_tokens} of {taken.prompt_tokens}, hit {taken.hit_tokens}"
                )
            if not arguments.dry:
                keep(rounds, arguments)  # an interrupted run keeps the results so far
    tell(summary(rounds))


if __name__ == "__main__":
    main()
