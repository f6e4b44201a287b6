"""Two servers and one Redis server: what one computes the other loads; the Redis server dies and is back.

Its password is in the environment of the servers, and in no line that they log.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import waiting
from answers import BLOCK, assert_same
from local_server import LocalServer, kv_transfer_config
from setting import PROMPT_BLOCKS, Reference, Serve

WHOLE = PROMPT_BLOCKS * BLOCK
ASK_SECONDS = 60  # for one answer, whatever the Redis server does
PASSWORD = "correct-horse-e2e"


def step(server: LocalServer) -> None:
    waiting.step(server, timeout=ASK_SECONDS)


class Redis:
    """A redis-server on a socket of its own, ended by its pid."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "s"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = [
            "--port",
            "0",
            "--unixsocket",
            str(self.socket),
            "--save",
            "",
            "--dir",
            str(self.directory),
        ]
        options += ["--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru", "--requirepass", PASSWORD]
        self.process = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
        waiting.until(lambda: self.cli("PING") == "PONG", 30, "redis-server answers")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def cli(self, *words: str) -> str:
        command = ["redis-cli", "-s", str(self.socket), "-a", PASSWORD, "--no-auth-warning", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()

    def records(self) -> int:
        return int(self.cli("DBSIZE")) - 1  # the epoch

    def wait_for(self, count: int, server: LocalServer) -> None:
        def enough() -> bool:
            step(server)
            return self.records() >= count

        waiting.until(enough, 60, f"{count} records on the server\n{server.log_tail()}")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    running = Redis(tmp_path_factory.mktemp("redis"))
    running.start()
    yield running
    running.kill()


@pytest.fixture(scope="module")
def servers(start: Serve, model: Path, redis: Redis) -> Iterator[tuple[LocalServer, LocalServer]]:
    tier = {
        "type": "redis",
        "url": f"unix://{redis.socket}",
        "password_env": "KV_E2E_PASSWORD",
        "op_deadline_ms": 30_000,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KV_E2E_PASSWORD", PASSWORD)
        config = kv_transfer_config(
            "256MiB", secondary_tiers=[tier], load_policy="always", lookup_deadline_ms=60_000
        )
        first, second = (start(model, config) for _ in range(2))
    yield first, second
    first.stop()
    second.stop()


def test_what_one_server_computed_the_other_loads(
    servers: tuple[LocalServer, LocalServer], redis: Redis, reference: Reference
) -> None:
    writer, reader = servers
    written = [writer.ask(prompt) for prompt in reference.prompts[:3]]
    redis.wait_for(3 * PROMPT_BLOCKS, writer)
    loaded = [reader.ask(prompt) for prompt in reference.prompts[:3]]
    assert_same([*written, *loaded], reference.answers[:3] * 2)
    assert [answer.cached_tokens for answer in loaded] == [WHOLE] * 3
    assert reader.metric("kv_offload_hit_tokens_total", tier="redis") == 3 * WHOLE
    assert reader.metric("kv_offload_failures_total") == 0


def test_a_server_that_dies_and_comes_back_empty_costs_time_only(
    servers: tuple[LocalServer, LocalServer], redis: Redis, reference: Reference
) -> None:
    first, second = servers
    redis.kill()
    answers = [server.ask(prompt, timeout=ASK_SECONDS) for server in servers for prompt in reference.prompts]
    assert_same(answers, reference.answers * 2)

    def failed() -> bool:
        step(first)
        return first.metric("kv_offload_failures_total", tier="redis") > 0

    waiting.until(failed, 60, f"failures are counted\n{first.log_tail()}")
    redis.start()
    assert redis.records() <= 0, "what is found later was written later"

    fresh = iter(range(8, 2000))

    def used_again() -> bool:
        # New ones: what is in host memory was offered to the tier once, while it was away, and is not again.
        first.ask([next(fresh)] * (2 * BLOCK), max_tokens=1, timeout=ASK_SECONDS)
        return redis.records() > 0

    waiting.until(used_again, 120, f"records on the server that came back\n{first.log_tail()}")
    again = [second.ask(prompt, timeout=ASK_SECONDS) for prompt in reference.prompts]
    assert_same(again, reference.answers)


def test_no_log_has_the_password(servers: tuple[LocalServer, LocalServer]) -> None:
    for server in servers:
        text = server.log_file.read_text()
        assert "redis unix://" in text, "the boot line names the tier"
        assert PASSWORD not in text
