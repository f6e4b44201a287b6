# SPDX-License-Identifier: Apache-2.0
"""Run by test_tiers.py: tiers of other kinds than fs under vLLM's scheduler; every byte is checked."""

import random
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import adapter
import pytest

adapter.use_specs()

import toy_tier  # noqa: E402
from live_root import records_in  # noqa: E402
from mooncake_store import mooncake_store  # noqa: E402
from redis_server import redis_server  # noqa: E402
from s3_server import ACCESS, BUCKET, SECRET, S3Server  # noqa: E402

from oracle.check_oracle import (  # noqa: E402
    FORCED,
    FULL,
    KINDS,
    PATIENT_MS,
    Setup,
    _check_at_rest,
    ask_again,
    live,
    until_scanned,
)
from oracle.drive import Rates, total  # noqa: E402
from oracle.engine import Engine  # noqa: E402


def with_tiers(setup: Setup, *tiers: dict[str, Any]) -> Setup:
    extra = {"secondary_tiers": list(tiers), "load_policy": "always", "lookup_timeout_ms": PATIENT_MS}
    return replace(setup, extra={**setup.extra, **extra})


def toy(**more: Any) -> dict[str, Any]:
    return {"type": "toy", "server": uuid.uuid4().hex, "op_timeout_ms": PATIENT_MS, **more}


def live_over(*tiers: dict[str, Any], kind: str = "full attention", seed: int) -> Engine:
    """Runs an engine life that ends with prompts of 96 blocks, twice, while host memory holds at most 64 of
    them: the others are loaded from a tier.
    """
    setup = with_tiers(
        replace(KINDS[kind], extra={**KINDS[kind].extra, "cpu_bytes_to_use": "256KiB"}), *tiers
    )
    alone = [[number, *range(199)] for number in range(8)]
    return live(setup, seed, 400, Rates(forced_reset=FORCED), alone=alone)


def some_prompts(count: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(1000) for _ in range(rng.randrange(33, 270))] for _ in range(count)]


@pytest.mark.parametrize("kind", ["full attention", "hybrid", "two ranks"])
def test_every_byte_from_a_newly_registered_tier_is_right(kind: str) -> None:
    shelf = toy()
    engine = live_over(shelf, kind=kind, seed=11)
    assert toy_tier.extension().records(shelf["server"]) > 0
    assert total(engine, "kv_offload_hit_tokens_total", "toy") > 0  # the next test checks how much


