"""Under vLLM's MultiConnector, beside a connector that keeps its own copy of every prompt."""

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
# vLLM's ExampleConnector keeps only what the first step of a prompt computes: all of it, then.
ONE_STEP = ("--max-num-batched-tokens", "4096")


def multi_connector(directory: Path) -> dict[str, Any]:
    """Ours first, then vLLM's own debugging connector: whole prompts in files, loaded in the forward pass."""
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
    """The answers when nobody had anything: nothing was loaded."""
    answers = [server.ask(prompt) for prompt in PROMPTS]
    assert not any(answer.cached_tokens for answer in answers)
    return answers


def test_both_keep_every_prompt_and_ours_gives_it_back(
    server: LocalServer, computed: list[Answer], others_files: Path
) -> None:
    again = [server.ask(prompt) for prompt in PROMPTS]
    assert_same(again, computed)
    assert [answer.cached_tokens for answer in again] == WHOLE
    assert server.metric("kv_offload_hit_tokens_total", tier="cpu") == sum(WHOLE)
    assert len(list(others_files.glob("*/*.safetensors"))) > 0, "the other connector stored as well"


def test_what_ours_has_not_the_other_gives_and_ours_keeps(
    server: LocalServer, computed: list[Answer], start: Serve, model: Path, others_files: Path
) -> None:
    server.stop()  # with all that ours had; the files of the other are left
    with start(model, multi_connector(others_files), arguments=ONE_STEP) as fresh:
        answers = [fresh.ask(prompt) for prompt in PROMPTS]
        assert_same(answers, computed)
        assert [answer.cached_tokens for answer in answers] == WHOLE
        assert fresh.metric("kv_offload_hit_tokens_total") == 0
        again = [fresh.ask(prompt) for prompt in PROMPTS]
        assert_same(again, computed)
        assert fresh.metric("kv_offload_hit_tokens_total", tier="cpu") == sum(WHOLE)
