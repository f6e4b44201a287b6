# SPDX-License-Identifier: Apache-2.0
"""Kinds of tiers: the registry, the properties of a kind, and a newly added kind."""

import ast
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kv_offload.cli import app
from kv_offload.cli.doctor_checks import place, plan, speed
from kv_offload.config import ConfigError, OffloadConfig
from kv_offload.machine import cautions, tier_bounds
from kv_offload.sizing import Geometry, startup_summary
from kv_offload.tiers import registry as tiers
from kv_offload.tiers.base import TierConfig


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> type[TierConfig]:
    """Registers the toy kind for one test."""
    monkeypatch.setattr(tiers, "_kinds", tiers.kinds())
    import toy_tier

    return tiers.register(toy_tier.ToyTierConfig)


def config(*given: dict[str, Any]) -> OffloadConfig:
    return OffloadConfig.parse({"cpu_bytes_to_use": "1GiB", "secondary_tiers": list(given)})[0]


def problems(*given: dict[str, Any]) -> Sequence[str]:
    with pytest.raises(ConfigError) as caught:
        config(*given)
    return caught.value.problems


DISK = {"type": "fs", "root_dir": "/var/cache/kv", "max_bytes": "1GiB"}


def test_the_type_of_a_tier_selects_its_kind(toy: type[TierConfig]) -> None:
    parsed = config(DISK, {"type": "toy", "server": "a", "write_policy": "reuse:2"})
    assert [type(tier) for tier in parsed.secondary_tiers] == [tiers.FsTierConfig, toy]
    assert parsed.secondary_tiers[1].write_policy == "reuse:2"
    assert OffloadConfig.model_validate(parsed.model_dump()) == parsed, (
        "fields of a kind are lost in a round trip"
    )


def test_each_kind_has_keys_of_its_own() -> None:
    (problem,) = problems({"type": "toy", "server": "a", "max_bytez": {"a": {}}})
    assert "'max_bytez' is not known" in problem
    assert "server" in problem
    assert "root_dir" not in problem
    (problem,) = problems({"type": "toy"})
    assert problem == "secondary_tiers[0].server is required"
    (problem,) = problems({"type": "tape"})
    assert "type 'tape'; possible: fs, redis, s3, mooncake, toy" in problem
    (problem,) = problems({"type": "toy", "server": "a"}, {"type": "toy", "server": "a"})
    assert "name a more than once; each tier needs its own server" in problem
    assert len(config({"type": "toy", "server": "/var/cache/kv"}, DISK).secondary_tiers) == 2


def test_names_count_each_kind() -> None:
    names = [{"type": "toy", "server": name} for name in "ab"]
    assert config(names[0], DISK, names[1]).tier_names() == ("toy", "fs", "toy-2")


def test_each_kind_has_its_own_bounds() -> None:
    assert tier_bounds(config({"type": "toy", "server": "a"}, DISK)) == (None, 1 << 30)


def test_messages_about_a_tier_name_only_its_own_kind() -> None:
    parsed = config({"type": "toy", "server": "shelf"})
    (tier,) = parsed.secondary_tiers
    assert [(check.name, check.state) for check in place(tier)] == [("toy shelf", "ok")]
    assert speed(tier, 1 << 20) == []
    assert cautions(parsed) == []
    assert ("toy.server", "shelf", True) in plan(parsed)
    geometry = Geometry.of([16], [[4096]])
    line = startup_summary(parsed, tier_bounds(parsed), geometry, copier="host", namespace="n", version="1")
    assert "toy shelf limited by its server (write_through)" in line
    assert set(geometry.tokens_by_tier(parsed, tier_bounds(parsed))) == {"cpu"}
    assert tier.load_locality == "REMOTE"


def test_the_example_of_every_kind_is_valid() -> None:
    for name, kind in tiers.kinds().items():
        (tier,) = config({**kind.example}).secondary_tiers
        assert tier.type == name
        assert str(kind.example[kind.place_key]) in tier.place


