# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of a tier that is slower than computing.

    python benchmarks/throttled_tier.py [--tokens 3072] [--rounds 2] [--speeds 20 5]

Prompts are repeated in turn on two servers with the same small host memory. One has no tier below it and
recomputes them. The other has all of them on a disk (tests/slow_disk, FUSE) that is fast at first and then
throttled to the given MB/s. Each request is sent to both servers, one after the other, so every measurement
has its own baseline. `auto` is the default policy, measured after it has learned the speed (the cost of
learning is reported separately); `always` loads at any cost. Times are whole requests for one token. The
target: `auto` is at most 10% slower than no tier.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "slow_disk"))

from local_server import LocalServer, difference, kv_transfer_config
from prompt_reload import wait_until_written
from reporting import describe_machine, draw_bars, echo, write_results
from same_for_all import BLOCK, environment
from slow_disk import SlowDisk, build
from tiny_model import SHAPES, make_model

AIM = 1.10
LEARNING = 3  # unmeasured requests after each change of the disk speed
PATIENT_MS = 120_000  # timeouts that do not cancel a slow load, because its cost is measured
CHOICES = ("load", "partial", "recompute", "give_up", "probe")
LOAD_POLICIES: dict[str, dict[str, Any]] = {
    "auto": {},
    "always": {"kv_transfer_params": {"load_policy": "always"}},
}


@dataclass
class Case:
    """Seconds of each request with the tier and, in the same order, without it; and the decisions."""

    name: str
    with_tier: list[float] = field(default_factory=list)
    without: list[float] = field(default_factory=list)
    decisions: dict[str, int] = field(default_factory=dict)
    learning: list[float] = field(default_factory=list)  # seconds of the unmeasured requests

    def summary(self) -> dict[str, Any]:
        pairs = [slow / plain for slow, plain in zip(self.with_tier, self.without, strict=True)]
        return {
            "with_tier": self.with_tier,
            "without": self.without,
            "learning": self.learning,
            "decisions": self.decisions,
            "median_seconds": statistics.median(self.with_tier),
            "median_seconds_without": statistics.median(self.without),
            "ratio": statistics.median(self.with_tier) / statistics.median(self.without),
            "worst_ratio_of_a_pair": max(pairs),
        }


@dataclass
class Bench:
    tiered: LocalServer
    plain: LocalServer
    disk: SlowDisk
    prompts: list[list[int]]
    rounds: int
    worst_difference: float = 0.0

    def __post_init__(self) -> None:
        self.turns = cycle(self.prompts)

    def decisions(self) -> dict[str, int]:
        return {
            choice: int(self.tiered.metric("kv_offload_decisions_total", choice=choice)) for choice in CHOICES
        }

    def ask(self, case: Case, policy: str) -> None:
        prompt = next(self.turns)
        if len(case.without) % 2 == 0:  # each is first equally often; the other one is idle
            computed = self.plain.ask(prompt, max_tokens=1)
        answer = self.tiered.ask(prompt, max_tokens=1, **LOAD_POLICIES[policy])
        if len(case.without) % 2 != 0:
            computed = self.plain.ask(prompt, max_tokens=1)
        assert computed.cached_tokens == 0, "the baseline must compute"
        self.worst_difference = max(self.worst_difference, difference(answer, computed))
        case.with_tier.append(answer.seconds)
        case.without.append(computed.seconds)

    def learn(self, case: Case) -> None:
        """Sends LEARNING requests, so that the policy learns the current speed of the disk.

        The policy decides each of them: it loads if it still expects that to be faster.
        """
        for _ in range(LEARNING):
            prompt = next(self.turns)
            self.plain.ask(prompt, max_tokens=1)  # both servers get the same sequence
            case.learning.append(self.tiered.ask(prompt, max_tokens=1).seconds)

    def measure(self, name: str, policy: str, requests: int) -> Case:
        case = Case(name)
        if policy == "auto":
            self.learn(case)
        before = self.decisions()
        for _ in range(requests):
            self.ask(case, policy)
        case.decisions = {choice: count - before[choice] for choice, count in self.decisions().items()}
        result = case.summary()
        echo(
            f"{name}: {result['median_seconds']:.3f} s, no tier {result['median_seconds_without']:.3f} s, "
            f"ratio {result['ratio']:.2f}; {case.decisions}"
        )
        return case


