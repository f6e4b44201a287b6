# SPDX-License-Identifier: Apache-2.0
"""``compress`` of every type of tier: refused values, messages, and the options that reach the core."""

import pytest
from pydantic import ValidationError
from written_root import FACTS

from kv_offload.tiers.compression import CompressedTierConfig
from kv_offload.tiers.registry import parse_tier

PLACES = {
    "fs": {"type": "fs", "max_bytes": "1GiB"},
    "redis": {"type": "redis", "url": "redis://127.0.0.1:1/0"},
    "s3": {"type": "s3", "bucket": "kv-cache", "endpoint": "http://127.0.0.1:1"},
}


def tier_of(kind, tmp_path, **keys) -> CompressedTierConfig:
    place = {"root_dir": str(tmp_path / "root")} if kind == "fs" else {}
    tier = parse_tier(PLACES[kind] | place | keys)
    assert isinstance(tier, CompressedTierConfig)
    return tier


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("compress", ["auto", "none", "zstd"])
def test_the_setting_reaches_the_core(kind, compress, tmp_path):
    tier = tier_of(kind, tmp_path, compress=compress)
    spec = tier.spec("tier", 1 << 30, FACTS)
    assert spec.compress == compress
    assert tier.traits() == ["write_through", *([] if compress == "none" else [f"compress {compress}"])]


def test_auto_is_the_default(tmp_path):
    assert tier_of("fs", tmp_path).compress == "auto"


def test_another_value_is_refused_with_the_valid_ones(tmp_path):
    with pytest.raises(ValidationError, match="'auto', 'none' or 'zstd'"):
        tier_of("fs", tmp_path, compress="lz4")


def test_the_element_type_of_a_group_is_checked(tmp_path):
    spec = tier_of("fs", tmp_path).spec("tier", 1 << 30, FACTS)
    spec.elements = ["bfloat16", "float16", "bytes"]
    assert spec.elements == ["bfloat16", "float16", "bytes"]
    with pytest.raises(ValueError, match="use one of bytes, bfloat16, float16"):
        spec.elements = ["float32"]
    assert spec.elements == ["bfloat16", "float16", "bytes"]


@pytest.mark.parametrize(
    ("compress", "read", "said"),
    [
        ("auto", 1e6, "compress auto is on: a read of 1 MiB takes"),
        ("auto", 1e12, "compress auto is off: a read of 1 MiB takes"),
        ("zstd", 1e12, "compress is zstd; auto would be off: "),
    ],
)
def test_the_measurement_shows_the_decision_of_auto(compress, read, said, tmp_path):
    figures = {"read_bytes_per_second": read, "write_bytes_per_second": read}
    (answer,) = tier_of("fs", tmp_path, compress=compress).measured(figures)
    assert answer.text.startswith(said)
    assert answer.figures is not None
    assert answer.figures["encode_bytes_per_second"] > 0


def test_no_text_without_compression_or_measurement(tmp_path):
    figures = {"read_bytes_per_second": 1e6, "write_bytes_per_second": 1e6}
    assert tier_of("fs", tmp_path, compress="none").measured(figures) == []
    assert tier_of("fs", tmp_path).measured({}) == []
