# SPDX-License-Identifier: Apache-2.0
"""Paths given to commands: errors for paths that are not a root, ownership, and relative paths."""

import json
import os

import pytest
from typer.testing import CliRunner
from written_root import write_root

from kv_offload.cli import app
from kv_offload.config import OffloadConfig

READING = (["stat"], ["ls"], ["verify"], ["evict", "--max-bytes", "1GiB", "--dry-run"])
WRITING = (
    ["verify", "--repair"],
    ["purge", "--yes"],
    ["evict", "--max-bytes", "1GiB"],
    ["evict", "--max-bytes", "1GiB", "--watch"],
)


def run(*arguments, status=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    return result


def places(tmp_path):
    """Returns paths that are not a root, by name, each with the expected error."""
    for name in ("empty", "other", "parent"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "photo.jpg").write_text("")
    (tmp_path / "file").write_text("")
    root = write_root(tmp_path / "parent" / "kv")
    namespace = next(path for path in root.iterdir() if path.is_dir())
    return {
        "missing": (tmp_path / "missing", "does not exist; the first server that uses it creates it"),
        "empty": (tmp_path / "empty", "is an empty directory: no server has used it as root_dir yet"),
        "file": (tmp_path / "file", "is not a directory; give the root_dir of a tier"),
        "other": (tmp_path / "other", "is not a root of kv-offload: it holds other files"),
        "parent": (tmp_path / "parent", f"is not a root, but contains one: give {root}"),
        "inside": (namespace, f"is part of the root {root}: give that directory"),
    }


@pytest.mark.parametrize("place", ["missing", "empty", "file", "other", "parent", "inside"])
def test_a_path_that_is_not_a_root_is_explained(tmp_path, place):
    path, part = places(tmp_path)[place]
    for command, *options in (*READING, *WRITING[:3]):
        result = run(command, path, *options, status=2)
        assert result.stderr.startswith(f"kv-offload: {path} {part}"), command
        assert result.stdout == ""


def test_an_unreadable_directory_is_not_a_usage_error(tmp_path, monkeypatch):
    def forbidden(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", forbidden)  # permissions do not stop the root user
    result = run("stat", tmp_path, status=1)
    assert result.stderr == f"kv-offload: {tmp_path}: Permission denied\n"


def not_refused(*_, **__):
    raise RuntimeError("the command was not refused")


@pytest.mark.parametrize("command", WRITING, ids=" ".join)
def test_a_root_of_another_user_is_not_changed(tmp_path, monkeypatch, command):
    root = write_root(tmp_path / "root")
    # as after a restore from a backup: the next process that opens the root creates it
    (root / "ledger").unlink()
    before = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
    monkeypatch.setattr(os, "geteuid", lambda: root.stat().st_uid + 1)
    monkeypatch.setattr("kv_offload.cli.evict_command.evict_once", not_refused)  # --watch would not end
    name, *options = command
    result = run(name, root, *options, status=1)
    owner = root.stat().st_uid
    assert f"{root} belongs to user {owner}, this process is user {owner + 1}" in result.stderr
    assert f"sudo -u '#{owner}' kv-offload" in result.stderr
    assert sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*")) == before


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_a_root_of_another_user_is_read(tmp_path, monkeypatch, command):
    root = write_root(tmp_path / "root")
    (root / "ledger").unlink()
    monkeypatch.setattr(os, "geteuid", lambda: root.stat().st_uid + 1)
    name, *options = command
    run(name, root, *options)
    assert not (root / "ledger").exists(), "a read command must not create files"


@pytest.mark.parametrize(
    ("given", "expected"), [("./kv", "{here}/kv"), ("~/kv", "{home}/kv"), ("../x/./kv/", "{here}/../x/kv")]
)
def test_the_directory_of_a_tier_is_written_as_an_absolute_path(tmp_path, monkeypatch, given, expected):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = os.path.normpath(expected.format(here=here, home=tmp_path / "home"))
    for options in (
        ["--disk", given],
        ["--set", f'secondary_tiers=[{{"type": "fs", "root_dir": "{given}"}}]'],
    ):
        extra = json.loads(run("config", "--cpu", "1GiB", *options).stdout)["kv_connector_extra_config"]
        assert extra["secondary_tiers"][0]["root_dir"] == path
        monkeypatch.chdir("/")  # where the server is started
        parsed, _ = OffloadConfig.parse(extra)
        assert parsed.secondary_tiers[0].root_dir == path
        monkeypatch.chdir(here)


def test_no_command_reads_32_as_32_bytes(tmp_path):
    for command in (
        ["config", "--cpu", "32"],
        ["doctor", "--no-measure", "--config", '{"cpu_bytes_to_use": 32}'],
        ["evict", tmp_path, "--max-bytes", "500"],
    ):
        result = run(*command, status=1 if command[0] == "doctor" else 2)
        assert "has no unit; below 1 MiB a size needs one" in " ".join(result.output.split())
    given = json.loads(run("config", "--cpu", "32Gi").stdout)["kv_connector_extra_config"]
    assert OffloadConfig.parse(given)[0].cpu_bytes_to_use == 32 << 30
