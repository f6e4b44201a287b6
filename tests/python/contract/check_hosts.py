# SPDX-License-Identifier: Apache-2.0
"""Which ranks on several hosts hold the same KV cache and share an area of host memory (specs/hosts.py)."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import adapter
import pytest
import torch

from contract.parts import offloading_config

adapter.use_specs()

from kv_offload.specs import hosts, identity  # noqa: E402

TWO_HOSTS = hosts.Hosts(count=2, own=1, ranks_each=8)


def layer(**more: Any) -> Any:
    """Returns an MLA layer as vLLM declares it."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    fields = {"block_size": 16, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    spec = MLAAttentionSpec(**{**fields, "max_tp_shards": 1, **more})
    return SimpleNamespace(get_kv_cache_spec=lambda _: spec)


def engine(tp_size: int = 16, pp_size: int = 1, **more: Any) -> Any:
    config = offloading_config(world_size=tp_size * pp_size, groups=2)
    return replace(config, parallel=replace(config.parallel, tp_size=tp_size, pp_size=pp_size, **more))


@pytest.fixture
def mla(vllm_config: Any) -> Any:
    """The VllmConfig of a model with two cache groups, both replicated."""
    vllm_config.model_config.use_mla = True
    vllm_config.model_config.is_hybrid = False
    vllm_config.compilation_config.static_forward_context = {"layer.0": layer(), "layer.1": layer()}
    return vllm_config


@pytest.mark.parametrize(
    ("ranks_each", "tp_size", "pp_size", "sharing"),
    [
        (8, 16, 1, 8),  # tensor parallelism over both hosts
        (8, 8, 2, 8),  # a stage on each host
        (8, 4, 4, 4),  # two stages on each host
        (4, 8, 2, 4),  # four hosts, a stage on two of them
        (2, 3, 2, 1),  # three hosts, of which one has ranks of both stages
        (1, 2, 1, 1),
    ],
)
def test_ranks_of_one_stage_on_one_host_share_an_area(
    mla: Any, ranks_each: int, tp_size: int, pp_size: int, sharing: int
) -> None:
    count = tp_size * pp_size // ranks_each
    for own in range(count):
        placed = hosts.Hosts(count, own, ranks_each)
        assert hosts.ranks_per_area(placed, engine(tp_size, pp_size), False) == sharing


def test_vllm_decides_for_ranks_on_one_host(mla: Any) -> None:
    assert hosts.ranks_per_area(None, engine(), False) == 1
    assert hosts.ranks_per_area(None, engine(), True) == 16


@pytest.mark.parametrize(
    "other",
    [
        layer(max_tp_shards=None),
        layer(max_tp_shards=2),
        SimpleNamespace(get_kv_cache_spec=lambda _: None),
        None,
    ],
)
def test_each_rank_stores_its_own_bytes_if_a_layer_is_not_replicated(mla: Any, other: Any) -> None:
    known = mla.compilation_config.static_forward_context
    if other is None:
        del known["layer.1"]
    else:
        known["layer.1"] = other
    assert hosts.ranks_per_area(TWO_HOSTS, engine(), False) == 1


def test_each_rank_stores_its_own_bytes_if_the_ranks_of_a_stage_may_differ(mla: Any) -> None:
    assert hosts.ranks_per_area(TWO_HOSTS, engine(dcp_size=2), False) == 1
    assert hosts.ranks_per_area(TWO_HOSTS, engine(world_size=32, pcp_size=2), False) == 1
    mla.model_config.use_mla = False
    assert hosts.ranks_per_area(TWO_HOSTS, engine(), False) == 1


@pytest.mark.parametrize(("is_hybrid", "sharing"), [(False, 8), (True, 1)])
def test_a_stage_without_layers_of_a_group_agrees_with_the_others(
    mla: Any, is_hybrid: bool, sharing: int
) -> None:
    mla.model_config.is_hybrid = is_hybrid
    config = engine(tp_size=8, pp_size=2)
    without = (config.groups[0], replace(config.groups[1], layer_names=()))
    for stage in (config, replace(config, groups=without)):
        assert hosts.ranks_per_area(TWO_HOSTS, stage, False) == sharing
    assert hosts.ranks_per_area(TWO_HOSTS, engine(), False) == 8, "one stage knows all layers"


def test_stages_with_a_drafter_do_not_share_areas(mla: Any) -> None:
    mla.speculative_config = SimpleNamespace(method="eagle")
    assert hosts.ranks_per_area(TWO_HOSTS, engine(8, 2), False) == 1
    assert hosts.ranks_per_area(TWO_HOSTS, engine(16, 1), False) == 8


def test_ranks_that_share_an_area_must_be_alike() -> None:
    first = json.loads(identity.worker_fingerprint(offloading_config(), "cpu", "host", [[4096]], 100))
    layers = json.dumps({**first, "shard": "other"})
    settings = json.dumps({**first, "settings": {"device": "cpu", "backends": "other"}})
    alike = json.dumps(first)
    identity.merge_fingerprints([alike, alike, layers, layers], 2)
    with pytest.raises(ValueError, match="rank 3 has other layers than rank 2, although vLLM declares"):
        identity.merge_fingerprints([alike, alike, alike, layers], 2)
    with pytest.raises(ValueError, match="rank 1 has other settings of the cache than rank 0, although vLLM"):
        identity.merge_fingerprints([alike, settings], 2)
