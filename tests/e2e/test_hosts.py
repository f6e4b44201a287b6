# SPDX-License-Identifier: Apache-2.0
"""An engine whose two ranks are on two nodes of vLLM (here both on this machine).

It reloads its prompts, after a restart from the directories of both nodes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import waiting
from answers import BLOCK, assert_same, make_prompts
from forked import ForkedServer
from forked_process import Zygote
from local_server import LocalServer, free_port
from setting import GPU_BLOCKS, PROMPT_BLOCKS, Serve, patient_config

PROMPTS = 3
HEADLESS = Path(__file__).with_name("headless_node.py")


@contextmanager
def two_nodes(
    start: Serve, zygote: Zygote, model: Path, log_file: Path, roots: list[Path]
) -> Iterator[LocalServer]:
    """``roots``: a directory for each node."""
    configs = [patient_config("512MiB", root) for root in roots]
    arguments = ["--tensor-parallel-size", "2", "--distributed-executor-backend", "mp", "--nnodes", "2"]
    arguments += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    environment = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    # It is started by hand, because it serves no requests.
    other = ForkedServer(
        model, log_file, blocks=GPU_BLOCKS, kv_transfer=configs[1], zygote=zygote, arguments=arguments
    )
    _, _, _, *rest = other.command()
    other.process = zygote.start(
        [str(HEADLESS), *rest, "--node-rank", "1", "--headless"],
        {
            **os.environ,
            **environment,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        },
        log_file,
    )
    try:
        with start(
            model,
            configs[0],
            arguments=[*arguments, "--node-rank", "0"],
            environment={**environment, "VLLM_CPU_OMP_THREADS_BIND": "0"},
        ) as server:
            yield server
    finally:
        other.kill()


def test_an_engine_on_two_nodes_reloads_its_prompts(
    start: Serve, zygote: Zygote, model: Path, tmp_path: Path
) -> None:
    prompts = make_prompts(PROMPTS, PROMPT_BLOCKS, seed=5)
    roots = [tmp_path / "root-0", tmp_path / "root-1"]
    with two_nodes(start, zygote, model, tmp_path / "node-1.log", roots) as server:
        first = [server.ask(prompt) for prompt in prompts]
        again = [server.ask(prompt) for prompt in prompts]
        assert not any(answer.cached_tokens for answer in first)
        assert_same(again, first)
        assert [answer.cached_tokens // BLOCK for answer in again] == [PROMPT_BLOCKS] * PROMPTS
        assert server.metric("kv_offload_hit_tokens_total", tier="cpu") == PROMPTS * PROMPT_BLOCKS * BLOCK
        assert server.metric("kv_offload_lost_hosts") == 0
        for root in roots:
            waiting.recorded(root, PROMPTS * PROMPT_BLOCKS, server)
    with two_nodes(start, zygote, model, tmp_path / "node-1-again.log", roots) as server:
        reloaded = [server.ask(prompt) for prompt in prompts]
        assert_same(reloaded, first)
        assert [answer.cached_tokens // BLOCK for answer in reloaded] == [PROMPT_BLOCKS] * PROMPTS
        assert server.metric("kv_offload_hit_tokens_total", tier="fs") == PROMPTS * PROMPT_BLOCKS * BLOCK
