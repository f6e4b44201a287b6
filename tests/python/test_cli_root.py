"""kv-offload on a root that the core itself has written: the stand-in of test_cli.py must not lie."""

import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kv_offload.cli import app
from kv_offload.machine import held_bytes
from kv_offload.namespace import GroupFacts, NamespaceFacts

core = pytest.importorskip("kv_offload._core", reason="the core is not built")

CHUNK = 64 << 10
KEYS = [bytes([number]) * 32 + bytes(4) for number in range(1, 6)]
FACTS = NamespaceFacts(
    model={"name": "org/model", "revision": "c0ffee"},
    kv_dtype="bfloat16",
    kv_cache_layout="LBHNC",
    groups=(GroupFacts(0, 16, 2, (CHUNK,)),),
    blocks_per_chunk=1,
    tokens_per_hash=16,
    hash_algorithm="sha256",
    hash_seed="00",
)


@pytest.fixture
def root(tmp_path):
    """A root with one record for each of KEYS."""
    path = tmp_path / "root"
    engine = f"cli-{os.getpid()}-{tmp_path.name}"
    size = 16 << 20
    worker = core.HostRegion.attach_worker(engine, size, 1, 1, 0, [CHUNK], "layout", huge_pages=False)
    region = core.HostRegion.attach_scheduler(engine, size, 1, 1, huge_pages=False)
    region.wait_for_ranks(10)
    tier = core.FsTier(
        root_dir=str(path),
        max_bytes=1 << 30,
        namespace_id=FACTS.namespace_id(),
        namespace_json=FACTS.readable_json(),
    )
    cache = core.TieredCache(
        region,
        core.Metrics(),
        group_ids=[0],
        tokens_per_chunk=[16],
        shard_bytes=[[CHUNK]],
        full_attention=[True],
        tiers=[tier],
    )
    request = cache.begin_request("r")
    accepted, ticket, rows, _, _ = cache.prepare_store(request, KEYS)
    assert accepted == KEYS
    for number, row in enumerate(rows):
        worker.area(0)[int(row) * 4096 :][:CHUNK] = number
    worker.report(0, ticket, 0)
    cache.complete_store(accepted)
    cache.end_request(request)
    deadline = time.monotonic() + 30
    while cache.tier_stats(0)["chunks"] < len(KEYS):
        cache.end_step()
        assert time.monotonic() < deadline, cache.tier_stats(0)
    cache.close()
    return path


def run(*arguments, status=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    return result.stdout


def records(root):
    return sorted(Path(root).rglob("*.rec"))


def test_stat_sees_what_was_written(root):
    facts = json.loads(run("stat", root, "--json"))
    (space,) = facts["namespaces"]
    assert space["id"] == FACTS.namespace_id().hex()
    assert (facts["records"], space["records"], facts["temporaries"]) == (5, 5, 0)
    assert space["bytes"] >= 5 * CHUNK
    assert abs(space["newest"] - time.time()) < 600, "unix seconds"
    assert json.loads(space["json"]) == json.loads(FACTS.canonical_json())
    assert "org/model@c0ffee" in run("stat", root)


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


def test_purge_leaves_nothing(root):
    assert json.loads(run("purge", root, "--yes", "--json"))["records"] == 5
    assert records(root) == []
    assert json.loads(run("stat", root, "--json"))["records"] == 0


def test_purge_of_the_one_namespace(root):
    prefix = FACTS.namespace_id().hex()[:8]
    assert json.loads(run("purge", root, "-n", prefix, "--yes", "--json"))["records"] == 5


def test_a_directory_of_others_is_no_root(tmp_path):
    (tmp_path / "kept.rec").write_text("kept")
    for command in ("stat", "ls", "verify", "purge"):
        result = CliRunner().invoke(app, [command, str(tmp_path)])
        assert result.exit_code == 2
        assert result.stderr.startswith("kv-offload: ")
        assert str(tmp_path) in result.stderr
    assert (tmp_path / "kept.rec").read_text() == "kept"


def test_the_account_tells_about_what_the_files_take(root):
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
