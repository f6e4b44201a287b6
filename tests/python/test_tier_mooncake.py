# SPDX-License-Identifier: Apache-2.0
"""The kind ``mooncake``: accepted values, refused values with their errors, and the output of commands."""

import json
from pathlib import Path
from typing import Any

import pytest
from mooncake_store import free_port, make_fake_package
from typer.testing import CliRunner

from kv_offload.cli import app
from kv_offload.cli.doctor_checks import place, speed
from kv_offload.config import ConfigError, OffloadConfig
from kv_offload.machine import cautions
from kv_offload.sizing import Geometry, startup_summary
from kv_offload.tiers.mooncake.config import MooncakeTierConfig
from kv_offload.tiers.registry import entry_at, parse_tier


def config(**given: Any) -> OffloadConfig:
    tier = {"type": "mooncake", "master": "mooncake.internal:50051", **given}
    return OffloadConfig.parse({"cpu_bytes_to_use": "1GiB", "secondary_tiers": [tier]})[0]


def tier(**given: Any) -> MooncakeTierConfig:
    (found,) = config(**given).secondary_tiers
    assert isinstance(found, MooncakeTierConfig)
    return found


def problem(**given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**given)
    (text,) = caught.value.problems
    return text


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Provides a fake package of Mooncake's interface to its processes."""
    monkeypatch.setenv("PYTHONPATH", str(make_fake_package(tmp_path)))
    monkeypatch.setenv("MOONCAKE_FAKE", str(tmp_path / "objects"))
    monkeypatch.setattr("kv_offload.tiers.base.TierConfig.op_timeout_seconds", property(lambda _: 240.0))


@pytest.mark.parametrize(
    "master", ["host:50051", "10.0.0.1:1", "[::1]:50051", "etcd://a:2379", "etcd://a:2379;b:2379"]
)
def test_the_place_of_a_mooncake_tier_is_its_master(master: str) -> None:
    assert tier(master=master).place == master
    assert tier(master=master).load_locality == "REMOTE"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("master", text) for text in ("", "host", "host:", "host:0", "host:x", "a b:1", "u:p@host:1")),
        *(("metadata", text) for text in ("", "host:1", "http://u:p@host", "ftp://h", "http://a b")),
        ("protocol", "ib"),
        ("devices", "mlx5_0;rm"),
        ("local_host", "a b"),
        ("key_prefix", "a:b"),
    ],
)
def test_an_invalid_value_is_refused(key: str, value: str) -> None:
    given = {"protocol": "rdma"} if key == "devices" else {}
    assert f"secondary_tiers[0].{key}" in problem(**{**given, key: value})


def test_invalid_or_conflicting_options_are_refused() -> None:
    assert "the store limits its size" in problem(max_bytes="1GiB")
    assert 'devices is given but protocol is not "rdma"' in problem(devices="mlx5_0")
    assert tier(devices="mlx5_0,mlx5_1", protocol="rdma").devices == "mlx5_0,mlx5_1"


def test_the_process_gets_all_its_settings() -> None:
    told = json.loads(tier(metadata="http://m:8080/metadata", local_host="10.0.0.7")._setup())
    assert told == {
        "master": "mooncake.internal:50051",
        "metadata": "http://m:8080/metadata",
        "protocol": "tcp",
        "devices": "",
        "local_host": "10.0.0.7",
        "patience_seconds": 90.0,
    }
    assert json.loads(tier(op_timeout_ms=100_000)._setup())["patience_seconds"] == 200.0


def test_config_writes_the_tier_and_the_startup_summary_names_it() -> None:
    done = CliRunner().invoke(app, ["config", "--cpu", "1GiB", "--tier", "mooncake=m.internal:50051"])
    assert done.exit_code == 0, done.output
    (written,) = json.loads(done.stdout)["kv_connector_extra_config"]["secondary_tiers"]
    assert (
        written == {"type": "mooncake", "master": "m.internal:50051"} == entry_at("mooncake=m.internal:50051")
    )
    line = startup_summary(
        config(), (None,), Geometry.of([16], [[4096]]), copier="host", namespace="n", version="1"
    )
    assert "mooncake mooncake.internal:50051 limited by its server (write_through, compress auto)" in line


def test_without_the_package_doctor_shows_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    (text,) = tier().problems()
    assert "pip install mooncake-transfer-engine" in text
    assert tier().cautions() == [], "the problem must not be repeated as a caution"


@pytest.mark.parametrize("command", [["stat"], ["ls"], ["verify"], ["purge", "--yes"]])
def test_commands_that_need_a_listing_are_refused(command: list[str]) -> None:
    name, *options = command
    done = CliRunner().invoke(app, [name, "mooncake=m.internal:50051", *options])
    assert done.exit_code != 0
    said = " ".join(done.output.split())
    assert "cannot list its objects" in said


@pytest.mark.usefixtures("fake")
def test_doctor_measures_a_store_that_answers() -> None:
    found = tier(master="etcd://127.0.0.1:2379")
    assert found.cautions() == []
    assert "by tcp, answers in " in found.summary().text
    check, codec = speed(found, 4 << 20)
    assert check.state == codec.state == "ok"
    assert "2 objects of 2.0 MiB" in check.text
    assert "compress auto is" in codec.text
    assert next(check.state for check in place(found)) == "ok"


@pytest.mark.usefixtures("fake")
def test_an_unusable_store_is_a_caution(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = config(master=f"127.0.0.1:{free_port()}")
    (text,) = cautions(silent)
    assert "is not used until it answers" in text
    assert "does not answer: Connection refused" in text
    monkeypatch.setenv("MOONCAKE_FAKE_SETUP", "-1")
    (text,) = cautions(config(master="etcd://127.0.0.1:2379"))
    assert "Mooncake's client does not start (code -1)" in text
    assert parse_tier({"type": "mooncake", "master": "etcd://127.0.0.1:2379"}).measure(1).state == "refused"
