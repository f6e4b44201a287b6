# SPDX-License-Identifier: Apache-2.0
"""A model with sliding windows instead of full attention. (Two ranks: test_kills.)

Host memory is smaller than the working set, so that prompts are loaded from both tiers.
"""

from __future__ import annotations

from pathlib import Path

import waiting
from answers import BLOCK, assert_same, make_prompts
from local_server import Answer, LocalServer
from setting import PROMPT_BLOCKS, PROMPTS, Serve, patient_config


def ask_and_wait_for_writes(server: LocalServer, prompt: list[int]) -> Answer:
    """Waits for the writes, because full host memory evicts chunks that a slow disk has not taken yet."""
    answer = server.ask(prompt)
    waiting.written(server)
    return answer


def test_a_sliding_window_model_reloads_from_host_memory_and_disk(
    start: Serve, sliding_model: Path, tmp_path: Path
) -> None:
    prompts = make_prompts(PROMPTS, PROMPT_BLOCKS, seed=3)
    with start(sliding_model, patient_config("72MiB", tmp_path), blocks=100) as server:
        first = [ask_and_wait_for_writes(server, prompt) for prompt in prompts]
        again = [server.ask(prompt) for prompt in reversed(prompts)]
        assert not any(answer.cached_tokens for answer in first)
        assert_same(again, first[::-1])
        assert [answer.cached_tokens // BLOCK for answer in again] == [PROMPT_BLOCKS] * PROMPTS
        assert server.metric("kv_offload_hit_tokens_total", tier="cpu") > 0
        assert server.metric("kv_offload_hit_tokens_total", tier="fs") > 0
