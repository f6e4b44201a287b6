# SPDX-License-Identifier: Apache-2.0
"""The kind ``redis``: accepted values, refused values with their errors; no password is shown."""

import json
import logging
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis_server import RedisClient, command, redis_server
from s3_server import free_ports
from typer.testing import CliRunner

from kv_offload import _core
from kv_offload.cli import app
from kv_offload.cli.doctor_checks import place, plan, speed
from kv_offload.config import ConfigError, OffloadConfig
from kv_offload.machine import cautions
from kv_offload.sizing import Geometry, startup_summary
from kv_offload.tiers.redis.config import RedisTierConfig, Url, parse_node, parse_url
from kv_offload.tiers.registry import parse_tier

SECRET = "hunter2-never-shown"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises timeouts: the machine is busy with other tests."""
    monkeypatch.setattr("kv_offload.tiers.redis.config._PROBE_SECONDS", 240.0)
    monkeypatch.setattr("kv_offload.tiers.base.TierConfig.op_timeout_seconds", property(lambda _: 240.0))


def config(**given: Any) -> OffloadConfig:
    tier = {"type": "redis", "url": "redis://cache:6379/0", **given}
    return OffloadConfig.parse({"cpu_bytes_to_use": "1GiB", "secondary_tiers": [tier]})[0]


def problem(**given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**given)
    (text,) = caught.value.problems
    return text


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Yields the address of this test's own server."""
    with redis_server(tmp_path, "--maxmemory", "100mb") as socket:
        yield f"unix://{socket}"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("redis://cache", Url("cache")),
        ("redis://kv@cache:7000/3", Url("cache", 7000, database=3, user="kv")),
        ("rediss://a%40b@[::1]:6380/", Url("::1", 6380, tls=True, user="a@b")),
        ("valkey://kv@cache:7000/3", Url("cache", 7000, database=3, user="kv")),
        ("valkeys://cache", Url("cache", tls=True)),
        ("unix:///run/r.sock", Url(unix_socket="/run/r.sock")),
        ("unix:///run/r.sock?db=2", Url(unix_socket="/run/r.sock", database=2)),
    ],
)
def test_an_address_is_parsed_into_its_parts(text: str, parts: Url) -> None:
    assert parse_url(text) == parts
    assert config(url=text).secondary_tiers[0].place == text


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "cache:6379",
            "http://cache",
            "redis://",
            "redis://cache/x",
            "redis://cache:0",
            "redis://cache:70000",
        ),
        *("redis://cache/0?x=1", "redis://cache/1#x", "unix://host/path", "unix:path", "unix:///p?db=x"),
    ],
)
def test_an_invalid_address_is_refused_with_the_valid_forms(text: str) -> None:
    sentence = problem(url=text)
    assert "secondary_tiers[0].url" in sentence
    assert "redis://" in sentence or "unix:///" in sentence


@pytest.mark.parametrize("scheme", ["redis-sentinel", "rediss-sentinel", "redis+sentinel", "valkey-sentinel"])
def test_the_address_of_a_sentinel_is_refused_with_the_alternative(scheme: str) -> None:
    assert "give the address of the primary" in problem(url=f"{scheme}://cache:26379/mymaster/0")
    for words in (["doctor", "--no-measure", "--root"], ["config", "--cpu", "1GiB", "--tier"]):
        prefix = "redis=" if words[0] == "config" else ""
        result = CliRunner().invoke(app, [*words, f"{prefix}{scheme}://cache:26379/mymaster"])
        assert result.exit_code == 2
        assert "the address of a Sentinel" in result.stderr


def wait_for_port(process: subprocess.Popen[bytes], port: int) -> None:
    give_up = time.monotonic() + 240
    while True:
        assert process.poll() is None
        assert time.monotonic() < give_up
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.01)


