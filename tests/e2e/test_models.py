"""Other shapes than one rank with full attention: tensor parallel, sliding windows.

Host memory is smaller than the working set, so that prompts come back from both tiers.
"""

from __future__ import annotations

from pathlib import Path

from answers import BLOCK, assert_same, make_prompts
from conftest import PROMPT_BLOCKS, PROMPTS, Reference, Serve
from local_server import kv_transfer_config


def test_two_ranks_reload_from_host_memory_and_disk(
    start: Serve, model: Path, reference: Reference, tmp_path: Path
) -> None:
    with start(
        model,
        kv_transfer_config("72MiB", tmp_path),
        arguments=["--tensor-parallel-size", "2"],
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    ) as server:
        first = [server.ask(prompt) for prompt in reference.prompts]
        again = [server.ask(prompt) for prompt in reversed(reference.prompts)]
        # Two ranks sum in another order than one: rounding, far below the bound.
        assert_same(first, reference.answers)
        assert_same(again, reference.answers[::-1])
        assert [answer.cached_tokens // BLOCK for answer in again] == [PROMPT_BLOCKS] * PROMPTS
        assert server.metric("kv_offload_hit_tokens_total", tier="cpu") > 0
        assert server.metric("kv_offload_hit_tokens_total", tier="fs") > 0


def test_a_sliding_window_model_reloads_from_host_memory_and_disk(
    start: Serve, sliding_model: Path, tmp_path: Path
) -> None:
    prompts = make_prompts(PROMPTS, PROMPT_BLOCKS, seed=3)
    with start(sliding_model, kv_transfer_config("72MiB", tmp_path), blocks=100) as server:
        first = [server.ask(prompt) for prompt in prompts]
        again = [server.ask(prompt) for prompt in reversed(prompts)]
        assert not any(answer.cached_tokens for answer in first)
        assert_same(again, first[::-1])
        assert [answer.cached_tokens // BLOCK for answer in again] == [PROMPT_BLOCKS] * PROMPTS
        assert server.metric("kv_offload_hit_tokens_total", tier="cpu") > 0
        assert server.metric("kv_offload_hit_tokens_total", tier="fs") > 0
