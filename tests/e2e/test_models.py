"""Another shape than full attention: sliding windows. (Two ranks: test_kills.)

Host memory is smaller than the working set, so that prompts come back from both tiers.
"""

from __future__ import annotations

from pathlib import Path

from answers import BLOCK, assert_same, make_prompts
from local_server import kv_transfer_config
from setting import PROMPT_BLOCKS, PROMPTS, Serve


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