def test_texts_about_all_kinds_name_no_single_kind() -> None:
    root = Path(tiers.__file__).parents[2]
    paths = ["config", "config_compat", "machine", "sizing", "tiers/base", "diagnosis", "exposition"]
    paths += ["prompt_file", "warming"]
    paths += [f"cli/{name}_command" for name in ("config", "doctor", "size", "bench", "top", "why", "warm")]
    paths += ["cli/doctor_checks", "cli/server_checks"]
    files = [root / f"kv_offload/{path}.py" for path in paths]
    for file in [*files, root / "docs/generate.py", *(root / "specs").glob("*.py")]:
        code = ast.parse(file.read_text())
        named = {node.id for node in ast.walk(code) if isinstance(node, ast.Name)}
        named |= {node.attr for node in ast.walk(code) if isinstance(node, ast.Attribute)}
        texts = [str(node.value) for node in ast.walk(code) if isinstance(node, ast.Constant)]
        named |= {text.partition("=")[0] for text in texts}  # TYPE=PLACE
        named |= {str(node.module) for node in ast.walk(code) if isinstance(node, ast.ImportFrom)}
        kinds_names = {"fs", "FsTier", "FsTierConfig", "root_dir", "kv_offload.tiers.fs.config"}
        assert not named & kinds_names, file


@pytest.mark.parametrize("name", ["cpu", "fs-2", "Redis", "", "s3:"])
def test_a_name_that_could_be_another_tiers_label_is_refused(name: str) -> None:
    kind = type("Kind", (TierConfig,), {"__annotations__": {"type": str}, "type": name})
    with pytest.raises(ValueError, match="cannot be the name of a type of tier"):
        tiers.register(kind)


def test_options_apply_to_tiers_whose_kind_has_them(toy: type[TierConfig]) -> None:
    command = ["config", "--cpu", "1GiB", "--tier", "toy=shelf", "--disk", "/a"]
    done = CliRunner().invoke(app, [*command, "--fsync", "data", "--read-threads", "3"])
    assert done.exit_code == 0, done.output
    disk, shelf = json.loads(done.stdout)["kv_connector_extra_config"]["secondary_tiers"]
    assert disk == {"type": "fs", "root_dir": "/a", "fsync": "data", "n_read_threads": 3}
    assert shelf == {"type": "toy", "server": "shelf", "n_read_threads": 3}


def test_a_place_is_a_directory_or_names_its_kind(toy: type[TierConfig]) -> None:
    assert tiers.entry_at("toy=shelf") == {"type": "toy", "server": "shelf"}
    assert tiers.entry_at("/a=b") == tiers.kind_of_tier("disk").entry("/a=b")
    assert tiers.entry_at("tape=1") == tiers.kind_of_tier("disk").entry("tape=1"), "no kind: a directory"
    with pytest.raises(ValueError, match="a tier of type 'toy' takes no size"):
        toy.entry("shelf", "1GiB")


@pytest.mark.parametrize("installed", ["older", None])
def test_an_extension_of_other_headers_is_refused(
    monkeypatch: pytest.MonkeyPatch, installed: str | None
) -> None:
    import toy_tier

    from kv_offload import _core

    monkeypatch.delitem(sys.modules, "kv_offload_toy_tier", raising=False)
    if installed is None:
        monkeypatch.delattr(_core, "tier_interface", raising=False)
    else:
        monkeypatch.setattr(_core, "tier_interface", installed, raising=False)
    with pytest.raises(ImportError, match=f"installed {installed or 'none'}.: compile it again"):
        toy_tier.extension()


@pytest.mark.timeout(1800)  # as in test_oracle.py
@pytest.mark.release_check("oracle/check_tiers.py", "0.32")
def test_an_added_kind_works_under_vllms_scheduler(check_output: str) -> None:
    print(check_output)
