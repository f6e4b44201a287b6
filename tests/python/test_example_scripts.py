# SPDX-License-Identifier: Apache-2.0
"""The scripts of examples/ that can be tested without a server."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kv_offload.hints import parse, type_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def served_with(tmp_path, *options):
    """Returns the command line that serve.sh would run, with fakes for the programs that it calls."""
    for name, text in {
        "kv-offload": "echo '{}'",
        "python": "exit 0",  # vllm is installed
        "vllm": 'printf "%s\\n" vllm "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    done = subprocess.run(
        ["bash", str(EXAMPLES / "serve.sh"), "org/model", *options],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    return done.stdout.splitlines()


def test_serve_gives_queued_chunks_time_to_reach_the_disk(tmp_path):
    command = served_with(tmp_path)
    assert command[:3] == ["vllm", "serve", "org/model"]
    assert command[command.index("--shutdown-timeout") + 1] == "30"


def test_an_option_of_the_caller_is_last_and_so_takes_effect(tmp_path):
    assert served_with(tmp_path, "--shutdown-timeout", "5")[-2:] == ["--shutdown-timeout", "5"]


def migrated(given):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "migrate.py")],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def of_vllm(*tiers):
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 30, "secondary_tiers": tiers}
    return json.dumps({"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra})


def test_a_migrated_configuration_gets_a_name_and_a_bound():
    done = migrated(of_vllm({"type": "fs", "root_dir": "/mnt/kv"}))
    assert done.returncode == 0, done.stderr
    extra = json.loads(done.stdout)["kv_connector_extra_config"]
    assert extra["spec_name"] == "KVOffloadSpec"
    assert extra["secondary_tiers"] == [{"max_bytes": "100GiB", "type": "fs", "root_dir": "/mnt/kv"}]


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (
            of_vllm({"type": "fs", "root_dir": "/mnt/kv", "max_disk_gib": 20}),
            "max_bytes limits the size of a tier",
        ),
        (of_vllm({"type": "p2p"}), "is of type 'p2p'"),
        (of_vllm("fs"), "must be a table"),
        ('{"kv_connector_extra_config": {"secondary_tiers": {"type": "fs"}}}', "it must be a list"),
        ('{"kv_connector_extra_config": 1}', "it is not a table"),
        ("[1]", "it is not a table"),
        ("{", "the input is not JSON"),
        ("", "the input is not JSON"),
    ],
)
def test_a_configuration_that_cannot_be_migrated_is_reported(given, part):
    done = migrated(given)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert ("not JSON" in done.stderr) == ("not JSON" in part)
    assert part in done.stderr


class FakeClient:
    """Answers with a tool call, then with text, and keeps the requests."""

    def __init__(self):
        self.requests = []
        self.chat = SimpleNamespace(completions=self)

    def create(self, **request):
        self.requests.append(json.loads(json.dumps(request)))
        turns = sum(each.get("max_tokens") is None for each in self.requests)
        call = SimpleNamespace(id="c", function=SimpleNamespace(name="clock"))
        message = SimpleNamespace(
            tool_calls=[call] if turns == 1 else [],
            model_dump=lambda exclude_none: {"role": "assistant", "content": f"turn {turns}"},
        )
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


def test_the_agent_sends_valid_hints_about_its_session():
    example = runpy.run_path(str(EXAMPLES / "agent_hints.py"))
    client = FakeClient()
    assert example["run"](client, "model", "task") == "turn 2"
    read = [parse(each["extra_body"]["kv_transfer_params"]["kv_offload_hints"]) for each in client.requests]
    assert all(each.rejected == [] for each in read)
    names = {each.session for each in read if each.session}
    assert len(names) == 1
    targets = [action for each in read for action in each.actions]
    assert [type_of(type(action)) for action in targets] == ["resume_in", "release"]
    assert {action.target.session for action in targets} == names
    first = client.requests[0]["messages"][0]
    for request in client.requests:
        assert request["messages"][0] == first  # the same first chunk
