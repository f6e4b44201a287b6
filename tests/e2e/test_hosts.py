# SPDX-License-Identifier: Apache-2.0
"""An engine whose two ranks are on two nodes of vLLM: this host, and an emulated second one.

vLLM itself waits for a node that is frozen or cut off. The engine must then continue with correct answers,
and use its chunks again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import records
import waiting
from answers import BLOCK, assert_same, make_prompts
from forked import ForkedServer
from forked_process import Zygote
from local_server import Answer, LocalServer, free_port
from second_host import SecondHost, problem
from setting import GPU_BLOCKS, PROMPT_BLOCKS, Serve, patient_config

PROMPTS = 3
HEADLESS = Path(__file__).with_name("headless_node.py")
RETURN_SECONDS = 240


@contextmanager
def two_nodes(
    start: Serve, zygote: Zygote, model: Path, log_file: Path, roots: list[Path]
) -> Iterator[tuple[LocalServer, SecondHost]]:
    """``roots``: a directory for each node."""
    if reason := problem():
        pytest.skip(f"an emulated host needs root: {reason}")
    host = SecondHost()
    configs = [patient_config("512MiB", root) for root in roots]
    arguments = ["--tensor-parallel-size", "2", "--distributed-executor-backend", "mp", "--nnodes", "2"]
    arguments += ["--master-addr", host.own_address, "--master-port", str(free_port())]
    # It is started by hand, because it serves no requests.
    other = ForkedServer(
        model, log_file, blocks=GPU_BLOCKS, kv_transfer=configs[1], zygote=zygote, arguments=arguments
    )
    _, _, _, *rest = other.command()
    other.process = zygote.start(
        [str(HEADLESS), *rest, "--node-rank", "1", "--headless"],
        {
            **os.environ,
            "KV_OFFLOAD_TEST_ADDRESS": host.address,
            "VLLM_HOST_IP": host.address,
            "GLOO_SOCKET_IFNAME": host.interface,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        },
        log_file,
    )
    try:
        host.connect(other)
        with start(
            model,
            configs[0],
            arguments=[*arguments, "--node-rank", "0"],
            environment={
                "VLLM_HOST_IP": host.own_address,
                "GLOO_SOCKET_IFNAME": host.own_interface,
                "VLLM_CPU_OMP_THREADS_BIND": "0",
            },
        ) as server:
            yield server, host
    finally:
        host.kill()


def blocks_found(answers: list[Answer]) -> list[int]:
    return [answer.cached_tokens // BLOCK for answer in answers]


def ask_during(
    fault: Callable[[], None],
    recovery: Callable[[], None],
    server: LocalServer,
    host: SecondHost,
    prompt: list[int],
) -> Answer:
    """Asks while the second host is faulty, until a connection with it was given up."""
    before = host.connections()
    assert before
    with ThreadPoolExecutor(1) as pool:
        fault()
        try:
            answer = pool.submit(server.ask, prompt)
            waiting.until(lambda: not before <= host.connections(), RETURN_SECONDS, "a lost connection")
        finally:
            recovery()
        return answer.result()


def wait_until_used_again(server: LocalServer, prompts: list[list[int]], right: list[Answer]) -> None:
    def used() -> bool:
        again = [server.ask(prompt) for prompt in prompts]
        assert_same(again, right)
        return (
            blocks_found(again) == [PROMPT_BLOCKS] * PROMPTS and server.metric("kv_offload_lost_hosts") == 0
        )

    waiting.until(used, RETURN_SECONDS, lambda: f"hits of all prompts\n{server.log_tail()}")


def test_an_engine_on_two_hosts_reloads_its_prompts(
    start: Serve, zygote: Zygote, model: Path, tmp_path: Path
) -> None:
    prompts = make_prompts(PROMPTS, PROMPT_BLOCKS, seed=5)
    roots = [tmp_path / "root-0", tmp_path / "root-1"]
    with two_nodes(start, zygote, model, tmp_path / "node-1.log", roots) as (server, host):
        first = [server.ask(prompt) for prompt in prompts]
        again = [server.ask(prompt) for prompt in prompts]
        assert not any(answer.cached_tokens for answer in first)
        assert_same(again, first)
        assert blocks_found(again) == [PROMPT_BLOCKS] * PROMPTS
        assert server.metric("kv_offload_hit_tokens_total", tier="cpu") == PROMPTS * PROMPT_BLOCKS * BLOCK
        assert server.metric("kv_offload_lost_hosts") == 0
        for root in roots:
            waiting.recorded(root, PROMPTS * PROMPT_BLOCKS, server)

        for fault, recovery in ((host.freeze, host.thaw), (host.cut, host.mend)):
            assert_same([ask_during(fault, recovery, server, host, prompts[0])], first[:1])
            wait_until_used_again(server, prompts, first)
        host.kill()  # vLLM does not survive that

    damaged = records.files(roots[1])[0]
    records.flip(damaged, records.HEADER)
    with two_nodes(start, zygote, model, tmp_path / "node-1-again.log", roots) as (server, _):
        reloaded = [server.ask(prompt) for prompt in prompts]
        assert_same(reloaded, first)
        assert blocks_found(reloaded).count(PROMPT_BLOCKS) == PROMPTS - 1
        assert server.metric("kv_offload_miss_tokens_total", reason="corrupt") >= BLOCK
        repaired = [server.ask(prompt) for prompt in prompts]
        assert_same(repaired, first)
        assert blocks_found(repaired) == [PROMPT_BLOCKS] * PROMPTS
