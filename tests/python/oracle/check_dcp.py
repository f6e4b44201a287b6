# SPDX-License-Identifier: Apache-2.0
"""Run by test_ranks_on_hosts.py under each vLLM release: context parallelism, on one host and on several
emulated ones.

vLLM accepts decode context parallelism (DCP) for full attention with more ranks than KV heads (GQA) and for
latent caches (MLA), also with Mamba layers. A block then covers as many tokens as the pages of all ranks of a
group, and each rank holds every n-th token. With prefill context parallelism (PCP, MLA only) and without DCP,
all ranks hold all tokens.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import adapter
import pytest

adapter.use_specs()

from vllm.config import VllmConfig  # noqa: E402

from kv_offload import _core  # noqa: E402
from oracle.check_hosts import (  # noqa: E402
    TWO,
    WHOLE,
    _one_store,  # noqa: F401
    agents_of,
    impatient,  # noqa: F401
    over_tiers,
    prompts,
    restarted,
    roots,  # noqa: F401
    settle,
    value,
)
from oracle.check_oracle import FORCED, MINOR, ask_again, boot, chunks_of, live  # noqa: E402
from oracle.drive import Rates, total  # noqa: E402
from oracle.engine import STATE, make_model_dir  # noqa: E402
from oracle.runner import WrongBytes  # noqa: E402

GQA = replace(TWO, dcp=2, num_blocks=24)
KINDS = {
    "GQA": GQA,
    "GQA, one host, asynchronous scheduling": replace(GQA, hosts=1, async_scheduling=True),
    "GQA, two groups on four hosts, a drafter": replace(GQA, world_size=4, hosts=4, drafts=2),
    "MLA, two groups on two hosts, two blocks a chunk": chunks_of(
        replace(GQA, replicated=True, world_size=4, interleave=4), 2
    ),
    "MLA, one group on four hosts": replace(
        GQA, replicated=True, world_size=4, hosts=4, dcp=4, interleave=16
    ),
    "Mamba-like": replace(GQA, window=STATE, interleave=2),
    "MLA, PCP": replace(GQA, replicated=True, pcp=2, dcp=1),
    "MLA, PCP and DCP": replace(GQA, replicated=True, world_size=4, pcp=2, dcp=2),
}


@pytest.fixture(autouse=True)
def _model_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM refuses PCP with the model runner that runs on CPU. The oracle has its own."""
    monkeypatch.setattr(VllmConfig, "_get_v1_model_runner_unsupported_features", lambda config: [])


@pytest.mark.parametrize("kind", ["MLA, two groups on two hosts, two blocks a chunk", "Mamba-like"])
def test_every_byte_of_ranks_that_hold_some_tokens_is_right(kind: str, roots: list[Path]) -> None:  # noqa: F811
    # Less host memory than the prompts need: they are loaded from the tier.
    memory_per_rank = 128 // int(KINDS[kind].extra.get("blocks_per_chunk", 1))
    setup = over_tiers(KINDS[kind], roots, f"{memory_per_rank * KINDS[kind].world_size}KiB")
    alone = [[number, *range(199)] for number in range(8)]
    engine = live(setup, 11, 60, Rates(arrive=0.5, forced_reset=FORCED), root=roots[1], alone=alone)
    loaded = total(engine, "kv_offload_hit_tokens_total", "fs")
    print(kind, dict(engine.happened), f"loaded {loaded:,.0f} tokens from fs")
    assert loaded > 0


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_loaded_from_memory_and_after_a_restart(kind: str, roots: list[Path]) -> None:  # noqa: F811
    asked = prompts(2)
    engine = boot(over_tiers(KINDS[kind], roots, "4MiB"))
    try:
        assert len(agents_of(engine)) == KINDS[kind].hosts - 1
        assert ask_again(engine, asked) == [0, 0]
        found = ask_again(engine, asked)
        drops_a_block = KINDS[kind].drafts > 0 and MINOR >= (0, 33)
        assert found == [WHOLE - 32 * drops_a_block] * 2
        engine = restarted(engine)
        assert ask_again(engine, asked) == found
        assert value(engine, "kv_offload_hit_tokens_total", "fs") >= sum(found)
        assert total(engine, "kv_offload_failures_total") == 0
    finally:
        engine.shutdown()


@pytest.mark.parametrize("change", [{"interleave": 2}, {"dcp": 1}])
def test_records_with_other_tokens_per_rank_are_not_loaded(
    change: dict[str, Any],
    roots: list[Path],  # noqa: F811
) -> None:
    asked = prompts(1)
    setup = over_tiers(GQA, roots)
    model_dir = make_model_dir(num_key_value_heads=1)
    for each, found in ((setup, 0), (replace(setup, **change), 0), (setup, WHOLE)):
        engine = boot(each, model_dir)
        try:
            assert ask_again(engine, asked) == [found]
            settle(engine)
        finally:
            engine.shutdown()


def test_the_oracle_detects_ranks_that_exchange_their_tokens(
    roots: list[Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = prompts(1)
    setup = over_tiers(replace(GQA, hosts=1), roots)
    first = boot(setup)
    ask_again(first, asked)
    settle(first)
    first.shutdown()
    original = _core.RankWorker

    def exchanged(region: Any, rank: int, *given: Any, **named: Any) -> Any:
        return original(region, rank, *given, **{**named, "area": 1 - rank})

    monkeypatch.setattr(_core, "RankWorker", exchanged)
    engine = boot(setup, first.model_dir)
    try:
        with pytest.raises(WrongBytes):
            ask_again(engine, asked)
    finally:
        engine.shutdown()
