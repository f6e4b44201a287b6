# SPDX-License-Identifier: Apache-2.0
"""The files in examples/ run unmodified. (serve.sh and the live dashboard: test_serving.)

The demonstration starts vLLM as users do, twice: the second start loads the records of the first.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from answers import BLOCK
from forked_process import Zygote
from setting import EXAMPLES, SCRIPT_ENVIRONMENT


def run(script: str, *arguments: str, given: str | None = None, seconds: float = 480) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=seconds,
        env=SCRIPT_ENVIRONMENT,
    )
    assert done.returncode == 0, f"{script}: {done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def test_offline_example_reloads_from_host_memory_and_from_disk(
    zygote: Zygote, model: Path, tmp_path: Path
) -> None:
    def reloaded() -> list[tuple[int, int]]:
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        command = [str(EXAMPLES / "offline.py"), str(model), "--directory", str(tmp_path / "kv")]
        status = zygote.start(command, SCRIPT_ENVIRONMENT, log).wait(480)
        output = log.read_text(errors="replace")
        assert status == 0, output[-8000:]
        return [(int(a), int(b)) for a, b in re.findall(r"(\d+) of (\d+) tokens were not computed", output)]

    (first, _), (again, tokens) = reloaded()
    assert first == 0
    assert again >= tokens // BLOCK * BLOCK - BLOCK > 0
    # the script exits before the disk has taken all chunks; a rerun computes and writes the missing ones
    for _ in range(5):
        (after_restart, tokens), _ = reloaded()
        if after_restart >= tokens // BLOCK * BLOCK - BLOCK:
            break
    assert after_restart >= tokens // BLOCK * BLOCK - BLOCK


def test_demo_shows_the_same_text_three_times(tmp_path: Path) -> None:
    output = run("demo.py", "--directory", str(tmp_path), "--prompts", "2", "--tokens", "2048", seconds=1500)
    assert output.count("yes") == 2


def test_a_migrated_configuration_keeps_its_options() -> None:
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