def run(bench: Bench, records: int, speeds: list[float]) -> list[Case]:
    """Measures the cases from fast to slow, so that no case has to wait for a probe."""
    each = bench.rounds * len(bench.prompts)
    for number, prompt in enumerate(bench.prompts, 1):
        for server in (bench.plain, bench.tiered):
            server.ask(prompt, max_tokens=1)
        wait_until_written(bench.disk.directory, number * records, bench.tiered)
    echo("all prompts are on the disk")
    cases = [bench.measure("fast disk, auto", "auto", each)]
    for speed in speeds:
        bench.disk.tell(read_bytes_per_second=int(speed * 1e6))
        cases.append(bench.measure(f"{speed:g} MB/s, auto", "auto", each))
        cases.append(bench.measure(f"{speed:g} MB/s, always", "always", 2))
    bench.disk.tell(read_bytes_per_second=0)
    return cases


def draw(path: Path, cases: list[Case], tokens: int) -> None:
    ratios = [(case.name, case.summary()["ratio"]) for case in cases]
    draw_bars(
        path,
        [(name, ratio, f"{ratio:.2f}") for name, ratio in ratios],
        "time to the first token / without a tier below host memory (red: the aim for auto)",
        f"Prompts of {tokens} tokens that return",
        {1: "black", AIM: "red"},
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=3072)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2, help="how often each prompt returns, in each case")
    parser.add_argument("--speeds", type=float, nargs="+", default=[20.0, 5.0], help="MB/s, falling")
    parser.add_argument("--kind", choices=sorted(SHAPES), default="small")
    parser.add_argument("--directory", type=Path, help="where the tier is; default: a temporary one")
    parser.add_argument("--try-out", action="store_true", help="nothing is written")
    arguments = parser.parse_args()
    generator = random.Random(0)
    tokens = arguments.tokens // BLOCK * BLOCK
    prompts = [[generator.randrange(2, 2048) for _ in range(tokens + 5)] for _ in range(arguments.prompts)]
    shape = SHAPES[arguments.kind]
    prompt_bytes = tokens * 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
    host_bytes = int(prompt_bytes * 2.3)  # fewer than all prompts, so each one comes from the tier
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="throttled-tier-") as name:
        folder = Path(name)
        model = make_model(folder / "model", arguments.kind)
        options: dict[str, Any] = {
            "blocks": tokens // BLOCK + 8,
            "max_model_len": tokens + BLOCK,
            "environment": environment(),
        }
        with SlowDisk(folder / "directory", folder / "mounted", build(folder)) as disk:
            common: dict[str, Any] = {"eviction_policy": "lru", "lookup_timeout_ms": PATIENT_MS}
            tiered = kv_transfer_config(host_bytes, disk.mountpoint, **common)
            extra = tiered["kv_connector_extra_config"]
            extra["secondary_tiers"][0]["op_timeout_ms"] = PATIENT_MS
            plain = kv_transfer_config(host_bytes, **common)
            echo("starting both servers")
            with (
                LocalServer(model, folder / "plain.log", kv_transfer=plain, **options) as without,
                LocalServer(model, folder / "tiered.log", kv_transfer=tiered, **options) as with_tier,
            ):
                for server in (without, with_tier):
                    server.ask([2] * (BLOCK - 1), max_tokens=4)  # warm-up: vLLM compiles helpers
                bench = Bench(with_tier, without, disk, prompts, arguments.rounds)
                cases = run(bench, tokens // BLOCK, arguments.speeds)
    report(cases, bench, arguments, tokens)


def report(cases: list[Case], bench: Bench, arguments: argparse.Namespace, tokens: int) -> None:
    echo(f"machine: {describe_machine()['text']}")
    echo(f"answers differ by at most {bench.worst_difference:.5f} in log-probability")
    results = {case.name: case.summary() for case in cases}
    for name, result in results.items():
        throttled_auto = name.endswith("MB/s, auto")
        verdict = (
            f"  aim {AIM:.2f}: {'met' if result['ratio'] <= AIM else 'MISSED'}" if throttled_auto else ""
        )
        echo(f"  {name:18} {result['median_seconds']:7.3f} s   ratio {result['ratio']:5.2f}{verdict}")
    if arguments.try_out:
        return
    write_results(
        "throttled_tier",
        {"tokens": tokens, "model": arguments.kind, "aim": AIM, "cases": results},
        lambda path: draw(path, cases, tokens),
    )


if __name__ == "__main__":
    main()
