# SPDX-License-Identifier: Apache-2.0
"""Run by test_oracle.py under each vLLM release. KV_OFFLOAD_ORACLE_STEPS, KV_OFFLOAD_ORACLE_SEEDS and
KV_OFFLOAD_ORACLE_DEVICE (cuda: caches on a GPU) extend it.
"""

import os
import random
import sysconfig
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import adapter
import numpy as np
import pytest

adapter.use_specs()

import vllm  # noqa: E402
from vllm.config import ModelConfig  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

from oracle import faults  # noqa: E402
from oracle.drive import Driver, Rates, total  # noqa: E402
from oracle.engine import STATE, Engine, Setup  # noqa: E402
from oracle.runner import FakeRunner, WrongBytes  # noqa: E402

Histories = list[tuple[list[int], str | None]]
# Tests that count hits wait longer than a machine stalls: a delay of a minute changes nothing.
PATIENT_MS = 240_000
MINOR = tuple(int(part) for part in vllm.__version__.split(".")[:2])
# Most failures do not depend on the release, so only the installed one runs all steps. vllm_trees puts the
# others before it on sys.path.
INSTALLED = Path(vllm.__file__).is_relative_to(sysconfig.get_paths()["purelib"])
STEPS = int(os.environ.get("KV_OFFLOAD_ORACLE_STEPS", "400" if INSTALLED else "200"))
# Each release has its own seeds.
SEEDS = range(MINOR[1] * 1000, MINOR[1] * 1000 + int(os.environ.get("KV_OFFLOAD_ORACLE_SEEDS", "1")))
# 0.31 and 0.32 assert in build_connector_meta when a forced reset and a reload fall into one step.
FORCED = 0.004 if MINOR >= (0, 33) else 0.0

FULL = Setup(
    extra={"cpu_bytes_to_use": "512KiB"},
    layers=4,
    device=os.environ.get("KV_OFFLOAD_ORACLE_DEVICE", "cpu"),
)
HYBRID = replace(FULL, window=40)
STATES = replace(FULL, window=STATE)
SHORTER = replace(FULL, window=24, extra={**FULL.extra, "blocks_per_chunk": 4})  # shorter than a chunk


def chunks_of(setup: Setup, blocks: int) -> Setup:
    return replace(setup, extra={**setup.extra, "blocks_per_chunk": blocks})


