# SPDX-License-Identifier: Apache-2.0
"""Measures how fast an engine loads a prompt that another engine of the host holds.

    python benchmarks/neighbour_reload.py --lmcache DIRECTORY [--rounds 7] [--tokens 8192] [--only SYSTEM ...]

Two engines per system serve the same generated model with vLLM on CPU. Each round sends two new prompts to
one engine, which computes them; the second one evicts the first from vLLM's own cache. Then the first prompt
is sent to the same engine ("own"), and to the other one, which never had it ("other"). The systems:

    shared   host memory of both engines with share_host_memory
    fs       separate host memory, and one directory in /dev/shm
    redis    separate host memory, and one redis-server on this machine
    lmcache  LMCache's server, which both engines use (see lmcache_server.py)

All engines run all the time (each takes 2 to 3 GiB with its host memory: 24 GiB do not suffice for all four
systems, so use --only), and the systems take turns within a round. Each engine computes on all cores,
but only one has a request at a time. A time is a whole request for one token. Ratios are those of one round.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from lmcache_server import LMCacheServer
from local_server import Answer, LocalServer, kv_transfer_config
from reporting import describe_machine, draw_bars, echo, median_with_interval, write_results
from same_for_all import BLOCK, environment, sleep_where_vllm_spins, wait_until_quiet
from tier_places import entry_of, own_redis
from tiny_model import make_model

SHARED, FS, REDIS, LMCACHE = SYSTEMS = ("shared", "fs", "redis", "lmcache")
BASELINE = "own"  # the same engine's memory, with SHARED
SETTLE_SECONDS = 120


class System:
    """Two engines, and the question whether the first one's chunks can be loaded."""

    def __init__(
        self, name: str, servers: Sequence[LocalServer], lmcache: LMCacheServer | None = None
    ) -> None:
        self.name, self.servers, self._lmcache = name, servers, lmcache

    def settle(self) -> None:
        """Waits until nothing is being stored."""
        give_up = time.monotonic() + SETTLE_SECONDS
        first = self.servers[0]
        while True:
            first.ask([7] * 16, max_tokens=1)  # an idle engine reports nothing
            if self._lmcache is not None:
                is_done = self._lmcache.has_written()
            else:
                is_done = first.metric("kv_offload_queue_depth", op="write") == 0
            if is_done:
                break
            if time.monotonic() > give_up:
                raise TimeoutError(f"{self.name}: still storing after {SETTLE_SECONDS} s\n{first.log_tail()}")
            time.sleep(0.1)
        wait_until_quiet(self.servers)


class Setup:
    def __init__(self, directory: Path, arguments: argparse.Namespace) -> None:
        self.directory, self.tokens = directory, arguments.tokens
        self.lmcache: Path | None = arguments.lmcache
        self.host_bytes = arguments.mib * 1024**2
        self.model = make_model(directory / "model", arguments.kind)

    def start(self, name: str, stack: contextlib.ExitStack) -> System:
        """Starts the engines of a system. ``stack`` ends them."""
        lmcache = None
        more: dict[str, str] = {}
        if name == LMCACHE:
            lmcache = LMCacheServer(None, 2 * self.host_bytes)  # the memory of both engines
            more["PYTHONPATH"] = os.pathsep.join((environment()["PYTHONPATH"], str(self.lmcache)))
            config = lmcache.kv_transfer
        elif name == SHARED:
            config = kv_transfer_config(self.host_bytes, share_host_memory=True)
        elif name == FS:
            root = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kv-bench-"))
            config = kv_transfer_config(self.host_bytes, root, 4 * self.host_bytes)
        else:
            config = kv_transfer_config(
                self.host_bytes, secondary_tiers=[entry_of(stack.enter_context(own_redis()))]
            )
        servers = []
        for number in range(2):
            echo(f"{name}: starting engine {number}")
            server = LocalServer(
                self.model,
                self.directory / f"{name}-{number}.log",
                blocks=self.tokens // BLOCK + 8,  # room for one prompt: the next one evicts it
                kv_transfer=config,
                max_model_len=self.tokens + BLOCK,
                environment=environment() | more,
            )
            stack.callback(server.stop)
            server.start()
            server.ask([2] * (BLOCK - 1), max_tokens=4)
            servers.append(server)
        return System(name, servers, lmcache)


def prompt(seed: str, tokens: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(2, 2048) for _ in range(tokens)]


