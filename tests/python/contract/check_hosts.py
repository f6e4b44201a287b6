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
from kv_offload.specs.spec import KVOffloadSpec  # noqa: E402
from kv_offload.specs.tier_specs import TierPlan  # noqa: E402

from kv_offload.calibration import Calibration, CalibrationError  # noqa: E402

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


def report(**more: Any) -> str:
    """Returns the fingerprint of a rank with a calibration."""
    fields = json.loads(identity.worker_fingerprint(offloading_config(), "cpu", "host", [[4096]], 100))
    fields |= {"elements": ["bfloat16"], "may_lose": [True], "windowed": [False], "kv_runs": [[128, 128]]}
    fields |= {"head_orders": [[3, True, 4096]], "layers": [[[0, 1]]]}
    return json.dumps({**fields, "canonical": {"shards": 2, "shards_per_area": 1, "pages": "abc"}, **more})


MALFORMED = [
    ("layers", [[[0, 1, 2]]]),
    ("layers", [[["0", "1"]]]),
    ("layers", [[0, 1]]),
    ("layers", [[[-1, 1]]]),
    ("layers", [7]),
    ("layers", {"0": []}),
    ("layers", 7),
    ("kv_runs", [[128]]),
    ("kv_runs", [[128, 1.5]]),
    ("kv_runs", [[128, True]]),
    ("kv_runs", [None]),
    ("head_orders", [[3, True]]),
    ("head_orders", [[3, 1, 4096]]),
    ("head_orders", [{"heads": 3}]),
    ("elements", [7]),
    ("elements", "bfloat16"),
    ("may_lose", ["no"]),
    ("windowed", [2]),
    ("settings", []),
    ("shard", None),
    ("copier", 1),
    ("cache_blocks", "100"),
    ("unread", None),
    ("model", "name"),
]


def test_a_rank_that_reports_a_malformed_layout_is_named() -> None:
    assert identity.merge_fingerprints([report(), report()])["layers"] == [[[[0, 1]], [[0, 1]]]]
    remedy = r"install the same release of vllm-kv-offload and of vLLM on all hosts"
    for field, value in MALFORMED:
        with pytest.raises(ValueError, match=rf"^rank 5 reports .*\(its {field}\): {remedy}$"):
            identity.merge_fingerprints([report(), report(**{field: value})], first_rank=4)
        without = {name: part for name, part in json.loads(report()).items() if name != field}
        if field in ("settings", "shard", "copier", "cache_blocks", "unread"):
            with pytest.raises(ValueError, match=rf"^rank 0 reports .*\(its {field}\)"):
                identity.merge_fingerprints([json.dumps(without)])
    for text in ("", "[]", "7", "{", "[" * 100_000):
        with pytest.raises(ValueError, match=r"^rank 1 reports .*\(its JSON\)"):
            identity.merge_fingerprints([report(), text])
    for canonical in (2, {}, {"shards": 2, "shards_per_area": "1", "pages": "abc"}):
        with pytest.raises(ValueError, match=r"^rank 0 reports .*\(its canonical\)"):
            identity.merge_fingerprints([report(canonical=canonical)])


@pytest.mark.parametrize("field", ["layers", "kv_runs", "head_orders", "elements", "may_lose"])
def test_a_malformed_number_of_groups_is_refused(field: str) -> None:
    twice = json.loads(report())[field] * 2
    with pytest.raises(
        ValueError, match=r"^rank 1 reports .*\(its number of cache groups\): install the same"
    ):
        identity.merge_fingerprints([report(), report(**{field: twice})])


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", "7", '{"identity": {"groups": [{}]}}', '{"identity": {"groups": [1]}}']
)
def test_an_unreadable_order_of_the_scheduler_says_what_to_do(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read the order .*: install the same release of"):
        TierPlan.of_text(text)


def test_a_calibration_is_refused_for_ranks_that_hold_the_same_bytes() -> None:
    spec = SimpleNamespace(config=engine(tp_size=2))
    calibration = Calibration({"name": "m"}, (), {})
    parts = SimpleNamespace(groups=(SimpleNamespace(shard_bytes=(4096,)),))
    merged = identity.merge_fingerprints([report(canonical=None)])

    def factors(exact: bool, sharing: int) -> Any:
        plan = SimpleNamespace(identity=parts, exact_groups=(exact,))
        return KVOffloadSpec._factors(spec, calibration, plan, merged, None, sharing)  # type: ignore[arg-type]

    assert factors(exact=True, sharing=2) == (None,)
    with pytest.raises(
        CalibrationError, match='2 ranks hold the same KV cache here: remove "calibration" on'
    ):
        factors(exact=False, sharing=2)
    with pytest.raises(CalibrationError, match="cache group 0: 2 ranks with the layers of 1"):
        factors(exact=False, sharing=1)
    merged = identity.merge_fingerprints([report(canonical=None, head_orders=[])] * 2)
    assert merged["head_orders"] == ["no rank reports its heads"]
    merged = identity.merge_fingerprints([report(canonical=None, layers=[], head_orders=[])] * 2)
    with pytest.raises(CalibrationError, match="cache group 0: rank 0 has no calibration"):
        factors(exact=False, sharing=1)
