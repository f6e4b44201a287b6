# SPDX-License-Identifier: Apache-2.0
"""kv-offload stat|ls|verify|purge of a Redis server and of a bucket that a tier of the core has filled."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis_server import RedisClient, redis_server
from s3_server import ACCESS, BUCKET, READER, SECRET, S3Server
from small_core import attach, keys, make_cache, store
from typer.testing import CliRunner

from kv_offload import _core
from kv_offload.cli import app
from kv_offload.tiers.remote_root import RemoteRoot

PASSWORD = "hunter2-never-shown"
FIRST, SECOND = bytes([0xAB]) * 32, bytes([0xCD]) * 32  # namespaces
COUNT = 5


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Increases the timeouts: the store runs on a slow disk, next to other tests."""
    monkeypatch.setattr("kv_offload.tiers.base.TierConfig.op_timeout_seconds", property(lambda _: 240.0))


def run(*arguments: Any, status: int = 0, width: int | None = None) -> Any:
    env = {} if width is None else {"COLUMNS": str(width)}
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env=env)
    assert result.exit_code == status, f"{result.output}\n{result.stderr}\n{result.exception!r}"
    assert "Traceback" not in result.output
    return result


def as_json(*arguments: Any, status: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", status=status).stdout)


def lines(*arguments: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run("ls", *arguments, "--json").stdout.splitlines()]


TENANTS = [("other", 0.5), ("acme", 0.5)]


def fill(directory: Path, spec: Any, written: Callable[[], int]) -> list[bytes]:
    """Stores COUNT records with a cache that is closed again. The first two are those of a tenant."""
    region, workers = attach(directory)
    cache = make_cache(region, tiers=[spec], tenants=TENANTS)
    wanted = store(cache, workers[0], cache.begin_request("r", tenant=1), keys(2))
    wanted += store(cache, workers[0], cache.begin_request("s"), keys(COUNT)[2:])
    pause = threading.Event()
    give_up = time.monotonic() + 240
    try:
        while written() < COUNT:
            assert time.monotonic() < give_up, cache.tier_stats(0)
            cache.end_step()
            pause.wait(0.005)
    finally:
        cache.close()
    return wanted


# ---- both kinds of servers


class Redis:
    """A server with records of two namespaces."""

    separator = ":"

    def __init__(self, socket: Path) -> None:
        self.client = RedisClient(socket)
        self.address = f"unix://{socket}"
        self.folder = ""
        self._socket = socket

    def spec(self, namespace: bytes, prefix: str = "kv_offload") -> Any:
        server = _core.RedisServer(unix_socket=str(self._socket))
        return _core.RedisTier(
            server=server, namespace_id=namespace, key_prefix=prefix, op_timeout_seconds=240.0
        )

    def names(self, start: str = "kv_offload") -> list[str]:
        found = self.client.ask("KEYS", f"{start}*")
        return sorted(name.decode() for name in found if name.count(b":") == 3)

    def get(self, name: str) -> bytes:
        return bytes(self.client.ask("GET", name))

    def put(self, name: str, value: bytes) -> None:
        self.client.ask("SET", name, value)

    def other(self) -> None:
        self.client.ask("SET", b"kv_offload:\xff\x1b", "x")
        self.client.ask("SET", "kv_offload2:" + "a" * 64, "x")


class Bucket:
    """A bucket with records of two namespaces."""

    separator = "/"

    def __init__(self, server: S3Server) -> None:
        self.server = server
        self.address = f"s3://{BUCKET}/kv_offload?endpoint={server.endpoint}"
        self.folder = f"s3://{BUCKET}/"

    def spec(self, namespace: bytes, prefix: str = "kv_offload") -> Any:
        bucket = _core.S3Bucket(
            name=BUCKET,
            endpoint=self.server.endpoint,
            path_style=True,
            access_key=ACCESS,
            secret_key=SECRET,
        )
        return _core.S3Tier(bucket=bucket, namespace_id=namespace, prefix=prefix, op_timeout_seconds=240.0)

    def names(self, start: str = "kv_offload") -> list[str]:
        return sorted(self.server.records(start))

    def get(self, name: str) -> bytes:
        return self.server.read(name)

    def put(self, name: str, value: bytes) -> None:
        self.server.overwrite(name, value)

    def other(self) -> None:
        self.server.overwrite("kv_offload/%D0%BA%20x", b"x")
        self.server.overwrite("kv_offload2/" + "a" * 64, b"x")


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    running = S3Server(tmp_path_factory.mktemp("s3"))
    try:
        running.start()
        yield running
    finally:
        running.kill()


@pytest.fixture
def of_s3(monkeypatch: pytest.MonkeyPatch, s3_server: S3Server) -> Bucket:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return Bucket(s3_server)


@pytest.fixture
def of_redis(tmp_path: Path) -> Iterator[Redis]:
    directory = tmp_path / "redis"
    directory.mkdir()
    with redis_server(directory, "--maxmemory", "200mb") as socket:
        place = Redis(socket)
        with place.client:
            yield place


@pytest.fixture(params=["of_redis", "of_s3"])
def place(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture
def filled(tmp_path: Path, place: Any) -> Any:
    """Stores COUNT records in each of two namespaces, and nothing else."""
    if place.names():
        run("purge", place.address, "--yes")
    for number, namespace in enumerate((FIRST, SECOND)):
        directory = tmp_path / f"region{number}"
        directory.mkdir()
        start = f"kv_offload{place.separator}{namespace.hex()}"
        fill(directory, place.spec(namespace), lambda start=start: len(place.names(start)))
    return place


def test_stat_lists_each_namespace(filled: Any) -> None:
    filled.other()
    report = as_json("stat", filled.address)
    size = len(filled.get(filled.names()[0]))
    assert (report["records"], report["temporaries"], report["others"]) == (2 * COUNT, 0, 1)
    assert [space["id"] for space in report["namespaces"]] == [FIRST.hex(), SECOND.hex()]
    for space in report["namespaces"]:
        assert space["records"] == COUNT
        assert COUNT * size <= space["bytes"] < 2 * COUNT * size
        assert abs(space["newest"] - time.time()) < 600, "unix seconds"
        assert (space["open"], space["description"], space["epoch"]) == (None, None, None)
    shown = run("stat", filled.address).stdout
    assert f"{2 * COUNT} records, 2 namespaces, 1 key not from kv-offload" in shown
    assert "not a record: kv_offload" in shown
    assert shown.isprintable() or "\x1b" not in shown


def test_ls_lists_every_key(filled: Any) -> None:
    listed = lines(filled.address)
    assert sorted(record["path"] for record in listed) == [filled.folder + name for name in filled.names()]
    for record in listed:
        _, namespace, epoch, key = record["path"].removeprefix(filled.folder).split(filled.separator)
        assert (record["namespace"], record["epoch"], record["key"]) == (namespace, epoch, key)
        assert record["bytes"] >= len(filled.get(filled.names()[0]))
        assert set(record) == {
            *("namespace", "epoch", "key", "bytes"),
            *("mtime", "created", "hit", "path"),
        }
        assert record["hit"] is None
        assert abs((record["mtime"] or record["created"]) - time.time()) < 600
    assert len(lines(filled.address, "-n", "ab")) == COUNT
    assert len(lines(filled.address, "-n", SECOND.hex(), "--limit", 2)) == 2
    assert "abababababab, cdcdcdcdcdcd" in run("ls", filled.address, "-n", "ff", status=2).stderr
    assert "choose another --by" in run("ls", filled.address, "--by", "hits", status=2).stderr


@pytest.mark.parametrize("width", [57, 80])
def test_tables_fit_a_terminal(filled: Any, width: int) -> None:
    bad = filled.names()[0]
    filled.put(bad, b"x")
    for command, headers in (("stat", "namespace bytes records"), ("ls", "key bytes used written hit")):
        shown = run(command, filled.address, width=width).stdout.splitlines()
        assert max(map(len, shown)) <= width, shown
        assert any(" ".join(line.split()).startswith(headers) for line in shown)
    listed = run("ls", filled.address, width=width).stdout.splitlines()
    assert len(listed) == 1 + 2 * COUNT, "each must have one line"
    shown = run("verify", filled.address, width=width, status=1).stdout.splitlines()
    assert max(map(len, shown)) <= width


def planted(place: Any) -> dict[str, bytes]:
    """Returns values under a record's name that are not valid records."""
    first, second, *_ = place.names()
    whole = place.get(first)

    def flipped(at: int) -> bytes:
        changed = bytearray(whole)
        changed[at] ^= 1
        return bytes(changed)

    return {
        "magic": flipped(0),
        "header": flipped(200),
        "header checksum": flipped(4090),
        "payload": flipped(5000),
        "last byte": flipped(-1),
        "truncated": whole[:-4096],
        "a part of a header": whole[:100],
        "emptied": b"",
        "longer": whole + bytes(4096),
        "of another key": place.get(second),
    }


@pytest.mark.parametrize(
    "damage",
    [
        *("magic", "header", "header checksum", "payload", "last byte", "truncated"),
        *("a part of a header", "emptied", "longer", "of another key"),
    ],
)
def test_verify_finds_every_planted_damage(filled: Any, damage: str) -> None:
    assert as_json("verify", filled.address) == {"checked": 2 * COUNT, "damaged": []}
    bad = filled.names()[0]
    filled.put(bad, planted(filled)[damage])
    found = as_json("verify", filled.address, status=1)
    assert found["checked"] == 2 * COUNT
    (told,) = found["damaged"]
    assert (told["path"], told["kind"], told["removed"]) == (filled.folder + bad, "corrupt", False)
    assert bad in filled.names()
    (told,) = as_json("verify", filled.address, "--repair", status=1)["damaged"]
    assert told["kind"] == "corrupt"
    assert told["removed"] == (bad not in filled.names())
    if not told["removed"]:
        assert (
            "it was not removed: the store does not support conditional removal (If-Match)" in told["message"]
        )


def test_purge_of_one_namespace_leaves_the_others(filled: Any) -> None:
    filled.other()
    before = as_json("stat", filled.address)
    gone = as_json("purge", filled.address, "-n", "ab", "--yes")
    assert gone["records"] == COUNT
    after = as_json("stat", filled.address)
    assert gone["bytes"] == before["bytes"] - after["bytes"]
    assert all(SECOND.hex() in name for name in filled.names())
    assert len(filled.names()) == COUNT
    assert as_json("purge", filled.address, "--yes")["records"] == COUNT
    assert filled.names() == []
    assert as_json("stat", filled.address)["others"] == 1, "other keys must stay"


def test_the_loss_of_records_is_read_from_their_headers(filled: Any) -> None:
    loss = as_json("stat", filled.address, "--loss")["loss"]
    assert loss["lossy_records"] == 0
    assert loss["exact_records"] == 2 * COUNT
    assert "loss" not in as_json("verify", filled.address), "namespaces are not described there"


def test_purge_of_a_tenant_leaves_the_records_of_others(filled: Any) -> None:
    filled.other()
    report = as_json("stat", filled.address, "--tenants")
    assert {name: total["records"] for name, total in report["tenants"].items()} == {"acme": 4, "other": 6}
    assert sum(total["bytes"] for total in report["tenants"].values()) == report["bytes"]
    assert "acme" in run("stat", filled.address, "--tenants").stdout
    assert as_json("purge", filled.address, "--tenant", "unknown", "--yes")["records"] == 0
    gone = as_json("purge", filled.address, "--tenant", "acme", "-n", "ab", "--yes")
    assert gone == {"records": 2, "bytes": report["tenants"]["acme"]["bytes"] // 2}
    assert as_json("purge", filled.address, "--tenant", "acme", "--yes")["records"] == 2
    after = as_json("stat", filled.address, "--tenants")
    assert {name: total["records"] for name, total in after["tenants"].items()} == {"other": 6}
    assert as_json("purge", filled.address, "--tenant", "other", "--yes")["records"] == 6
    assert as_json("stat", filled.address)["others"] == 1, "other keys must stay"


def test_purge_of_a_tenant_fails_if_a_record_has_no_valid_header(filled: Any) -> None:
    damaged = filled.names()[0]
    filled.put(damaged, b"\0" + filled.get(damaged)[1:])
    told = run("purge", filled.address, "--tenant", "acme", "--yes", status=1)
    assert damaged in told.stderr
    assert "verify --repair" in told.stderr
    left = as_json("stat", filled.address, "--tenants")
    assert "acme" not in left["tenants"], "all others are removed"
    assert left["unknown_tenant"]["records"] == 1
    assert left["unknown_tenant"]["bytes"] + left["tenants"]["other"]["bytes"] == left["bytes"]
    run("verify", filled.address, "--repair", status=1)
    assert damaged not in filled.names()
    assert as_json("purge", filled.address, "--tenant", "acme", "--yes")["records"] == 0


def test_stat_counts_no_records_that_are_removed_meanwhile(
    filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed_first(_: RemoteRoot, records: list[Any]) -> Iterator[tuple[Any, None]]:
        run("purge", filled.address, "--yes")
        yield from ((record, None) for record in records)

    monkeypatch.setattr(RemoteRoot, "_with_tenants", removed_first)
    report = as_json("stat", filled.address, "--tenants")
    assert (report["tenants"], report["unknown_tenant"]["records"]) == ({}, 0)


def test_a_prefix_does_not_match_a_longer_prefix(filled: Any) -> None:
    address = filled.address.replace("kv_offload", "kv") if "s3" in filled.address else None
    address = address or f"{filled.address}?key_prefix=kv"
    # With "kv" as the whole prefix it would be a record.
    neighbour = filled.separator.join(("kv" + "a" * 64, "b" * 32, "c" * 72))
    filled.put(neighbour, b"x")
    report = as_json("stat", address)
    assert (report["records"], report["others"], report["namespaces"]) == (0, 0, [])
    assert as_json("purge", address, "--yes") == {"records": 0, "bytes": 0}
    assert len(filled.names()) == 2 * COUNT
    assert filled.get(neighbour) == b"x"


def test_purge_asks_and_names_the_server(filled: Any) -> None:
    result = CliRunner().invoke(app, ["purge", filled.address], input="n\n")
    assert result.exit_code == 1
    assert f"Remove {2 * COUNT} records" in result.output
    assert "Servers that use it recompute" in result.output
    assert len(filled.names()) == 2 * COUNT


# ---- Redis alone


def test_a_password_from_the_environment_or_a_file_is_used(
    of_redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_redis.client.ask("CONFIG", "SET", "requirepass", PASSWORD)
    said = run("stat", of_redis.address, status=1).stderr
    assert "set password_env or password_file" in said
    monkeypatch.setenv("KV_TEST_PASSWORD", PASSWORD)
    assert as_json("stat", f"{of_redis.address}?password_env=KV_TEST_PASSWORD")["records"] == 0
    path = tmp_path / "password"
    path.write_text(PASSWORD)
    assert as_json("stat", f"{of_redis.address}?password_file={path}")["records"] == 0
    monkeypatch.setenv("KV_TEST_PASSWORD", PASSWORD + "!")
    result = run("stat", f"{of_redis.address}?password_env=KV_TEST_PASSWORD", status=1)
    assert "refuses the user name or the password" in result.stderr
    assert PASSWORD not in result.output + result.stderr


@pytest.mark.parametrize(
    ("rights", "command", "sentence"),
    [
        ("+@all -scan ~*", ["stat"], "allow +scan"),
        ("+@all -watch ~*", ["verify"], "allow +watch"),
        ("+@all -getrange ~*", ["verify"], "allow +getrange"),
        ("+@all -del ~*", ["purge", "--yes"], "allow +del"),
        ("+@all ~other:*", ["purge", "--yes"], "the keys ~kv_offload:*"),
    ],
)
def test_a_missing_permission_is_named(
    of_redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rights: str, command: list[str],
    sentence: str,
) -> None:  # fmt: skip
    fill(tmp_path, of_redis.spec(FIRST), lambda: len(of_redis.names()))
    of_redis.client.ask("ACL", "SETUSER", "looker", "on", f">{PASSWORD}", *rights.split())
    monkeypatch.setenv("KV_TEST_PASSWORD", PASSWORD)
    address = of_redis.address.replace("unix://", "unix://looker@")
    result = run(command[0], f"{address}?password_env=KV_TEST_PASSWORD", *command[1:], status=1)
    assert sentence in result.stderr + result.stdout
    assert PASSWORD not in result.output + result.stderr
    assert len(of_redis.names()) == COUNT


def test_a_repair_without_transactions_removes_nothing(
    of_redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, of_redis.spec(FIRST), lambda: len(of_redis.names()))
    of_redis.put(of_redis.names()[0], b"x")
    rights = ["+@all", "-multi", "~*"]
    of_redis.client.ask("ACL", "SETUSER", "looker", "on", f">{PASSWORD}", *rights)
    monkeypatch.setenv("KV_TEST_PASSWORD", PASSWORD)
    address = of_redis.address.replace("unix://", "unix://looker@") + "?password_env=KV_TEST_PASSWORD"
    (told,) = as_json("verify", address, "--repair", status=1)["damaged"]
    assert "it was not removed: the user may not use MULTI" in told["message"]
    assert len(of_redis.names()) == COUNT


def test_sizes_are_found_without_memory_usage(
    of_redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, of_redis.spec(FIRST), lambda: len(of_redis.names()))
    rights = ["+@all", "-memory", "-object", "~*"]
    of_redis.client.ask("ACL", "SETUSER", "looker", "on", f">{PASSWORD}", *rights)
    monkeypatch.setenv("KV_TEST_PASSWORD", PASSWORD)
    address = of_redis.address.replace("unix://", "unix://looker@") + "?password_env=KV_TEST_PASSWORD"
    size = len(of_redis.get(of_redis.names()[0]))
    report = as_json("stat", address)
    assert report["bytes"] == COUNT * size
    assert report["namespaces"][0]["newest"] is None
    assert as_json("purge", address, "--yes") == {"records": COUNT, "bytes": COUNT * size}


def test_inspection_does_not_count_as_a_use(of_redis: Redis, tmp_path: Path) -> None:
    """Control: a normal read does count as a use."""
    fill(tmp_path, of_redis.spec(FIRST), lambda: len(of_redis.names()))
    names = of_redis.names()
    for name in names:
        dumped = of_redis.client.ask("DUMP", name)
        of_redis.client.ask("RESTORE", name, 0, dumped, "REPLACE", "IDLETIME", 10_000)
    report = as_json("stat", of_redis.address)
    assert abs(time.time() - report["namespaces"][0]["newest"] - 10_000) < 300
    listed = lines(of_redis.address)
    assert all(abs(time.time() - record["mtime"] - 10_000) < 300 for record in listed)
    assert all(of_redis.client.ask("OBJECT", "IDLETIME", name) >= 10_000 for name in names)
    of_redis.get(names[0])
    assert of_redis.client.ask("OBJECT", "IDLETIME", names[0]) < 300


def test_a_replica_is_read_but_not_changed(of_redis: Redis, tmp_path: Path) -> None:
    fill(tmp_path, of_redis.spec(FIRST), lambda: len(of_redis.names()))
    of_redis.client.ask("CONFIG", "SET", "replica-serve-stale-data", "yes")
    of_redis.client.ask("REPLICAOF", "127.0.0.1", "1")  # an unreachable primary
    assert as_json("stat", of_redis.address)["records"] == COUNT
    assert as_json("verify", of_redis.address)["checked"] == COUNT
    said = run("purge", of_redis.address, "--yes", status=1).stderr
    assert "read-only replica" in said
    assert "address of its primary" in said
    assert len(of_redis.names()) == COUNT


def test_values_of_other_types_and_lfu_are_listed_and_damaged_ones_found(
    of_redis: Redis, tmp_path: Path
) -> None:
    fill(tmp_path, of_redis.spec(FIRST), lambda: len(of_redis.names()))
    name = of_redis.names()[0]
    of_redis.client.ask("DEL", name)
    of_redis.client.ask("RPUSH", name, "x")
    of_redis.client.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lfu")
    assert as_json("stat", of_redis.address)["namespaces"][0]["newest"] is None
    assert [record["mtime"] for record in lines(of_redis.address)] == [None] * COUNT
    assert "-" in run("ls", of_redis.address).stdout
    (found,) = as_json("verify", of_redis.address, "--repair", status=1)["damaged"]
    assert (found["path"], found["kind"], found["removed"]) == (name, "corrupt", True)
    assert of_redis.client.ask("EXISTS", name) == 0


# ---- S3 alone


def test_read_only_credentials_list_but_remove_nothing(
    of_s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = f"kv_offload/{FIRST.hex()}"
    run("purge", of_s3.address, "--yes")
    fill(tmp_path, of_s3.spec(FIRST), lambda: len(of_s3.names(start)))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER)
    assert as_json("verify", of_s3.address)["checked"] == COUNT
    said = run("purge", of_s3.address, "--yes", status=1).stderr
    assert "s3:DeleteObject" in said
    assert SECRET not in said
    assert len(of_s3.names(start)) == COUNT


def test_without_credentials_the_error_names_the_settings(
    of_s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert "no credentials" in run("stat", of_s3.address, status=2).stderr


def test_more_than_a_page_is_listed(of_s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(7):
        of_s3.server.overwrite(f"pages/{FIRST.hex()}/{'e' * 32}/{number:02x}{'0' * 70}", b"x")
    whole = _core.s3_records
    monkeypatch.setattr(_core, "s3_records", lambda bucket, **given: whole(bucket, **given, page=3))
    address = of_s3.address.replace("/kv_offload", "/pages")
    assert as_json("stat", address)["records"] == 7
    assert len({record["key"] for record in lines(address)}) == 7
    assert as_json("purge", address, "--yes")["records"] == 7
    assert as_json("stat", address)["records"] == 0
