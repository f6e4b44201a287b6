# SPDX-License-Identifier: Apache-2.0
"""kv-offload on a root that the core itself has written; the fake core of test_cli.py must agree with it."""

import json
import os
import time
from pathlib import Path

import pytest
from live_root import records_in
from typer.testing import CliRunner
from unprivileged import hidden
from written_root import CHUNK, FACTS, KEYS, write_root

from kv_offload import _core
from kv_offload.cli import app
from kv_offload.tiers.fs.config import held_bytes

pytest.importorskip("kv_offload._core", reason="the core is not built")


@pytest.fixture
def root(tmp_path):
    """A root with one record for each of KEYS."""
    return write_root(tmp_path / "root")


def run(*arguments, status=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    return result.stdout


def records(root):
    return records_in(Path(root))


def test_stat_shows_the_written_records(root):
    facts = json.loads(run("stat", root, "--json"))
    (space,) = facts["namespaces"]
    assert space["id"] == FACTS.namespace_id().hex()
    assert (facts["records"], space["records"], facts["temporaries"]) == (5, 5, 0)
    assert space["bytes"] >= 5 * CHUNK
    assert abs(space["newest"] - time.time()) < 600, "unix seconds"
    assert space["description"] == json.loads(FACTS.canonical_json())
    assert "org/model@c0ffee" in run("stat", root)


@pytest.mark.parametrize(
    "description", [b'{"model": "x"}', b"[1]", b'{"model": null}', b"", b'{"model": "\xff"}']
)
def test_stat_shows_a_root_whose_description_is_damaged(root, description):
    next(root.glob("*/namespace.json")).write_bytes(description)
    assert FACTS.short_id() in run("stat", root)


@pytest.mark.parametrize("command", ["stat", "ls"])
def test_a_root_that_cannot_be_read_is_not_reported_as_wrong_use(root, command):
    with hidden(root / "kv_offload.json"):
        result = CliRunner().invoke(app, [command, str(root)])
    assert (result.exit_code, "cannot be read" in result.output) == (1, True), result.output


@pytest.mark.parametrize("levels", [0, 1, 2])
def test_a_directory_that_cannot_be_read_is_named_and_the_other_records_are_shown(tmp_path, levels):
    root = write_root(tmp_path / "root")
    unreadable = records(root)[2].parent
    for _ in range(levels):
        unreadable = unreadable.parent
    left = [path.name for path in records(root) if unreadable not in path.parents]
    with hidden(unreadable):
        shown = CliRunner().invoke(app, ["stat", str(root), "--json"])
        table = CliRunner().invoke(app, ["stat", str(root)])
        listed = CliRunner().invoke(app, ["ls", str(root), "--json"])
        rows = CliRunner().invoke(app, ["ls", str(root), "--by", "hits"])
    for result in (shown, table, listed, rows):
        assert result.exit_code == 1, result.output
        assert f"{unreadable} cannot be read: " in result.stderr
    report = json.loads(shown.stdout)
    assert report["records"] == len(left)
    assert [each["path"] for each in report["unreadable"]] == [str(unreadable)]
    assert FACTS.short_id() in table.stdout
    assert sorted(json.loads(line)["path"].split("/")[-1] for line in listed.stdout.splitlines()) == left
    assert json.loads(run("stat", root, "--json"))["unreadable"] == []


def test_damage_that_is_not_text_is_found_and_removed(root):
    described = next(root.glob("*/namespace.json"))
    data = bytearray(described.read_bytes())
    data[20] ^= 0x80
    described.write_bytes(data)
    stray = os.path.join(os.fsencode(records(root)[0].parent), b"\xff\xfe.rec")
    with open(stray, "w"):
        pass
    found = {bad["path"] for bad in json.loads(run("verify", root, "--json", status=1))["damaged"]}
    assert found == {str(described), f"{records(root)[0].parent}/\\xff\\xfe.rec"}
    run("verify", root, "--repair", status=1)
    assert not described.exists()
    assert not os.path.exists(stray)
    run("verify", root)
    assert json.loads(run("purge", root, "-n", FACTS.short_id(), "--yes", "--json"))["records"] == 5


def test_a_damaged_root_file_is_shown_with_escapes(root):
    (root / "kv_offload.json").write_bytes(b'{"format": \xff}')
    result = CliRunner().invoke(app, ["stat", str(root)])
    assert result.exit_code == 2
    assert r'another format: "{\"format\": \xff}"' in result.output.replace("\n", "")


def test_ls_lists_every_key(root):
    listed = [json.loads(line) for line in run("ls", root, "--json").splitlines()]
    assert sorted(record["key"] for record in listed) == [key.hex() for key in KEYS]
    assert {Path(record["path"]) for record in listed} == set(records(root))
    assert {record["namespace"] for record in listed} == {FACTS.namespace_id().hex()}
    assert all(abs(record["mtime"] - time.time()) < 600 for record in listed)
    assert KEYS[0].hex() in run("ls", root).replace("\n", "")


def test_verify_finds_and_removes_a_flipped_bit(root):
    assert json.loads(run("verify", root, "--json")) == {"checked": 5, "damaged": []}
    bad = records(root)[2]
    with bad.open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 1]))
    (found,) = json.loads(run("verify", root, "--json", status=1))["damaged"]
    assert (Path(found["path"]), found["kind"], found["removed"]) == (bad, "corrupt", False)
    assert "1 removed" in run("verify", root, "--repair", status=1)
    assert not bad.exists()
    assert "4 records, all good" in run("verify", root)


