"""Run by test_oracle.py under each vLLM release. More: KV_OFFLOAD_ORACLE_STEPS, KV_OFFLOAD_ORACLE_SEEDS."""

import os
import uuid
from dataclasses import replace

import adapter
import pytest

adapter.use_specs()
core = adapter.use_core()

import vllm  # noqa: E402

from oracle import faults  # noqa: E402
from oracle.drive import Driver, Rates, total  # noqa: E402
from oracle.engine import Engine, Setup  # noqa: E402
from oracle.runner import WrongBytes  # noqa: E402

STEPS = int(os.environ.get("KV_OFFLOAD_ORACLE_STEPS", "500"))
SEEDS = range(int(os.environ.get("KV_OFFLOAD_ORACLE_SEEDS", "1")))
REAL = not adapter.is_plain(core)
MINOR = tuple(int(part) for part in vllm.__version__.split(".")[:2])
# 0.31 and 0.32 assert in build_connector_meta when a forced reset and a reload meet in one step.
FORCED = 0.004 if MINOR >= (0, 33) else 0.0

FULL = Setup(extra={"cpu_bytes_to_use": "512KiB"}, layers=4)
HYBRID = replace(FULL, window=40)

KINDS = {
    "full attention": FULL,
    "packed blocks": replace(FULL, layout="BLHNC"),
    "two blocks a chunk": replace(FULL, extra={**FULL.extra, "blocks_per_chunk": 2}),
    "four blocks a chunk": replace(FULL, extra={**FULL.extra, "blocks_per_chunk": 4}),
    "two ranks": replace(FULL, world_size=2, extra={"cpu_bytes_to_use": "1MiB"}),
    "hybrid": HYBRID,
    "hybrid, two blocks a chunk": replace(HYBRID, extra={**FULL.extra, "blocks_per_chunk": 2}),
    "hybrid, packed, two ranks": replace(HYBRID, layout="BLHNC", world_size=2),
    "asynchronous scheduling": replace(FULL, async_scheduling=True),
    "hybrid, asynchronous scheduling": replace(HYBRID, async_scheduling=True),
    "events": replace(HYBRID, events=True),
    "decoded tokens too": replace(HYBRID, extra={**FULL.extra, "offload_prompt_only": False}),
}


def boot(setup: Setup) -> Engine:
    return Engine(setup, engine_id=f"oracle-{uuid.uuid4()}")


def live(setup: Setup, seed: int, steps: int = STEPS, rates: Rates | None = None) -> Engine:
    """One life of an engine; raises WrongBytes when a request is about to read what is not its own."""
    engine = boot(setup)
    try:
        driver = Driver(engine, seed, rates or Rates(forced_reset=FORCED))
        driver.run(steps)
        engine.happened = driver.happened
    finally:
        engine.shutdown()
    return engine


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_that_a_request_reads_is_its_own(kind: str, seed: int) -> None:
    engine = live(KINDS[kind], seed)
    loaded = total(engine, "vllm:kv_offload_load_bytes")
    print(kind, dict(engine.happened), f"loaded {loaded:,.0f} bytes")
    assert loaded > 10_000, "hardly anything was loaded: the run shows nothing"
    assert engine.happened["requests"] > STEPS // 20


WORKER_FAULTS = (faults.WrongRow, faults.SkippedLoad, faults.EarlyLoad, faults.EarlyStore)


@pytest.mark.parametrize("fault", WORKER_FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("kind", ["full attention", "hybrid"])
def test_a_fault_of_the_worker_is_seen(fault: type, kind: str) -> None:
    with pytest.raises(WrongBytes):
        live(replace(KINDS[kind], wrap_worker=fault), seed=0, steps=1500)


def test_a_row_that_is_given_out_twice_is_seen() -> None:
    with pytest.raises(WrongBytes):
        live(replace(FULL, wrap_manager=faults.StaleRow), seed=0, steps=1500)


def test_storing_after_a_reset_what_fell_behind_a_window_is_seen() -> None:
    rates = Rates(reset=0.05, evict_prefixes=0.1)
    setup = replace(HYBRID, wrap_manager=faults.TrustingAfterReset)
    with pytest.raises(WrongBytes):
        [live(setup, seed, steps=800, rates=rates) for seed in range(6)]


def test_many_resets_leave_nothing_wrong() -> None:
    live(HYBRID, seed=1, rates=Rates(reset=0.05, evict_prefixes=0.1, forced_reset=FORCED * 5))
