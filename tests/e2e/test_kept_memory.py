"""Host memory through four lives of a server of two ranks that has no tier: killed, killed again, reset."""

from __future__ import annotations

from collections.abc import Iterator
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
    """The names of what its processes leave in shared memory."""
    files = shared_memory.mapped(process.pid for process in server.processes())
    server.kill()
    return shared_memory.left(files)


@pytest.fixture(scope="module")
def kept(start: Serve, model: Path, reference: Reference) -> Iterator[set[str]]:
    """What the first life leaves: it computes all prompts and is killed."""
    server = serve(start, model)
    assert_same(ask_all(server, reference), reference.answers)
    names = kill(server)
    yield names
    for name in names:
        Path(shared_memory.DIRECTORY, name).unlink(missing_ok=True)


@pytest.fixture(scope="module")
def second(start: Serve, model: Path, reference: Reference, kept: set[str]) -> list[Answer]:
    """Asks again, and is killed."""
    server = serve(start, model)
    answers = ask_all(server, reference)
    hits = server.metric("kv_offload_hit_tokens_total", tier="cpu")
    assert hits >= sum(answer.cached_tokens for answer in answers)
    assert kill(server) == kept
    return answers


def test_a_kill_leaves_one_region_that_no_sweep_removes(kept: set[str]) -> None:
    (name,) = kept
    assert name.startswith("kv_offload-kept-")


def test_after_a_kill_whole_prompts_are_hit_in_host_memory(
    second: list[Answer], reference: Reference
) -> None:
    assert [answer.cached_tokens // BLOCK for answer in second] == [PROMPT_BLOCKS] * len(reference.prompts)
    assert_same(second, reference.answers)


def test_after_a_reset_nothing_is_left_for_the_next(
    start: Serve, model: Path, reference: Reference, kept: set[str], second: list[Answer]
) -> None:
    server = serve(start, model)
    assert server.ask(reference.prompts[0]).cached_tokens == PROMPT_BLOCKS * BLOCK
    waiting.until(
        lambda: bool(server.post("/reset_prefix_cache?reset_external=true")["success"]), 240, "a reset"
    )
    assert server.ask(reference.prompts[0]).cached_tokens == 0
    assert kill(server) == kept
    with serve(start, model) as server:
        answers = ask_all(server, reference)
    assert [answer.cached_tokens for answer in answers] == [0] * len(answers)
    assert_same(answers, reference.answers)
