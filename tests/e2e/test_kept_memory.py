# SPDX-License-Identifier: Apache-2.0
"""Host memory over three lives of a server of two ranks without a tier: killed, reset, empty."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import shared_memory
import waiting
from answers import BLOCK, assert_same
from local_server import Answer, LocalServer, kv_transfer_config
from setting import PROMPT_BLOCKS, Reference, Serve


def serve(start: Serve, model: Path) -> LocalServer:
    return start(
        model,
        kv_transfer_config("1GiB", keep_host_memory=True),
        arguments=["--tensor-parallel-size", "2"],
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )


def ask_all(server: LocalServer, reference: Reference) -> list[Answer]:
    return [server.ask(prompt) for prompt in reference.prompts]


def kill(server: LocalServer) -> set[str]:
    """Kills the server; returns the names that its processes leave in shared memory."""
    files = shared_memory.mapped(process.pid for process in server.processes())
    server.kill()
    return shared_memory.left(files)


@pytest.fixture(scope="module")
def kept(start: Serve, model: Path, reference: Reference) -> Iterator[set[str]]:
    """Returns the shared memory that the first life leaves: it computes all prompts and is killed."""
    server = serve(start, model)
    assert_same(ask_all(server, reference), reference.answers)
    names = kill(server)
    yield names
    for name in names:
        Path(shared_memory.DIRECTORY, name).unlink(missing_ok=True)


@dataclass
class Second:
    """The second life: answers, reported loads, answer after a reset, and files left by its kill."""

    answers: list[Answer]
    hit_tokens: float
    after_reset: Answer
    left: set[str]


@pytest.fixture(scope="module")
def second(start: Serve, model: Path, reference: Reference, kept: set[str]) -> Second:
    server = serve(start, model)
    answers = ask_all(server, reference)
    hit_tokens = server.metric("kv_offload_hit_tokens_total", tier="cpu")
    waiting.reset(server)
    return Second(answers, hit_tokens, server.ask(reference.prompts[0]), kill(server))


def test_the_next_server_takes_over_the_one_region_that_a_kill_leaves(kept: set[str], second: Second) -> None:
    (name,) = kept
    assert name.startswith("kv_offload-kept-")
    assert second.left == kept


def test_after_a_kill_whole_prompts_are_hit_in_host_memory(second: Second, reference: Reference) -> None:
    cached = [answer.cached_tokens for answer in second.answers]
    assert cached == [PROMPT_BLOCKS * BLOCK] * len(reference.prompts)
    assert second.hit_tokens >= sum(cached)
    assert_same(second.answers, reference.answers)


def test_after_a_reset_the_next_server_finds_nothing(
    start: Serve, model: Path, reference: Reference, second: Second
) -> None:
    assert second.after_reset.cached_tokens == 0
    with serve(start, model) as server:
        answers = ask_all(server, reference)
    assert [answer.cached_tokens for answer in answers] == [0] * len(answers)
    assert_same(answers, reference.answers)