def test_a_sentinel_behind_a_plain_address_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sentinel.conf").write_text("sentinel monitor mymaster 127.0.0.1 1 1\n")
    port = free_ports(1)[0]
    started = ["redis-server", str(tmp_path / "sentinel.conf"), "--sentinel", "--port", str(port)]
    sentinel = subprocess.Popen(started, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        wait_for_port(sentinel, port)
        (tier,) = config(url=f"redis://127.0.0.1:{port}").secondary_tiers
        (answer,) = place(tier)
        assert (answer.state, "this is a Sentinel, which stores no records" in answer.text) == (
            "refused",
            True,
        )
        (measured,) = speed(tier, 1 << 20)
        assert measured.state == "refused"
        (numbered,) = place(config(url=f"redis://127.0.0.1:{port}/1").secondary_tiers[0])
        assert (numbered.state, "it is a Sentinel" in numbered.text) == ("refused", True)
    finally:
        sentinel.kill()
        sentinel.wait()


@pytest.mark.parametrize("held", [0, 75, 135])
def test_a_measurement_uses_a_quarter_of_free_memory_and_evicts_nothing(tmp_path: Path, held: int) -> None:
    options = ("--maxmemory", "160mb", "--maxmemory-policy", "allkeys-lru")
    with redis_server(tmp_path, *options) as path, RedisClient(path) as client:
        for number in range(held):
            assert client.ask("SET", f"other:{number}", b"x" * 1_000_000) == b"OK"
        assert client.ask("DBSIZE") == held, "control: no key may be evicted yet"
        (tier,) = config(url=f"unix://{path}").secondary_tiers
        (answer, *_) = speed(tier, 64 << 20)
        assert answer.state in ("ok", "note"), answer.text
        assert client.ask("DBSIZE") == held
        assert b"evicted_keys:0\r\n" in client.ask("INFO", "stats")
        assert answer.figures is not None
        (node,) = answer.figures["nodes"]
        assert answer.figures["records"] * (2 << 20) <= node["free_bytes"] / 4
        assert (answer.figures["records"] > 0) == (node["free_bytes"] > 4 * 2.5 * (2 << 20))


@pytest.mark.parametrize(("policy", "state"), [("allkeys-lru", "note"), ("noeviction", "refused")])
def test_a_full_server_is_not_measured(tmp_path: Path, policy: str, state: str) -> None:
    options = ("--maxmemory", "2mb", "--maxmemory-policy", policy)
    with redis_server(tmp_path, *options) as path, RedisClient(path) as client:
        (tier,) = config(url=f"unix://{path}").secondary_tiers
        (answer, *_) = speed(tier, 64 << 20)
        assert answer.state == state, answer.text
        assert "not measured" in answer.text
        assert client.ask("DBSIZE") == 0


@pytest.mark.parametrize(
    "text", [f"redis://u:{SECRET}@h", f"rediss://:{SECRET}@h:1/2", f"redis://u:{SECRET}@h:notaport"]
)
def test_a_password_in_the_address_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(url=text)
    assert SECRET not in str(caught.value)
    if "notaport" not in text:
        assert "password_env" in str(caught.value)


@pytest.mark.parametrize("command", [["doctor", "--no-measure", "--root"], ["bench"], ["config", "--tier"]])
def test_no_command_repeats_the_password_in_an_address(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, f"redis=redis://u:{SECRET}@h"])
    assert result.exit_code == 2
    assert "password_env" in result.stderr
    assert SECRET not in result.output + result.stderr


def test_the_error_of_an_invalid_tier_does_not_quote_the_values() -> None:
    with pytest.raises(ValueError, match="password_env") as caught:
        parse_tier({"type": "redis", "url": f"redis://u:{SECRET}@h"})
    assert SECRET not in str(caught.value)


def test_invalid_or_conflicting_options_are_refused() -> None:
    assert "maxmemory" in problem(max_bytes="1GiB")
    assert "give one of them" in problem(password_env="A", password_file="/b")
    assert "not rediss://" in problem(ca_file="/ca.pem")
    assert "key_prefix" in problem(key_prefix="a b")
    assert "'password' is not known" in problem(password=SECRET)
    assert SECRET not in problem(password=SECRET)


