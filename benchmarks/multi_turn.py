"""Conversations and agents that come back: how long until the first token, how long for all of it?

    python benchmarks/multi_turn.py [--sizes 64MiB 512MiB] [--sessions 6] [--turns 5] [--clients 2]

Serves a model made on the spot with vLLM on CPU and plays two closed loops (a client sends its next request
when it has the answer): a chat, where each session's turn is all that was said before and a new question; and
an agent, where all tasks share a system prompt and each step appends a tool's result. Sessions take turns, so
that vLLM's own cache, which holds little more than what runs, has lost a session when it goes on. Without a
connector, with this one, and with vLLM's TieringOffloadingSpec (with the memcpy worker of
vllm_tiering_on_cpu.py: its own refuses CPU), each of the latter with a disk below several sizes of host
memory. All in one run on one machine; the same requests in the same order for everybody.
"""

from __future__ import annotations

import argparse
import http.client
import json
import queue
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from local_server import LocalServer as LocalServer
from local_server import kv_transfer_config
from reporting import describe_machine, say, write_results
from same_for_all import environment
from tiny_model import make_model

BLOCK = 128
PERCENTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Loop:
    """What one closed loop consists of, in tokens."""

    name: str
    shared: int  # of all sessions
    first: int  # of a session
    more: int  # of each turn after the first
    answer: int


LOOPS = (Loop("chat", 0, 1024, 256, 16), Loop("agent", 768, 256, 384, 8))


@dataclass
class Taken:
    """One system under one loop: seconds."""

    first_tokens: list[float] = field(default_factory=list)
    total: float = 0.0
    prompt_tokens: int = 0


def ask(server: LocalServer, prompt: Sequence[int], answer: int) -> tuple[float, list[int]]:
    """(seconds until the first token, the tokens of a greedy answer)."""
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
        first, tokens = 0.0, []
        for event in _events(reply):
            for choice in event.get("choices", ()):
                first = first or time.perf_counter() - began
                names = (choice.get("logprobs") or {}).get("tokens", ())
                tokens += [int(name.removeprefix("token_id:")) for name in names]
    finally:
        connection.close()
    if len(tokens) != answer:
        raise RuntimeError(f"{answer} tokens were asked for, {len(tokens)} came")
    return first, tokens


def _events(reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in reply:
        text = line.decode().removeprefix("data:").strip()
        if text and text != "[DONE]":
            yield json.loads(text)


def warm_up(server: LocalServer) -> None:
    """vLLM compiles its helpers at the first requests."""
    for _ in range(2):
        server.ask([random.randrange(2, 2048) for _ in range(4 * BLOCK)], max_tokens=4)


def play(
    route: Callable[[int, int], LocalServer], loop: Loop, sessions: int, turns: int, clients: int, seed: int
) -> Taken:
    """Every session's turns in order; clients take the session that waited longest. ``route``: the server
    of a session's turn."""
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
                seconds, answer = ask(route(session, turn), said[session], loop.answer)
                with lock:
                    taken.first_tokens.append(seconds)
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


def connector(name: str, size: str, root: Path) -> dict[str, Any] | None:
    if name == "none":
        return None
    config = kv_transfer_config(size, root, "8GiB")
    if name == "vllm":
        extra = config["kv_connector_extra_config"]
        extra |= {"spec_name": "CpuTieringSpec", "spec_module_path": "vllm_tiering_on_cpu"}
        extra["cpu_bytes_to_use"] = int(size.removesuffix("MiB")) * 1024**2  # it knows only numbers
        del extra["secondary_tiers"][0]["max_bytes"]  # and no bound
    return config


def measure(
    directory: Path, model: Path, name: str, size: str, arguments: argparse.Namespace
) -> dict[str, Taken]:
    label = f"{name} {size}".strip()
    root = directory / f"root {label}".replace(" ", "-")
    longest = max(
        loop.shared + loop.first + (arguments.turns - 1) * (loop.more + loop.answer) + loop.answer
        for loop in LOOPS
    )
    say(f"{label}: starting")
    with LocalServer(
        model,
        directory / f"{label}.log".replace(" ", "-"),
        blocks=arguments.clients * (longest // BLOCK + 2) + 2,
        kv_transfer=connector(name, size, root),
        max_model_len=longest + BLOCK,
        environment=environment(),
    ) as server:
        warm_up(server)
        results = {}
        for loop in LOOPS:
            taken = play(
                lambda *_: server, loop, arguments.sessions, arguments.turns, arguments.clients, seed=1
            )
            results[loop.name] = taken
            say(f"  {label}, {loop.name}: {row(taken)}")
        if name == "kv_offload":
            for choice in ("load", "partial", "recompute", "give_up"):
                decided = server.metric("kv_offload_decisions_total", choice=choice)
                if decided:
                    say(f"  {label}: decided {choice} {decided:.0f} times")
    return results


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def row(taken: Taken) -> str:
    times = ", ".join(
        f"{share:.0%} within {percentile(taken.first_tokens, share):.2f} s" for share in PERCENTILES
    )
    return f"first token {times}; all of it {taken.total:.1f} s"


def draw(path: Path, results: dict[str, dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(LOOPS), figsize=(6.5 * len(LOOPS), 0.55 * len(results) + 1.5))
    for axis, loop in zip(axes, LOOPS, strict=True):
        for offset, share in ((-0.2, "0.5"), (0.2, "0.9")):
            values = [result[loop.name]["first_token_seconds"][share] for result in results.values()]
            places = [place + offset for place in range(len(results))]
            axis.barh(places, values, 0.4, label=f"{float(share):.0%} of the requests")
        axis.set_yticks(range(len(results)), list(results))
        axis.invert_yaxis()
        axis.set_xlabel("seconds to the first token")
        axis.set_title(loop.name)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["64MiB", "512MiB"], help="of host memory, in MiB")
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--kind", default="large", help="model of examples/tiny_model.py")
    parser.add_argument("--only", choices=("none", "kv_offload", "vllm"), action="append")
    parser.add_argument("--directory", type=Path, help="where the tiers are; default: a temporary one")
    arguments = parser.parse_args()
    say(describe_machine()["text"])
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="multi-turn-") as name:
        directory = Path(name)
        model = make_model(directory / "model", arguments.kind)
        runs = [("none", ""), *((s, size) for size in arguments.sizes for s in ("kv_offload", "vllm"))]
        for system, size in runs:
            if arguments.only and system not in arguments.only:
                continue
            taken = measure(directory, model, system, size, arguments)
            results[f"{system} {size}".strip()] = {
                loop: {
                    "first_token_seconds": {str(p): percentile(one.first_tokens, p) for p in PERCENTILES},
                    "all_first_token_seconds": one.first_tokens,
                    "total_seconds": one.total,
                    "prompt_tokens": one.prompt_tokens,
                }
                for loop, one in taken.items()
            }
    if "none" in results:
        for label, result in results.items():
            for loop, one in result.items():
                without = results["none"][loop]
                one["total_ratio"] = without["total_seconds"] / one["total_seconds"]
                one["median_ratio"] = (
                    without["first_token_seconds"]["0.5"] / one["first_token_seconds"]["0.5"]
                )
                say(
                    f"{label:20} {loop:6} against no connector: first token {one['median_ratio']:.2f}x, "
                    f"all of it {one['total_ratio']:.2f}x"
                )
    if not arguments.only:
        parameters = {name: getattr(arguments, name) for name in ("sessions", "turns", "clients", "kind")}
        write_results(
            "multi_turn", {"parameters": parameters, "results": results}, lambda path: draw(path, results)
        )


if __name__ == "__main__":
    main()
