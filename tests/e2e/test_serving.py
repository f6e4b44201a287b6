# SPDX-License-Identifier: Apache-2.0
"""One server with both tiers, started by examples/serve.sh as a user starts it. Prompts that vLLM's cache
evicted are loaded again, a real Prometheus scrapes the server, and the queries of examples/monitoring find
its metrics.
"""

from __future__ import annotations

import json
import os
import shutil
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import waiting
from answers import BLOCK, assert_same, make_prompts
from dashboard import panels
from kv_offload.specs.openmp_wait import SPINS
from local_prometheus import prometheus
from local_server import Answer, LocalServer
from setting import EXAMPLES, GPU_BLOCKS, PROMPT_BLOCKS, SCRIPT_ENVIRONMENT, Reference

Query = Callable[[str], list[dict[str, Any]]]


@dataclass
class ScriptServer(LocalServer):
    """The server that serve.sh starts, in place of LocalServer's own command."""

    def command(self) -> list[str]:
        options = super().command()
        return [
            "bash",
            str(EXAMPLES / "serve.sh"),
            str(self.model),
            *options[options.index(str(self.model)) + 1 :],
        ]


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    directory = tmp_path_factory.mktemp("served")
    server = ScriptServer(
        model,
        directory / "log",
        blocks=GPU_BLOCKS,
        environment={
            "PATH": SCRIPT_ENVIRONMENT["PATH"],
            # Holds all prompts of the first tests, but not all conversations of the last test.
            "KV_MEMORY": "160MiB",
            "KV_DIRECTORY": str(directory / "kv"),
            "KV_DISK_SIZE": "1GiB",
            # all usable cores
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "SPT_NOENV": "1",  # the process title that vLLM sets must not overwrite the environment
        },
    )
    with server:
        yield server


@pytest.fixture(scope="module")
def rounds(server: LocalServer, reference: Reference) -> list[list[Answer]]:
    """Sends every prompt, then every prompt again, after vLLM's own cache has evicted it."""
    return [[server.ask(prompt) for prompt in reference.prompts] for _ in range(2)]


def test_a_rank_that_computes_on_all_cores_is_started_with_few_spins(server: LocalServer) -> None:
    (rank,) = (process for process in server.processes() if "Worker" in process.command)
    environment = Path(f"/proc/{rank.pid}/environ").read_text().split("\0")
    assert f"GOMP_SPINCOUNT={SPINS}" in environment
    assert "openmp_wait" in server.log_file.read_text()


def test_evicted_prompts_are_loaded_from_host_memory(
    server: LocalServer, rounds: list[list[Answer]], reference: Reference
) -> None:
    first, again = rounds
    assert_same(first, reference.answers)
    assert_same(again, reference.answers)
    assert [answer.cached_tokens for answer in first] == [0] * len(first)
    assert [answer.cached_tokens for answer in again] == [PROMPT_BLOCKS * BLOCK] * len(again)
    assert server.metric("kv_offload_hit_tokens_total", tier="cpu") == len(again) * PROMPT_BLOCKS * BLOCK


def test_a_chunk_that_was_never_stored_is_a_miss_with_this_reason(
    server: LocalServer, rounds: list[list[Answer]]
) -> None:
    # vLLM looks up from the left and stops at the first miss; the rest of the prompt counts as missed too.
    missed = server.metric("kv_offload_miss_tokens_total", reason="not_stored")
    assert missed == len(rounds[0]) * PROMPT_BLOCKS * BLOCK
    assert server.metric("kv_offload_miss_tokens_total") == missed


def test_nothing_failed_and_no_bytes_were_dropped(server: LocalServer, rounds: list[list[Answer]]) -> None:
    assert server.metric("kv_offload_failures_total") == 0
    assert server.metric("kv_offload_dropped_bytes_total") == 0


@pytest.fixture(scope="module")
def query(server: LocalServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Query]:
    """Sends queries to a Prometheus that scrapes the server."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    with prometheus(f"127.0.0.1:{server.port}", tmp_path_factory.mktemp("prometheus")) as base:

        def ask(expression: str) -> list[dict[str, Any]]:
            for variable, value in {"$__rate_interval": "1m", "$job": ".*", "$engine": ".*"}.items():
                expression = expression.replace(variable, value)
            address = f"{base}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
            with urllib.request.urlopen(address, timeout=60) as reply:
                result: list[dict[str, Any]] = json.loads(reply.read())["data"]["result"]
            return result

        waiting.until(lambda: bool(ask("kv_offload_info")), 240, "a first scrape")
        yield ask


def test_prometheus_sees_hits_by_tier(server: LocalServer, rounds: list[list[Answer]], query: Query) -> None:
    expected = server.metric("kv_offload_hit_tokens_total", tier="cpu")
    assert expected > 0
    waiting.until(
        lambda: (
            [float(row["value"][1]) for row in query('kv_offload_hit_tokens_total{tier="cpu"}')] == [expected]
        ),
        240,
        f"{expected} hit tokens in Prometheus, actual: {query('kv_offload_hit_tokens_total')}",
    )


def test_prometheus_reads_the_contents_of_each_tier(
    server: LocalServer, rounds: list[list[Answer]], query: Query, reference: Reference
) -> None:
    held = len(reference.prompts) * PROMPT_BLOCKS

    def held_on(tier: str) -> bool:
        waiting.step(server)  # the server publishes new disk records in a step
        rows = query(f'kv_offload_tier_chunks{{tier="{tier}"}}')
        return any(float(row["value"][1]) >= held for row in rows)

    for tier in ("cpu", "fs"):
        waiting.until(
            lambda tier=tier: held_on(tier),  # type: ignore[misc]
            240,
            f"{held} chunks on {tier}: {query('kv_offload_tier_chunks')}",
        )
        ratio = f'kv_offload_tier_bytes{{tier="{tier}"}} / kv_offload_tier_capacity_bytes{{tier="{tier}"}}'
        waiting.until(  # a failed scrape leaves no data to divide
            lambda ratio=ratio: [0 < float(row["value"][1]) <= 1 for row in query(ratio)] == [True],  # type: ignore[misc]
            240,
            f"{ratio}: {query(ratio)}",
        )


def test_the_dashboard_shows_a_live_server(server: LocalServer, query: Query) -> None:
    prompts = make_prompts(8, PROMPT_BLOCKS, seed=9)  # more than host memory holds

    def come_back() -> bool:
        for prompt in prompts:
            server.ask(prompt, kv_transfer_params={"kv_offload_load_policy": "always"})
        return server.metric("kv_offload_hit_tokens_total", tier="fs") > 0

    waiting.until(come_back, 240, "prompts from disk")
    empty: list[str] = []

    def shown() -> bool:
        empty[:] = [panel.title for panel in panels() if not any(map(query, panel.queries.values()))]
        return len(empty) < 0.3 * len(panels())

    # A counter without events is absent.
    waiting.until(shown, 240, f"panels with data; empty: {empty}")
