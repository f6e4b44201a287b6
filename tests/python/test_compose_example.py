# SPDX-License-Identifier: Apache-2.0
"""examples/compose: its parts fit together, and a server accepts its configuration."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis_server import wait_for

from kv_offload.config import OffloadConfig
from kv_offload.sizes import parse_byte_size
from kv_offload.tiers.redis.config import RedisTierConfig
from kv_offload.tiers.registry import parse_tier

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "compose" / "compose.yaml"
OPTION = "--kv-transfer-config="
SECRET = "/run/secrets/valkey_password"


@pytest.fixture
def example() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    return found


@pytest.fixture
def replicas(example: dict[str, Any]) -> list[dict[str, Any]]:
    return [service for service in example["services"].values() if "vllm" in service["image"]]


def config_of(replica: dict[str, Any]) -> OffloadConfig:
    (given,) = [word for word in replica["command"] if word.startswith(OPTION)]
    transfer = json.loads(given.removeprefix(OPTION))
    assert transfer["kv_connector"] == "OffloadingConnector"
    config, notes = OffloadConfig.parse(transfer["kv_connector_extra_config"])
    assert not notes
    return config


def test_the_replicas_share_one_tier_and_nothing_else(replicas: list[dict[str, Any]]) -> None:
    first, second = replicas
    assert config_of(first) == config_of(second)
    for key in ("ports", "deploy"):
        assert first[key] != second[key]


def test_each_replica_finds_redis_and_the_secret(
    example: dict[str, Any], replicas: list[dict[str, Any]]
) -> None:
    services = example["services"]
    for replica in replicas:
        (tier,) = config_of(replica).secondary_tiers
        assert isinstance(tier, RedisTierConfig)
        assert tier.parts.host in services
        assert (tier.parts.host, tier.parts.port) == ("valkey", 6379)
        assert tier.password_file == SECRET
        assert tier.problems() == [f"{tier.label()}: password_file {SECRET}: No such file or directory"]
    for service in services.values():
        assert service["secrets"] == [Path(SECRET).name]
    assert list(example["secrets"]) == [Path(SECRET).name]


def test_host_memory_fits_in_shared_memory(replicas: list[dict[str, Any]]) -> None:
    for replica in replicas:
        shared = parse_byte_size(replica["shm_size"].replace("gb", "GiB"))
        assert config_of(replica).cpu_bytes_to_use < shared


def test_only_replicas_have_ports_and_only_on_loopback(example: dict[str, Any]) -> None:
    assert "ports" not in example["services"]["valkey"]
    for service in example["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_a_server_accepts_its_options_and_doctor_finds_no_problem(
    example: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    password, socket = tmp_path / "password", tmp_path / "s"
    password.write_text("correct-horse\n")
    service = example["services"]["valkey"]
    (line,) = service["command"]
    line = line.replace("$$", "$").replace(SECRET, str(password)).replace("valkey-server", "redis-server")
    line = line.replace("<<END", f"--port 0 --unixsocket {socket} --dir {tmp_path} <<END")
    server = subprocess.Popen([*service["entrypoint"], line], stdout=subprocess.DEVNULL)
    try:
        wait_for(server, socket)
        tier = parse_tier({"type": "redis", "url": f"unix://{socket}", "password_file": str(password)})
        assert tier.problems() == []
        assert tier.cautions() == []
    finally:
        server.kill()  # the shell has exec'ed it, so that Docker's signals reach it
        server.wait()