def planted(root):
    """Returns named ways to damage a root; each returns the path that verify must name."""

    def flip(path, at):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
        return path

    first, second, *_ = records(root)

    def truncated():
        first.write_bytes(first.read_bytes()[:-4096])
        return first

    def emptied():
        first.write_bytes(b"")
        return first

    def of_another_key():
        first.write_bytes(second.read_bytes())
        return first

    def in_another_directory():
        return first.rename(second.parent / first.name)

    def misspelt():
        return first.rename(first.with_name("x" + first.name))

    def description():
        path = next(root.glob("*/namespace.json"))
        path.write_text(path.read_text().replace("bfloat16", "float16"))
        return path

    def description_cut():
        path = next(root.glob("*/namespace.json"))
        path.write_text(path.read_text()[:-20])
        return path

    return {
        "magic": lambda: flip(first, 0),
        "header": lambda: flip(first, 200),
        "header checksum": lambda: flip(first, 4090),
        "payload": lambda: flip(first, 5000),
        "last byte": lambda: flip(first, first.stat().st_size - 1),
        "truncated": truncated,
        "emptied": emptied,
        "of another key": of_another_key,
        "in another directory": in_another_directory,
        "misspelt": misspelt,
        "description of the namespace": description,
        "description cut short": description_cut,
    }


@pytest.mark.parametrize(
    "damage",
    [
        "magic",
        "header",
        "header checksum",
        "payload",
        "last byte",
        "truncated",
        "emptied",
        "of another key",
        "in another directory",
        "misspelt",
        "description of the namespace",
        "description cut short",
    ],
)
def test_verify_finds_every_planted_damage_and_removes_it(root, damage):
    bad = planted(root)[damage]()
    (found,) = json.loads(run("verify", root, "--json", status=1))["damaged"]
    assert (Path(found["path"]), found["kind"], found["removed"]) == (bad, "corrupt", False)
    (found,) = json.loads(run("verify", root, "--repair", "--json", status=1))["damaged"]
    assert found["removed"]
    assert not bad.exists()
    assert json.loads(run("verify", root, "--json"))["damaged"] == []


@pytest.mark.parametrize("change", ["written again", "removed"])
def test_a_description_that_a_server_changes_during_verify_is_not_damaged(root, monkeypatch, change):
    path = next(root.glob("*/namespace.json"))
    whole = path.read_text()
    planted(root)["description of the namespace"]()
    stat = _core.FsRoot.stat

    def stat_and_change(opened):
        found = stat(opened)
        path.unlink(missing_ok=True)
        if change == "written again":
            path.write_text(whole)
        return found

    monkeypatch.setattr(_core.FsRoot, "stat", stat_and_change)
    assert json.loads(run("verify", root, "--repair", "--json"))["damaged"] == []
    assert path.exists() == (change == "written again")


def test_a_root_with_a_damaged_description_serves_and_repairs_it(root):
    planted(root)["description of the namespace"]()
    run("verify", root, status=1)
    write_root(root)
    assert "5 records, all good" in run("verify", root)


def test_purge_leaves_nothing(root):
    assert json.loads(run("purge", root, "--yes", "--json"))["records"] == 5
    assert records(root) == []
    assert json.loads(run("stat", root, "--json"))["records"] == 0


def test_purge_of_the_only_namespace_removes_its_records(root):
    prefix = FACTS.namespace_id().hex()[:8]
    assert json.loads(run("purge", root, "-n", prefix, "--yes", "--json"))["records"] == 5


def test_a_directory_of_others_is_not_a_root(tmp_path):
    (tmp_path / "kept.rec").write_text("kept")
    for command in ("stat", "ls", "verify", "purge"):
        result = CliRunner().invoke(app, [command, str(tmp_path)])
        assert result.exit_code == 2
        assert result.stderr.startswith("kv-offload: ")
        assert str(tmp_path) in result.stderr
    assert (tmp_path / "kept.rec").read_text() == "kept"


def test_the_ledger_matches_the_space_of_the_files(root):
    taken = sum(path.stat().st_blocks * 512 for path in root.rglob("*"))
    assert taken <= held_bytes(str(root)) <= taken + (1 << 20)


def test_doctor_measures_with_the_core(tmp_path):
    stdout = (
        CliRunner()
        .invoke(app, ["doctor", "--json", "--measure-size", "32MiB", "--root", str(tmp_path / "kv")])
        .stdout
    )
    checks = json.loads(stdout)["checks"]
    speeds = [check for check in checks if check.get("read_bytes_per_second", 0) > 0]
    assert len(speeds) == 1
    assert speeds[0]["write_bytes_per_second"] > 0
    assert [check["bytes_per_second"] > 0 for check in checks if check["name"] == "copy"] == [True]
    assert [check["available_bytes"] > 0 for check in checks if check["name"] == "memory"] == [True]
    assert list(tmp_path.iterdir()) == []
