# SPDX-License-Identifier: Apache-2.0
"""Request traces, read and replayed through the core: directly and with ``kv-offload replay``."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from kv_offload.cli import app
from kv_offload.traces import OPTIMUM, Setting, Speeds, Trace, read_trace, replay

core = pytest.importorskip("kv_offload._core", reason="the core is not built")

# Room for four blocks: the second prompt evicts the end of the first.
PROMPTS = [[1, 2, 3], [4, 5], [1, 2, 3], [4, 5]]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 0, "input_length": 10 * len(p), "hash_ids": p} for p in PROMPTS]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


def run(*arguments, status=0):
    result = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    return result


def test_a_trace_is_read_line_by_line(trace):
    read = read_trace(trace)
    assert read.prompts == PROMPTS
    assert (read.blocks, read.unique_blocks(), read.tokens, read.block_tokens) == (10, 5, 100, 10.0)
    assert read_trace(trace, limit=1).prompts == PROMPTS[:1]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "is not JSON"),
        ("[1]", "has no hash_ids"),
        ('{"hash_ids": [-1]}', "has no hash_ids"),
        ('{"hash_ids": [true]}', "has no hash_ids"),
        ('{"hash_ids": [1], "input_length": "x"}', "input_length of 'x'"),
    ],
)
def test_an_invalid_line_is_named(tmp_path, line, part):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl:2 ") as caught:
        read_trace(path)
    assert part in str(caught.value)


def test_an_empty_trace_is_refused(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no request"):
        read_trace(path)


@pytest.mark.parametrize(
    ("policy", "host", "tier", "hits", "from_tier"),
    [
        ("lru", 4, 0, 3, 0),
        ("lru", 5, 0, 5, 0),
        ("lru", 3, 9, 5, 4),
        ("prefix", 4, 0, 3, 0),
        (OPTIMUM, 4, 0, 4, 0),
    ],
)
def test_the_hits_of_a_small_trace_are_exact(trace, policy, host, tier, hits, from_tier):
    read = read_trace(trace)
    row = replay(read.to_core(), read, Setting(policy, host, tier), Speeds(100))
    assert row["hit_blocks"] == hits
    assert row["tier_hits"] <= row["hit_blocks"]
    assert row["hit_tokens"] == 10 * hits
    assert row["saved_prefill_seconds"] == pytest.approx(hits / 10)
    assert row["tier_hits"] == from_tier


def test_the_estimated_ttft_includes_reads_from_disk(trace):
    """30 and 20 tokens are computed. Then 30 tokens are loaded, 20 of them from disk, and 20 from disk."""
    read = read_trace(trace)
    speeds = Speeds(prefill=100, token_bytes=10, load=1000, disk=500)
    row = replay(read.to_core(), read, Setting("lru", 3, 9), speeds)
    seconds = sorted([0.3, 0.2, 0.3 + 0.4, 0.2 + 0.4])
    assert row["ttft_p50_seconds"] == pytest.approx((seconds[1] + seconds[2]) / 2)
    assert row["ttft_p95_seconds"] == pytest.approx(seconds[2] + 0.85 * (seconds[3] - seconds[2]))
    assert (row["loaded_bytes"], row["read_bytes"]) == (5 * 100, 4 * 100)
    unknown = replay(read.to_core(), Trace(read.prompts), Setting("lru", 3, 9), speeds)
    assert unknown["ttft_p50_seconds"] is None


def test_records_on_disk_survive_a_kill(trace):
    read = read_trace(trace)
    setting = Setting("lru", 3, 9, kill_after=2, recent=1)
    row = replay(read.to_core(), read, setting, Speeds(100))
    assert (row["killed_with"], row["recent_hits"], row["recent_blocks"]) == (5, 2, 2)
    assert (row["hits_after"], row["blocks_after"]) == (5, 5)
    kept = replace(setting, write_policy="on_evict", keep_host_memory=True)
    row = replay(read.to_core(), read, kept, Speeds(100))
    assert (row["killed_with"], row["recent_hits"], row["hits_after"]) == (2, 2, 5)
    unharmed = replay(read.to_core(), read, Setting("lru", 3, 9), Speeds(100))
    assert unharmed["killed_with"] is unharmed["hits_after"] is None


def test_a_trace_that_the_core_cannot_replay_is_refused():
    read = Trace([[1]])
    with pytest.raises(ValueError, match="host_chunks is 0"):
        read.to_core().replay(host_chunks=0)
    with pytest.raises(ValueError, match="reuse"):
        read.to_core().replay(host_chunks=1, tier_chunks=1, write_policy="reuse:x")


def test_the_command_prints_a_row_for_each_capacity_and_policy(trace):
    found = json.loads(run(trace, "--host", 4, "--host", 5, "--json").stdout)
    assert found["trace"]["requests"] == 4
    assert [(row["host_blocks"], row["policy"]) for row in found["replays"]] == [
        (capacity, policy) for capacity in (4, 5) for policy in ("lru", "prefix", OPTIMUM)
    ]
    assert [row["hit_blocks"] for row in found["replays"] if row["host_blocks"] == 5] == [5] * 3


def test_the_command_shows_the_bytes_written(trace):
    options = ("--host", 3, "--disk", 9, "--policy", "lru", "--token-bytes", "1MiB")
    (row,) = json.loads(run(trace, *options, "--json").stdout)["replays"]
    assert row["written_bytes"] == 50 << 20, "5 blocks of 10 tokens"
    options = (*options, "--write-policy", "reuse:2")
    (row,) = json.loads(run(trace, *options, "--json").stdout)["replays"]
    assert 0 < row["written_bytes"] < 60 << 20


def test_the_table_shows_hits_after_a_kill(trace):
    options = ("--host", 3, "--disk", 9, "--policy", "lru", "--kill-after", 2, "--recent", 1)
    said = run(trace, *options, "--write-policy", "on_evict").stdout
    assert "recent" in said
    assert "after kill" in said
    assert "0.0%" in said.split(), "4 and 5 were only in host memory"
    kept = run(trace, *options, "--write-policy", "on_evict", "--keep-host-memory").stdout
    assert "0.0%" not in kept.split()
    assert "after kill" not in run(trace, "--host", 3, "--disk", 9).stdout


def test_the_table_names_its_columns(trace):
    said = run(trace, "--host", 5).stdout
    for part in ("4 requests", "10 blocks", "prefix", "50.0%", OPTIMUM):
        assert part in said


@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        (("--policy", "mru"), 2, "policy 'mru' is not known"),
        (("--host", "1", "--write-policy", "sometimes", "--disk", "1"), 2, "write_policy"),
        (("--host", "1", "--kill-after", "5"), 2, "--kill-after is 5, the trace has 4 requests"),
    ],
)
def test_invalid_arguments_of_replay_are_refused(trace, arguments, status, part):
    assert part in run(trace, *arguments, status=status).stderr


def test_a_missing_trace_is_reported(tmp_path):
    assert "nowhere.jsonl" in run(tmp_path / "nowhere.jsonl", status=1).stderr
