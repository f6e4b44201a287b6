# SPDX-License-Identifier: Apache-2.0
"""One server over a disk that is throttled, frozen, and fails to read: answers stay right, and the tier
recovers.

The disk is a FUSE file system (tests/slow_disk) whose behaviour is set at run time. The tests run in this
order; each leaves the disk fully working and the tier in use. Times only bound the waiting:
benchmarks/throttled_tier.py measures the cost of a slow tier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import waiting
from answers import assert_same
from local_server import Answer, LocalServer, kv_transfer_config
from setting import PROMPT_BLOCKS, Reference, Serve
from slow_disk import NoFuseError, SlowDisk, build

HOST_MEMORY = "56MiB"  # two of the six prompts: a prompt that repeats in turn is loaded from disk
LOOKUP_TIMEOUT_MS = 3000
OP_DEADLINE_MS = 4000
# Three records are read concurrently, so each arrives within the deadline of its op; a prompt takes 13 s.
THROTTLED = 2_000_000
ALWAYS = {"kv_offload_load_policy": "always"}
RECOVERY_SECONDS = (
    # the tier is probed after 30 s and the circuit breaker retries within 60 s; the slow disk below adds time
    600
)


@dataclass
class Setting:
    """The server, its disk, and the prompts that it gets in turn."""

    server: LocalServer
    disk: SlowDisk
    reference: Reference
    turn: int = 0

    def ask(self, count: int = 1, load_policy: dict[str, str] | None = None) -> None:
        """Sends the next prompts; each answer must equal the answer without the connector."""
        for _ in range(count):
            at = self.turn % len(self.reference.prompts)
            self.turn += 1
            extra = {"kv_transfer_params": load_policy} if load_policy else {}
            answer: Answer = self.server.ask(self.reference.prompts[at], **extra)
            assert_same([answer], [self.reference.answers[at]])

    def ask_until(
        self, condition: Callable[[], bool], what: str, load_policy: dict[str, str] | None = None
    ) -> None:
        def met() -> bool:
            self.ask(1, load_policy)
            return condition()

        waiting.until(met, RECOVERY_SECONDS, f"{what}\n{self.server.log_tail()}")

    def ask_until_loaded(self, tokens: float, load_policy: dict[str, str] | None = None) -> None:
        """Sends prompts until that many more tokens were loaded from disk."""
        before = self.hits()
        self.ask_until(lambda: self.hits() >= before + tokens, "hits from disk again", load_policy)

    def hits(self) -> float:
        return self.server.metric("kv_offload_hit_tokens_total", tier="fs")

    def decisions(self, choice: str) -> float:
        return self.server.metric("kv_offload_decisions_total", choice=choice)

    def failures(self, kind: str) -> float:
        return self.server.metric("kv_offload_failures_total", tier="fs", op="read", kind=kind)

    def trips(self) -> float:
        return self.server.metric("kv_offload_breaker_trips_total", tier="fs")


PROMPT_TOKENS = PROMPT_BLOCKS * 128


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowDisk]:
    folder = tmp_path_factory.mktemp("slow-disk")
    slow_disk = SlowDisk(folder / "directory", folder / "mounted", build(folder))
    try:
        slow_disk.__enter__()
    except NoFuseError as error:
        pytest.skip(f"no slow disk: {error}")
    try:
        yield slow_disk
    finally:
        slow_disk.__exit__(None, None, None)


@pytest.fixture(scope="module")
def setting(start: Serve, model: Path, reference: Reference, disk: SlowDisk) -> Iterator[Setting]:
    """Records all prompts; the disk is still fast and in use."""
    kv_transfer = kv_transfer_config(
        HOST_MEMORY, disk.mountpoint, eviction_policy="lru", lookup_timeout_ms=LOOKUP_TIMEOUT_MS
    )
    tier = kv_transfer["kv_connector_extra_config"]["secondary_tiers"][0]
    tier |= {"op_timeout_ms": OP_DEADLINE_MS, "n_read_threads": 2, "n_write_threads": 1}
    with start(model, kv_transfer) as server:
        setting = Setting(server, disk, reference)
        try:
            for number, prompt in enumerate(reference.prompts):
                server.ask(prompt)
                # Full host memory evicts chunks that the disk has not taken yet.
                waiting.recorded(disk.directory, (number + 1) * PROMPT_BLOCKS, server, RECOVERY_SECONDS)
            setting.ask_until_loaded(2 * PROMPT_TOKENS)
            yield setting
        finally:
            disk.tell(frozen=0)  # a thread in a frozen call cannot be killed


@pytest.fixture(autouse=True)
def whole_again(disk: SlowDisk) -> Iterator[None]:
    """Repairs the disk, so that a failed test does not fail the next one."""
    yield
    disk.tell(read_bytes_per_second=0, frozen=0, read_errors=0)


def test_a_tier_slower_than_computing_is_bypassed_until_it_is_fast_again(setting: Setting) -> None:
    setting.disk.tell(read_bytes_per_second=THROTTLED)
    # The server must detect the slow disk itself; chunks it gives up on meanwhile are recomputed.
    setting.ask_until(lambda: setting.decisions("recompute") > 0, "a prompt recomputed by choice")
    before = {choice: setting.decisions(choice) for choice in ("load", "partial", "recompute")}
    hits = setting.hits()
    setting.ask(4)
    assert setting.decisions("recompute") >= before["recompute"] + 4
    assert setting.decisions("load") == before["load"]
    assert setting.decisions("partial") == before["partial"]
    assert setting.hits() == hits
    missed = setting.server.metric("kv_offload_miss_tokens_total", reason="recompute_cheaper")
    assert missed >= 4 * PROMPT_TOKENS

    setting.disk.tell(read_bytes_per_second=0)
    setting.ask_until_loaded(2 * PROMPT_TOKENS)
    assert setting.decisions("probe") > 0
    assert setting.decisions("load") > before["load"]


def test_a_frozen_disk_delays_no_request_beyond_its_deadline_and_recovers(setting: Setting) -> None:
    trips, timeouts = setting.trips(), setting.failures("timeout")
    setting.disk.tell(frozen=1)
    late = setting.server.metric("kv_offload_miss_tokens_total", reason="deadline")
    # Each prompt waits for the disk, which never answers: without the deadline none would end.
    setting.ask_until(lambda: setting.trips() > trips, "the breaker tripped", ALWAYS)
    assert setting.disk.tell()["held"] > 0, "no call was inside the frozen disk"
    assert setting.failures("timeout") > timeouts
    assert setting.server.metric("kv_offload_miss_tokens_total", reason="deadline") > late

    setting.disk.tell(frozen=0)
    setting.ask_until_loaded(2 * PROMPT_TOKENS, ALWAYS)


def test_a_disk_that_fails_to_read_costs_hits_until_it_reads_again(setting: Setting) -> None:
    failures, trips = setting.failures("io"), setting.trips()
    given = setting.disk.tell(read_errors=1)["read_bytes"]
    setting.ask(len(setting.reference.prompts), ALWAYS)
    counts = setting.disk.tell()
    assert counts["read_errors"] > 0
    assert counts["read_bytes"] == given, "not all reads failed"
    setting.ask_until(lambda: setting.failures("io") >= failures + 8, "8 reads failed", ALWAYS)
    setting.ask_until(
        lambda: setting.trips() > trips, "reads that fail did not trip the circuit breaker", ALWAYS
    )
    assert setting.disk.tell()["read_bytes"] == given, "not all reads failed"
    assert setting.failures("corrupt") == 0

    # The prompts were recomputed and so offered again: their records were replaced, or are unchanged on disk.
    wanted = len(setting.reference.prompts) * PROMPT_BLOCKS
    waiting.recorded(setting.disk.directory, wanted, setting.server, RECOVERY_SECONDS)
    setting.disk.tell(read_errors=0)
    setting.ask_until_loaded(2 * PROMPT_TOKENS, ALWAYS)
