# SPDX-License-Identifier: Apache-2.0
"""The setting ``tenants``: shares, how a request's tenant is found, and errors."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kv_offload.cli import app
from kv_offload.cli.doctor_checks import tenants
from kv_offload.config import ConfigError, OffloadConfig
from kv_offload.tenants import MAX_TENANTS, client_of
from kv_offload.tiers.encryption import key_ids

GIB = 1 << 30


def read(tenants: Any) -> OffloadConfig:
    return OffloadConfig.from_extra_config({"cpu_bytes_to_use": GIB, "tenants": tenants})


def only_problem(tenants: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(tenants)
    (problem,) = caught.value.problems
    return problem


def test_without_the_setting_there_are_no_tenants() -> None:
    assert OffloadConfig.from_extra_config({"cpu_bytes_to_use": GIB}).tenant_table() is None


def test_other_has_the_rest_of_the_memory() -> None:
    table = read({"acme": {"share": 40}, "beta": {"share": 25.5}}).tenant_table()
    assert table is not None
    assert table.shares == (("other", pytest.approx(0.345)), ("acme", 0.4), ("beta", 0.255))
    full = read({"acme": {"share": 100}}).tenant_table()
    assert full is not None
    assert full.shares[0] == ("other", 0.0)


def with_keys(tier_key: str | None, **tenants: Any) -> OffloadConfig:
    tier = {"type": "fs", "root_dir": "/kv"} | ({} if tier_key is None else {"encryption_key_file": tier_key})
    return OffloadConfig.from_extra_config(
        {"cpu_bytes_to_use": GIB, "tenants": tenants, "secondary_tiers": [tier]}
    )


def test_a_tenant_has_the_key_files_that_it_names() -> None:
    acme = {"share": 40, "encryption_key_file": ["/keys/acme-2", "/keys/acme-1"]}
    table = with_keys("/keys/all", acme=acme, beta={"share": 10}).tenant_table()
    assert table is not None
    assert table.key_files == ((), ("/keys/acme-2", "/keys/acme-1"), ())


def test_doctor_checks_the_keys_of_tenants(tmp_path: Path) -> None:
    for name, mode in (("acme", 0o600), ("beta", 0o644)):
        (tmp_path / name).write_bytes(bytes(range(32)))
        (tmp_path / name).chmod(mode)
    own = {name: {"share": 10, "encryption_key_file": str(tmp_path / name)} for name in ("acme", "beta")}
    acme, beta = tenants(with_keys("/keys/all", **own, plain={"share": 10}))
    assert (acme.name, acme.state) == ("tenant acme", "ok")
    assert f"encrypted with key {key_ids((str(tmp_path / 'acme'),))[0][:8]}" in acme.text
    assert (beta.name, beta.state) == ("tenant beta", "refused")
    assert "chmod 600" in beta.text


def test_doctor_asks_about_the_keys_of_tenants(tmp_path: Path) -> None:
    config = {
        "spec_name": "KVOffloadSpec",
        "cpu_bytes_to_use": GIB,
        "tenants": {"acme": {"share": 10, "encryption_key_file": str(tmp_path / "missing")}},
        "secondary_tiers": [
            {"type": "fs", "root_dir": str(tmp_path / "kv"), "encryption_key_file": str(tmp_path / "all")}
        ],
    }
    command = ["doctor", "--json", "--no-measure", "--config", json.dumps(config)]
    result = CliRunner().invoke(app, command)
    states = {check["name"]: check["state"] for check in json.loads(result.stdout)["checks"]}
    assert states["tenant acme"] == "refused"


def test_keys_of_tenants_need_encrypted_tiers() -> None:
    acme = {"share": 40, "encryption_key_file": "/keys/acme"}
    with pytest.raises(ConfigError) as caught:
        with_keys(None, acme=acme)
    assert caught.value.problems == [
        "tenants: acme: encryption_key_file of a tenant needs an encryption_key_file in each tier, and "
        "secondary_tiers[0] has none; add one, or remove that of the tenant"
    ]
    with pytest.raises(ConfigError, match="give the path of a file with 32 random bytes"):
        with_keys("/keys/all", acme={"share": 40, "encryption_key_file": 7})


def test_a_tenant_is_found_by_its_salt_before_its_client() -> None:
    table = read(
        {
            "acme": {"share": 40, "clients": ["web", "batch"]},
            "beta": {"share": 30, "cache_salts": ["pepper"]},
            "gamma": {"share": 10},
        }
    ).tenant_table()
    assert table is not None
    assert table.names == ("other", "acme", "beta", "gamma")
    assert [table.number_of(None, client) for client in ("web", "batch", "gamma", "acme", "beta", None)] == [
        *(1, 1, 3, 0, 0, 0)
    ]
    assert table.number_of("pepper", None) == 2
    assert table.number_of("pepper", "web") == 2
    assert table.number_of("unknown", "web") == 1
    assert table.uses_salts
    no_salts = read({"acme": {"share": 40}}).tenant_table()
    assert no_salts is not None
    assert not no_salts.uses_salts


@pytest.mark.parametrize(
    ("tenants", "problem"),
    [
        ({"acme": {}}, "tenants.acme.share is required"),
        ({"acme": {"share": 101}}, "tenants.acme.share is 101; it should be less than or equal to 100"),
        ({"acme": {"share": -1}}, "tenants.acme.share is -1; it should be greater than or equal to 0"),
        ({"acme": {"share": "40%"}}, "tenants.acme.share is '40%'; it should be a valid number"),
        ({"acme": {"share": True}}, "tenants.acme.share is True; it should be a valid number"),
        ({"acme": {"share": 1, "weight": 2}}, "tenants.acme.weight"),
        ({"acme": {"share": 1, "clients": [""]}}, "tenants.acme.clients[0] is ''"),
        ({"a b": {"share": 1}}, "tenants.a b"),
        ({"other": {"share": 1}}, "tenants: other is the name of the tenant of all other requests"),
        (["acme"], "tenants is ['acme']"),
        (
            {"acme": {"share": 60}, "beta": {"share": 50}},
            "tenants: the shares are 110 % together (acme 60, beta 50); at most 100 % are possible",
        ),
        (
            {"acme": {"share": 1, "clients": ["web"]}, "beta": {"share": 1, "clients": ["app", "web"]}},
            "tenants: beta.clients[1] (web) is also one of acme",
        ),
        (
            {"acme": {"share": 1}, "beta": {"share": 1, "clients": ["acme"]}},
            "tenants: beta.clients[0] (acme) is also one of acme",
        ),
        (
            {"acme": {"share": 1, "clients": ["web", "web"]}},
            "tenants: acme.clients[1] (web) is also one of acme",
        ),
        ({f"t{i}": {"share": 0} for i in range(MAX_TENANTS + 1)}, "tenants"),
    ],
)
def test_an_invalid_tenant_is_refused_with_its_place(tenants: Any, problem: str) -> None:
    assert only_problem(tenants).startswith(problem)


def test_a_duplicate_salt_is_named_by_its_place_only() -> None:
    problem = only_problem(
        {
            "acme": {"share": 1, "cache_salts": ["s3cr3t"]},
            "beta": {"share": 1, "cache_salts": ["x", "s3cr3t"]},
        }
    )
    assert problem.startswith("tenants: beta.cache_salts[1] is also one of acme")
    assert "s3cr3t" not in problem


def test_shares_that_add_up_to_100_in_decimals_are_accepted() -> None:
    assert read({f"t{i}": {"share": 0.1 + 10 * (i > 0)} for i in range(10)}).tenants
    assert read({"a": {"share": 33.3}, "b": {"share": 33.3}, "c": {"share": 33.4}}).tenants


@pytest.mark.parametrize(
    ("params", "document", "client"),
    [
        (None, None, None),
        ({}, None, None),
        ({"kv_offload_hints": {"version": 1, "client": "web"}}, None, "web"),
        ({"kv_offload_hints": {"client": "web", "sesion": 1}}, None, "web"),
        ({"kv_offload_hints": {"client": 7}}, None, None),
        ({"kv_offload_hints": ["web"]}, None, None),
        ({"kv_offload_hints": {"version": 1}}, {"client": "app"}, "app"),
        ({"kv_offload_hints": {"client": "web"}}, {"client": "app"}, "web"),
        (["kv_offload_hints"], {"client": "app"}, "app"),
    ],
)
def test_the_client_is_read_from_the_hints(params: Any, document: Any, client: str | None) -> None:
    assert client_of(params, document) == client