KINDS = {
    "full attention": FULL,
    "packed blocks": replace(FULL, layout="BLHNC"),
    "two blocks a chunk": replace(FULL, extra={**FULL.extra, "blocks_per_chunk": 2}),
    "four blocks a chunk": replace(FULL, extra={**FULL.extra, "blocks_per_chunk": 4}),
    "two ranks": replace(FULL, world_size=2, extra={"cpu_bytes_to_use": "1MiB"}),
    "canonical, two ranks": replace(
        FULL, heads=4, world_size=2, extra={"cpu_bytes_to_use": "2MiB", "canonical_layout": True}
    ),
    "two stages of a pipeline": replace(FULL, world_size=2, pipelined=True, layers=5),
    "hybrid": HYBRID,
    "hybrid, two stages of a pipeline": replace(HYBRID, world_size=2, pipelined=True),
    "hybrid, two blocks a chunk": replace(HYBRID, extra={**FULL.extra, "blocks_per_chunk": 2}),
    "hybrid, packed, two ranks": replace(HYBRID, layout="BLHNC", world_size=2),
    "asynchronous scheduling": replace(FULL, async_scheduling=True),
    "hybrid, asynchronous scheduling": replace(HYBRID, async_scheduling=True),
    "events": replace(HYBRID, events=True),
    "mamba-like": STATES,
    "mamba-like, two ranks": replace(STATES, world_size=2, extra={"cpu_bytes_to_use": "1MiB"}),
    "mamba-like, two blocks a chunk": chunks_of(replace(STATES, retention=32), 2),
    "mamba-like, four blocks a chunk": chunks_of(replace(STATES, retention=64), 4),
    "mamba-like, parts of a block": replace(STATES, match_unit=4),
    "mamba-like, parts of a block, two ranks": replace(
        STATES, match_unit=4, world_size=2, extra={"cpu_bytes_to_use": "1MiB"}
    ),
    "a drafter in the group": replace(FULL, drafts=2),
    "a drafter in the group, two blocks a chunk": replace(
        FULL, drafts=3, extra={**FULL.extra, "blocks_per_chunk": 2}
    ),
    "hybrid, every window, a drafter in one group": replace(HYBRID, drafts=2, retention=16),
    "hybrid, a drafter, two ranks": replace(HYBRID, drafts=2, world_size=2, layout="BLHNC"),
    "a drafter, asynchronous scheduling": replace(FULL, drafts=2, async_scheduling=True),
    "replicated, two ranks": replace(FULL, replicated=True, world_size=2),
    "mirrored": replace(HYBRID, mirrored=True),
    "mirrored, parts of a block": replace(STATES, match_unit=4, mirrored=True),
    "decoded tokens too": replace(HYBRID, extra={**FULL.extra, "offload_prompt_only": False}),
    "decoded tokens too, a drafter, asynchronous scheduling": replace(
        HYBRID, drafts=3, async_scheduling=True, extra={**FULL.extra, "offload_prompt_only": False}
    ),
    "short window": SHORTER,
    "short window, packed, two ranks": replace(SHORTER, layout="BLHNC", world_size=2),
    "short window, canonical, two ranks": replace(
        SHORTER,
        heads=4,
        world_size=2,
        extra={**SHORTER.extra, "cpu_bytes_to_use": "2MiB", "canonical_layout": True},
    ),
    "short window, a drafter": replace(SHORTER, drafts=2, retention=64),
    "short window, a drafter of two modules": replace(
        SHORTER, window=32, drafts=2, modules=True, retention=64
    ),
    "short window, asynchronous scheduling": replace(SHORTER, async_scheduling=True),
    "short window, decoded tokens too": replace(
        SHORTER, retention=None, extra={**SHORTER.extra, "offload_prompt_only": False}
    ),
    "short window, stages of one kind": replace(SHORTER, layers=2, world_size=2, pipelined=True),
    "short window, stages of one kind, no hybrid manager": replace(
        SHORTER, layers=2, world_size=2, pipelined=True, hybrid_manager=False
    ),
    "loads within a step": chunks_of(
        replace(HYBRID, extra={**FULL.extra, "sync_load_budget_bytes": 1 << 20}), 2
    ),
}


# The new features of these kinds show in the first steps.
SHORT = {
    kind
    for kind in KINDS
    if kind.startswith(("mamba-like, ", "mirrored, ", "canonical", "short window, ", "loads within"))
    and not kind.startswith("short window, a drafter")
}
UNSEEN = {kind for kind in KINDS if "replicated" in kind and MINOR < (0, 32)}
UNSEEN |= {kind for kind in KINDS if "sync_load_budget_bytes" in KINDS[kind].extra and MINOR < (0, 33)}


def kinds(*names: str) -> list[str]:
    """Returns the kinds that this release supports."""
    return [name for name in names or KINDS if name not in UNSEEN]


def boot(setup: Setup, model_dir: str | None = None) -> Engine:
    """Boots an engine as vLLM does for a model with a replicated cache: there is no model class here."""
    with patch.object(ModelConfig, "use_mla", setup.replicated) if setup.replicated else nullcontext():
        engine = Engine(setup, f"oracle-{uuid.uuid4()}", model_dir)
    is_replicated = engine.ranks[0][1].connector_worker.spec.replicated_layout
    assert is_replicated == (setup.replicated and setup.hosts == 1)
    return engine


def live(
    setup: Setup,
    seed: int,
    steps: int = STEPS,
    rates: Rates | None = None,
    histories: Histories | None = None,
    root: Path | None = None,
    model_dir: str | None = None,
    alone: Sequence[list[int]] = (),
) -> Engine:
    """Runs one engine life; raises WrongBytes when a request is about to read bytes that are not its own. The
    prompts of ``alone`` are sent one by one before and after the random requests; twice afterwards, so that
    the second time loads from us even after resets and evictions.
    """
    engine = boot(setup, model_dir)
    try:
        driver = Driver(engine, seed, rates or Rates(forced_reset=FORCED), root=root)
        if histories is not None:
            driver.histories = histories
        ask_again(engine, alone)
        driver.run(steps)
        engine.happened = driver.happened
        _check_at_rest(engine)
        for _ in range(2):
            ask_again(engine, alone)
        _check_at_rest(engine)
    finally:
        engine.shutdown()
    return engine


