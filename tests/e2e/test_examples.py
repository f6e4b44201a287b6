"""What examples/ holds runs as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from answers import BLOCK, assert_same
from conftest import PROMPT_BLOCKS, REPOSITORY, Reference
from local_server import LocalServer

EXAMPLES = REPOSITORY / "examples"
# The scripts call `python` and `kv-offload`: those of the running interpreter.
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def run(script: str, *arguments: str, given: str | None = None, seconds: float = 240) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=seconds,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, f"{script}: {done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


@dataclass
class ScriptServer(LocalServer):
    """The server that serve.sh starts, where LocalServer would start its own."""

    def command(self) -> list[str]:
        options = super().command()
        return [
            "bash",
            str(EXAMPLES / "serve.sh"),
            str(self.model),
            *options[options.index(str(self.model)) + 1 :],
        ]


def test_serve_script_serves_with_the_plugin(model: Path, reference: Reference, tmp_path: Path) -> None:
    server = ScriptServer(
        model,
        tmp_path / "log",
        blocks=40,
        environment={
            "PATH": ENVIRONMENT["PATH"],
            "KV_MEMORY": "512MiB",
            "KV_DIRECTORY": str(tmp_path / "kv"),
            "KV_DISK_SIZE": "1GiB",
        },
    )
    with server:
        first = [server.ask(prompt) for prompt in reference.prompts[:3]]
        again = [server.ask(prompt) for prompt in reference.prompts[:3]]
    assert_same([*first, *again], reference.answers[:3] * 2)
    assert [answer.cached_tokens for answer in again] == [PROMPT_BLOCKS * BLOCK] * 3


def test_offline_example_reloads_from_host_memory_and_from_disk(model: Path, tmp_path: Path) -> None:
    def reloaded() -> list[tuple[int, int]]:
        output = run("offline.py", str(model), "--directory", str(tmp_path / "kv"))
        return [(int(a), int(b)) for a, b in re.findall(r"(\d+) of (\d+) tokens were not computed", output)]

    (first, _), (again, tokens) = reloaded()
    assert first == 0
    assert again >= tokens // BLOCK * BLOCK - BLOCK > 0
    (after_restart, tokens), _ = reloaded()
    assert after_restart >= tokens // BLOCK * BLOCK - BLOCK


def test_demo_shows_the_same_text_three_times(tmp_path: Path) -> None:
    output = run("demo.py", "--directory", str(tmp_path), "--prompts", "2", "--tokens", "2048", seconds=540)
    assert output.count("yes") == 2


def test_live_monitoring_draws_the_dashboard(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib (extra: bench)")
    file = tmp_path / "dashboard.png"
    output = run("monitoring/live.py", str(file), "--seconds", "40", seconds=300)
    shown = re.search(r"(\d+) of (\d+) panels have data", output)
    assert shown is not None
    assert int(shown.group(1)) > 0.7 * int(shown.group(2)), "counters of what did not happen are not there"
    assert file.read_bytes().startswith(b"\x89PNG")


def test_migration_keeps_the_meaning() -> None:
    before = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 8 << 30,
            "secondary_tiers": [
                {"type": "fs", "root_dir": "/mnt/kv", "n_read_threads": 8, "n_write_threads": 4}
            ],
        },
    }
    after = json.loads(run("migrate.py", given=json.dumps(before)))
    extra = after["kv_connector_extra_config"]
    assert extra.pop("spec_name") == "KVOffloadSpec"
    assert extra.pop("spec_module_path") == "kv_offload.specs"
    assert extra["secondary_tiers"][0].pop("max_bytes") == "100GiB"
    before["kv_connector_extra_config"].pop("spec_name")  # type: ignore[attr-defined]
    assert after == before
