# SPDX-License-Identifier: Apache-2.0
"""Calibrations of lossy tiers: files, factors and the setting."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from vllm_trees import MINORS
from written_root import FACTS

from kv_offload.calibration import Calibration, CalibrationError, LayerFactors, PageLayout
from kv_offload.tiers.registry import parse_tier

MODEL = {"name": "org/model", "revision": "abc"}


def layer_of(*keys: float, size: int = 64) -> LayerFactors:
    """A layer whose values have half the factors of its keys; one head for each."""
    heads = tuple((key,) * -(-size // 64) for key in keys)
    return LayerFactors(size, size, heads, tuple(tuple(each / 2 for each in head) for head in heads))


def calibration() -> Calibration:
    return Calibration(MODEL, (layer_of(0.5, 1.0), layer_of(0.25, 0.125)), {"text": "built-in"})


def test_factors_make_all_elements_contribute_alike() -> None:
    # The typical (geometric mean) sensitivity is 4; four times as sensitive: half the error.
    found = Calibration.of_sensitivities(MODEL, [([[4.0], [16.0]], [[1.0], [4.0]])], [(64, 64)], {}).layers[0]
    assert found.keys == ((0.5,), (0.25,))
    assert found.values == ((1.0,), (0.5,)), "the largest factor is 1"


def test_a_head_without_any_effect_has_the_largest_bound() -> None:
    found = Calibration.of_sensitivities(MODEL, [([[0.0]], [[1.0]])], [(64, 64)], {}).layers[0]
    assert found == LayerFactors(64, 64, ((1.0,),), ((0.5,),))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_impossible_sensitivities_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        Calibration.of_sensitivities(MODEL, [([[1.0]], [[wrong]])], [(64, 64)], {})
    with pytest.raises(ValueError, match="all of them are zero"):
        Calibration.of_sensitivities(MODEL, [([[0.0]], [[0.0]])], [(64, 64)], {})


def test_a_file_has_the_same_factors_and_digest(tmp_path: Path) -> None:
    made, path = calibration(), tmp_path / "calibration.json"
    path.write_text("an older file")
    made.write(path)
    found = Calibration.read(path)
    assert found == made
    assert found.digest == made.digest
    assert [each.name for each in tmp_path.iterdir()] == ["calibration.json"], "no temporary file is left"
    assert Calibration(MODEL, made.layers[:1], made.made_of).digest != made.digest
    assert Calibration({"name": "other"}, made.layers, made.made_of).digest != made.digest


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not a calibration, or is damaged"),
        (b"[" * 100_000, "is not a calibration, or is damaged"),
        (b"[]", "is not a calibration"),
        (b'{"format": "kv-offload calibration", "version": 2}', "has version 2, this release reads 1"),
        (b'{"format": "kv-offload calibration", "version": 1}', "is damaged ('layers')"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(content)
    with pytest.raises(CalibrationError) as refused:
        Calibration.read(path)
    assert reason in str(refused.value)
    assert "make it again" in str(refused.value)


def test_a_missing_file_is_refused_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"cannot be read: No such file.*`kv-offload calibrate`"):
        Calibration.read(tmp_path / "missing")


def test_a_path_that_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, tmp_path, Path("/dev/zero")):
        with pytest.raises(
            CalibrationError, match=f"calibration {path} cannot be read: it is not a regular file"
        ):
            Calibration.read(path)


def test_every_changed_character_of_a_file_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    calibration().write(path)
    content = path.read_bytes()
    for at in range(len(content) - 1):  # without the line end
        other = b"x" if content[at : at + 1] == b"7" else b"7"
        if content[at : at + 1] == b" ":
            continue
        path.write_bytes(content[:at] + other + content[at + 1 :])
        with pytest.raises(CalibrationError):
            Calibration.read(path)


@pytest.mark.parametrize(
    "change",
    [
        {"keys": [[0.5]]},  # fewer heads than values
        {"keys": [[0.5], []]},
        {"keys": [[0.5], [0.5, 0.5]]},
        {"keys": [[0.5], [0.0]]},
        {"keys": [[0.5], [1.5]]},
        {"keys": [[0.5], ["x"]]},
        {"keys": [[0.5], [10**400]]},
        {"key_size": 0},
        {"key_size": "64"},
        {"value_size": 65},
    ],
)
def test_impossible_factors_are_refused_under_a_valid_digest(
    tmp_path: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "calibration.json"
    calibration().write(path)
    fields = json.loads(path.read_text())
    fields["layers"][1].update(change)
    path.write_text(json.dumps(fields))
    monkeypatch.setattr(Calibration, "digest", fields["digest"])
    with pytest.raises(CalibrationError, match="is damaged"):
        Calibration.read(path)


def test_a_deeply_nested_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    calibration().write(path)
    content = path.read_text()
    for depth in range(sys.getrecursionlimit() - 100, sys.getrecursionlimit() + 1):
        path.write_text(content.replace('"built-in"', "[" * depth + "]" * depth))
        with pytest.raises(CalibrationError):
            Calibration.read(path)


def test_another_model_is_refused_and_the_operators_name_does_not_count() -> None:
    calibration().refuse_other_model({**MODEL, "model_id": "ours"})
    with pytest.raises(CalibrationError, match="another model: revision differ"):
        calibration().refuse_other_model({**MODEL, "revision": "abd"})
    for name, remedy in (
        ("draft", 'do not support a drafter: remove "calibration" from the tier'),
        ("code", "`kv-offload calibrate --trust-remote-code`, and serve without --code-revision"),
        ("revision", "make one for this model with `kv-offload calibrate`"),
    ):
        with pytest.raises(CalibrationError, match=f"another model: {name} differ; .*{remedy}$"):
            calibration().refuse_other_model({**MODEL, name: {"name": "x"}})


def test_64_elements_with_several_factors_have_the_smallest() -> None:
    # Heads of 96 channels: 64 and 32 of the keys, then of the values; 192 elements are three groups.
    layer = LayerFactors(96, 96, ((0.8, 0.6),), ((0.4, 0.9),))
    made = Calibration(MODEL, (layer,), {})
    page = PageLayout(192, 192, True, 2, 2 * 384)
    assert made.block_factors([0], page, 0, 1) == [0.8, 0.4, 0.4] * 2
    # A head of 80 channels has 160 elements in a token.
    odd = Calibration(MODEL, (LayerFactors(80, 80, ((0.8, 0.6),), ((0.4, 0.9),)),), {})
    with pytest.raises(CalibrationError, match="not a multiple of 64 elements"):
        odd.block_factors([0], PageLayout(160, 160, True, 2, 320), 0, 1)
    assert len(odd.block_factors([0], PageLayout(160, 160, True, 2, 640), 0, 1)) == 5


def test_a_run_of_several_tokens_has_the_smallest_factor_of_its_head() -> None:
    layer = LayerFactors(128, 128, ((0.8, 0.6), (0.5, 0.7)), ((0.4, 0.9), (0.3, 0.2)))
    page = PageLayout(2 * 256, 2 * 256, True, 2, 2 * 2 * 512)
    found = Calibration(MODEL, (layer,), {}).block_factors([0], page, 0, 2)
    assert found == [0.6] * 4 + [0.4] * 4 + [0.5] * 4 + [0.2] * 4


def tier_of(**settings: Any) -> Any:
    return parse_tier({"type": "fs", "root_dir": "/r", "max_bytes": "1GiB", **settings})


def test_the_setting_needs_one_bound(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    tier = tier_of(compress="lossy:0.16", calibration=str(path))
    assert tier.calibration == str(path)
    assert tier.portable()["calibration"] == str(path)
    (answer,) = tier.findings()
    assert (answer.state, answer.text[:30]) == ("refused", f"calibration {path}"[:30])
    calibration().write(path)
    (answer,) = tier.findings()
    assert answer.state == "ok"
    assert calibration().digest[:12] in answer.text
    assert tier.traits()[-1] == "LOSSY, relative error up to 0.16, calibrated"
    for compress in ("zstd", "auto", "none", "lossy:0.1:0.2"):
        with pytest.raises(ValidationError, match="a calibration needs lossy:E"):
            tier_of(compress=compress, calibration=str(path))
    with pytest.raises(ValidationError, match="a calibration needs lossy:E"):
        tier_of(calibration=str(path))
    with pytest.raises(ValidationError, match="expected the path of a file"):
        tier_of(compress="lossy:0.16", calibration=" ")


def test_the_core_rejects_impossible_factors() -> None:
    tier = tier_of(compress="lossy:0.16").spec("fs", 1 << 30, FACTS)
    tier.set_bound_factors([[0.5, 1.0], []], 2)
    for factors, shards in (([[0.5, 0.0]], 2), ([[0.5, 1.5]], 2), ([[0.5]], 2)):
        with pytest.raises(ValueError, match="bound factor"):
            tier.set_bound_factors(factors, shards)


@pytest.mark.timeout(1800)  # as in test_oracle.py
@pytest.mark.release_check("oracle/check_lossy.py")
@pytest.mark.parametrize("minor", MINORS)
def test_calibrated_records_are_within_the_bounds_of_their_heads(minor: str, check_output: str) -> None:
    print(check_output)


@pytest.mark.timeout(1800)
@pytest.mark.release_check("oracle/check_calibrate.py", "0.32")
def test_the_command_computes_sensitivities(check_output: str) -> None:
    print(check_output)