def test_the_next_engine_finds_the_records_of_a_registered_tier() -> None:
    prompts = some_prompts(8)
    whole = [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    setup = with_tiers(FULL, toy())
    first = Engine(setup, f"oracle-{uuid.uuid4()}")
    assert ask_again(first, prompts) == [0] * len(prompts)
    _check_at_rest(first)
    first.shutdown()
    second = Engine(setup, f"oracle-{uuid.uuid4()}", first.model_dir)
    found = ask_again(second, prompts)
    from_toy = total(second, "kv_offload_hit_tokens_total", "toy")
    second.shutdown()
    assert [min(pair) for pair in zip(found, whole, strict=True)] == whole
    assert from_toy >= sum(whole)


def test_a_read_only_tier_is_read_and_never_written() -> None:
    prompts, others = some_prompts(8), some_prompts(12)[8:]
    shelf = toy()
    first = Engine(with_tiers(FULL, shelf), f"oracle-{uuid.uuid4()}")
    ask_again(first, prompts)
    _check_at_rest(first)
    first.shutdown()
    recorded = toy_tier.extension().records(shelf["server"])
    reader = with_tiers(FULL, {**shelf, "write_policy": "read_only"})
    second = Engine(reader, f"oracle-{uuid.uuid4()}", first.model_dir)
    assert sum(ask_again(second, prompts)) > 0
    ask_again(second, others)
    _check_at_rest(second)
    assert total(second, "kv_offload_hit_tokens_total", "toy") > 0
    second.shutdown()
    assert toy_tier.extension().records(shelf["server"]) == recorded


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Yields a tier on this test's own server."""
    with redis_server(tmp_path) as socket:
        yield {"type": "redis", "url": f"unix://{socket}", "op_timeout_ms": PATIENT_MS}


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Yields a tier in a bucket of this test's own store."""
    server = S3Server(tmp_path)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    try:
        server.start()
        yield {"type": "s3", "bucket": BUCKET, "endpoint": server.endpoint, "op_timeout_ms": PATIENT_MS}
    finally:
        server.kill()


@pytest.fixture
def mooncake(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Yields a tier with this test's own master and storage process."""
    with mooncake_store(tmp_path) as running:
        yield {"type": "mooncake", "master": running.address, "op_timeout_ms": PATIENT_MS}


@pytest.mark.parametrize("server", ["redis", "s3", "mooncake"])
def test_every_byte_from_a_server_is_right_and_the_next_engine_finds_all(
    server: str, request: pytest.FixtureRequest
) -> None:
    tier = request.getfixturevalue(server)
    engine = live_over(tier, seed=11)
    assert total(engine, "kv_offload_hit_tokens_total", server) > 0
    prompts = some_prompts(8)
    whole = [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    first = Engine(with_tiers(FULL, tier), f"oracle-{uuid.uuid4()}")
    ask_again(first, prompts)
    _check_at_rest(first)
    first.shutdown()
    second = Engine(with_tiers(FULL, tier), f"oracle-{uuid.uuid4()}", first.model_dir)
    found = ask_again(second, prompts)
    second.shutdown()
    assert [min(pair) for pair in zip(found, whole, strict=True)] == whole
    assert total(second, "kv_offload_failures_total") == 0


def test_every_byte_from_an_encrypted_directory_is_right(tmp_path: Path) -> None:
    keys = [tmp_path / "new", tmp_path / "old"]
    for number, key in enumerate(keys):
        key.write_bytes(bytes([number]) * 32)
        key.chmod(0o600)
    root = tmp_path / "root"
    disk = {"type": "fs", "root_dir": str(root), "max_bytes": "4MiB", "op_timeout_ms": 60_000}
    old = {**disk, "encryption_key_file": str(keys[1])}
    engine = live_over(old, seed=13)
    assert total(engine, "kv_offload_hit_tokens_total", "fs") > 0
    assert total(engine, "kv_offload_failures_total") == 0
    prompts = some_prompts(8)
    first = Engine(with_tiers(FULL, old), f"oracle-{uuid.uuid4()}")
    until_scanned(first)  # the previous life may have left it full
    ask_again(first, prompts)
    _check_at_rest(first)
    first.shutdown()
    both = {**disk, "encryption_key_file": [str(key) for key in keys]}
    second = Engine(with_tiers(FULL, both), f"oracle-{uuid.uuid4()}", first.model_dir)
    assert sum(ask_again(second, prompts)) > 0
    assert total(second, "kv_offload_hit_tokens_total", "fs") > 0
    assert total(second, "kv_offload_failures_total") == 0
    second.shutdown()
    other = Engine(with_tiers(FULL, disk), f"oracle-{uuid.uuid4()}", first.model_dir)
    ask_again(other, prompts)
    assert total(other, "kv_offload_hit_tokens_total", "fs") == 0  # an engine without the key finds nothing
    other.shutdown()
    assert all(len(path.name.split(".")[0]) in (40, 72) for path in records_in(root))


def test_two_kinds_of_tiers_serve_together_under_their_own_names(tmp_path: Path) -> None:
    disk = {
        "type": "fs",
        "root_dir": str(tmp_path / "root"),
        "max_bytes": "4MiB",
        "op_timeout_ms": PATIENT_MS,
    }
    engine = live_over(disk, toy(), seed=12)
    for name in ("fs", "toy"):
        assert total(engine, "kv_offload_write_bytes_total", name) > 0
    assert engine.manager._cache.tier_stats(1)["name"] == "toy"
