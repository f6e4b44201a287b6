# SPDX-License-Identifier: Apache-2.0
"""kv-offload stat --tenants and purge --tenant, on a directory with records of a tenant and of others."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from live_root import records_in
from small_core import SHARD_BYTES, attach, keys, make_cache, store
from typer.testing import CliRunner
from written_root import FACTS

from kv_offload import _core
from kv_offload.cli import app


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return result.stdout


def write_for_tenants(path: Path, shm: Path, keys_of_tenants: tuple[str, ...] = ()) -> Any:
    """Writes three records for a tenant and two for other requests. Returns the metrics of the server.

    ``keys_of_tenants``: a key for other requests, and one for the tenant.
    """
    region, workers = attach(shm)
    tier = _core.FsTier(
        root_dir=str(path),
        max_bytes=1 << 30,
        namespace_id=FACTS.namespace_id(),
        namespace_json=FACTS.readable_json(),
        op_timeout_seconds=240.0,
    )
    tier.encryption_key_files = list(keys_of_tenants[:1])
    tier.tenant_key_files = [[], list(keys_of_tenants[1:])]
    metrics = _core.Metrics()
    cache = make_cache(region, metrics, tiers=[tier], tenants=[("other", 0.75), ("acme", 0.25)])
    store(cache, workers[0], cache.begin_request("r", tenant=1), keys(3))
    store(cache, workers[0], cache.begin_request("s"), keys(2, 10))
    pause, deadline = threading.Event(), time.monotonic() + 240
    while cache.tier_stats(0)["chunks"] < 5:
        cache.end_step()
        assert time.monotonic() < deadline, cache.tier_stats(0)
        pause.wait(0.005)
    cache.publish_gauges()
    cache.close()
    return metrics


def records_by_tenant(root: Path) -> dict[str, int]:
    found = json.loads(run("stat", root, "--tenants", "--json"))["tenants"]
    return {name: total["records"] for name, total in found.items()}


def test_stat_and_purge_know_the_tenants_of_records(tmp_path: Path) -> None:
    root = tmp_path / "root"
    metrics = write_for_tenants(root, tmp_path)
    assert records_by_tenant(root) == {"acme": 3, "other": 2}
    assert "acme" in run("stat", root, "--tenants")
    assert "acme" not in run("stat", root), "the headers are not read"
    record = 4096 + SHARD_BYTES
    values = [
        metrics.value(f"kv_offload_tenant_tier_{name}", ["acme", "fs"]) for name in ("bytes", "share_bytes")
    ]
    assert values == [3 * record, 1 << 28]
    assert json.loads(run("purge", root, "--tenant", "gone", "--yes", "--json")) == {"records": 0, "bytes": 0}
    purged = json.loads(run("purge", root, "--tenant", "acme", "--yes", "--json"))
    assert purged == {"records": 3, "bytes": 3 * record}
    assert records_by_tenant(root) == {"other": 2}
    assert len(records_in(root)) == 2


def test_purge_of_a_tenant_removes_records_from_before_a_reset(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_for_tenants(root, tmp_path)
    (epoch,) = root.glob("*/g[0-9]")
    (epoch.parent / "g7").mkdir(mode=0o700)
    (epoch.parent / "g7.reset").touch(mode=0o600)
    assert json.loads(run("purge", root, "--tenant", "acme", "--yes", "--json"))["records"] == 3
    assert records_by_tenant(root) == {"other": 2}


def test_purge_of_a_tenant_fails_if_a_record_cannot_be_read(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_for_tenants(root, tmp_path)
    record = records_in(root)[0]
    unreadable = record.with_name("00" * 16 + record.name[record.name.index(".") :])
    unreadable = unreadable.parent.parent / "00" / unreadable.name
    unreadable.mkdir(parents=True)
    for command in (["purge", root, "--tenant", "acme", "--yes"], ["stat", root, "--tenants"]):
        result = CliRunner().invoke(app, [str(argument) for argument in command])
        assert result.exit_code == 1
        assert unreadable.name in result.output
    unreadable.rmdir()
    assert records_by_tenant(root) == {"other": 2}, "all others are removed"
    run("purge", root, "--tenant", "acme", "--yes")
    assert records_by_tenant(root) == {"other": 2}


def test_purge_of_a_tenant_fails_if_a_record_has_no_valid_header(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_for_tenants(root, tmp_path)
    damaged = next(path for path in records_in(root) if _core.record_tenant(str(path)) == "acme")
    whole = damaged.read_bytes()
    damaged.write_bytes(b"\0" + whole[1:])
    result = CliRunner().invoke(app, ["purge", str(root), "--tenant", "acme", "--yes"])
    assert result.exit_code == 1
    assert damaged.name in result.output
    assert "verify --repair" in result.output
    assert damaged.exists()
    assert records_by_tenant(root) == {"other": 2}, "all others are removed"
    CliRunner().invoke(app, ["verify", str(root), "--repair"])
    assert not damaged.exists()
    assert json.loads(run("purge", root, "--tenant", "acme", "--yes", "--json"))["records"] == 0


def test_purge_of_a_tenant_tells_of_temporary_files(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_for_tenants(root, tmp_path)
    unfinished = records_in(root)[0].parent / ".tmp-1-00000000000000ab-1"
    unfinished.write_bytes(b"x")
    told = CliRunner().invoke(app, ["purge", str(root), "--tenant", "acme", "--yes"])
    assert told.exit_code == 0
    assert "unfinished writes that are left: 1" in told.stderr
    unfinished.unlink()
    told = CliRunner().invoke(app, ["purge", str(root), "--tenant", "acme", "--yes"])
    assert "temporary files" not in told.output


def test_purge_of_a_tenant_passes_over_records_that_are_evicted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    write_for_tenants(root, tmp_path)
    read = _core.record_tenant

    def evict_first(path: str) -> str | None:
        Path(path).unlink(missing_ok=True)
        return read(path)

    monkeypatch.setattr(_core, "record_tenant", evict_first)
    assert json.loads(run("purge", root, "--tenant", "acme", "--yes", "--json"))["records"] == 0


def test_purge_of_a_tenant_removes_the_others_if_a_record_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    write_for_tenants(root, tmp_path)
    kept: list[str] = []

    class Root:
        def __init__(self, path: str) -> None:
            self._root = core_root(path)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._root, name)

        def remove(self, paths: list[str]) -> int:
            if kept:
                return self._root.remove(paths)
            kept.extend(paths)
            raise _core.ResourceError(f"{paths[0]} cannot be removed: Permission denied")

    core_root = _core.FsRoot
    monkeypatch.setattr(_core, "FsRoot", Root)
    monkeypatch.setattr("kv_offload.tiers.fs.root._REMOVED_AT_ONCE", 1)
    result = CliRunner().invoke(app, ["purge", str(root), "--tenant", "acme", "--yes"])
    assert result.exit_code == 1
    assert "cannot be removed" in result.output
    assert records_by_tenant(root) == {"acme": 1, "other": 2}


def test_purge_of_a_tenant_asks_first(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_for_tenants(root, tmp_path)
    result = CliRunner().invoke(app, ["purge", str(root), "-t", "acme"], input="n\n")
    assert result.exit_code == 1
    assert "the records of tenant acme" in result.output
    assert len(records_in(root)) == 5


def test_only_the_key_of_a_tenant_decrypts_its_records(tmp_path: Path) -> None:
    root, files = tmp_path / "root", []
    for name in ("all", "acme"):
        files.append(str(tmp_path / name))
        Path(files[-1]).write_bytes(name.encode().ljust(32, b"."))
        Path(files[-1]).chmod(0o600)
    write_for_tenants(root, tmp_path, tuple(files))
    assert records_by_tenant(root) == {"acme": 3, "other": 2}

    def unreadable(*keys: str) -> int:
        options = [word for key in keys for word in ("--encryption-key-file", key)]
        result = CliRunner().invoke(app, ["verify", str(root), "--json", *options])
        return len(json.loads(result.stdout)["damaged"])

    assert [unreadable(files[0]), unreadable(files[1]), unreadable(*files)] == [3, 2, 0]
