# SPDX-License-Identifier: Apache-2.0
"""Calibrations of lossy tiers: files, factors and the setting."""

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from vllm_trees import MINORS
from written_root import FACTS

from kv_offload.calibration import (
    Calibration,
    CalibrationError,
    ChannelStatistics,
    HeadFactors,
    LayerFactors,
    PageLayout,
)
from kv_offload.tiers.registry import parse_tier

MODEL = {"name": "org/model", "revision": "abc"}
HEAD: dict[str, Any] = {"plain": [0.5], "weighted": [0.5], "weights": [0] * 64}


def head_of(plain: float, weighted: float | None = None, octaves: Sequence[int] = (0,) * 64) -> HeadFactors:
    blocks = -(-len(octaves) // 64)
    return HeadFactors((plain,) * blocks, (weighted or plain,) * blocks, tuple(octaves))


def layer_of(*keys: float, size: int = 64) -> LayerFactors:
    """A layer whose values have half the factors of its keys; one head for each."""
    octaves = (0,) * size
    return LayerFactors(
        tuple(head_of(each, octaves=octaves) for each in keys),
        tuple(head_of(each / 2, octaves=octaves) for each in keys),
    )


def calibration() -> Calibration:
    return Calibration(MODEL, (layer_of(0.5, 1.0), layer_of(0.25, 0.125)), {"text": "built-in"})


def statistics(*sensitivities: float, peak: float = 0.2) -> ChannelStatistics:
    """Of 64 channels: these, repeated."""
    channels = list(sensitivities) * (64 // len(sensitivities))
    return ChannelStatistics(channels, [peak] * 64)


def factors_of(*heads: tuple[ChannelStatistics, ChannelStatistics]) -> LayerFactors:
    """``heads``: keys and values."""
    keys, values = zip(*heads, strict=True)
    return Calibration.of_statistics(MODEL, [(keys, values)], {}).layers[0]


def test_factors_make_all_elements_contribute_alike() -> None:
    # The typical (geometric mean) sensitivity is 4; four times as sensitive: half the error.
    found = factors_of((statistics(4.0), statistics(1.0)), (statistics(16.0), statistics(4.0)))
    for kind in ("plain", "weighted"):
        assert [getattr(head, kind) for head in found.keys] == [(0.5,), (0.25,)]
        assert [getattr(head, kind) for head in found.values] == [(1.0,), (0.5,)], "the largest factor is 1"
    assert all(head.weights == (0,) * 64 for head in (*found.keys, *found.values))


def test_weights_make_all_channels_contribute_alike() -> None:
    # A quarter of the sensitivity: twice the error.
    found = factors_of((statistics(1.0, 16.0, 4.0, 4.0), statistics(4.0))).keys[0]
    assert found.weights == (1, -1, 0, 0) * 16
    # The mean of the sensitivities is 6.25. Weighted with the squares of the weights it is
    # (4 * 1 + 16 / 4 + 4 + 4) / (4 + 1 / 4 + 1 + 1) = 2.56.
    typical = math.sqrt(2.56 * 4)
    assert found.weighted == pytest.approx((0.5 * math.sqrt(typical / 2.56),), abs=1e-5)
    assert found.plain == pytest.approx((0.5 * math.sqrt(math.sqrt(6.25 * 4) / 6.25),), abs=1e-5)


def test_weights_are_limited_and_channels_without_effect_have_the_largest() -> None:
    found = factors_of((statistics(4.0**9, 4.0**3, 4.0**3, 0.0), statistics(1.0))).keys[0]
    assert found.weights == (-2, 2, 2, 2) * 16


def test_large_channels_have_weights_for_which_their_integers_are_possible() -> None:
    channels = [64.0] + [1.0] * 63
    small, large = (
        factors_of((ChannelStatistics(channels, [peak] + [0.1] * 63), statistics(1e-6))).keys[0]
        for peak in (0.2, 0.5)
    )
    assert small.weights == (-2, *[0] * 63)
    assert large.weights == (-1, *[0] * 63)
    bound = max(0.02, 0.2 * large.weighted[0])
    step = bound * math.sqrt(12 / sum(4.0**each for each in large.weights))
    assert 127 * step * 2.0**-2 < 0.5 <= 127 * step * 2.0**-1


def test_a_head_without_any_effect_has_the_largest_bound() -> None:
    found = factors_of((statistics(0.0), statistics(1.0)))
    assert found == LayerFactors((head_of(1.0),), (head_of(0.5),))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_impossible_sensitivities_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        factors_of((statistics(1.0), statistics(1.0, wrong)))
    with pytest.raises(ValueError, match="not finite"):
        factors_of((statistics(1.0), statistics(1.0, peak=wrong)))
    with pytest.raises(ValueError, match="all of them are zero"):
        factors_of((statistics(0.0), statistics(0.0)))


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
        (b'{"format": "kv-offload calibration", "version": 1}', "has version 1, this release reads 2"),
        (b'{"format": "kv-offload calibration", "version": 2}', "is damaged ('layers')"),
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
        {"keys": [HEAD]},  # fewer heads than values
        {"keys": []},
        {"keys": [HEAD, {}]},
        {"keys": [HEAD, HEAD | {"plain": [0.5, 0.5]}]},
        {"keys": [HEAD, HEAD | {"weighted": []}]},
        {"keys": [HEAD, HEAD | {"plain": [0.0]}]},
        {"keys": [HEAD, HEAD | {"weighted": [1.5]}]},
        {"keys": [HEAD, HEAD | {"weighted": ["x"]}]},
        {"keys": [HEAD, HEAD | {"weighted": [10**400]}]},
        {"keys": [HEAD, HEAD | {"weights": []}]},
        {"keys": [HEAD, HEAD | {"weights": [0] * 63 + [3]}]},
        {"keys": [HEAD, HEAD | {"weights": [0] * 63 + [0.5]}]},
        {"keys": [HEAD, HEAD | {"weights": [0] * 63 + [True]}]},
        {"keys": [HEAD, HEAD | {"weights": [0] * 65}]},
        {"keys": [HEAD, HEAD | {"weights": [0] * 63}]},  # another size
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


def block_of(layer: LayerFactors, page: PageLayout, heads: int = 1) -> list[tuple[float, bytes]]:
    """Factor and weights of each 64 elements of a block."""
    found = Calibration(MODEL, (layer,), {}).group_factors([([0], 0)], page, heads)
    rows = [bytes([8]) * 64, *(found.weights[at : at + 64] for at in range(0, len(found.weights), 64))]
    assert len(set(rows)) == len(rows)
    return [(factor, rows[row]) for factor, row in found.shards[0]]


def test_64_elements_with_several_factors_have_the_smallest_and_the_weights_of_their_channels() -> None:
    # Heads of 96 channels: 64 and 32 of the keys, then of the values; 192 elements are three groups.
    octaves = [-2, -1, 0, 1, 2, 1] * 16
    keys = HeadFactors((0.7, 0.7), (0.8, 0.6), tuple(octaves))
    values = HeadFactors((0.1, 0.1), (0.4, 0.9), tuple(reversed(octaves)))
    page = PageLayout(192, 192, True, 2, 2 * 384)
    codes = bytes(8 + each for each in (*octaves, *reversed(octaves)))
    expected = [(0.8, codes[:64]), (0.4, codes[64:128]), (0.4, codes[128:])]
    assert block_of(LayerFactors((keys,), (values,)), page) == expected * 2
    # A head of 80 channels has 160 elements in a token.
    odd = LayerFactors(
        (HeadFactors((0.5, 0.5), (0.8, 0.6), (1,) * 80),), (HeadFactors((0.5, 0.5), (0.4, 0.9), (-1,) * 80),)
    )
    with pytest.raises(CalibrationError, match="not a multiple of 64 elements"):
        block_of(odd, PageLayout(160, 160, True, 2, 320))
    found = block_of(odd, PageLayout(160, 160, True, 2, 640))
    assert b"".join(weights for _, weights in found) == (bytes([9]) * 80 + bytes([7]) * 80) * 2


def test_a_page_of_partial_runs_is_refused() -> None:
    with pytest.raises(CalibrationError, match="pages of 400 bytes are not whole runs"):
        block_of(layer_of(0.5), PageLayout(128, 128, True, 2, 400))


def test_a_run_of_several_tokens_has_the_smallest_factor_of_its_head_and_no_weights() -> None:
    def head(*factors: float) -> HeadFactors:
        return HeadFactors(factors, (0.01, 0.01), (1, -1) * 64)

    layer = LayerFactors((head(0.8, 0.6), head(0.5, 0.7)), (head(0.4, 0.9), head(0.3, 0.2)))
    page = PageLayout(2 * 256, 2 * 256, True, 2, 2 * 2 * 512)
    expected = [0.6] * 4 + [0.4] * 4 + [0.5] * 4 + [0.2] * 4
    assert block_of(layer, page, heads=2) == [(factor, bytes([8]) * 64) for factor in expected]


def test_fp8_and_groups_with_too_many_weights_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LayerFactors((head_of(0.5, 0.3, (1, -1) * 32),), (head_of(0.4, 0.2, (-1, 1) * 32),))
    plain = [(0.5, bytes([8]) * 64), (0.4, bytes([8]) * 64)]
    assert block_of(layer, PageLayout(64, 64, True, 1, 128)) == plain
    assert [factor for factor, _ in block_of(layer, PageLayout(128, 128, True, 2, 256))] == [0.3, 0.2]
    monkeypatch.setattr("kv_offload.calibration._MOST_ROWS", 1)
    assert block_of(layer, PageLayout(128, 128, True, 2, 256)) == plain


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


def test_the_core_rejects_impossible_factors_and_weights() -> None:
    tier = tier_of(compress="lossy:0.16").spec("fs", 1 << 30, FACTS)
    row = bytes([8]) * 64
    tier.set_bound_factors([([[(0.5, 0), (1.0, 1)], []], row), None])
    for block, weights, reason in (
        ([(0.5, 0), (0.0, 0)], b"", "bound factor 0"),
        ([(1.5, 0)], b"", "bound factor 1.5"),
        ([(0.5, 2)], row, "row 2 of the weights: there are 1"),
        ([(0.5, 1 << 16)], row, "row 65536 of the weights"),
        ([(0.5, 0)], row[:-1], "63 weights: expected at most 4096 rows of 64"),
        ([(0.5, 0)], row[:-1] + bytes([17]), "weight 17: expected at most 16"),
    ):
        with pytest.raises(ValueError, match=reason):
            tier.set_bound_factors([([block], weights)])
    with pytest.raises(ValueError, match="without shards"):
        tier.set_bound_factors([([], b"")])


@pytest.mark.timeout(1800)  # as in test_oracle.py
@pytest.mark.release_check("oracle/check_lossy.py")
@pytest.mark.parametrize("minor", MINORS)
def test_calibrated_records_are_within_the_bounds_of_their_heads(minor: str, check_output: str) -> None:
    print(check_output)


@pytest.mark.timeout(1800)
@pytest.mark.release_check("oracle/check_calibrate.py", "0.32")
def test_the_command_computes_sensitivities(check_output: str) -> None:
    print(check_output)
