# SPDX-License-Identifier: Apache-2.0
"""A new user's first session, stored as it looks in a terminal of 80 columns (transcripts/new_user.txt).

KV_OFFLOAD_WRITE_TRANSCRIPT=1 writes it again; review the differences before committing it.
"""

import json
import os
import re
from pathlib import Path

import fake_core
import pytest
from test_cli import vllm  # noqa: F401  (a fixture)
from test_cli_size import LLAMA_8B
from test_cli_top import FIRST, serve  # noqa: F401
from typer.testing import CliRunner
from written_root import FACTS, write_root

import kv_offload.cli.doctor_checks
from kv_offload import _core
from kv_offload.cli import app

TRANSCRIPT = Path(__file__).parent / "transcripts" / "new_user.txt"
# Each line is typed as it is; # starts a comment line. SERVER stands for a server's address.
SESSION = """\
# What is there, and what does my model take?
kv-offload --help
kv-offload size config.json --cpu 32GiB --disk-size 500GiB --prefill 8000
# My first try: no unit, and a word that is not a size.
kv-offload config --cpu 32
kv-offload config --cpu 32gigs
kv-offload config --cpu 4Gi --disk ./kv --disk-size 10G
# Would that be served here?
kv-offload doctor --no-measure --config @kv.json
# The directory before a server has run, and after.
kv-offload stat ./kv
kv-offload stat ./
kv-offload stat ./used
kv-offload ls ./used -l 2
kv-offload verify ./used
# Is the server hitting? And why not?
kv-offload top SERVER --once --interval 0.05
kv-offload why SERVER
kv-offload why 127.0.0.1:1
# A namespace that is not there; then all of it.
kv-offload purge ./used -n ffff
kv-offload purge ./used --yes
"""


def typed(line, server):
    """Returns the output of a command, including standard error, and its exit status if not 0."""
    words = line.replace("SERVER", server).split()[1:]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "80"}, prog_name="kv-offload")
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), line
    status = f"(exit status {result.exit_code})\n" if result.exit_code else ""
    return f"{result.output}{status}"


def without_chance(text, place, server):
    """Replaces text that differs between runs, keeping the width of table cells."""
    for name, found in (
        ("PLACE", str(place)),
        ("SERVER", server),
        ("SERVER", server.removeprefix("http://")),
    ):
        text = text.replace(found, name)
    text = text.replace(FACTS.namespace_id().hex()[:12], "NAMESPACE123")
    text = re.sub(r"\S+, Python \S+, Linux", "VERSION, Python VERSION, Linux", text)
    # as du: depends on the file system
    text = re.sub(r"\b[0-9]{3}\.[0-9] KiB(?! in bfloat16)", "NNN.N KiB", text)
    text = re.sub(r"(?m) +[0-9]+ (?:s|min)(?=  )", lambda match: "NOW".rjust(len(match.group())), text)
    return re.sub(r"[ ]+$", "", text, flags=re.MULTILINE)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Creates the user's working directory: the model's config.json, a configuration, and a directory that a
    server used.
    """
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "kv.json").write_text(
        json.dumps({"spec_name": "KVOffloadSpec", "cpu_bytes_to_use": "4GiB", "lookup_timeout": 2000})
    )
    write_root(tmp_path / "used")
    monkeypatch.chdir(tmp_path)
    # These values differ between machines; all others come from the real core.
    monkeypatch.setattr(_core, "memory_headroom", fake_core.memory_headroom)
    monkeypatch.setattr(_core, "region_files", fake_core.region_files)
    monkeypatch.setattr(_core, "cuda_unavailable_reason", fake_core.cuda_unavailable_reason)
    monkeypatch.setattr(kv_offload.cli.doctor_checks.platform, "platform", lambda: "Linux")
    monkeypatch.setattr(
        kv_offload.cli.doctor_checks,
        "plugin",
        lambda: kv_offload.cli.doctor_checks.Check("plugin", "ok", "spec_name alone is enough"),
    )
    return tmp_path


def test_a_new_users_session_matches_the_stored_transcript(place, vllm, serve):  # noqa: F811
    server = serve(FIRST)
    said = []
    for line in SESSION.splitlines():
        if line.startswith("#"):
            said.append(f"\n{line}\n")
            continue
        text = without_chance(typed(line, server), place, server)
        said.append(f"$ {line}\n{text}")
    session = "".join(said).lstrip()
    if os.environ.get("KV_OFFLOAD_WRITE_TRANSCRIPT") == "1":
        TRANSCRIPT.parent.mkdir(exist_ok=True)
        TRANSCRIPT.write_text(session)
    assert session == TRANSCRIPT.read_text()
    wide = [
        line
        for line in session.splitlines()
        if len(line) > 80 and not line.startswith(("{", "kv-offload: ", "  - "))
    ]
    assert wide == [], "only JSON and errors, which are one line each, may be wider"
