# SPDX-License-Identifier: Apache-2.0
"""Our connector under vLLM's MultiConnector, next to a connector that keeps its own copy of every prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answers import BLOCK, assert_same, make_prompts
from local_server import Answer, LocalServer, kv_transfer_config
from setting import PROMPT_BLOCKS, Serve

PROMPTS = make_prompts(3, PROMPT_BLOCKS, seed=3)
WHOLE = [PROMPT_BLOCKS * BLOCK] * len(PROMPTS)
# vLLM's ExampleConnector keeps only the chunks that the first step of a prompt computes, so one step must
# compute all.
ONE_STEP = ("--max-num-batched-tokens", "4096")


def multi_connector(directory: Path) -> dict[str, Any]:
    """Configures ours first, then vLLM's debugging connector, which keeps whole prompts in files and loads
    them in the forward pass.
    """
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(directory)},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [kv_transfer_config("512MiB"), example]},
    }


@pytest.fixture(scope="module")
def others_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("others")


@pytest.fixture(scope="module")
def server(start: Serve, model: Path, others_files: Path) -> Iterator[LocalServer]:
    with start(model, multi_connector(others_files), arguments=ONE_STEP) as server:
        yield server


@pytest.fixture(scope="module")
def computed(server: LocalServer) -> list[Answer]:
    """Returns the answers while all caches are empty, so that nothing is loaded."""
    answers = [server.ask(prompt) for prompt in PROMPTS]
    assert not any(answer.cached_tokens for answer in answers)
    return answers


def test_both_connectors_keep_every_prompt_and_ours_reloads_it(
    server: LocalServer, computed: list[Answer], others_files: Path
) -> None:
    again = [server.ask(prompt) for prompt in PROMPTS]
    assert_same(again, computed)
    assert [answer.cached_tokens for answer in again] == WHOLE
    assert server.metric("kv_offload_hit_tokens_total", tier="cpu") == sum(WHOLE)
    assert len(list(others_files.glob("*/*.safetensors"))) > 0, "the other connector stored them too"


def test_the_other_connector_loads_a_prompt_that_ours_misses_and_ours_stores_it(
    server: LocalServer, computed: list[Answer], start: Serve, model: Path, others_files: Path
) -> None:
    server.stop()  # drops all our chunks; the files of the other connector stay
    with start(model, multi_connector(others_files), arguments=ONE_STEP) as fresh:
        answers = [fresh.ask(prompt) for prompt in PROMPTS]
        assert_same(answers, computed)
        assert [answer.cached_tokens for answer in answers] == WHOLE
        assert fresh.metric("kv_offload_hit_tokens_total") == 0
        again = [fresh.ask(prompt) for prompt in PROMPTS]
        assert_same(again, computed)
        assert fresh.metric("kv_offload_hit_tokens_total", tier="cpu") == sum(WHOLE)
