# SPDX-License-Identifier: Apache-2.0
"""``compress`` "lossy:E": refused values, messages, the namespace, and the commands that report the loss."""

import json
import struct
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pydantic import ValidationError
from small_core import attach, keys, make_cache, store
from typer.testing import CliRunner
from written_root import FACTS

from kv_offload import _core
from kv_offload.cli import app
from kv_offload.cli.doctor_checks import Check
from kv_offload.cli.server_checks import server_checks
from kv_offload.config import OffloadConfig
from kv_offload.exposition import Page
from kv_offload.losses import ErrorBounds, LossTotals, allows_loss, text_of
from kv_offload.machine import cautions
from kv_offload.tiers.compression import LEAST_ERROR, MOST_ERROR, CompressedTierConfig
from kv_offload.tiers.registry import parse_tier


def tier_of(tmp_path: Path, compress: str) -> CompressedTierConfig:
    tier = parse_tier(
        {"type": "fs", "root_dir": str(tmp_path / "root"), "max_bytes": "1GiB", "compress": compress}
    )
    assert isinstance(tier, CompressedTierConfig)
    return tier


def config_of(tmp_path: Path, *compress: str) -> OffloadConfig:
    tiers = [
        {"type": "fs", "root_dir": str(tmp_path / str(number)), "max_bytes": "2GiB", "compress": each}
        for number, each in enumerate(compress)
    ]
    return OffloadConfig(cpu_bytes_to_use="1GiB", secondary_tiers=tiers)


def test_the_bound_reaches_the_core_and_the_startup_summary(tmp_path):
    tier = tier_of(tmp_path, "lossy:5e-2")
    assert tier.compress == "lossy:0.05"
    assert tier.error_bounds() == (0.05, 0.05)
    assert tier.spec("tier", 1 << 30, FACTS).compress == "lossy:0.05"
    assert tier.traits() == ["write_through", "LOSSY, relative error up to 0.05"]
    assert tier_of(tmp_path, "zstd").error_bounds() is None


def test_a_separate_bound_for_values_reaches_the_core_and_the_startup_summary(tmp_path):
    tier = tier_of(tmp_path, "lossy:5e-2:.1")
    assert tier.compress == "lossy:0.05:0.1"
    assert tier.error_bounds() == (0.05, 0.1)
    assert tier.spec("tier", 1 << 30, FACTS).compress == "lossy:0.05:0.1"
    assert tier.traits() == ["write_through", "LOSSY, relative error up to 0.05 (keys) and 0.1 (values)"]
    assert tier_of(tmp_path, "lossy:0.05:0.05").compress == "lossy:0.05"


@pytest.mark.parametrize(
    "error",
    [
        *("", "0", "0.019", "0.61", "-0.1", "nan", "inf", "1e9", "0.05x", "much"),
        *(":", "0.05:", ":0.05", "0.05:0.7", "0.01:0.05", "0.05:nan", "0.05:0.1:0.2", "0.05,values=0.1"),
    ],
)
def test_an_impossible_bound_is_refused_with_the_possible_ones(error, tmp_path):
    with pytest.raises(ValidationError, match=r"'lossy:KEYS:VALUES' with relative errors from 0\.02 to 0\.6"):
        tier_of(tmp_path, f"lossy:{error}")
    spec = tier_of(tmp_path, "zstd").spec("tier", 1 << 30, FACTS)
    with pytest.raises(ValueError, match=r"lossy:KEYS:VALUES, errors from 0\.02 to 0\.6"):
        spec.compress = f"lossy:{error}"
    assert spec.compress == "zstd"


def test_a_smaller_bound_for_values_than_for_keys_is_refused(tmp_path):
    with pytest.raises(ValidationError, match=r"at least KEYS; did you mean 'lossy:0\.05:0\.1'"):
        tier_of(tmp_path, "lossy:0.1:0.05")
    spec = tier_of(tmp_path, "zstd").spec("tier", 1 << 30, FACTS)
    with pytest.raises(ValueError, match="VALUES >= KEYS"):
        spec.compress = "lossy:0.1:0.05"


def test_core_and_settings_have_the_same_limits(tmp_path):
    spec = tier_of(tmp_path, "zstd").spec("tier", 1 << 30, FACTS)
    for error in (LEAST_ERROR, MOST_ERROR):
        spec.compress = f"lossy:{error}"
        assert spec.compress == f"lossy:{error}"
    for error in (LEAST_ERROR * 0.999, MOST_ERROR * 1.001):
        with pytest.raises(ValueError, match="errors from"):
            spec.compress = f"lossy:{error}"


