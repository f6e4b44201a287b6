# SPDX-License-Identifier: Apache-2.0
"""Two servers with one and two ranks share a directory in the canonical layout: each loads the other's
records, also while an evictor runs.

Both serve throughout, so no record is found by a scan at start: the second server was up before the first
write.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import records
import waiting
from answers import BLOCK, assert_same, make_prompts
from local_server import LocalServer
from setting import PROMPT_BLOCKS, Reference, Serve, patient_config

MEMORY = ("512MiB", "256MiB")  # of the first and the second server
WHOLE = PROMPT_BLOCKS * BLOCK


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def servers(start: Serve, model: Path, root: Path) -> Iterator[tuple[LocalServer, LocalServer]]:
    configs = [patient_config(memory, root) for memory in MEMORY]
    for config in configs:
        config["kv_connector_extra_config"]["canonical_layout"] = True
    first = start(model, configs[0])
    second = start(
        model,
        configs[1],
        arguments=["--tensor-parallel-size", "2"],
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    yield first, second
    first.stop()
    second.stop()


def cli(*arguments: str, status: int = 0) -> str:
    command = "from kv_offload.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, *arguments], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_each_engine_states_its_own_budget(servers: tuple[LocalServer, LocalServer], model: Path) -> None:
    facts = json.loads(cli("size", str(model), "--kv-dtype", "float32", "--block-size", "128", "--json"))
    per_token = facts["bytes_per_token"]["float32"]
    for server, size in zip(servers, (512, 256), strict=True):
        (line,) = [line for line in server.log_file.read_text().splitlines() if " tokens/GiB)" in line]
        tokens = (size << 20) // per_token
        assert f"cpu {size}.0 MiB = {tokens:,} tokens" in line, "kv-offload size predicts the same"


def test_a_server_loads_the_records_of_the_other(
    servers: tuple[LocalServer, LocalServer], root: Path, reference: Reference
) -> None:
    writer, reader = servers
    written = [writer.ask(prompt) for prompt in reference.prompts[:3]]
    waiting.recorded(root, 3 * PROMPT_BLOCKS, writer)
    waiting.known(3 * PROMPT_BLOCKS, reader)
    loaded = [reader.ask(prompt) for prompt in reference.prompts[:3]]
    assert_same([*written, *loaded], reference.answers[:3] * 2)
    assert [answer.cached_tokens for answer in loaded] == [WHOLE] * 3
    assert reader.metric("kv_offload_hit_tokens_total", tier="fs") == 3 * WHOLE
    assert len(records.files(root)) == 3 * PROMPT_BLOCKS, "an existing record is written again"


def test_the_first_server_loads_the_records_of_the_second(
    servers: tuple[LocalServer, LocalServer], root: Path, reference: Reference
) -> None:
    reader, writer = servers
    writer.ask(reference.prompts[4])
    waiting.recorded(root, 4 * PROMPT_BLOCKS, writer)
    # The first server has no notice of these records yet, so it looks for their names.
    loaded = reader.ask(reference.prompts[4])
    assert_same([loaded], [reference.answers[4]])
    assert loaded.cached_tokens == WHOLE


def test_both_servers_log_that_they_share_records(servers: tuple[LocalServer, LocalServer]) -> None:
    said = "canonical_layout: records are shared by servers of any tensor-parallel size that divides"
    for server in servers:
        assert said in server.log_file.read_text()
        (layout,) = [
            check["text"]
            for check in json.loads(cli("doctor", f"http://127.0.0.1:{server.port}", "--json"))["checks"]
            if check["name"] == "layout"
        ]
        assert layout == "canonical: other tensor-parallel sizes share the records"


def test_a_prompt_that_no_server_wrote_is_computed(servers: tuple[LocalServer, LocalServer]) -> None:
    # Negative control: no server wrote this prompt, so no server finds it.
    (prompt,) = make_prompts(1, PROMPT_BLOCKS, seed=7)
    assert servers[1].ask(prompt).cached_tokens == 0


def test_a_concurrent_evictor_costs_only_speed(
    servers: tuple[LocalServer, LocalServer], root: Path, reference: Reference
) -> None:
    used = json.loads(cli("stat", str(root), "--json"))["bytes"]
    report = json.loads(cli("evict", str(root), "--max-bytes", str(used // 2), "--json"))
    assert report["records"] > 0
    assert report["dead_namespaces"] == []
    assert report["bytes_after"] <= used // 2
    answers = [server.ask(prompt) for server in servers for prompt in reference.prompts[:5]]
    assert_same(answers, reference.answers[:5] * 2)
    for server in servers:
        assert server.metric("kv_offload_failures_total", op="read") == 0, (
            "an evicted record must be a miss, not a failure"
        )
    assert json.loads(cli("verify", str(root), "--json"))["damaged"] == []


def test_top_reads_a_real_server(servers: tuple[LocalServer, LocalServer]) -> None:
    url = f"http://127.0.0.1:{servers[1].port}"
    figures = json.loads(cli("top", url, "--once", "--interval", "0.2", "--json"))
    assert set(figures["tiers"]) == {"cpu", "fs"}
    assert figures["tiers"]["fs"]["hit_tokens"] >= 3 * WHOLE
    assert figures["tiers"]["cpu"]["capacity_bytes"] == 256 << 20
    assert figures["misses"]["not_stored"]["tokens"] > 0
    assert figures["info"][0]["copier"].startswith("host")
