# SPDX-License-Identifier: Apache-2.0
"""Run by test_contract.py under each vLLM release: which bytes of a cache group are keys or values."""

import inspect
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapter
import pytest
import torch

adapter.use_specs()

from kv_offload.specs import compat, identity  # noqa: E402
from kv_offload.specs.bound_factors import (  # noqa: E402
    HostCalibration,
    factors_by_group,
    layer_ranges_of,
)
from kv_offload.specs.kv_runs import UNKNOWN, head_orders_of, kv_runs_of, share_of_values  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)
from vllm.v1.kv_offload import base  # noqa: E402

from contract.parts import offloading_config  # noqa: E402
from kv_offload.calibration import Calibration, CalibrationError, HeadFactors, LayerFactors  # noqa: E402

BLOCKS, HEADS, TOKENS, WIDTH = 5, 3, 32, 64
NO_WEIGHTS = bytes([8]) * 64
NO_PAIRS = "not keys and values per head in bfloat16, float16 or fp8"
LAYOUTS = {"LBHNC": (0, 1, 2, 3), "LBNHC": (0, 2, 1, 3), "LHBNC": (1, 0, 2, 3)}


def cache_of(layout: str, width: int = 2 * WIDTH, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A layer's cache in the logical shape, in the physical order of the layout."""
    shape = (BLOCKS, HEADS, TOKENS, width)
    order = LAYOUTS[layout]
    cache = torch.zeros([shape[axis] for axis in order], dtype=dtype)
    return cache.permute([order.index(axis) for axis in range(4)])


def spec_of(**changes: Any) -> Any:
    facts = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": WIDTH, "dtype": torch.bfloat16}
    return FullAttentionSpec(**{**facts, **changes})


class Group:
    """One cache group, whose layers have a page each."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        caches: Sequence[torch.Tensor],
        backend: str = "FLASH_ATTN",
        specs: Sequence[Any] = (),
        first_layer: int = 0,
    ) -> None:
        names = tuple(f"layer.{first_layer + number}" for number in range(len(caches)))
        config = offloading_config()
        self.config = replace(config, groups=(replace(config.groups[0], layer_names=names),))
        self.is_weighted = backend != "CPU_ATTN"
        self.layers: dict[str, Any] = {}
        tensors, refs = [], []
        for name, cache, spec in zip(names, caches, specs or [spec_of()] * len(caches), strict=True):
            page = cache.numel() // BLOCKS * cache.element_size()
            pages = torch.tensor([], dtype=torch.int8).set_(
                cache.untyped_storage(),
                cache.element_size() * cache.storage_offset(),
                (BLOCKS, page),
                (page, 1),
            )
            refs.append(base.CanonicalKVCacheRef(len(tensors), page))
            tensors.append(base.CanonicalKVCacheTensor(pages, page))
            self.layers[name] = SimpleNamespace(
                kv_cache=cache,
                attn_backend=SimpleNamespace(get_name=lambda: backend, customize_spec=lambda spec: spec),
                get_kv_cache_spec=lambda _, spec=spec: spec,
                kv_cache_dtype="fp8" if spec.dtype == torch.uint8 else "auto",
            )
        self.kv_caches = base.CanonicalKVCaches(tensors, [refs])
        compilation = SimpleNamespace(static_forward_context=self.layers)
        self.vllm_config = SimpleNamespace(compilation_config=compilation)
        monkeypatch.setattr(compat, "current_vllm_config", lambda: self.vllm_config)

    def runs(self) -> tuple[int, int] | str:
        (found,) = kv_runs_of(self.config, self.kv_caches)
        return found

    def factors(
        self,
        calibration: Calibration,
        shards: int = 1,
        parts: int = 1,
        ranks: int = 1,
        stages: Sequence["Group"] = (),
        of: range | None = None,
    ) -> list[float]:
        """``shards``: of all hosts. ``parts``: shards of a rank's page, 1 without the canonical layout.
        ``ranks``: of each pipeline stage. ``stages``: their groups; one stage with this group if empty.
        ``of``: the ranks of a host; None: all."""
        reports = [layer_ranges_of(stage.config)[0] for stage in stages or [self] for _ in range(ranks)]
        page = self.kv_caches.group_data_refs[0][0].page_size_bytes // parts
        merged = {
            "kv_runs": kv_runs_of(self.config, self.kv_caches),
            "head_orders": head_orders_of(self.config, self.kv_caches),
            "elements": ["bfloat16"],
            "canonical": {"shards_per_area": parts} if parts > 1 else None,
            "layers": [json.loads(json.dumps(reports))],
        }
        parallel = SimpleNamespace(world_size=len(reports), tp_size=ranks, dcp_size=1)
        of = of or range(len(reports))
        shard_bytes = [[2 * len(self.layers) * page] * (shards * len(of) // len(reports))]
        if stages:
            layers = [len(stage.layers) for stage in stages for _ in range(ranks)]
            shard_bytes = [[2 * layers[rank] * page for rank in of]]
        (found,) = factors_by_group(calibration, shard_bytes, merged, [False], parallel, of)
        assert found is not None
        assert len(found.shards) == len(shard_bytes[0])
        rows = [NO_WEIGHTS, *(found.weights[at : at + 64] for at in range(0, len(found.weights), 64))]
        flat = [(factor, rows[row]) for shard in found.shards for factor, row in shard]
        for factor, weights in flat:
            assert weights == (weights_of(factor) if self.is_weighted else NO_WEIGHTS)
        return [factor for factor, _ in flat]

    def first_pages(self, dtype: torch.dtype) -> torch.Tensor:
        """All blocks of the first layer as numbers."""
        found: torch.Tensor = self.kv_caches.tensors[0].tensor.reshape(-1).view(dtype)
        return found


def values_of_cell(cache: torch.Tensor) -> torch.Tensor:
    """As in flash_attn.py and the other backends."""
    return cache.transpose(1, 2).split(WIDTH, dim=-1)[1]


def values_of_cpu(cache: torch.Tensor) -> torch.Tensor:
    """As in cpu_attn.py."""
    return cache.view(BLOCKS, HEADS, 2 * TOKENS, -1).chunk(2, dim=2)[1]


@pytest.mark.parametrize(
    ("backend", "layout", "values"),
    [
        *((each, "LBHNC", values_of_cell) for each in ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")),
        *(("FLASH_ATTN", each, values_of_cell) for each in LAYOUTS),
        ("FLEX_ATTENTION", "LBNHC", values_of_cell),
        ("CPU_ATTN", "LBHNC", values_of_cpu),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_the_runs_of_values_are_where_the_backend_puts_values(
    backend: str,
    layout: str,
    values: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = dtype.itemsize
    cache = cache_of(layout, dtype=dtype)
    values(cache).fill_(1)
    mode = get_kv_quant_mode("fp8" if size == 1 else "auto")
    specs = [spec_of(dtype=dtype, kv_quant_mode=mode)] * 2
    group = Group(monkeypatch, [cache, cache_of(layout, dtype=dtype)], backend, specs)
    keys, after = (int(each) for each in group.runs())
    assert keys > 0
    period = (keys + after) // size
    runs = group.first_pages(dtype).reshape(-1, period)
    assert (runs[:, : keys // size] == 0).all()
    assert (runs[:, keys // size :] == 1).all()


def test_the_backends_of_this_release_split_keys_and_values_as_assumed() -> None:
    """Their source is compared, because their kernels need a GPU."""
    from vllm.v1.attention.backends import cpu_attn

    assert "kv_cache.chunk(2, dim=2)" in inspect.getsource(cpu_attn)
    folder = cpu_attn.__file__.rpartition("/")[0]
    for name in ("flash_attn", "flashinfer", "triton_attn", "flex_attention", "flash_attn_diffkv"):
        with open(f"{folder}/{name}.py", encoding="utf-8") as file:
            text = "".join(file.read().split())
        assert "kv_cache.transpose(1,2).split(self.head_size,dim=-1)" in text, name
    with open(f"{folder}/triton_attn_diffkv.py", encoding="utf-8") as file:
        assert "value_cache = kv_cache[..., head_size_qk : head_size_qk + head_size_v]" in file.read()


def test_keys_and_values_of_different_width_have_runs_of_different_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    specs = [spec_of(head_size=192, head_size_v=128)]
    group = Group(monkeypatch, [cache_of("LBNHC", 320)], "FLASH_ATTN_DIFFKV", specs)
    assert group.runs() == (384, 256)


def padded() -> list[torch.Tensor]:
    """Pages with padding: a block does not consist of whole runs."""
    bytes_of_block = HEADS * TOKENS * 2 * WIDTH + 16
    cache = torch.zeros(BLOCKS * bytes_of_block, dtype=torch.bfloat16)
    strides = (bytes_of_block, TOKENS * 2 * WIDTH, 2 * WIDTH, 1)
    return [cache.as_strided((BLOCKS, HEADS, TOKENS, 2 * WIDTH), strides)]


@pytest.mark.parametrize(
    ("caches", "backend", "specs", "reason"),
    [
        ([cache_of("LBHNC")], "ROCM_ATTN", [spec_of()], "attention backend ROCM_ATTN"),
        ([cache_of("LBNHC")], "CPU_ATTN", [spec_of()], "attention backend CPU_ATTN"),
        ([cache_of("LBHNC").float()], "FLASH_ATTN", [spec_of(dtype=torch.float32)], NO_PAIRS),
        ([cache_of("LBHNC", WIDTH)], "FLASH_ATTN", [spec_of()], "shape (5, 3, 32, 64)"),
        ([cache_of("LBHNC").reshape(BLOCKS, 2, -1)], "FLASH_ATTN", [spec_of()], "shape (5, 2, 6144)"),
        ([cache_of("LBHNC")], "FLASH_ATTN", [spec_of(num_head_slots=HEADS)], "packs its pages"),
        ([cache_of("LBHNC")], "FLASH_ATTN", [spec_of(num_kv_heads=HEADS + 1)], "shape (5, 3, 32, 128)"),
        ([cache_of("LBHNC")], "FLASH_ATTN", [spec_of(state_content_bytes=4 * WIDTH)], NO_PAIRS),
        ([cache_of("LBHNC")], "FLASH_ATTN", [spec_of(head_size_v=0)], NO_PAIRS),
        (
            [cache_of("LBHNC"), cache_of("LBHNC", 256)],
            "FLASH_ATTN",
            [spec_of(), spec_of(head_size=128)],
            "the layers differ in the bytes of keys and values: [(128, 128), (256, 256)]",
        ),
        (padded(), "FLASH_ATTN", [spec_of()], "with strides (12304, 4096, 128, 1)"),
    ],
)
def test_an_unusual_layout_is_unknown_for_a_stated_reason(
    caches: list[torch.Tensor],
    backend: str,
    specs: list[Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Group(monkeypatch, caches, backend, specs).runs()
    assert isinstance(found, str)
    assert reason in found


def test_planes_of_keys_and_values_that_look_like_two_heads_are_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """rocm_aiter_fa.py is also named FLASH_ATTN. Its shuffle layout has a plane of keys and one of values."""
    from vllm.v1.attention.backends import rocm_aiter_fa

    backend = rocm_aiter_fa.AiterFlashAttentionBackend
    assert backend.get_name() == "FLASH_ATTN"
    cache = torch.zeros(BLOCKS, 2, TOKENS, 2 * WIDTH, dtype=torch.bfloat16)
    for has_planes in (False, True):
        ops = SimpleNamespace(is_shuffle_kv_cache_enabled=lambda value=has_planes: value)
        monkeypatch.setattr(rocm_aiter_fa, "rocm_aiter_ops", ops)
        group = Group(monkeypatch, [cache], specs=[spec_of(num_kv_heads=2)])
        layer = group.layers["layer.0"]
        layer.attn_backend = backend
        assert compat.layer_may_lose(layer, None) is not has_planes
        assert group.runs() == (NO_PAIRS if has_planes else (2 * WIDTH, 2 * WIDTH))


def test_a_latent_cache_and_a_layer_that_is_missing_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=2 * WIDTH, dtype=torch.bfloat16)
    assert Group(monkeypatch, [cache_of("LBHNC")], "FLASH_ATTN", [spec]).runs() == NO_PAIRS
    group = Group(monkeypatch, [cache_of("LBHNC"), cache_of("LBHNC")])
    del group.layers["layer.1"]
    assert group.runs() == "KeyError: 'layer.1'"


def test_a_page_that_begins_inside_a_run_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, [cache_of("LBHNC")])
    assert group.runs() == (2 * WIDTH, 2 * WIDTH)
    whole = group.kv_caches.tensors[0].tensor
    group.kv_caches.tensors[0].tensor = whole.reshape(-1)[2 * WIDTH : -2 * WIDTH].reshape(-1, 2 * WIDTH)
    assert group.runs() == "pages do not consist of whole runs of 256 bytes"


def test_ranks_that_do_not_agree_make_the_runs_unknown(vllm_config: Any) -> None:
    texts = [
        identity.worker_fingerprint(offloading_config(), "cpu", "host", [[4096]], 100, None, [runs])
        for runs in ((128, 128), (128, 128), "no cache", (256, 256))
    ]
    assert identity.merge_fingerprints(texts[:2])["kv_runs"] == [(128, 128)]
    for some, reason in ((texts[1:3], "no cache"), (texts, "no cache"), (texts[::3], "different layouts")):
        merged = identity.merge_fingerprints(some)
        assert merged["kv_runs"] == [UNKNOWN]
        assert reason in merged["kv_runs_unknown"][0]


@pytest.mark.parametrize(
    ("head", "share"),
    [(32, 0), (48, 0), (64, 1), (80, 0.4), (96, 2 / 3), (112, 4 / 7), (120, 8 / 15), (128, 1), (160, 0.8)],
)
def test_only_values_in_groups_without_a_key_have_their_own_bound(head: int, share: float) -> None:
    assert share_of_values((2 * head, 2 * head)) == pytest.approx(share)
    assert share_of_values((head, head), "float8_e4m3fn") == pytest.approx(share)


@pytest.mark.parametrize(("lookahead", "kept"), [(None, 100), (0, 100), (1, 100), (4, 103)])
def test_a_window_includes_the_tokens_that_vllm_keeps_for_drafts(lookahead: int | None, kept: int) -> None:
    spec = object.__new__(SlidingWindowSpec)  # the fields of the releases differ
    object.__setattr__(spec, "sliding_window", 100)
    config = SimpleNamespace(num_prefill_lookahead_tokens=lookahead)
    if lookahead is None:
        del config.num_prefill_lookahead_tokens
    assert compat.layer_window(SimpleNamespace(get_kv_cache_spec=lambda _: spec), config) == kept


def calibration_of(heads: int, layers: int = 1, size: int = WIDTH) -> Calibration:
    """Each head has a factor of its own for keys, and one for values."""

    def factors(layer: int, kind: int) -> tuple[HeadFactors, ...]:
        known = [factor(layer, kind, head) for head in range(heads)]
        octaves = [[code - 8 for code in weights_of(each)] for each in known]
        return tuple(
            HeadFactors((each,) * -(-size // 64), (each,) * -(-size // 64), tuple((2 * of_channels)[:size]))
            for each, of_channels in zip(known, octaves, strict=True)
        )

    made = (LayerFactors(factors(layer, 0), factors(layer, 1)) for layer in range(layers))
    return Calibration({}, tuple(made), {})


def weights_of(factor: float) -> bytes:
    """Weights of 64 channels that belong to this factor alone."""
    return bytes(8 + each for each in random.Random(factor).choices((-1, 0, 1), k=64))


def factor(layer: int, kind: int, head: int) -> float:
    return (1 + 16 * layer + 8 * kind + head) / 64  # exact in bfloat16


def marked(layout: str, backend: str, layer: int, heads: range) -> torch.Tensor:
    """A cache whose elements are the factors of their heads."""
    cache = cache_of(layout)
    runs = cache.view(BLOCKS, HEADS, 2 * TOKENS, -1) if backend == "CPU_ATTN" else None
    for at, head in enumerate(heads):
        for kind in (0, 1):
            place = (
                cache[:, at, :, kind * WIDTH : (kind + 1) * WIDTH]
                if runs is None
                else runs[:, at, kind * TOKENS : (kind + 1) * TOKENS]
            )
            place.fill_(factor(layer, kind, head))
    return cache


@pytest.mark.parametrize(
    ("backend", "layout"), [("FLASH_ATTN", "LBHNC"), ("FLASH_ATTN", "LBNHC"), ("CPU_ATTN", "LBHNC")]
)
def test_the_factors_of_a_calibration_follow_the_bytes_of_a_record(
    backend: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = [marked(layout, backend, layer, range(HEADS)) for layer in (0, 1)]
    group = Group(monkeypatch, caches, backend)
    pages = [cache.tensor[0].view(torch.bfloat16) for cache in group.kv_caches.tensors]
    groups = torch.cat(pages).view(-1, 64)
    assert (groups == groups[:, :1]).all()
    assert group.factors(calibration_of(HEADS, layers=2)) == groups[:, 0].tolist()
    # Two ranks: the second one has the next heads.
    others = [marked(layout, backend, layer, range(HEADS, 2 * HEADS)) for layer in (0, 1)]
    second = Group(monkeypatch, others, backend)
    pages += [cache.tensor[0].view(torch.bfloat16) for cache in second.kv_caches.tensors]
    both = torch.cat(pages).view(-1, 64)[:, 0].tolist()
    assert second.factors(calibration_of(2 * HEADS, layers=2), shards=2, ranks=2) == both


def test_a_shard_of_the_canonical_layout_has_the_factors_of_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = [marked("LBHNC", "FLASH_ATTN", layer, range(HEADS)) for layer in (0, 1)]
    group = Group(monkeypatch, caches)
    pages = [cache.tensor[0].view(torch.bfloat16).view(HEADS, -1, 64) for cache in group.kv_caches.tensors]
    by_head = torch.cat([page[head] for head in range(HEADS) for page in pages])
    calibration = calibration_of(HEADS, layers=2)
    assert group.factors(calibration, shards=HEADS, parts=HEADS) == by_head[:, 0].tolist()


def test_ranks_with_the_same_head_have_the_same_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = torch.zeros(BLOCKS, 1, TOKENS, 2 * WIDTH, dtype=torch.bfloat16)
    group = Group(monkeypatch, [cache], specs=[spec_of(num_kv_heads=1)])
    found = group.factors(calibration_of(2), shards=4, ranks=4)
    quarter = len(found) // 4
    assert found[:quarter] == found[quarter : 2 * quarter] == [factor(0, 0, 0), factor(0, 1, 0)] * TOKENS
    assert (
        found[2 * quarter : 3 * quarter]
        == found[3 * quarter :]
        == [factor(0, 0, 1), factor(0, 1, 1)] * TOKENS
    )


@pytest.mark.parametrize(
    ("layout", "calibration", "reason"),
    [
        ("LHBNC", calibration_of(HEADS), "not possible with this cache layout (a cache of shape"),
        ("LBHNC", calibration_of(HEADS + 1), "the calibration has 4 KV heads, the cache 3"),
        ("LBHNC", calibration_of(HEADS, layers=0), "has no layer 0"),
        ("LBHNC", calibration_of(HEADS, size=96), "heads of 96 and 96 channels in the calibration"),
    ],
)
def test_a_calibration_that_does_not_fit_the_cache_is_refused(
    layout: str, calibration: Calibration, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(monkeypatch, [cache_of(layout)])
    with pytest.raises(CalibrationError, match="cache group 0: ") as refused:
        group.factors(calibration)
    assert reason in str(refused.value)


def test_the_factors_of_pipeline_stages_are_those_of_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two stages of two layers, and two ranks for each, in the order of the ranks.
    stages, pages = [], []
    for stage in (0, 1):
        for rank in (0, 1):
            heads = range(rank * HEADS, (rank + 1) * HEADS)
            caches = [marked("LBHNC", "FLASH_ATTN", layer, heads) for layer in (2 * stage, 2 * stage + 1)]
            group = Group(monkeypatch, caches, first_layer=2 * stage)
            pages += [cache.tensor[0].view(torch.bfloat16) for cache in group.kv_caches.tensors]
        stages.append(group)
    expected = torch.cat(pages).view(-1, 64)[:, 0].tolist()
    assert len(set(expected)) == 2 * 2 * 2 * 2 * HEADS
    calibration = calibration_of(2 * HEADS, layers=4)
    assert group.factors(calibration, shards=4, ranks=2, stages=stages) == expected
    # The same ranks on two and on four hosts: each host has the factors of its own ranks.
    for each in (2, 1):
        hosts = [range(first, first + each) for first in range(0, 4, each)]
        found = [group.factors(calibration, shards=4, ranks=2, stages=stages, of=host) for host in hosts]
        assert [factor for part in found for factor in part] == expected


def test_pipeline_stages_may_have_different_numbers_of_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = (
        Group(
            monkeypatch,
            [marked("LBHNC", "FLASH_ATTN", layer, range(HEADS)) for layer in layers],
            first_layer=layers[0],
        )
        for layers in (range(0, 1), range(1, 4))
    )
    calibration = calibration_of(HEADS, layers=4)
    expected = []
    for host, group in enumerate((first, second)):
        pages = [cache.tensor[0].view(torch.bfloat16) for cache in group.kv_caches.tensors]
        expected += torch.cat(pages).view(-1, 64)[:, 0].tolist()
        monkeypatch.setattr(compat, "current_vllm_config", lambda group=group: group.vllm_config)
        found = group.factors(calibration, shards=2, stages=[first, second], of=range(host, host + 1))
        assert found == torch.cat(pages).view(-1, 64)[:, 0].tolist()
    assert second.factors(calibration, shards=2, stages=[first, second]) == expected, "on one host"


def test_layers_are_reported_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, [cache_of("LBHNC")])
    (described,) = group.config.groups

    def reported(*names: str) -> Any:
        return layer_ranges_of(replace(group.config, groups=(replace(described, layer_names=names),)))

    assert reported("model.layers.3.attn", "model.layers.4.attn", "model.layers.9.attn") == [[(3, 4), (9, 9)]]
    assert reported("a.2", "a.1", "a.0") == [[(2, 2), (1, 1), (0, 0)]]
    assert reported("a.2", "a.b") == ["the number of layer 'a.b' is not known"]
    assert reported("a.2.3") == ["the number of layer 'a.2.3' is not known"]


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([[[0, 1]], [[0, 1]], [[2, 3]], [[2, 2]]], "the ranks of a pipeline stage have different layers"),
        ([[[0, 1]], [[2, 3]], [[0, 1]], [[2, 3]]], "the ranks of a pipeline stage have different layers"),
        ([[[0, 1]], [[0, 1]], [[2, 3]]], "4 ranks with the layers of 3"),
        ([[[0, 1]], [[0, 1]], [[2, 3]], None], "rank 3 has no calibration"),
        ([[[0, 1]], [[0, 1]], [[1, 2]], [[1, 2]]], "layer 1 is in the cache more than once"),
        ([[[0, 1]], [[0, 1]], [[0, 1]], [[0, 1]]], "layer 0 is in the cache more than once"),
        ([[[0, 1]], [[0, 1]], [[2, 2], [4, 4]], [[2, 2], [4, 4]]], "the calibration has no layer 4"),
        ([[[0, 1]], [[0, 1]], [[2, 3]], [[2, 1_000_000]]], "the calibration has no layer 1000000"),
        ([[[0, 1]], [[0, 1]], [[2, 3]], [[-1_000_000, 3]]], "the calibration has no layer -1000000"),
        ([[[0, 1]], [[0, 1]], "the number of layer 'x' is not known", [[2, 3]]], "layer 'x' is not known"),
    ],
)
def test_a_calibration_is_refused_unless_each_layer_has_a_known_place(
    layers: list[Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(monkeypatch, [cache_of("LBHNC"), cache_of("LBHNC")])
    page = group.kv_caches.group_data_refs[0][0].page_size_bytes
    merged = {
        "kv_runs": kv_runs_of(group.config, group.kv_caches),
        "head_orders": head_orders_of(group.config, group.kv_caches),
        "elements": ["bfloat16"],
        "layers": [layers],
    }
    parallel = SimpleNamespace(world_size=4, tp_size=2, dcp_size=1)
    calibration = calibration_of(2 * HEADS, layers=4)

    def found(shard_bytes: Sequence[int]) -> Any:
        (group_factors,) = factors_by_group(calibration, [shard_bytes], merged, [False], parallel, range(4))
        return group_factors

    with pytest.raises(CalibrationError, match="cache group 0: ") as refused:
        found([2 * page] * 4)
    assert reason in str(refused.value)
    # The same with layers in their places; then with shards that do not have the same blocks.
    merged["layers"] = [[[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]]]]
    assert [len(shard) for shard in found([2 * page] * 4).shards] == [2 * page // 128] * 4
    with pytest.raises(CalibrationError, match="4 ranks with shards of"):
        found([2 * page] * 3)
    for wrong in (3 * page, 0):
        with pytest.raises(
            CalibrationError, match=f"a shard of {wrong} bytes is not whole blocks of 2 layers"
        ):
            found([2 * page] * 3 + [wrong])
    # The last stage has fewer layers, or none.
    merged["layers"] = [[[[0, 1]], [[0, 1]], [[2, 2]], [[2, 2]]]]
    assert [len(shard) for shard in found([2 * page] * 2 + [page] * 2).shards] == [2 * page // 128] * 2 + [
        page // 128
    ] * 2
    merged["layers"] = [[[[0, 1]], [[0, 1]], [], []]]
    assert [len(shard) for shard in found([2 * page] * 2 + [0] * 2).shards] == [2 * page // 128] * 2 + [0] * 2


def test_a_layer_in_two_cache_groups_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, [cache_of("LBHNC")])
    page = group.kv_caches.group_data_refs[0][0].page_size_bytes
    merged = {
        "kv_runs": 2 * kv_runs_of(group.config, group.kv_caches),
        "head_orders": 2 * head_orders_of(group.config, group.kv_caches),
        "elements": ["bfloat16"] * 2,
        "layers": [[[[0, 0]]], [[[0, 0]]]],
    }
    parallel = SimpleNamespace(world_size=1, tp_size=1, dcp_size=1)

    def found(*exact: bool) -> Any:
        shard_bytes = [[page], [page]]
        return factors_by_group(calibration_of(HEADS), shard_bytes, merged, exact, parallel, range(1))

    with pytest.raises(CalibrationError, match="cache group 1: layer 0 is in the cache more than once"):
        found(False, False)
    assert found(False, True)[1] is None


@pytest.mark.parametrize(("world", "sizes"), [(3, {}), (2, {"dcp_size": 2}), (4, {"pcp_size": 2})])
def test_a_calibration_is_refused_if_ranks_split_tokens(world: int, sizes: dict[str, int]) -> None:
    parallel = SimpleNamespace(world_size=world, tp_size=2, **sizes)
    with pytest.raises(CalibrationError, match="ranks that split layers or KV heads, not tokens"):
        factors_by_group(calibration_of(HEADS), [], {}, [], parallel, range(world))


def test_a_host_keeps_the_calibration_that_it_has_read(vllm_config: Any, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    first = calibration_of(HEADS)
    first.write(path)
    text = identity.worker_fingerprint(offloading_config(), "cpu", "host", [[4096]], 100)
    region: Any = SimpleNamespace(geometry=lambda rank: ([4096], text))
    options: Any = SimpleNamespace(calibration_file=lambda: str(path))
    parallel = SimpleNamespace(world_size=2, tp_size=2, dcp_size=1)
    host = HostCalibration(options, region, range(1, 2), parallel)

    def factors(digest: Any) -> Any:
        asked: Any = SimpleNamespace(settings={"calibration": digest} if digest else {})
        return host.factors(asked, [True])

    assert factors(first.digest) == (None,)
    calibration_of(HEADS, layers=2).write(path)
    assert factors(first.digest) == (None,), "of the file that has replaced it"
    # The scheduler's text comes over the network.
    for other in ("", "x" * 20_000, ["x"] * 5000, first.digest[:-1]):
        shown = str(other or "none")[:64]
        with pytest.raises(CalibrationError) as refused:
            factors(other)
        assert str(refused.value).startswith(
            f"its calibration is {first.digest} and that of the scheduler's host is {shown}: copy one"
        )
        assert len(str(refused.value)) < 400


def test_ranks_without_a_calibration_do_not_fail_the_merge(vllm_config: Any) -> None:
    """Their host refuses the calibration of the others, with both digests."""
    texts = [
        identity.worker_fingerprint(
            offloading_config(), "cpu", "host", [[4096]], 100, None, [(128, 128)], orders, layers
        )
        for orders, layers in (([(3, True, 4096)], [[(0, 1)]]), ((), ()))
    ]
    merged = identity.merge_fingerprints(texts)
    assert merged["head_orders"] == [(3, True, 4096)]
    assert merged["layers"] == [[[[0, 1]], None]]
