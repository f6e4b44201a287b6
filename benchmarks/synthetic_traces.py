# SPDX-License-Identifier: Apache-2.0
"""Generates request traces of other shapes than the recorded one, from a seed.

Chats continue after minutes. Agents continue after seconds, among one-off prompts and popular documents. The
shape "mixed" alternates between both.

    python benchmarks/synthetic_traces.py agents > agents.jsonl
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
from collections.abc import Iterator

BLOCK_TOKENS = 512
SHAPES = ("chats", "agents", "mixed")


def make(shape: str, requests: int = 12_000, seed: int = 1) -> list[list[int]]:
    """Returns prompts as block numbers, in the order of their arrival."""
    rng = random.Random(f"{shape} {seed}")
    numbers = itertools.count()
    sessions = {"chats": _chats, "agents": _agents, "mixed": _mixed}[shape](rng, numbers)
    waiting: list[tuple[float, int, Iterator[tuple[float, list[int]]]]] = []
    prompts: list[list[int]] = []
    now = 0.0
    for order in itertools.count():
        now += rng.expovariate(1.0)
        heapq.heappush(waiting, (now, order, next(sessions)))
        while waiting and waiting[0][0] <= now:
            at, number, session = heapq.heappop(waiting)
            pause, prompt = next(session)
            prompts.append(prompt)
            if len(prompts) == requests:
                return prompts
            if math.isfinite(pause):
                heapq.heappush(waiting, (at + pause, number, session))
    raise AssertionError


def _new(numbers: Iterator[int], count: float) -> list[int]:
    return list(itertools.islice(numbers, max(1, int(count))))


def _talk(
    rng: random.Random, numbers: Iterator[int], prompt: list[int], turns: int, median: float, spread: float
) -> Iterator[tuple[float, list[int]]]:
    """Yields (seconds until the next turn, prompt) for each turn; the prompt grows."""
    for turn in range(turns):
        prompt = prompt + _new(numbers, rng.lognormvariate(0.8, 0.8))
        yield (math.inf if turn + 1 == turns else rng.lognormvariate(math.log(median), spread)), prompt


def _chats(rng: random.Random, numbers: Iterator[int]) -> Iterator[Iterator[tuple[float, list[int]]]]:
    systems = [_new(numbers, rng.randint(2, 6)) for _ in range(8)]
    while True:
        turns = 1 + int(rng.expovariate(1 / 3))
        yield _talk(rng, numbers, list(rng.choice(systems)), turns, 300, 1.2)


def _agents(rng: random.Random, numbers: Iterator[int]) -> Iterator[Iterator[tuple[float, list[int]]]]:
    systems = [_new(numbers, rng.randint(10, 40)) for _ in range(5)]
    documents = [_new(numbers, rng.randint(10, 200)) for _ in range(300)]
    while True:
        kind = rng.random()
        if kind < 0.1:
            yield _talk(rng, numbers, list(rng.choice(systems)), rng.randint(5, 40), 20, 1.0)
        elif kind < 0.6:
            yield _talk(rng, numbers, _new(numbers, rng.randint(10, 60)), 1, 1, 1)
        else:
            document = documents[min(len(documents), int(rng.paretovariate(0.6))) - 1]
            yield _talk(rng, numbers, list(document), 1, 1, 1)


def _mixed(rng: random.Random, numbers: Iterator[int]) -> Iterator[Iterator[tuple[float, list[int]]]]:
    """Switches between chats and agents every 500 sessions, so that learned statistics become stale."""
    kinds = itertools.cycle([_chats(rng, numbers), _agents(rng, numbers)])
    while True:
        yield from itertools.islice(next(kinds), 500)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for prompt in make(options.shape, options.requests, options.seed):
        print(json.dumps({"input_length": BLOCK_TOKENS * len(prompt), "hash_ids": prompt}))


if __name__ == "__main__":
    main()
