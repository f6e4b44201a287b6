# SPDX-License-Identifier: Apache-2.0
"""Drives an engine with random requests: conversations, shared prefixes, aborts, resets, hints."""

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from live_root import paths_in
from vllm.v1.request import RequestStatus

from oracle.engine import Engine
from oracle.runner import VOCABULARY, Sequence

SALTS = (None, None, None, "tenant")


def _of_session(*actions: dict[str, Any], **more: str) -> dict[str, Any]:
    return {"kv_offload_hints": {"version": 1, "actions": actions, **more}}


# The sessions do not fit the prompts, as those of confused or hostile clients.
SESSION_HINTS = (
    _of_session({"type": "resume_in", "seconds": 0.1}, session="a"),
    _of_session({"type": "resume_in", "seconds": 1000}, {"type": "retain", "seconds": 0.5}, session="a"),
    _of_session({"type": "supersede"}, {"type": "pin", "seconds": 600}, session="b"),
    _of_session({"type": "pin", "seconds": 0.2}, {"type": "retain", "seconds": 600}, session="b", branch="x"),
    _of_session({"type": "release", "target": {"session": "b", "branch": "x"}}, session="b"),
    _of_session({"type": "release", "target": {"session": "a"}}),
    _of_session({"type": "resume_in"}, {"type": "release"}, session="b"),
    _of_session({"type": "prefetch", "target": {"session": "a"}}, session="b"),
    _of_session({"type": "prefetch"}, {"type": "prefetch", "target": {"session": "b"}}, session="a"),
)
HINTS: tuple[dict[str, Any] | None, ...] = (
    *([None] * 12),
    {"kv_offload_skip_store": True},
    {"kv_offload_load_policy": "never"},
    {"kv_offload_load_policy": "always", "kv_offload_priority": 3},
    {"kv_offload_load_policy": "sometimes", "kv_offload_priority": "high"},  # ignored
    {"max_load_tokens": 48},
    {"max_offload_tokens": 64},
    {"kv_load_tiers": [{"medium": "CPU"}]},
    {"kv_load_tiers": []},
    *SESSION_HINTS,
)


@dataclass
class Rates:
    """Probabilities per step."""

    arrive: float = 0.3
    abort: float = 0.02
    reset: float = 0.004
    forced_reset: float = 0.0
    damage: float = 0.1
    # probability of clearing the GPU's prefix cache, so that the tier is looked up
    evict_prefixes: float = 0.03