def test_the_password_comes_from_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def problems(**given: Any) -> list[str]:
        return config(**given).secondary_tiers[0].problems()

    assert "set password_env" in problems(url="redis://kv@cache")[0]
    assert "is unset or empty" in problems(password_env="KV_TEST_PASSWORD")[0]
    monkeypatch.setenv("KV_TEST_PASSWORD", SECRET)
    assert problems(url="redis://kv@cache", password_env="KV_TEST_PASSWORD") == []
    path = tmp_path / "password"
    assert "No such file" in problems(password_file=str(path))[0]
    path.write_text(SECRET + "\n")
    assert problems(password_file=str(path)) == []
    tier = config(password_file=str(path)).secondary_tiers[0]
    assert isinstance(tier, RedisTierConfig)
    assert tier._password() == SECRET


def test_nothing_shows_the_password(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, server: str
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("KV_TEST_PASSWORD", SECRET)
    parsed = config(url=server, password_env="KV_TEST_PASSWORD")  # unknown to that server
    (tier,) = parsed.secondary_tiers
    assert isinstance(tier, RedisTierConfig)
    shown = [
        repr(parsed),
        json.dumps(parsed.model_dump(mode="json")),
        repr(tier._server()),
        str(plan(parsed)),
        str(tier.problems()),
        str(cautions(parsed)),
        str(place(tier)),
        str(speed(tier, 4 << 20)),
        startup_summary(
            parsed, (None,), Geometry.of([16], [[4096]]), copier="host", namespace="n", version="1"
        ),
    ]
    assert "refuses the user name or the password" in str(place(tier))
    assert SECRET not in "".join(shown) + caplog.text


def test_doctor_shows_the_server_and_its_speed(server: str) -> None:
    (tier,) = config(url=server).secondary_tiers
    (looked,) = place(tier)
    assert looked.state == "ok"
    assert "of 100.0 MiB used" in looked.text
    measured, codec = speed(tier, 8 << 20)
    assert codec.text.startswith("compress auto is ")
    assert measured.figures is not None
    assert measured.figures["write_bytes_per_second"] > 0
    assert measured.figures["read_bytes_per_second"] > 0
    assert measured.state == "note"  # a note, because it does not evict
    assert "set allkeys-lru" in measured.text
    assert cautions(config(url=server))
    assert cautions(config(url=server, ttl_seconds=60)) == []


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """Yields the address of a cluster of one node, which has all slots."""
    bus = str(free_ports(1)[0])
    options = ("--cluster-enabled", "yes", "--cluster-port", bus, "--maxmemory", "100mb")
    with redis_server(tmp_path, *options) as path:
        assert command(path, "CLUSTER", "ADDSLOTSRANGE", "0", "16383") == b"+OK\r\n"
        give_up = time.monotonic() + 240
        while b"cluster_state:ok" not in command(path, "CLUSTER", "INFO"):
            assert time.monotonic() < give_up
            time.sleep(0.01)
        yield f"unix://{path}"


def test_doctor_reports_a_cluster_and_names_the_nodes(cluster: str) -> None:
    (tier,) = config(url=cluster, op_timeout_ms=240_000).secondary_tiers
    (looked,) = place(tier)
    assert looked.state == "ok"
    assert "cluster of 1 node, answers" in looked.text
    measured, codec = speed(tier, 8 << 20)
    assert codec.text.startswith("compress auto is ")
    assert measured.figures is not None
    assert measured.figures["read_bytes_per_second"] > 0
    socket = cluster.removeprefix("unix://")
    assert f"{socket} db 0: its maxmemory-policy is noeviction" in measured.text
    assert "hash tag" not in measured.text
    assert "hash tag" in str(cautions(config(url=cluster, key_prefix="{kv}")))
    assert "only has database 0" in str(place(config(url=f"{cluster}?db=2").secondary_tiers[0]))


def test_an_engine_is_served_by_a_cluster(cluster: str) -> None:
    """As the adapter opens it: the next process finds the records of the first."""
    (tier,) = config(url=cluster, op_timeout_ms=240_000).secondary_tiers
    assert isinstance(tier, RedisTierConfig)
    assert tier._others() == []
    found = tier._probe(1)
    assert found["cluster"]
    assert [node["failure"] for node in found["nodes"]] == [""]
    assert found["write_refused"] == ""


@pytest.mark.parametrize(
    ("text", "node"),
    [("cache", ("cache", 6379)), ("cache-2:7001", ("cache-2", 7001)), ("[::1]:7001", ("::1", 7001))],
)
def test_other_nodes_may_omit_the_port(text: str, node: tuple[str, int]) -> None:
    assert parse_node(text) == node
    assert config(other_nodes=[text]).secondary_tiers


@pytest.mark.parametrize(
    "text", ["", "redis://h", f"u:{SECRET}@h", "h:0", "h:x", "h:", ":1", "h/1", "h:1/2", "h?x"]
)
def test_invalid_other_nodes_are_refused_and_not_repeated(text: str) -> None:
    sentence = problem(other_nodes=[text])
    assert "HOST or HOST:PORT" in sentence
    assert SECRET not in sentence


def test_other_nodes_exclude_options_that_clusters_do_not_support() -> None:
    assert "unix socket" in problem(url="unix:///s", other_nodes=["h"])
    assert "names a database" in problem(url="redis://h/3", other_nodes=["h"])


def test_messages_about_a_cluster_name_the_nodes() -> None:
    (tier,) = config(url="redis://h").secondary_tiers
    assert isinstance(tier, RedisTierConfig)

    def node(number: int, **given: Any) -> dict[str, Any]:
        usual = {
            "address": f"redis://10.0.0.{number}:6379/0",
            "failure": "",
            "version": "Valkey 8.1",
            "role": "master",
            "eviction_policy": "allkeys-lru",
            "used_bytes": 1 << 20,
            "max_bytes": 8 << 20,
        }
        return {**usual, **given}

    found = {"cluster": True, "ping_seconds": 0.001, "nodes": [node(1), node(2), node(3)]}
    assert tier._cautions_of(found) == []
    assert tier._described(found).startswith(
        "Valkey 8.1, cluster of 3 nodes, answers in 1.00 ms, 3.0 MiB of 24.0 MiB"
    )
    found["nodes"] = [node(1, max_bytes=0), node(2, failure="gone"), node(3, max_bytes=0)]
    lines = tier._cautions_of(found)
    assert lines[0].startswith("10.0.0.1:6379, 10.0.0.3:6379: maxmemory is not set")
    assert lines[1] == "10.0.0.2:6379: its records are not used until it answers: gone"
    assert "1 of them unreachable" in tier._described(found)
    assert "no maxmemory" in tier._described(found)


@pytest.mark.parametrize(("taken", "told"), [(2_100_000, False), (2_621_496, True), (0, False)])
def test_doctor_reports_the_allocated_size_of_a_record(
    monkeypatch: pytest.MonkeyPatch, taken: int, told: bool
) -> None:
    (tier,) = config(url="redis://h").secondary_tiers
    assert isinstance(tier, RedisTierConfig)
    found = {
        "cluster": False,
        "nodes": [],
        "ping_seconds": 0.001,
        "write_refused": "",
        "write_bytes_per_second": 1e9,
        "read_bytes_per_second": 1e9,
        "bytes_per_record": taken,
        "records": 2,
    }
    monkeypatch.setattr(RedisTierConfig, "_probe", lambda *_: found)
    measured = tier.measure(1 << 22)
    assert measured.state == "ok"
    assert ("each takes 2.5 MiB of its memory" in measured.text) == told


def test_an_unreachable_server_is_a_caution_and_refused_by_doctor(tmp_path: Path) -> None:
    parsed = config(url=f"unix://{tmp_path}/nobody")
    assert "is not used until it answers" in cautions(parsed)[0]
    (measured,) = speed(parsed.secondary_tiers[0], 1 << 20)
    assert measured.state == "refused"


def test_the_core_never_shows_credentials() -> None:
    shown = repr(_core.RedisServer(host="h", user="somebody", password=SECRET))
    assert shown == "<RedisServer redis://h:6379/0>"
    with pytest.raises(ValueError, match="either host or unix_socket"):
        _core.RedisServer()
