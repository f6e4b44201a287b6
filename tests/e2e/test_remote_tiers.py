# SPDX-License-Identifier: Apache-2.0
"""Two servers share one store, for each kind of remote tier. One loads the chunks that the other computes,
also with one prefill and one decode server. A slow store is bypassed by recomputing. The store dies and
returns empty while requests run.

The store's password or keys are in the servers' environment and must not appear in any log line.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import pytest
import waiting
from answers import BLOCK, assert_same
from local_server import Answer, LocalServer, kv_transfer_config
from mooncake_store import MooncakeProcesses
from proxies import AWAITING, DEMO, NIXL, P2P, Protocol, Proxy
from s3_server import ACCESS, BUCKET, SECRET, S3Server
from setting import PROMPT_BLOCKS, Reference, Serve
from slow_link import SlowLink

WHOLE = PROMPT_BLOCKS * BLOCK
REQUEST_TIMEOUT_SECONDS = 120  # per answer, whatever the store does
HOST_MEMORY = "56MiB"  # two of the six prompts: a repeated prompt is loaded from the store
ONE_PROMPT = "28MiB"
# bytes per second: a prompt takes 25 s to load and about 3 s to compute on two old cores
THROTTLED = 1_000_000
PASSWORD = "correct-horse-e2e"


def step(server: LocalServer) -> None:
    waiting.step(server, timeout=REQUEST_TIMEOUT_SECONDS)


class Redis:
    """A redis-server on a socket of its own; ended by its pid."""

    environment: ClassVar = {"KV_E2E_PASSWORD": PASSWORD}
    secret = PASSWORD

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "s"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts an empty server."""
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
        waiting.until(lambda: self._cli("PING") == "PONG", 120, "redis-server answers")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def tier(self) -> dict[str, Any]:
        return {"type": "redis", "url": f"unix://{self.socket}", "password_env": "KV_E2E_PASSWORD"}

    def link(self) -> SlowLink:
        return SlowLink(str(self.socket))

    def tier_over(self, link: SlowLink) -> dict[str, Any]:
        return self.tier() | {"url": f"redis://127.0.0.1:{link.port}"}

    def records(self) -> int:
        return int(self._cli("DBSIZE")) - 1  # minus the epoch

    def _cli(self, *words: str) -> str:
        command = ["redis-cli", "-s", str(self.socket), "-a", PASSWORD, "--no-auth-warning", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout.strip()


class S3:
    """A bucket of an S3 server on loopback."""

    environment: ClassVar = {
        "AWS_ACCESS_KEY_ID": ACCESS,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": "",
    }
    secret = SECRET

    def __init__(self, directory: Path) -> None:
        self.server = S3Server(directory)

    def start(self) -> None:
        """Starts the server again, empty, at the same address."""
        shutil.rmtree(self.server.directory / "data", ignore_errors=True)
        self.server.start()

    def kill(self) -> None:
        self.server.kill()

    def tier(self) -> dict[str, Any]:
        return {"type": "s3", "bucket": BUCKET, "endpoint": self.server.endpoint}

    def link(self) -> SlowLink:
        return SlowLink(("127.0.0.1", self.server.ports["s3"]))

    def tier_over(self, link: SlowLink) -> dict[str, Any]:
        return self.tier() | {"endpoint": f"http://127.0.0.1:{link.port}"}

    def records(self) -> int:
        return len(self.server.records())


class Mooncake:
    """A Mooncake master and a storage process, on loopback."""

    environment: ClassVar = {}
    secret = "hunter2, as it has none"

    def __init__(self, directory: Path) -> None:
        self.processes = MooncakeProcesses(directory, holder_bytes=1 << 30)

    def start(self) -> None:
        """Starts the processes again, empty, at the same address."""
        self.processes.start_master()
        self.processes.start_holder()

    def kill(self) -> None:
        self.processes.kill(self.processes.master)
        self.processes.kill(self.processes.holder)

    def tier(self) -> dict[str, Any]:
        return {"type": "mooncake", "master": self.processes.address}

    def records(self) -> int:
        return self.processes.objects() - 1  # minus the epoch


Store = Redis | S3 | Mooncake
LONG = bool(os.environ.get("KV_OFFLOAD_LONG"))
STORES = [Redis, S3, *([Mooncake] if LONG else [])]
# What does not depend on the kind of store is tested with one of them, except in long runs.
ONE_STORE = STORES if LONG else STORES[:1]


@pytest.fixture(scope="module", params=STORES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    running: Store = request.param(tmp_path_factory.mktemp("store"))
    try:
        running.start()
        yield running
    finally:
        running.kill()


def start_over(
    start: Serve, model: Path, store: Store, tier: dict[str, Any], host_memory: str, **options: Any
) -> LocalServer:
    tier = {**tier, "op_timeout_ms": 30_000}
    config = kv_transfer_config(host_memory, secondary_tiers=[tier], lookup_timeout_ms=60_000, **options)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        return start(model, config)


@pytest.fixture(scope="module")
def servers(start: Serve, model: Path, store: Store) -> Iterator[tuple[LocalServer, LocalServer]]:
    first, second = (
        start_over(start, model, store, store.tier(), HOST_MEMORY, load_policy="always") for _ in range(2)
    )
    yield first, second
    first.stop()
    second.stop()


def wait_for_records(store: Store, count: int, server: LocalServer) -> None:
    def enough() -> bool:
        step(server)
        return store.records() >= count

    waiting.until(enough, 180, f"{count} records in the store\n{server.log_tail()}")


def test_a_server_loads_the_chunks_that_another_server_computed(
    servers: tuple[LocalServer, LocalServer], store: Store, reference: Reference
) -> None:
    writer, reader = servers
    written = []
    for prompt in reference.prompts[:3]:  # host memory holds two prompts that are being written
        written.append(writer.ask(prompt))
        wait_for_records(store, len(written) * PROMPT_BLOCKS, writer)
    loaded = [reader.ask(prompt) for prompt in reference.prompts[:3]]
    assert_same([*written, *loaded], reference.answers[:3] * 2)
    assert [answer.cached_tokens for answer in loaded] == [WHOLE] * 3
    assert reader.metric("kv_offload_hit_tokens_total", tier=store.tier()["type"]) == 3 * WHOLE
    assert reader.metric("kv_offload_failures_total") == 0


class Served:
    """The prompt work that a server has done since this object was made, by the server's counters."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self._before = self._read()

    def _read(self) -> tuple[float, float, float]:
        """Returns computed prompt tokens, loaded prompt tokens, and answer tokens."""
        by_source = "vllm:prompt_tokens_by_source_total"
        return (
            self._server.metric(by_source, source="local_compute"),
            self._server.metric(by_source, source="external_kv_transfer"),
            self._server.metric("vllm:generation_tokens_total"),
        )

    def wait_for(self, computed: int, loaded: int, answered: int) -> None:
        def so_far() -> tuple[float, ...]:
            return tuple(now - before for now, before in zip(self._read(), self._before, strict=True))

        wanted = (computed, loaded, answered)
        waiting.until(
            lambda: so_far() == wanted, 240, lambda: f"computed, loaded, answered: {so_far()}, {wanted}"
        )


@pytest.mark.parametrize("store", ONE_STORE, indirect=True)
@pytest.mark.parametrize("protocol", [DEMO, NIXL, P2P], ids=lambda protocol: protocol.name)
def test_with_a_vllm_proxy_one_server_prefills_and_the_other_decodes(
    servers: tuple[LocalServer, LocalServer], store: Store, reference: Reference, protocol: Protocol
) -> None:
    prefill, decode = servers
    prompt, expected = reference.prompts[3], reference.answers[3]
    before = store.records()

    def written() -> None:
        # The prefill server gets no further request: it must write its chunks anyway.
        waiting.until(
            lambda: store.records() >= before + PROMPT_BLOCKS,
            180,
            f"the records of a prompt\n{prefill.log_tail()}",
        )

    prefilled, decoded = Served(prefill), Served(decode)
    with Proxy(prefill, decode, protocol, between=written) as both:
        answer = both.ask(prompt, cache_salt=protocol.name)  # new to both servers
    assert_same([answer], [expected])
    assert answer.cached_tokens == WHOLE, "every full block must be loaded"
    prefilled.wait_for(computed=len(prompt), loaded=0, answered=1)
    decoded.wait_for(computed=len(prompt) - WHOLE, loaded=WHOLE, answered=len(expected.token_ids))


def ask_at_once(
    protocol: Protocol, servers: tuple[LocalServer, LocalServer], reference: Reference
) -> list[Answer]:
    """Returns checked answers from a proxy that does not wait; the prompts are new to both servers."""
    with Proxy(*servers, protocol) as both:
        answers = [
            both.ask(prompt, cache_salt=f"{protocol.name}, at once") for prompt in reference.prompts[4:]
        ]
    assert_same(answers, reference.answers[4:])
    return answers


@pytest.mark.parametrize("store", ONE_STORE, indirect=True)
def test_a_proxy_that_does_not_wait_for_records_costs_only_time(
    servers: tuple[LocalServer, LocalServer], reference: Reference
) -> None:
    ask_at_once(DEMO, servers, reference)


@pytest.mark.parametrize("store", ONE_STORE, indirect=True)
def test_a_server_that_waits_for_records_loads_whole_prompts_if_the_proxy_does_not_wait(
    servers: tuple[LocalServer, LocalServer], reference: Reference
) -> None:
    answers = ask_at_once(AWAITING, servers, reference)
    assert [answer.cached_tokens for answer in answers] == [WHOLE] * len(answers)


@pytest.mark.parametrize("store", ONE_STORE, indirect=True)
def test_the_server_recomputes_when_the_store_is_slower(
    start: Serve, model: Path, store: Store, reference: Reference
) -> None:
    if isinstance(store, Mooncake):
        pytest.skip("its clients exchange their addresses, so no proxy can be placed between them")
    prompts = itertools.cycle(zip(reference.prompts[:3], reference.answers[:3], strict=True))
    with store.link() as link, start_over(start, model, store, store.tier_over(link), ONE_PROMPT) as server:

        def ask() -> None:
            prompt, expected = next(prompts)
            assert_same([server.ask(prompt, timeout=REQUEST_TIMEOUT_SECONDS)], [expected])

        def hits() -> float:
            return server.metric("kv_offload_hit_tokens_total", tier=store.tier()["type"])

        def missed() -> float:
            return server.metric("kv_offload_miss_tokens_total", reason="recompute_cheaper")

        def happens(what: str, is_seen: Callable[[], bool]) -> None:
            def asked() -> bool:
                ask()
                return is_seen()

            waiting.until(asked, 300, f"{what}\n{server.log_tail()}")

        answer = server.ask(reference.prompts[5])  # the server learns the cost of computing from this prompt
        assert_same([answer], [reference.answers[5]])
        assert answer.cached_tokens == 0
        happens("a load", lambda: hits() >= WHOLE)
        link.bytes_per_second = THROTTLED
        # the server must detect the slow store itself
        happens("a prompt that is computed by choice", lambda: missed() > 0)
        loaded, computed = hits(), missed()
        for _ in range(3):
            ask()
        assert hits() == loaded
        # of three prompts; chunks that are still in host memory do not count as missed
        assert missed() >= computed + 2 * WHOLE

        link.bytes_per_second = 0
        happens("loads again", lambda: hits() >= loaded + WHOLE)
        assert server.metric("kv_offload_failures_total") == 0


class Asking:
    """Sends the prompts to a server in turn, repeatedly, while the block runs."""

    def __init__(self, server: LocalServer, reference: Reference) -> None:
        self.server, self.reference = server, reference
        self.answers: list[Answer] = []
        self._errors: list[Exception] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        try:
            while not self._done.is_set():
                prompt = self.reference.prompts[len(self.answers) % len(self.reference.prompts)]
                self.answers.append(self.server.ask(prompt, timeout=REQUEST_TIMEOUT_SECONDS))
        except Exception as error:
            self._errors.append(error)

    def wait_for_more(self, count: int) -> None:
        enough = len(self.answers) + count
        waiting.until(
            lambda: len(self.answers) >= enough or bool(self._errors),
            600,
            f"{count} more answers\n{self.server.log_tail()}",
        )
        assert not self._errors, f"{self._errors}\n{self.server.log_tail()}"

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def check(self) -> None:
        assert not self._errors, f"{self._errors}\n{self.server.log_tail()}"
        known = self.reference.answers
        assert_same(self.answers, [known[number % len(known)] for number in range(len(self.answers))])


def test_a_store_that_is_killed_and_returns_empty_during_requests_costs_only_time(
    servers: tuple[LocalServer, LocalServer], store: Store, reference: Reference
) -> None:
    first, second = servers
    with Asking(first, reference) as one, Asking(second, reference) as other:
        for happens in (lambda: None, store.kill, store.start):
            happens()
            for asking in (one, other):
                asking.wait_for_more(3)
    one.check()
    other.check()

    def failed() -> bool:
        step(first)
        return first.metric("kv_offload_failures_total", tier=store.tier()["type"]) > 0

    waiting.until(failed, 60, f"failures are counted\n{first.log_tail()}")
    fresh = iter(range(8, 2000))

    def written() -> float:
        return first.metric("kv_offload_write_bytes_total", tier=store.tier()["type"])

    before = written()

    def used_again() -> bool:
        # New prompts: chunks in host memory were offered to the tier once, while it was down, and are not
        # offered again.
        first.ask([next(fresh)] * (2 * BLOCK), max_tokens=1, timeout=REQUEST_TIMEOUT_SECONDS)
        return written() > before

    waiting.until(used_again, 180, f"records on the server that came back\n{first.log_tail()}")
    again = [second.ask(prompt, timeout=REQUEST_TIMEOUT_SECONDS) for prompt in reference.prompts[:2]]
    assert_same(again, reference.answers[:2])


def test_no_log_contains_a_secret(servers: tuple[LocalServer, LocalServer], store: Store) -> None:
    tier = store.tier()
    for server in servers:
        text = server.log_file.read_text()
        assert f"{tier['type']} {tier.get('url') or tier.get('master', BUCKET)}" in text, (
            "the startup summary must name the tier"
        )
        assert store.secret not in text
