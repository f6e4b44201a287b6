# SPDX-License-Identifier: Apache-2.0
"""Capacity in tokens."""

import pytest

from kv_offload.config import OffloadConfig
from kv_offload.sizing import Geometry, startup_summary

MIB = 1 << 20
# 64 tokens per chunk, two ranks of 1 MiB: 32 KiB per token.
PLAIN = Geometry.of([64], [[MIB, MIB]])


def test_a_plain_model_has_the_expected_bytes_and_tokens():
    assert PLAIN.bytes_per_token == 32 << 10
    assert PLAIN.tokens_in_memory(1 << 30) == 32768
    assert PLAIN.tokens_in_memory(0) == 0


def test_a_record_is_a_row_plus_a_header():
    (group,) = PLAIN.groups
    assert (group.row_bytes, group.record_bytes) == (2 * MIB, 2 * MIB + 4096)
    assert PLAIN.tokens_on_tier(2 * MIB + 4096) == 64
    assert PLAIN.tokens_on_tier(2 * MIB + 4095) == 63


def test_each_shard_in_an_area_takes_whole_pages():
    (group,) = Geometry.of([16], [[1000, 5000]], 3).groups
    assert group.row_bytes == 3 * (1 + 2) * 4096
    assert group.record_bytes == group.row_bytes + 4096


def test_each_shard_is_padded_to_pages():
    geometry = Geometry.of([16], [[1000, 5000]])
    assert geometry.groups[0].row_bytes == 4096 + 8192
    assert geometry.tokens_in_memory(12288) == 16
    assert geometry.bytes_per_token == 6000 / 16


def test_groups_with_other_chunks_add_up():
    """A token takes 1 KiB of the first group's 16-token chunk and 256 B of the second's 64-token chunk."""
    geometry = Geometry.of([16, 64], [[16 << 10], [16 << 10]])
    assert geometry.bytes_per_token == 1024 + 256
    assert geometry.tokens_in_memory(1280 * 1000) == 1000
    assert geometry.largest_record_bytes == (16 << 10) + 4096


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        Geometry.of([16, 16], [[1]])


def test_zero_bytes_are_zero_tokens():
    assert Geometry.of([16], [[0]]).tokens_in_memory(1 << 30) == 0


def test_the_startup_summary_is_complete():
    config = OffloadConfig.from_extra_config(
        {
            "cpu_bytes_to_use": "2GiB",
            "secondary_tiers": [{"type": "fs", "root_dir": "/kv", "write_policy": "reuse:2"}],
        }
    )
    line = startup_summary(
        config, [1 << 40], PLAIN, copier="host, 2 threads", namespace="abc123", version="0.1.0"
    )
    assert "\n" not in line
    for part in (
        "kv-offload 0.1.0: cpu 2.0 GiB = 65,536 tokens",
        "fs /kv 1.0 TiB = 33,489,023 tokens",
        "(reuse:2, compress auto)",
        "32.0 KiB a token (32,768 tokens/GiB)",
        "copier host, 2 threads",
        "namespace abc123",
    ):
        assert part in line


def test_the_startup_summary_of_a_replica_shows_its_own_share():
    config = OffloadConfig.from_extra_config(
        {"cpu_bytes_to_use": "2GiB", "secondary_tiers": [{"type": "fs", "root_dir": "/kv"}]}
    )
    line = startup_summary(
        config, [1 << 40], PLAIN, copier="host", namespace="abc", version="1", replica=1, replicas=4
    )
    assert "kv-offload 1 engine 2 of 4: cpu 2.0 GiB for this engine = " in line
    assert "fs /kv 1.0 TiB for all engines = " in line