def play(system: System, seed: str, tokens: int) -> dict[str, float]:
    """Returns the seconds of one round: "computed", "own", "other"."""
    first, second = system.servers
    wanted, displacing = prompt(f"{seed} wanted", tokens), prompt(f"{seed} displacing", tokens)
    system.settle()
    computed = first.ask(wanted, max_tokens=1)
    assert computed.cached_tokens == 0, computed.cached_tokens
    first.ask(displacing, max_tokens=1)
    system.settle()
    own = _reload(system, first, wanted)
    second.ask(prompt(f"{seed} other", tokens), max_tokens=1)  # so that both have a full cache
    system.settle()
    wait_until_quiet([second])
    other = _reload(system, second, wanted)
    return {"computed": computed.seconds, "own": own.seconds, "other": other.seconds}


def _reload(system: System, server: LocalServer, wanted: list[int]) -> Answer:
    answer = server.ask(wanted, max_tokens=1)
    least = len(wanted) - 2 * BLOCK  # LMCache's chunks are two blocks, and one is computed for the answer
    if answer.cached_tokens < least:
        raise RuntimeError(
            f"{system.name}: {answer.cached_tokens} of {len(wanted)} tokens were loaded\n{server.log_tail()}"
        )
    return answer


def summary(rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, played in rounds.items():
        row: dict[str, Any] = {
            kind: statistics.median(one[kind] for one in played) for kind in ("computed", "own", "other")
        }
        row["other_vs_own"] = median_with_interval([one["other"] / one["own"] for one in played])
        if SHARED in rounds and name != SHARED:
            pairs = zip(played, rounds[SHARED], strict=False)
            row["other_vs_shared"] = median_with_interval(
                [one["other"] / ours["other"] for one, ours in pairs]
            )
        row["rounds"] = played
        results[name] = row
    return results


def tell(results: dict[str, Any]) -> None:
    for name, row in results.items():
        ratio = row["other_vs_own"]
        text = (
            f"{name:8} computed {row['computed']:6.3f} s, own {row['own']:6.3f} s, "
            f"other {row['other']:6.3f} s, other/own {ratio['median']:.2f} "
            f"({ratio['low']:.2f} to {ratio['high']:.2f})"
        )
        if against := row.get("other_vs_shared"):
            text += (
                f", against shared {against['median']:.2f} ({against['low']:.2f} to {against['high']:.2f})"
            )
        echo(text)


def draw(path: Path, results: dict[str, Any], tokens: int) -> None:
    bars = []
    if SHARED in results:
        own = results[SHARED]["own"]
        bars.append(("own memory", own, f"{own:.3f} s"))
    bars += [(name, row["other"], f"{row['other']:.3f} s") for name, row in results.items()]
    draw_bars(path, bars, "seconds to the first token", f"{tokens} tokens that another engine holds")


def keep(rounds: dict[str, list[dict[str, float]]], arguments: argparse.Namespace) -> None:
    results = summary(rounds)
    parameters = {key: getattr(arguments, key) for key in ("tokens", "mib", "kind")}
    chosen = [f"-{name}" for name in results if name != SHARED] if len(results) < len(SYSTEMS) else []
    write_results(
        "neighbour_reload" + "".join(chosen),
        {"parameters": parameters, "results": results},
        lambda path: draw(path, results, arguments.tokens),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--mib", type=int, default=1024, help="host memory of an engine")
    parser.add_argument("--kind", default="large", help="model of examples/tiny_model.py")
    parser.add_argument("--only", choices=SYSTEMS, action="append", help="may be repeated")
    parser.add_argument("--lmcache", type=Path, help="the directory that LMCache is installed in")
    parser.add_argument("--dry", action="store_true", help="for trying out: nothing is written")
    arguments = parser.parse_args()
    names = [name for name in SYSTEMS if name in (arguments.only or SYSTEMS)]
    if LMCACHE in names and arguments.lmcache is None:
        parser.error(f"give --lmcache DIRECTORY, or --only without {LMCACHE}")
    echo(describe_machine()["text"])
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="neighbour-") as folder, contextlib.ExitStack() as stack:
        directory = Path(folder).resolve()
        (directory / "sleep").mkdir()
        sleep_where_vllm_spins(directory / "sleep")
        setup = Setup(directory, arguments)
        systems = [setup.start(name, stack) for name in names]
        for number in range(arguments.rounds):
            for system in systems if number % 2 == 0 else systems[::-1]:
                played = play(system, f"{number} {system.name}", arguments.tokens)
                rounds[system.name].append(played)
                text = ", ".join(f"{kind} {seconds:.3f} s" for kind, seconds in played.items())
                echo(f"round {number + 1}, {system.name:8} {text}")
            if not arguments.dry:
                keep(rounds, arguments)  # an interrupted run keeps the results so far
    tell(summary(rounds))


if __name__ == "__main__":
    main()