@dataclass
class Driver:
    """Feeds one engine; drivers with the same ``histories`` form one stream over several engines."""

    engine: Engine
    seed: int
    rates: Rates = field(default_factory=Rates)
    histories: list[tuple[list[int], str | None]] = field(default_factory=list)
    root: Path | None = None  # root of a tier whose records are damaged
    live: dict[str, tuple[Any, Sequence]] = field(default_factory=dict)
    happened: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.number = 0
        # vLLM (0.31 to 0.33) ends with an assertion when a part of a block is after max_offload_tokens.
        parts = self.engine.setup.match_unit is not None
        self.hints = [hint for hint in HINTS if not (parts and hint and "max_offload_tokens" in hint)]

    def run(self, steps: int) -> None:
        """Runs ``steps`` random steps, then runs until all requests are done; compares outputs too."""
        for _ in range(steps):
            self._maybe_arrive()
            self._maybe_abort()
            self._maybe_reset()
            self._maybe_damage()
            self.engine.step_idle()
            self._harvest()
        self.engine.drain()
        self._harvest()
        assert not self.live, f"requests that never ended: {sorted(self.live)}"
        held = sorted(self.engine.scheduler.requests)
        assert not held, f"requests that vLLM still holds: {held}"

    def _prompt(self) -> tuple[list[int], str | None]:
        salt = self.rng.choice(SALTS)
        prompt: list[int] = []
        if self.histories and self.rng.random() < 0.75:
            prompt, salt = self.rng.choice(self.histories[-12:])
            prompt = prompt[: self.rng.randrange(len(prompt) + 1)] if self.rng.random() < 0.3 else prompt
        room = self.engine.setup.max_model_len - 40
        prompt = prompt[: room - 60] + self._tokens(self.rng.randrange(1, 60))
        return prompt, salt

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def _maybe_arrive(self) -> None:
        if len(self.live) >= 8 or self.rng.random() >= self.rates.arrive:
            return
        prompt, salt = self._prompt()
        # A name is reused once its request has ended and vLLM has released it, which waits for its stores and
        # loads; a disk that stalls for a second delays that. The connector must have been notified too, or
        # vLLM 0.31 takes the new request for the ended one.
        name = f"r{self.number % 37}"
        self.number += 1
        scheduler = self.engine.scheduler
        if name in self.live or name in scheduler.requests or name in scheduler.finished_req_ids:
            return
        max_tokens = self.rng.randrange(1, 36)
        request = self.engine.add(name, prompt, max_tokens, salt, self.rng.choice(self.hints))
        self.live[name] = (request, Sequence(prompt, max_tokens, salt))
        self.happened["requests"] += 1

    def _maybe_abort(self) -> None:
        if self.live and self.rng.random() < self.rates.abort:
            self.engine.abort(self.rng.choice(sorted(self.live)))
            self.happened["aborts"] += 1

    def _maybe_reset(self) -> None:
        statuses = {request.status for request, _ in self.live.values()}
        remote = RequestStatus.WAITING_FOR_REMOTE_KVS in statuses
        if self.rng.random() < self.rates.evict_prefixes:
            self.engine.scheduler.reset_prefix_cache()  # succeeds only while nothing runs
            self.happened["prefix resets"] += 1
        if self.rng.random() < self.rates.reset:
            self.happened["resets"] += self.engine.reset(running=False)
        if not remote and self.rng.random() < self.rates.forced_reset:
            self.happened["forced resets"] += self.engine.reset(running=True)

    def _maybe_damage(self) -> None:
        if self.root is not None and self.rng.random() < self.rates.damage:
            self.happened["damages"] += damage_a_record(self.root, self.rng)

    def _harvest(self) -> None:
        for name in [name for name, (request, _) in self.live.items() if request.is_finished()]:
            request, sequence = self.live.pop(name)
            made = list(request.output_token_ids)
            start = sequence.prompt_len
            assert made == sequence.tokens[start : start + len(made)], f"{name} has other tokens"
            self.happened["preemptions"] += request.num_preemptions
            salt = request.cache_salt
            self.histories.append((sequence.tokens[: start + len(made)], salt))


def damage_a_record(root: Path, rng: random.Random) -> bool:
    """Flips a byte of one record, truncates it or deletes it; returns False if there is no record."""
    records = sorted(path for path in paths_in(root) if path.suffix == ".rec")
    if not records:
        return False
    record = rng.choice(records)
    try:
        content = bytearray(record.read_bytes())
        match rng.choice(("flip", "cut", "delete")):
            case "flip":
                content[rng.choice((rng.randrange(4096), rng.randrange(len(content))))] ^= 1 << rng.randrange(
                    8
                )
                record.write_bytes(content)
            case "cut":
                record.write_bytes(content[: rng.randrange(len(content))])
            case "delete":
                record.unlink()
    except (FileNotFoundError, ValueError, IndexError):
        return False  # evicted or damaged meanwhile
    return True


def total(engine: Engine, name: str, *labels: str) -> float:
    """Returns a counter from the stats for vLLM's front end; without labels, the sum over all labels."""
    return sum(
        value
        for stats in engine.stats
        for metric, values in stats.get("data", {}).items()
        if metric == name
        for found, value in values.items()
        if not isinstance(value, list) and (not labels or tuple(found) == labels)
    )
