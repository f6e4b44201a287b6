# SPDX-License-Identifier: Apache-2.0
"""Measures the connector's overhead when all prompts hit vLLM's own cache.

    python benchmarks/closed_loop.py [--rounds 12] [--seconds 8] [--clients 4] [--frozen-disk]

Runs two servers of one model, one with the connector (host memory and disk) and one without. The working set
fits in vLLM's own cache, so nothing is ever reloaded. Closed-loop clients (each sends its next request after
the response) load one server, then the other, in alternating order from round to round. Reports the ratio of
requests per second, with to without the connector: the median over the rounds and its 95% confidence interval
(bootstrap). Also reports the ratios of the mean and the 99th percentile of the request times.

With --frozen-disk each request ends in a unique block, which is stored, while the tier's disk
(tests/slow_disk, FUSE) does not respond at all: stores must not block requests.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "slow_disk"))

from local_server import LocalServer, kv_transfer_config
from reporting import describe_machine, echo, interval_of_median, write_results
from same_for_all import BLOCK, environment
from slow_disk import SlowDisk, build
from tiny_model import make_model

AIM, AIM_FROZEN = 0.99, 1 / 1.05
NAMES = ("without", "with")


@dataclass
class Round:
    """Results of one server under load in one round."""

    requests_per_second: float
    latencies: list[float] = field(repr=False)


def load(
    server: LocalServer, prompts: Sequence[Sequence[int]], own: int, clients: int, seconds: float, seed: int
) -> Round:
    """Sends prompts of the working set from ``clients`` threads for ``seconds``; waits for all responses.

    ``own``: unique tokens at the end of each request. The server computes them and generates 24 more.
    """
    latencies: list[list[float]] = [[] for _ in range(clients)]
    errors: list[BaseException] = []
    start = threading.Barrier(clients + 1)
    until = [0.0]

    def client(number: int) -> None:
        choose = random.Random(seed * 1000 + number)
        start.wait()
        try:
            while time.perf_counter() < until[0]:
                prompt = prompts[choose.randrange(len(prompts))]
                question = [choose.randrange(2, 2048) for _ in range(own)]
                latencies[number].append(server.ask([*prompt, *question], max_tokens=24, logprobs=0).seconds)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    began = time.perf_counter()
    until[0] = began + seconds
    start.wait()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    taken = time.perf_counter() - began
    flat = [value for own in latencies for value in own]
    return Round(len(flat) / taken, flat)


def draw_rounds(path: Path, rounds: dict[str, list[Round]], ratio: float, frozen: bool) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5))
    for name in NAMES:
        axes.plot([each.requests_per_second for each in rounds[name]], marker="o", label=f"{name} connector")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("round")
    axes.set_ylabel("requests per second")
    what = "Storing to a frozen disk" if frozen else "Working set inside vLLM's cache"
    axes.set_title(f"{what}: median ratio {ratio:.3f}, {describe_machine()['name']}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def measure(
    directory: Path, rounds: int, seconds: float, clients: int, disk: SlowDisk | None
) -> dict[str, list[Round]]:
    own = 40 if disk is None else BLOCK + 40
    root = directory / "kv" if disk is None else disk.mountpoint
    model = make_model(directory / "model", "small")
    generator = random.Random(0)
    prompts = [[generator.randrange(2, 2048) for _ in range(8 * BLOCK)] for _ in range(8)]
    kv_transfer = {"without": None, "with": kv_transfer_config("1GiB", root, "4GiB")}
    servers: dict[str, LocalServer] = {}
    taken: dict[str, list[Round]] = {name: [] for name in NAMES}
    try:
        for name in NAMES:
            echo(f"starting the server {name} the connector")
            servers[name] = LocalServer(
                model,
                directory / f"{name}.log",
                blocks=256,
                kv_transfer=kv_transfer[name],
                max_model_len=2048,
                environment=environment(),
            )
            servers[name].start()
            for prompt in prompts:  # fills the cache and makes vLLM compile its helpers
                servers[name].ask(prompt, max_tokens=2)
            load(servers[name], prompts, own, clients, seconds, seed=-1)
        if disk is not None:
            disk.tell(frozen=1)
        for number in range(rounds):
            for name in NAMES if number % 2 == 0 else NAMES[::-1]:
                taken[name].append(load(servers[name], prompts, own, clients, seconds, seed=number))
            pair = {name: taken[name][-1].requests_per_second for name in NAMES}
            echo(
                f"round {number + 1} of {rounds}: {pair['without']:.2f} requests/s without, "
                f"{pair['with']:.2f} with, ratio {pair['with'] / pair['without']:.3f}"
            )
        reloaded = servers["with"].metric("kv_offload_hit_tokens_total")
        assert reloaded == 0, f"the working set is not inside the cache: {reloaded} tokens were reloaded"
        if disk is not None:
            assert disk.tell()["held"] > 0, "nobody was inside the frozen disk"
    finally:
        if disk is not None:
            disk.tell(frozen=0)  # a process in a frozen call cannot be killed
        for server in servers.values():
            server.stop()
    return taken


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--frozen-disk", action="store_true", help="each request stores, the disk is stuck")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="closed-loop-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        disk = None
        if arguments.frozen_disk:
            disk = SlowDisk(directory / "slow", directory / "mounted", build(directory))
            stack.enter_context(disk)
        rounds = measure(directory, arguments.rounds, arguments.seconds, arguments.clients, disk)
    ratios = [
        one.requests_per_second / other.requests_per_second
        for one, other in zip(rounds["with"], rounds["without"], strict=True)
    ]
    low, high = interval_of_median(ratios)
    aim = AIM_FROZEN if arguments.frozen_disk else AIM
    ratio = statistics.median(ratios)
    times = {name: [value for each in rounds[name] for value in each.latencies] for name in NAMES}
    mean = statistics.mean(times["with"]) / statistics.mean(times["without"])
    tail = percentile(times["with"], 0.99) / percentile(times["without"], 0.99)
    echo(f"machine: {describe_machine()['text']}")
    echo(f"requests per second, with / without: {ratio:.3f} (95%: {low:.3f} .. {high:.3f}), aim >= {aim:.2f}")
    echo(f"request time, with / without: mean {mean:.3f}, 99th percentile {tail:.3f}")
    write_results(
        "closed_loop-frozen" if arguments.frozen_disk else "closed_loop",
        {
            "frozen_disk": arguments.frozen_disk,
            "ratio": ratio,
            "ratio_95": [low, high],
            "mean_time_ratio": mean,
            "p99_time_ratio": tail,
            "clients": arguments.clients,
            "requests_per_second": {
                name: [each.requests_per_second for each in rounds[name]] for name in NAMES
            },
        },
        lambda path: draw_rounds(path, rounds, ratio, arguments.frozen_disk),
    )


if __name__ == "__main__":
    main()