def test_the_core_has_all_element_types(tmp_path):
    spec = tier_of(tmp_path, "zstd").spec("tier", 1 << 30, FACTS)
    names = ["bytes", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
    spec.elements = names
    assert spec.elements == names
    with pytest.raises(ValueError, match="float8_e4m3fnuz"):
        spec.elements = ["float8_e4m3fnuz"]


def test_a_server_with_a_lossy_tier_has_another_namespace_for_each_bound(tmp_path):
    pairs = ((0.02, 0.02), (0.05, 0.05), (0.02, 0.05), (0.02, 0.1), (0.05, 0.1))
    bounds = (None, *(ErrorBounds(*pair) for pair in pairs))
    assert len({FACTS.with_error_bounds(each).namespace_id() for each in bounds}) == len(bounds)
    assert FACTS.with_error_bounds(None) is FACTS
    assert config_of(tmp_path, "zstd", "lossy:0.1").error_bounds() == (0.1, 0.1)
    assert config_of(tmp_path, "zstd").error_bounds() is None
    assert config_of(tmp_path).error_bounds() is None


def test_different_runs_give_different_namespaces():
    separate, same = ErrorBounds(0.02, 0.04), ErrorBounds(0.02, 0.02)
    layouts = ([(128, 128)], [(0, 0)], [(4096, 4096)])
    assert len({FACTS.with_error_bounds(separate, each).namespace_id() for each in layouts}) == 3
    assert len({FACTS.with_error_bounds(same, each).namespace_id() for each in layouts}) == 1


def test_two_lossy_tiers_are_refused(tmp_path):
    with pytest.raises(ValidationError, match=r"0 \(lossy:0\.02\) and disk .*/1 \(lossy:0\.1:0\.2\): a"):
        config_of(tmp_path, "lossy:0.02", "lossy:0.1:0.2")


def test_a_lossy_tier_causes_a_warning_that_names_it(tmp_path):
    (warning,) = (text for text in cautions(config_of(tmp_path, "zstd", "lossy:0.05")) if "LOSSY" in text)
    assert "loaded from fs-2 differs" in warning
    assert "up to 0.05" in warning
    (warning,) = (text for text in cautions(config_of(tmp_path, "lossy:0.05:0.1")) if "LOSSY" in text)
    assert "up to 0.05 (keys) and 0.1 (values)" in warning
    assert not any("LOSSY" in text for text in cautions(config_of(tmp_path, "zstd", "auto")))


def test_a_measurement_shows_that_records_lose_precision(tmp_path):
    figures = {"read_bytes_per_second": 1e6, "write_bytes_per_second": 1e6}
    (answer,) = tier_of(tmp_path, "lossy:0.05").measured(figures)
    assert answer.state == "note"
    assert "lose precision, with a relative error up to 0.05; kv-offload stat --loss" in answer.text


def test_doctor_reports_the_ratio_and_the_loss_of_a_running_server():
    def tier_check(errors: str) -> Check:
        page = Page('kv_offload_tier_capacity_bytes{tier="far"} 1e9\n' + errors)
        (check,) = (each for each in server_checks("http://server", page) if each.name == "tier far")
        return check

    ratio = 'kv_offload_codec_ratio{tier="far"} 3.9\n'
    keys = 'kv_offload_codec_largest_error{tier="far",part="keys"} 0.05\n'
    values = 'kv_offload_codec_largest_error{tier="far",part="values"} 0.1\n'
    assert "LOSSY" not in tier_check(ratio).text
    one = "LOSSY: compression ratio 3.90, largest relative error: 0.0500"
    assert tier_check(ratio + keys).text.endswith(one)
    both = tier_check(ratio + keys + values)
    assert both.text.endswith(f"{one} keys, 0.1000 values")
    assert both.figures is not None
    assert both.figures["largest_error"] == both.figures["largest_value_error"] == 0.1
    assert both.figures["largest_key_error"] == 0.05


def test_descriptions_of_namespaces_say_whether_records_may_be_lossy():
    assert allows_loss(FACTS.with_error_bounds(ErrorBounds(0.05, 0.1)).readable_json())
    assert not allows_loss(FACTS.readable_json())
    for text in ("", "{", "[]", '{"settings": 5}', '"max_error"'):
        assert not allows_loss(text)


def test_totals_weigh_the_records_by_their_size():
    totals = LossTotals()
    assert text_of(totals.totals()) == "no lossy records, 0 exact"
    for stated in (
        (True, 300, 100, 0.05, 0.03, 0.0),
        (True, 100, 100, 0.04, 0.01, 0.0),
        (False, 100, 90, 0.0, 0.0, 0.0),
        None,
    ):
        totals.add(stated)
    found = totals.totals()
    assert found["lossy_records"] == 2
    assert found["exact_records"] == 1
    assert found["ratio"] == 2.0
    assert found["largest_error"] == 0.05
    assert found["rms_error"] == pytest.approx(((300 * 0.03**2 + 100 * 0.01**2) / 400) ** 0.5)
    assert text_of(found).startswith("2 lossy, 1 exact; the lossy ones are 2.00 times smaller")
    assert text_of(found).endswith("(largest of 64 elements: 0.0500)")
    totals.add((True, 100, 100, 0.01, 0.01, 0.09))
    found = totals.totals()
    assert found["largest_error"] == found["largest_value_error"] == 0.09
    assert found["largest_key_error"] == 0.05
    assert text_of(found).endswith("(largest of 64 elements: 0.0500 keys, 0.0900 values)")


# ---- records on disk


def noise(size: int) -> bytes:
    """Pseudo-random numbers in bfloat16."""
    random = Random(1)
    signs = (0x3C00, 0xBC00)
    numbers = [random.choice(signs) | random.getrandbits(9) for _ in range(size // 2)]
    return struct.pack(f"<{len(numbers)}H", *numbers)


def write_records(root: Path, shm: Path, compress: str, numbers: int, element: str = "bfloat16") -> None:
    """Stores chunks of the small cache in a directory, in the namespace of the setting."""
    region, workers = attach(shm)
    area = memoryview(workers[0].area(0))
    area[:] = noise(len(area))
    identity = FACTS.with_error_bounds(tier_of(root, compress).error_bounds())
    tier = _core.FsTier(
        root_dir=str(root),
        max_bytes=1 << 30,
        namespace_id=identity.namespace_id(),
        namespace_json=identity.readable_json(),
        op_timeout_seconds=240.0,
    )
    tier.compress = compress
    tier.elements = [element]
    assert tier.elements == [element]
    run_bytes = 128 if element == "bfloat16" else 64
    tier.kv_runs = [(run_bytes, run_bytes)]
    assert tier.kv_runs == [(run_bytes, run_bytes)]
    cache = make_cache(region, _core.Metrics(), tiers=[tier])
    store(cache, workers[0], cache.begin_request("r"), keys(numbers))
    pause, deadline = threading.Event(), time.monotonic() + 240
    while cache.tier_stats(0)["chunks"] < numbers:
        cache.end_step()
        assert time.monotonic() < deadline, cache.tier_stats(0)
        pause.wait(0.005)
    cache.close()


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return result.stdout


# A record of 8 KiB must become half as large, which needs larger errors in fp8.
@pytest.mark.parametrize(
    ("element", "keys", "values"),
    [("bfloat16", 0.05, 0.1), ("float8_e4m3fn", 0.15, 0.3)],
)
def test_stat_and_verify_report_the_loss_of_a_directory(tmp_path, element, keys, values):
    root = tmp_path / "root"
    write_records(root, tmp_path, f"lossy:{keys}:{values}", 3, element)
    loss = json.loads(run("stat", root, "--loss", "--json"))["loss"]
    assert loss["lossy_records"] == 3
    assert loss["exact_records"] == 0
    assert keys / 2.5 < loss["largest_key_error"] <= keys + 1e-7
    assert keys + 1e-7 < loss["largest_value_error"] <= values + 1e-7
    assert loss["largest_error"] == loss["largest_value_error"]
    assert loss["largest_key_error"] < loss["rms_error"] < loss["largest_error"]
    assert loss["ratio"] > 1.1
    assert "3 lossy, 0 exact" in run("stat", root, "--loss")
    assert "lossy" not in run("stat", root)
    assert json.loads(run("verify", root, "--json"))["loss"] == loss
    assert "3 lossy, 0 exact" in run("verify", root)


def test_verify_does_not_mention_loss_if_no_namespace_allows_it(tmp_path):
    root = tmp_path / "root"
    write_records(root, tmp_path, "zstd", 2)
    assert "loss" not in json.loads(run("verify", root, "--json"))
    assert json.loads(run("stat", root, "--loss", "--json"))["loss"]["exact_records"] == 2
