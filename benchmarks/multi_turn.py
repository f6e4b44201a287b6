# SPDX-License-Identifier: Apache-2.0
"""Measures TTFT and total time of multi-turn conversations and agents.

    python benchmarks/multi_turn.py [--rounds 5] [--sizes 64MiB 192MiB 512MiB] [--sessions 6] [--turns 5]

Serves a generated model with vLLM on CPU and plays two closed loops (a client sends its next request after
the response). In "chat", each turn's prompt is the whole session so far and a new question. In "agent", all
tasks share a system prompt, and each step appends a tool result. Sessions take turns, so that vLLM's own
cache, which holds little more than the running requests, has evicted a session when it continues. The servers
are: without a connector, with this one, and with vLLM's TieringOffloadingSpec (with the memcpy worker of
vllm_tiering_on_cpu.py, because its own worker does not support CPU). The latter two have a disk below host
memory of several sizes. All servers run at the same time. Each round uses new conversations, the same for all
servers. The servers take turns in a different order each time, and a server gets requests only after all
writes are done.

Reports TTFT, the time per output token after the first and the total time, with ratios in the same round to
no connector and to vLLM's tiering of the same size; also CPU seconds by thread.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from local_server import LocalServer
from reporting import describe_machine, echo, median_with_interval, write_results
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

PERCENTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Loop:
    """The shape of one closed loop; sizes in tokens."""

    name: str
    shared: int  # prefix shared by all sessions
    first: int  # first turn of a session
    more: int  # added by each later turn
    answer: int


LOOPS = (Loop("chat", 0, 1024, 256, 16), Loop("agent", 768, 256, 384, 8))


@dataclass
class Taken:
    """Results of one system in one loop, in seconds."""

    first_tokens: list[float] = field(default_factory=list)
    later_tokens: list[float] = field(default_factory=list)  # per request: the mean of those after the first
    total: float = 0.0
    prompt_tokens: int = 0


def ask(server: LocalServer, prompt: Sequence[int], answer: int) -> tuple[list[float], list[int]]:
    """Returns (seconds until each piece of a greedy response, its tokens)."""
    body = {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": answer,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 0,
        "return_tokens_as_token_ids": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    began = time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {reply.read()[:500]!r}")
        times, tokens = list[float](), list[int]()
        for event in _events(reply):
            for choice in event.get("choices", ()):
                times.append(time.perf_counter() - began)
                names = (choice.get("logprobs") or {}).get("tokens", ())
                tokens += [int(name.removeprefix("token_id:")) for name in names]
    finally:
        connection.close()
    if len(tokens) != answer:
        raise RuntimeError(f"{answer} tokens were asked for, {len(tokens)} came")
    return times, tokens


def _events(reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in reply:
        text = line.decode().removeprefix("data:").strip()
        if text and text != "[DONE]":
            yield json.loads(text)


def warm_up(server: LocalServer) -> None:
    """Sends a few requests, because vLLM compiles helpers during the first ones."""
    for _ in range(2):
        server.ask([random.randrange(2, 2048) for _ in range(4 * BLOCK)], max_tokens=4)


def play(
    route: Callable[[int, int], LocalServer], loop: Loop, sessions: int, turns: int, clients: int, seed: int
) -> Taken:
    """Plays the turns of every session in order. A free client takes the session that waited longest.

    ``route``: returns the server for a session's turn.
    """
    make = random.Random(f"{loop.name} {seed}")

    def text(tokens: int) -> list[int]:
        return [make.randrange(2, 2048) for _ in range(tokens)]

    shared = text(loop.shared)
    said = [[*shared, *text(loop.first)] for _ in range(sessions)]
    questions = [[text(loop.more) for _ in range(turns - 1)] for _ in range(sessions)]
    taken, lock, errors = Taken(), threading.Lock(), list[BaseException]()
    ready: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
    for session in range(sessions):
        ready.put((session, 0))
    left = [sessions * turns]

    def client() -> None:
        try:
            while (item := ready.get()) is not None:
                session, turn = item
                times, answer = ask(route(session, turn), said[session], loop.answer)
                with lock:
                    taken.first_tokens.append(times[0])
                    taken.later_tokens.append((times[-1] - times[0]) / (loop.answer - 1))
                    taken.prompt_tokens += len(said[session])
                    left[0] -= 1
                    done = left[0] == 0
                if turn + 1 < turns:
                    said[session] += [*answer, *questions[session][turn]]
                    ready.put((session, turn + 1))
                if done:
                    for _ in range(clients):
                        ready.put(None)
        except BaseException as error:
            errors.append(error)
            for _ in range(clients):
                ready.put(None)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    taken.total = time.perf_counter() - began
    return taken


def decisions(server: LocalServer) -> dict[str, float]:
    """Returns how often each choice was made so far; an empty dict for other connectors."""
    page = Page(server.get("/metrics"))
    counter = "kv_offload_decisions_total"
    return {choice: page.sum(counter, choice=choice) for choice in page.values_of(counter, "choice")}


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def figures(taken: Taken) -> dict[str, float]:
    """Returns the figures of one loop in one round, in seconds."""
    return {
        "total": taken.total,
        **{f"first_token_{share:.0%}": percentile(taken.first_tokens, share) for share in PERCENTILES},
        "later_token": statistics.fmean(taken.later_tokens),
    }


def ratio(
    ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]], what: str
) -> dict[str, float]:
    """Returns the speedup of ``ours`` over the rounds: median and 95% confidence interval."""
    return median_with_interval([their[what] / our[what] for our, their in zip(ours, theirs, strict=True)])


def draw(path: Path, results: dict[str, dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(LOOPS), figsize=(6.5 * len(LOOPS), 0.55 * len(results) + 1.5))
    for axis, loop in zip(axes, LOOPS, strict=True):
        for offset, share in ((-0.2, "50%"), (0.2, "90%")):
            values = [result[loop.name]["median"][f"first_token_{share}"] for result in results.values()]
            places = [place + offset for place in range(len(results))]
            axis.barh(places, values, 0.4, label=f"{share} of the requests")
        axis.set_yticks(range(len(results)), list(results))
        axis.invert_yaxis()
        axis.set_xlabel("seconds to the first token")
        axis.set_title(loop.name)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def report(rounds: dict[str, dict[str, list[dict[str, Any]]]]) -> dict[str, dict[str, Any]]:
    """Returns by system and loop: the figures of all rounds, their medians and ratios. Prints them."""
    results: dict[str, dict[str, Any]] = {}
    for label, loops in rounds.items():
        system, _, size = label.partition(" ")
        results[label] = {}
        for loop, played in loops.items():
            shown = [what for what in played[0] if what not in ("cpu", "decided")]
            kept: dict[str, Any] = {
                "rounds": played,
                "median": {what: statistics.median(one[what] for one in played) for what in shown},
                "cpu_seconds": mean_cpu_by_thread(played),
            }
            against = {"none": "no connector"} if system != "none" else {}
            if system == "kv_offload":
                against[f"vllm {size}"] = "vLLM's tiering"
            for other, name in against.items():
                if other not in rounds:
                    continue
                kept[f"times_as_fast_as_{other.partition(' ')[0]}"] = found = {
                    what: ratio(played, rounds[other][loop], what) for what in shown
                }
                echo(
                    f"{label:18} {loop:6} times as fast as {name}: "
                    + ", ".join(
                        f"{what} {r['median']:.2f} ({r['low']:.2f} to {r['high']:.2f})"
                        for what, r in found.items()
                    )
                )
            echo(
                f"{label:18} {loop:6} "
                + ", ".join(f"{what} {seconds:.3f} s" for what, seconds in kept["median"].items())
            )
            echo(f"{label:18} {loop:6} CPU seconds by thread: {kept['cpu_seconds']}")
            results[label][loop] = kept
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--sizes", nargs="+", default=["64MiB", "192MiB", "512MiB"], help="of host memory, in MiB"
    )
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--kind", default="large", help="model of examples/tiny_model.py")
    add_spins(parser)
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--directory", type=Path, help="where the tiers are; default: a temporary one")
    arguments = parser.parse_args()
    echo(describe_machine()["text"])
    longest = max(
        loop.shared + loop.first + (arguments.turns - 1) * (loop.more + loop.answer) + loop.answer
        for loop in LOOPS
    )
    sizes = {"none": [""], "kv_offload": arguments.sizes, "vllm": arguments.sizes}
    labels = [f"{system} {size}".strip() for system in arguments.only for size in sizes[system]]
    rounds: dict[str, dict[str, list[dict[str, Any]]]] = {
        label: {loop.name: [] for loop in LOOPS} for label in labels
    }
    with (
        tempfile.TemporaryDirectory(dir=arguments.directory, prefix="multi-turn-") as name,
        contextlib.ExitStack() as running,
    ):
        directory = Path(name)
        model = make_model(directory / "model", arguments.kind)
        servers, roots = {}, {}
        for label in labels:
            echo(f"{label}: starting")
            system, _, size = label.partition(" ")
            roots[label] = directory / f"root-{label}".replace(" ", "-")
            servers[label] = running.enter_context(
                LocalServer(
                    model,
                    directory / f"{label}.log".replace(" ", "-"),
                    blocks=arguments.clients * (longest // BLOCK + 2) + 2,
                    kv_transfer=connector(system, size, roots[label]),
                    max_model_len=longest + BLOCK,
                    environment=environment(arguments.spins),
                )
            )
            warm_up(servers[label])
        make = random.Random(7)
        for number in range(-1, arguments.rounds):
            for loop in LOOPS:
                for label in make.sample(labels, len(labels)):
                    server = servers[label]
                    wait_until_quiet(servers.values())
                    cpu, decided = cpu_by_thread(server), decisions(server)
                    taken = play(
                        lambda *_, server=server: server,
                        loop,
                        arguments.sessions,
                        arguments.turns,
                        arguments.clients,
                        seed=number + 1,
                    )
                    one = figures(taken) | {
                        "cpu": grown(cpu_by_thread(server), cpu),
                        "decided": grown(decisions(server), decided),
                    }
                    for other, root in roots.items():
                        if other != "none":
                            wait_for_writes(root, 1)
                    echo(
                        f"round {number}, {loop.name}, {label}: all of it {taken.total:.2f} s, first token "
                        f"{statistics.median(taken.first_tokens):.3f} s, decided {one['decided']}"
                    )
                    if number >= 0:  # round -1 fills host memory
                        rounds[label][loop.name].append(one)
    results = report(rounds)
    if tuple(arguments.only) == SYSTEMS:
        names = ("rounds", "sizes", "sessions", "turns", "clients", "kind", "spins")
        parameters = {name: getattr(arguments, name) for name in names}
        write_results(
            "multi_turn", {"parameters": parameters, "results": results}, lambda path: draw(path, results)
        )


if __name__ == "__main__":
    main()
