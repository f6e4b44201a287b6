"""Shared by the end-to-end tests: models, reference answers, and servers that are ended whatever happens.

A server takes half a minute to start, so one start serves several checks, and the answers without the
connector are asked once for all files.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(REPOSITORY / "examples"),
    str(REPOSITORY / "tests" / "slow_disk"),
    str(REPOSITORY / "tests" / "python"),
    str(Path(__file__).parent),
]

from answers import make_prompts  # noqa: E402
from local_server import Answer, LocalServer  # noqa: E402

PROMPT_BLOCKS = 24
GPU_BLOCKS = 40  # one prompt at a time, and a rest: each prompt pushes the one before out
PROMPTS = 6

Serve = Callable[..., LocalServer]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


def _make_model(directory: Path, kind: str) -> Path:
    # In a process of its own: torch and transformers warn on import, and warnings are errors here.
    script = REPOSITORY / "examples" / "tiny_model.py"
    subprocess.run([sys.executable, str(script), str(directory), "--kind", kind], check=True, timeout=120)
    return directory


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _make_model(tmp_path_factory.mktemp("models") / "small", "small")


@pytest.fixture(scope="session")
def sliding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _make_model(tmp_path_factory.mktemp("models") / "sliding", "sliding")


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Starts a server; what a test leaves running is killed at the end of the session."""
    servers: list[LocalServer] = []
    logs = tmp_path_factory.mktemp("logs")

    def begin(model: Path, kv_transfer: dict[str, Any] | None = None, **options: Any) -> LocalServer:
        options.setdefault("blocks", GPU_BLOCKS)
        server = LocalServer(model, logs / f"server-{len(servers)}.log", kv_transfer=kv_transfer, **options)
        server.environment.setdefault("VLLM_SERVER_DEV_MODE", "1")  # gives /reset_prefix_cache
        servers.append(server)
        server.start()
        return server

    yield begin
    for server in servers:
        server.kill()


@dataclass(frozen=True)
class Reference:
    """Prompts and what the server without the connector says to them."""

    prompts: list[list[int]]
    answers: list[Answer]


@pytest.fixture(scope="session")
def reference(start: Serve, model: Path) -> Reference:
    prompts = make_prompts(PROMPTS, PROMPT_BLOCKS)
    with start(model) as server:
        answers = [server.ask(prompt) for prompt in prompts]
    assert not any(answer.cached_tokens for answer in answers)
    return Reference(prompts, answers)
