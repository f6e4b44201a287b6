# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the end-to-end tests: models, reference answers, and servers that are always stopped.

Servers are forks of one process that has imported vLLM (tests/python/zygote.py): a fork takes seconds, a
separate start half a minute. The examples are also started as users start them. The answers without the
connector are computed once for all files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(REPOSITORY / "examples"),
    str(REPOSITORY / "examples" / "monitoring"),
    str(REPOSITORY / "tests" / "slow_disk"),
    str(REPOSITORY / "tests" / "python"),
    str(Path(__file__).parent),
]

from answers import make_prompts  # noqa: E402
from forked import ForkedServer  # noqa: E402
from forked_process import Zygote  # noqa: E402
from local_server import LocalServer  # noqa: E402
from setting import EXAMPLES, GPU_BLOCKS, PROMPT_BLOCKS, PROMPTS, Reference, Serve  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            # Server starts, prefills and reads of gigabytes have to fit in, also on a slow machine.
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with Zygote(tmp_path_factory.mktemp("zygote") / "log", dict(os.environ)) as zygote:
        yield zygote


def _make_model(zygote: Zygote, directory: Path, kind: str) -> Path:
    script = EXAMPLES / "tiny_model.py"
    log = directory.with_suffix(".log")
    making = zygote.start([str(script), str(directory), "--kind", kind], dict(os.environ), log)
    assert making.wait(480) == 0, log.read_text()
    return directory


@pytest.fixture(scope="session")
def model(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _make_model(zygote, tmp_path_factory.mktemp("models") / "small", "small")


@pytest.fixture(scope="session")
def sliding_model(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _make_model(zygote, tmp_path_factory.mktemp("models") / "sliding", "sliding")


@pytest.fixture(scope="session")
def start(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Starts servers; kills the ones that are still running at the end of the session."""
    servers: list[LocalServer] = []
    logs = tmp_path_factory.mktemp("logs")

    def begin(model: Path, kv_transfer: dict[str, Any] | None = None, **options: Any) -> LocalServer:
        options.setdefault("blocks", GPU_BLOCKS)
        log = logs / f"server-{len(servers)}.log"
        server = ForkedServer(model, log, kv_transfer=kv_transfer, zygote=zygote, **options)
        server.environment.setdefault("VLLM_SERVER_DEV_MODE", "1")  # enables /reset_prefix_cache
        servers.append(server)
        server.start()
        return server

    yield begin
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def reference(start: Serve, model: Path) -> Reference:
    prompts = make_prompts(PROMPTS, PROMPT_BLOCKS)
    with start(model) as server:
        answers = [server.ask(prompt) for prompt in prompts]
    assert not any(answer.cached_tokens for answer in answers)
    return Reference(prompts, answers)