def _check_at_rest(engine: Engine) -> None:
    """Checks that an idle engine holds nothing and that its writes have reached the disk."""
    _until_written(engine)
    # Jobs that a reset overtook may still be in flight.
    held = ("waiting_requests", "requests", "quarantined_rows")
    _step_until_none(engine, engine.manager._cache.stats, held)


def _until_written(engine: Engine) -> None:
    """Waits for the writes: full host memory evicts chunks that the disk has not taken yet."""
    if engine.setup.extra.get("secondary_tiers"):
        _step_until_none(engine, lambda: engine.manager._cache.tier_stats(0), ("queued_writes",))


def until_scanned(engine: Engine) -> None:
    """Waits for the scan: before it, a full disk takes nothing, because existing records may be newer than
    the known ones.
    """
    cache = engine.manager._cache
    _step_until_none(engine, lambda: {"scanning": not cache.tier_stats(0)["scan_complete"]}, ("scanning",))


def _step_until_none(engine: Engine, figures: Callable[[], dict[str, Any]], names: tuple[str, ...]) -> None:
    deadline = time.monotonic() + PATIENT_MS / 1000
    found = figures()
    while any(found[name] for name in names):
        assert time.monotonic() < deadline, found
        engine.step_idle()
        found = figures()


def with_disk(setup: Setup, root: Path, **tier: object) -> Setup:
    """Returns the same engine over a tier; it loads every stored chunk, so that all are checked."""
    tiers = [{"type": "fs", "root_dir": str(root), "max_bytes": "4MiB", "op_timeout_ms": PATIENT_MS, **tier}]
    extra = {"secondary_tiers": tiers, "load_policy": "always", "lookup_timeout_ms": PATIENT_MS}
    return replace(setup, extra={**setup.extra, **extra})


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", kinds())
def test_every_byte_that_a_request_reads_is_right(kind: str, seed: int) -> None:
    for life in range(5):  # a short life may load too little to prove anything
        steps = max(STEPS // 3, min(STEPS, 333)) if kind in SHORT else STEPS
        engine = live(KINDS[kind], seed + 100 * life, steps)
        loaded = total(engine, "vllm:kv_offload_load_bytes")
        print(kind, dict(engine.happened), f"loaded {loaded:,.0f} bytes")
        if loaded > 10_000:
            break
    assert loaded > 10_000
    if engine.setup.drafts:
        # Before 0.33 vLLM names no drafter where there is one group, and the connector drops no block there.
        named = MINOR >= (0, 33) or engine.setup.window is not None
        assert sum(engine.draft_groups) == int(named)
        _, _, runner = engine.ranks[0]
        print(f"{runner.rejected} drafts rejected, {runner.stale} positions of other continuations")
        assert runner.rejected > STEPS // 20
    if "sync_load_budget_bytes" in engine.setup.extra:
        print(f"{engine.sync_loads} loads within a step")
        assert engine.sync_loads > 0
    if engine.setup.match_unit:
        assert all(runner.copied_blocks > STEPS // 100 for _, _, runner in engine.ranks)
    assert engine.happened["requests"] > STEPS // 20


WORKER_FAULTS = (faults.WrongRow, faults.SkippedLoad, faults.EarlyLoad, faults.EarlyStore)


@pytest.mark.parametrize("fault", WORKER_FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("kind", kinds("full attention", "hybrid", "mirrored"))
def test_the_oracle_detects_a_faulty_worker(fault: type, kind: str) -> None:
    with pytest.raises(WrongBytes):
        live(replace(KINDS[kind], wrap_worker=fault), seed=0, steps=1500)


@pytest.mark.parametrize(
    "kind",
    kinds(
        "mamba-like",
        "mamba-like, two blocks a chunk",
        "mamba-like, parts of a block",
        "hybrid, every window, a drafter in one group",
    ),
)
def test_the_oracle_detects_rows_of_other_chunks_in_states_and_drafts(kind: str) -> None:
    with pytest.raises(WrongBytes):
        live(replace(KINDS[kind], wrap_worker=faults.WrongRow), seed=0, steps=1500)


def test_in_drafter_layers_only_the_last_position_of_a_block_may_differ() -> None:
    blocks = np.zeros((4, 16, 32), dtype=np.int8)
    runner = FakeRunner([[blocks]], [None], 16, 0, draft_layers={(0, 0)})
    prompt = list(range(40))
    for name, at in (("same", None), ("after the block", 16), ("in the block", 15)):
        runner.expect(name, [999 if at == index else token for index, token in enumerate(prompt)], 4, None)
        runner.sequences[name].hold([[1, 2, 3]], runner.slots)
    runner._write(runner.sequences["same"], 32, 32)
    for name, blocks_seen in (("same", 32), ("after the block", 16)):
        runner.check(name, runner.sequences[name], blocks_seen)
    assert runner.stale == 1
    with pytest.raises(WrongBytes):
        runner.check("in the block", runner.sequences["in the block"], 16)
    blocks[2, 15, 0] ^= 1
    with pytest.raises(WrongBytes):
        runner.check("same", runner.sequences["same"], 32)


def test_the_oracle_detects_a_row_that_is_allocated_twice() -> None:
    with pytest.raises(WrongBytes):
        live(replace(FULL, wrap_manager=faults.StaleRow), seed=0, steps=1500)


def test_the_oracle_detects_stores_of_reused_window_blocks_after_a_reset() -> None:
    rates = Rates(reset=0.05, evict_prefixes=0.1)
    setup = replace(HYBRID, wrap_manager=faults.TrustingAfterReset)

    def live_until_vllm_stops(seed: int) -> None:
        # A reused block may occur twice in one store job: vLLM stops when it removes it the second time.
        with suppress(KeyError):
            live(setup, seed, steps=800, rates=rates)

    with pytest.raises(WrongBytes):
        [live_until_vllm_stops(seed) for seed in range(12)]


def play_sessions(setup: Setup) -> list[tuple[int, int]]:
    """Runs sessions of streaming input. Returns for each the tokens that we load when its whole text is sent
    again, and the tokens of that text. The first parts end within a block, at its end and after it; one is
    preempted.
    """
    engine = boot(setup)
    rng = random.Random(0)
    found = []

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1000) for _ in range(count)]

    def until_it_waits(session: Any) -> None:
        deadline = time.monotonic() + 60
        while session.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            assert time.monotonic() < deadline, f"the session is {session.status.name} for ever"
            engine.step_idle()

    try:
        for first in (53, 58, 59, 60, 61):
            preempted = first == 61 and not setup.async_scheduling  # a batch in flight refuses the reset
            # 0.31 and 0.32 assert if a request is preempted by a reset and loads in the same step.
            params = {"kv_offload_skip_load": True} if preempted else None
            session = engine.add(f"session-{first}", tokens(first), 6, params=params, resumable=True)
            if preempted:
                for _ in range(3):
                    engine.step_idle()
                assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
                assert session.num_preemptions == 1
            for more in (70, 5, 30):
                until_it_waits(session)
                engine.go_on(session, tokens(more), 6)
            until_it_waits(session)
            whole = list(session.all_token_ids[: session.num_computed_tokens])
            engine.abort(session.request_id)
            engine.drain()
            found.append((ask_again(engine, [whole])[0], len(whole)))
    finally:
        engine.shutdown()
    return found


@pytest.mark.parametrize(
    "kind",
    kinds(
        "full attention",
        "two blocks a chunk",
        "hybrid",
        "mamba-like",
        "asynchronous scheduling",
        "decoded tokens too",
    ),
)
def test_resumed_sessions_store_right_bytes(kind: str) -> None:
    found = play_sessions(KINDS[kind])
    print(kind, found)
    assert all(loaded > 0 for loaded, _ in found)
    if MINOR >= (0, 33) and KINDS[kind].window != HYBRID.window:
        assert all(loaded >= tokens - 40 for loaded, tokens in found), (
            "these sessions must be stored completely"
        )


def test_the_oracle_detects_wrong_offers_of_a_resumed_session() -> None:
    with pytest.raises(WrongBytes) if MINOR < (0, 33) else nullcontext():
        play_sessions(replace(FULL, wrap_manager=faults.TrustingSessions))


DISK_KINDS = (
    "full attention",
    "two ranks",
    "two stages of a pipeline",
    "hybrid",
    "hybrid, two blocks a chunk",
    "asynchronous scheduling",
    "mamba-like",
    "hybrid, every window, a drafter in one group",
    "replicated, two ranks",
    "short window",
    # With retention: without it, vLLM offers no chunk that a repeat with a drafter can find, and the next
    # life finds only what its random conversations happen to share.
    "short window, a drafter of two modules",
)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", kinds(*DISK_KINDS))
def test_every_byte_from_disk_is_right_also_after_a_restart(kind: str, seed: int, tmp_path: Path) -> None:
    setup = with_disk(KINDS[kind], tmp_path / "root", max_bytes="8MiB")
    histories: Histories = []
    # The random requests of the next life may miss all records on disk; these prompts hit.
    rng = random.Random(seed)
    alone = [[rng.randrange(1000) for _ in range(150)] for _ in range(3)]
    first = live(setup, seed, histories=histories, rates=Rates(reset=0), alone=alone)
    second = live(
        setup, seed + 100, STEPS // 4, Rates(reset=0), histories[:], model_dir=first.model_dir, alone=alone
    )
    loaded = total(second, "kv_offload_hit_tokens_total", "fs")
    print(kind, dict(second.happened), f"{loaded:,.0f} tokens from disk in the second life")
    assert loaded >= sum(len(prompt) // 32 * 32 for prompt in alone)


def ask_again(
    engine: Engine, prompts: Sequence[list[int]], salt: str | None = None, lora: str | None = None
) -> list[int]:
    """Sends each prompt alone with an empty GPU cache; returns the number of loaded tokens of each."""
    loaded = []
    for number, prompt in enumerate(prompts):
        assert engine.scheduler.reset_prefix_cache()
        engine.add(f"again-{number}", prompt, 1, salt, lora=lora)
        engine.drain()
        _until_written(engine)
        _, _, runner = engine.ranks[0]
        loaded.append(runner.sequences[f"again-{number}"].found)
    return loaded


def test_concurrent_loads_that_need_more_blocks_than_exist_all_end() -> None:
    # vLLM leaves the first request too few blocks for the tokens after its 144: alone it would never proceed.
    engine = boot(HYBRID)
    rng = random.Random(7)
    prompts = [[rng.randrange(1000) for _ in range(tokens)] for tokens in (274, 220)]
    ask_again(engine, [prompts[0][:145], prompts[1][:209]])
    assert engine.scheduler.reset_prefix_cache()
    for number, prompt in enumerate(prompts):
        engine.add(f"r{number}", prompt, 1)
    engine.drain()
    _, _, runner = engine.ranks[0]
    assert [runner.sequences[f"r{number}"].found for number in range(2)] == [144, 208]
    _check_at_rest(engine)
    engine.shutdown()


@pytest.mark.parametrize(("retention", "found"), [(0, 0), (16, 128)])
def test_a_window_with_a_drafter_serves_a_repeat_only_with_retention(retention: int, found: int) -> None:
    # docs/reference/limits.md states this; update it when a release serves the first case too.
    engine = boot(replace(HYBRID, drafts=2, retention=retention))
    prompt = [token % 1000 for token in range(150)]
    assert [ask_again(engine, [prompt]), ask_again(engine, [prompt])] == [[0], [found]]
    _check_at_rest(engine)
    engine.shutdown()


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_states_are_found_with_any_chunk_size(blocks: int) -> None:
    engine = boot(chunks_of(replace(STATES, retention=None), blocks))
    rng = random.Random(7)
    prompts = [[rng.randrange(1000) for _ in range(200)] for _ in range(6)]
    assert ask_again(engine, prompts) == [0] * 6
    assert ask_again(engine, prompts) == [192] * 6, (
        "the hit must end at a multiple of 64, where a step of vLLM ends"
    )
    assert total(engine, "kv_offload_failures_total", "cpu", "store", "device") == 0
    _check_at_rest(engine)
    engine.shutdown()


def test_partial_blocks_are_found_and_after_a_restart_whole_blocks(tmp_path: Path) -> None:
    setup = with_disk(KINDS["mamba-like, parts of a block"], tmp_path / "root", max_bytes="64MiB")
    rng = random.Random(7)
    prompts = [[rng.randrange(1000) for _ in range(rng.randrange(33, 270))] for _ in range(8)]
    parts = [(len(prompt) - 1) // 4 * 4 for prompt in prompts]
    first = boot(setup)
    assert ask_again(first, prompts) == [0] * len(prompts)
    missed = sum(len(prompt) // 16 * 16 for prompt in prompts)
    assert total(first, "kv_offload_miss_tokens_total") == missed, (
        "only whole chunks: no partial chunk can be missed"
    )
    assert ask_again(first, prompts) == parts
    # Only the last state of each prompt is loaded.
    hit = sum(parts) + sum(part % 16 or 16 for part in parts)
    assert total(first, "kv_offload_hit_tokens_total") == hit
    assert total(first, "kv_offload_miss_tokens_total") == missed
    assert total(first, "kv_offload_lookup_tokens_total") == missed + hit
    _, _, runner = first.ranks[0]
    assert runner.copied_blocks >= len(prompts), "the state of each prompt must be copied before it continues"
    _check_at_rest(first)
    first.shutdown()
    second = boot(setup, first.model_dir)
    # vLLM loads a partial block only if it is available at once, so from disk it gets whole blocks.
    assert ask_again(second, prompts) == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    second.shutdown()


def test_the_oracle_detects_missing_block_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRunner, "_copy_blocks", lambda self, copies: None)
    with pytest.raises(WrongBytes):
        live(KINDS["mamba-like, parts of a block"], seed=0, steps=600)


@pytest.mark.parametrize("kind", ["full attention", "packed blocks", "two blocks a chunk", "two ranks"])
def test_every_stored_chunk_is_loaded_from_memory_and_after_a_restart(kind: str, tmp_path: Path) -> None:
    setup = with_disk(KINDS[kind], tmp_path / "root", max_bytes="64MiB")
    rng = random.Random(7)
    prompts = [[rng.randrange(1000) for _ in range(rng.randrange(33, 270))] for _ in range(12)]
    chunk = 16 * setup.extra.get("blocks_per_chunk", 1)
    whole = [(len(prompt) - 1) // chunk * chunk for prompt in prompts]
    first = Engine(setup, f"oracle-{uuid.uuid4()}")
    assert ask_again(first, prompts) == [0] * len(prompts)
    again = ask_again(first, prompts)
    _check_at_rest(first)
    first.shutdown()
    second = Engine(setup, f"oracle-{uuid.uuid4()}", first.model_dir)
    after_restart = ask_again(second, prompts)
    from_disk = total(second, "kv_offload_hit_tokens_total", "fs")
    second.shutdown()
    assert [min(pair) for pair in zip(again, whole, strict=True)] == whole
    assert [min(pair) for pair in zip(after_restart, whole, strict=True)] == whole
    assert from_disk >= sum(whole)


@pytest.mark.parametrize("kind", ["full attention", "hybrid"])
def test_damaged_records_are_misses_and_never_wrong(kind: str, tmp_path: Path) -> None:
    setup = with_disk(
        replace(KINDS[kind], extra={**FULL.extra, "cpu_bytes_to_use": "128KiB"}), tmp_path / "root"
    )
    damages, hits, corrupt = 0, 0.0, 0.0
    for life in range(8):  # not every life reads a damaged record
        engine = live(setup, 3 + life, 1000, Rates(reset=0), root=tmp_path / "root")
        damages += engine.happened["damages"]
        hits += total(engine, "kv_offload_hit_tokens_total", "fs")
        corrupt += total(engine, "kv_offload_failures_total", "fs", "read", "corrupt")
        if damages > 20 and hits > 100 and corrupt > 0:
            break
    assert damages > 20
    assert hits > 100
    assert corrupt > 0


def test_resets_with_a_disk_leave_no_wrong_bytes(tmp_path: Path) -> None:
    setup = with_disk(HYBRID, tmp_path / "root")
    live(setup, 5, rates=Rates(reset=0.03, forced_reset=FORCED * 5))


def test_many_resets_leave_no_wrong_bytes() -> None:
    live(HYBRID, seed=1, rates=Rates(reset=0.05, evict_prefixes=0.1, forced_reset=FORCED * 5))
