# SPDX-License-Identifier: Apache-2.0
"""kv-offload bench: the measurements, and the plan that follows from them."""

import fcntl
import json

import pytest
from live_root import records_in, used_bytes
from typer.testing import CliRunner
from written_root import CHUNK, FACTS, write_root

from kv_offload import raw_speed
from kv_offload.cli import app
from kv_offload.cli.bench_command import suggested_config, token_plan
from kv_offload.config import OffloadConfig
from kv_offload.tiers.fs.config import FsTierConfig, held_bytes

core = pytest.importorskip("kv_offload._core", reason="the core is not built")

GIB = 1 << 30
LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def run(*arguments, status=0):
    result = CliRunner().invoke(app, ["bench", *(str(argument) for argument in arguments)])
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    return result


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return path


def speeds(write, read):
    rows = {"write": write, "read": read, "copy": 10 * GIB}
    return {name: {"bytes_per_second": float(speed)} for name, speed in rows.items()}


def test_bench_measures_regardless_of_bounds_and_leaves_no_files(tmp_path):
    facts = json.loads(run(tmp_path / "kv", "--measure-size", "32MiB", "--json").stdout)
    assert set(facts["speeds"]) == {"write", "read", "copy"}
    for row in facts["speeds"].values():
        assert row["bytes_per_second"] > 0
        assert row["ratio"] == row["bytes_per_second"] / row["limit_bytes_per_second"]
    assert [row["bytes_per_token"] for row in facts["plan"]] == [32 << 10, 70_272, 128 << 10, 320 << 10]
    assert list(tmp_path.iterdir()) == []


def test_bench_of_a_directory_with_records_leaves_it_unchanged(tmp_path):
    root = write_root(tmp_path / "root")
    before = records_in(root)
    facts = json.loads(run(root, "--measure-size", "32MiB", "--json").stdout)
    assert all(row["bytes_per_second"] > 0 for row in facts["speeds"].values())
    assert records_in(root) == before
    assert {path.name for path in root.iterdir()} == {"kv_offload.json", "ledger", FACTS.namespace_id().hex()}
    # A directory that was created during the count of the root may be counted twice until the next count.
    assert 0 <= held_bytes(str(root)) - used_bytes(root) <= CHUNK


def test_a_directory_at_its_limit_is_not_measured(tmp_path):
    root = write_root(tmp_path / "root")
    tier = FsTierConfig(root_dir=str(root), max_bytes=16 << 20)
    answer = tier.measure(64 << 20)
    assert (answer.state, answer.figures) == ("note", None)
    assert "max_bytes is reached" in answer.text
    with pytest.raises(RuntimeError, match="no space for a measurement"):
        tier.raw_speed(64 << 20)
    assert held_bytes(str(root)) == used_bytes(root)


def test_a_directory_inside_another_root_is_not_measured(tmp_path):
    root = write_root(tmp_path / "root")
    before = sorted(root.rglob("*"))
    for name in ("new", "new/below"):
        tier = FsTierConfig(root_dir=str(root / name))
        answer = tier.measure(64 << 20)
        assert (answer.state, answer.figures) == ("note", None)
        assert f"inside the tier directory {root}" in answer.text
        with pytest.raises(RuntimeError, match=f"inside the tier directory {root}"):
            tier.raw_speed(64 << 20)
    assert sorted(root.rglob("*")) == before


def test_the_measurement_takes_what_the_limit_allows(tmp_path, monkeypatch):
    root = write_root(tmp_path / "root")
    tier = FsTierConfig(root_dir=str(root), max_bytes=40 << 20)
    most = 0

    def speed(blocks, transfer):
        nonlocal most
        most = blocks * raw_speed.BLOCK_BYTES
        assert not [path for path in root.iterdir() if path.name.startswith(".")], "a kill would leave it"
        with pytest.raises(RuntimeError):
            core.ReservedSpace(str(root), 40 << 20, 8 << 20)
        return 1.0

    monkeypatch.setattr(raw_speed, "_speed", speed)
    monkeypatch.setattr(core, "probe_disk", lambda *_: pytest.fail("it writes outside of the ledger"))
    answer = tier.measure(1 << 30)
    assert answer.figures is not None
    assert "34.0 MiB of 2.0 MiB records" in answer.text
    tier.raw_speed(1 << 30)
    assert 30 << 20 <= most <= 36 << 20


def test_a_directory_in_use_is_measured_only_if_its_limit_is_known(tmp_path):
    root = write_root(tmp_path / "root")
    with (root / FACTS.namespace_id().hex() / "open").open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        assert "open in other processes" in run(root, "--measure-size", "32MiB", status=1).output
        with pytest.raises(RuntimeError, match="open in other processes"):
            FsTierConfig(root_dir=str(root)).raw_speed(32 << 20)
        assert FsTierConfig(root_dir=str(root), max_bytes=1 << 30).measure(32 << 20).figures


def test_the_exit_status_shows_whether_a_tier_pays_off(tmp_path, model):
    arguments = (tmp_path / "kv", "--measure-size", "32MiB", "--model", model, "--cpu", "1GiB")
    text = " ".join(run(*arguments, "--prefill", 1).output.split())
    assert "a tier here pays off" in text
    assert '"secondary_tiers"' in text
    text = " ".join(run(*arguments, "--prefill", 1e12, status=1).output.split())
    assert "a tier here does not pay off" in text
    assert '"secondary_tiers"' not in text


def test_the_plan_for_a_fast_disk_uses_write_through():
    plan = token_plan(speeds(2 * GIB, 4 * GIB), 128 << 10, prefill=8192)
    assert plan["tier_tokens_per_second"] == 32_768
    assert plan["break_even_bytes_per_second"] == GIB
    assert (plan["tier_pays"], plan["write_policy"]) == (True, "write_through")


@pytest.mark.parametrize(
    ("write", "read", "pays", "policy"),
    [
        (2 * GIB, 1.1 * GIB, False, "write_through"),  # faster than computing, but barely
        (2 * GIB, 1.3 * GIB, True, "write_through"),
        (0.9 * GIB, 2 * GIB, True, "reuse:2"),  # slower than prefill produces chunks
    ],
)
def test_the_plan_near_break_even_depends_on_both_speeds(write, read, pays, policy):
    plan = token_plan(speeds(write, read), 128 << 10, prefill=8192)
    assert (plan["tier_pays"], plan["write_policy"]) == (pays, policy)


def test_the_suggested_configuration_is_valid(tmp_path):
    plan = token_plan(speeds(0.9 * GIB, 2 * GIB), 128 << 10, prefill=8192)
    extra = suggested_config(FsTierConfig(root_dir=str(tmp_path)), GIB, plan)["kv_connector_extra_config"]
    config, notes = OffloadConfig.parse(extra)
    assert not notes
    assert config.secondary_tiers[0].write_policy == "reuse:2"
    assert config.secondary_tiers[0].max_bytes


def test_a_failed_measurement_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    assert "is not a directory" in run(tmp_path / "file" / "kv", status=1).stderr
    assert "give --model as well" in run(tmp_path, "--prefill", 10, status=2).stderr
