# SPDX-License-Identifier: Apache-2.0
"""The start of the command: the modules that help and completion load, and the completions."""

import json
import os
import subprocess
import sys

import pytest

from kv_offload.cli.app import COMMANDS

HEAVY = ("rich", "numpy", "prometheus_client", "huggingface_hub", "kv_offload._core", "kv_offload.config")
RUN = """
import json, sys
from kv_offload.cli import main
try:
    main()
except SystemExit:
    pass
sys.stdout.flush()
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def start(*arguments, **environment):
    """Returns the output of a new process for these arguments, and the modules that it has loaded."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment,
    )
    return done.stdout, set(json.loads(done.stderr.splitlines()[-1]))


def test_the_list_of_commands_loads_none_of_them():
    text, loaded = start("--help")
    assert "Usage: kv-offload" in text
    assert "verify" in text
    assert loaded.isdisjoint((*HEAVY, "pydantic"))
    assert not {f"kv_offload.cli.{module}" for _, module, _ in COMMANDS} & loaded


@pytest.mark.parametrize("command", [name for name, _, _ in COMMANDS])
def test_the_help_of_a_command_loads_no_module_of_its_execution(command):
    text, loaded = start(command, "--help")  # typer itself loads pydantic for options, from 0.29 on
    assert f"Usage: kv-offload {command}" in text
    assert loaded.isdisjoint(HEAVY)


def test_control_running_a_command_loads_these_modules():
    _, loaded = start("stat", "/nowhere-at-all")
    assert "kv_offload._core" in loaded


def completed(words):
    text, _ = start(
        _KV_OFFLOAD_COMPLETE="complete_bash",
        COMP_WORDS=f"kv-offload {words}",
        COMP_CWORD=str(len(words.split(" "))),
    )
    return text.split()


def test_commands_options_and_values_are_completed():
    assert completed("ver") == ["verify"]
    assert completed("verify --rep") == ["--repair"]
    assert completed("ls --by la") == ["largest"]


def test_completion_is_installed_by_an_option_that_help_names():
    text, _ = start("--help")
    assert "--install-completion" in text
    script, _ = start("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_KV_OFFLOAD_COMPLETE=complete_bash" in script
