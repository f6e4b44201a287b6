"""The scripts of examples/ that need no server to be looked at."""

import os
import subprocess
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def served_with(tmp_path, *options):
    """The command line that serve.sh would run, with stand-ins for the programs that it calls."""
    for name, text in {
        "kv-offload": "echo '{}'",
        "python": "exit 0",  # vllm is there
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


def test_an_option_of_the_caller_comes_last_and_so_counts(tmp_path):
    assert served_with(tmp_path, "--shutdown-timeout", "5")[-2:] == ["--shutdown-timeout", "5"]
