"""Under vLLM's MultiConnector, beside a connector that keeps its own copy of every prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answers import BLOCK, assert_same
from conftest import PROMPT_BLOCKS, Reference, Serve
from local_server import LocalServer, kv_transfer_config

PROMPTS = 3
WHOLE = PROMPT_BLOCKS * BLOCK


def multi_connector(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def example_connector(directory: Path) -> dict[str, Any]:
    """vLLM's own debugging connector: whole prompts in files, loaded within the forward pass."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(directory)},
    }


@pytest.fixture(scope="module")
def others_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("others")


@pytest.fixture(scope="module")
def server(start: Serve, model: Path, others_files: Path) -> Iterator[LocalServer]:
    transfer = multi_connector(kv_transfer_config("512MiB"), example_connector(others_files))
    with start(model, transfer) as server:
        yield server


def test_both_keep_every_prompt_and_ours_gives_it_back(
    server: LocalServer, reference: Reference, others_files: Path
) -> None:
    prompts = reference.prompts[:PROMPTS]
    first = [server.ask(prompt) for prompt in prompts]
    again = [server.ask(prompt) for prompt in prompts]
    assert_same([*first, *again], reference.answers[:PROMPTS] * 2)
    assert [answer.cached_tokens for answer in again] == [WHOLE] * PROMPTS
    assert server.metric("kv_offload_hit_tokens_total", tier="cpu") == PROMPTS * WHOLE
    assert len(list(others_files.glob("*/*.safetensors"))) > 0, "the other connector stored as well"


def test_what_ours_has_not_the_other_gives(
    server: LocalServer, start: Serve, model: Path, others_files: Path, reference: Reference
) -> None:
    server.stop()
    # Nothing of ours is left in memory; the files of the other are.
    transfer = multi_connector(kv_transfer_config("512MiB"), example_connector(others_files))
    with start(model, transfer) as fresh:
        answers = [fresh.ask(prompt) for prompt in reference.prompts[:PROMPTS]]
        assert_same(answers, reference.answers[:PROMPTS])
        assert [answer.cached_tokens for answer in answers] == [WHOLE] * PROMPTS
        assert fresh.metric("kv_offload_hit_tokens_total") == 0
        again = [fresh.ask(prompt) for prompt in reference.prompts[:PROMPTS]]
        assert_same(again, reference.answers[:PROMPTS])
