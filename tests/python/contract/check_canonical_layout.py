# SPDX-License-Identifier: Apache-2.0
"""Run by test_contract.py under each vLLM release: the conditions for the canonical layout."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import adapter
import pytest
import torch

adapter.use_specs()

from kv_offload.specs import compat  # noqa: E402
from kv_offload.specs.canonical import CanonicalPages, canonical_pages, record_shards  # noqa: E402
from vllm.v1.kv_offload import base  # noqa: E402

from contract.parts import offloading_config  # noqa: E402

BLOCKS, TOKENS, CONTENT = 6, 16, 8  # CONTENT: K and V of a token and head, float32


class Rank:
    """One rank of an engine with one group of layers, in the byte order that vLLM requests (LBHNC)."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, heads: Sequence[int], rank: int = 0, ranks: int = 1
    ) -> None:
        self.config = offloading_config(world_size=ranks, rank=rank, canonical=True)
        names = tuple(f"layer.{number}" for number in range(len(heads)))
        self.config = replace(self.config, groups=(replace(self.config.groups[0], layer_names=names),))
        self.layers: dict[str, Any] = {}
        self.tensors: list[Any] = []
        self.refs: list[Any] = []
        for name, total in zip(names, heads, strict=True):
            own = max(1, total // ranks)
            cache = torch.zeros(BLOCKS, own, TOKENS, CONTENT)
            page = own * TOKENS * CONTENT * 4
            copies = max(1, ranks // total)
            mapping = base.CanonicalPageMapping(
                canonical_page_size_bytes=page * ranks // copies,
                local_page_size_bytes=page,
                runs=(base.CopyRun(0, rank // copies * page, page, 1, page, page),),
                num_writers=copies,
                writer_index=rank % copies,
                parallelism_agnostic=True,
            )
            view = cache.view(torch.int8).reshape(BLOCKS, page)
            self.refs.append(base.CanonicalKVCacheRef(len(self.tensors), page, mapping))
            self.tensors.append(base.CanonicalKVCacheTensor(view, page))
            spec = SimpleNamespace(num_kv_heads=own)
            self.layers[name] = SimpleNamespace(kv_cache=cache, get_kv_cache_spec=lambda _, spec=spec: spec)
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(calculate_kv_scales=False),
            compilation_config=SimpleNamespace(static_forward_context=self.layers),
        )
        monkeypatch.setattr(compat, "current_vllm_config", lambda: self.vllm_config)

    def change_mapping(self, **fields: Any) -> None:
        self.refs[0] = replace(self.refs[0], mapping=replace(self.refs[0].mapping, **fields))

    def find_pages(self, replicated: bool = False) -> CanonicalPages | str:
        return canonical_pages(self.config, base.CanonicalKVCaches(self.tensors, [self.refs]), replicated)


@pytest.mark.parametrize(
    ("heads", "shards"), [(1, 1), (8, 8), (64, 64), (71, 1), (72, 36), (96, 48), (128, 64)]
)
def test_the_number_of_shards_divides_the_number_of_heads(heads: int, shards: int) -> None:
    assert record_shards(heads) == shards


def test_ranks_of_every_tensor_parallel_size_map_to_parts_of_the_same_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = ((8 * TOKENS * CONTENT * 4,) * 2,)
    for ranks in (1, 2, 4, 8):
        for rank in range(ranks):
            found = Rank(monkeypatch, [8, 8], rank, ranks).find_pages()
            assert found == CanonicalPages(8, 8 // ranks, pages)


def test_several_heads_share_a_shard_if_there_are_more_heads_than_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = ((72 * TOKENS * CONTENT * 4,),)
    assert Rank(monkeypatch, [72], 0, 4).find_pages() == CanonicalPages(36, 9, pages)
    assert (
        Rank(monkeypatch, [72], 0, 8).find_pages()
        == "a record has 36 shards, which 8 ranks cannot share equally"
    )


def test_a_replicated_cache_has_one_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Rank(monkeypatch, [1], 1, 2)
    assert one.find_pages(replicated=True) == CanonicalPages(1, 1, ((TOKENS * CONTENT * 4,),))
    assert "2 ranks hold the same KV heads" in str(Rank(monkeypatch, [1], 1, 2).find_pages())


@pytest.mark.parametrize("mapping", [None, "not the same for all"])
def test_the_canonical_layout_needs_a_certificate_of_vllm(
    mapping: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Rank(monkeypatch, [4, 4])
    if mapping is None:
        one.refs[0] = replace(one.refs[0], mapping=None)
    else:
        one.change_mapping(parallelism_agnostic=False)
    assert (
        one.find_pages()
        == "vLLM declares no layout of layer.0 that is the same for all tensor-parallel sizes"
    )


def by_tokens(cache: torch.Tensor) -> torch.Tensor:
    """LBHNC: all heads of a token are adjacent."""
    blocks, heads, tokens, content = cache.shape
    return cache.view(blocks, tokens, heads, content).transpose(1, 2)


SHAPES = {
    "tokens before heads": by_tokens,
    "K and V apart": lambda cache: cache.view(BLOCKS, 2, TOKENS, cache.shape[1], CONTENT // 2),
    "smaller blocks of a kernel": lambda cache: cache.view(2 * BLOCKS, cache.shape[1], TOKENS // 2, CONTENT),
    "of another address": lambda cache: cache.clone(),
    "heads in the other order": lambda cache: cache.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("name", SHAPES)
def test_heads_must_be_contiguous_in_a_page(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's mapping looks the same for one rank in all of these layouts."""
    one = Rank(monkeypatch, [4])
    one.layers["layer.0"].kv_cache = SHAPES[name](one.layers["layer.0"].kv_cache)
    assert "the KV heads of a page of layer.0 are not contiguous" in str(one.find_pages())


@pytest.mark.parametrize("field", ["num_head_slots", "state_content_bytes"])
def test_planes_of_packed_pages_are_not_mistaken_for_heads(
    monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    one = Rank(monkeypatch, [4, 4], 0, 2)
    packed = SimpleNamespace(num_kv_heads=2, **{field: 2})
    one.layers["layer.0"].get_kv_cache_spec = lambda _: packed
    assert "packs its pages in its own layout" in str(one.find_pages())


def test_the_packing_that_a_backend_adds_to_the_spec_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    one = Rank(monkeypatch, [4, 4], 0, 2)
    spec = FullAttentionSpec(
        block_size=16,
        num_kv_heads=4,
        head_size=16,
        dtype=torch.int8,
        kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
    )
    one.layers["layer.0"].get_kv_cache_spec = lambda _: spec
    one.layers["layer.0"].attn_backend = TritonAttentionBackend
    assert "packs its pages in its own layout" in str(one.find_pages())


def test_a_shard_of_one_rank_is_never_stored_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"layer\.0 holds only a part; start without canonical_layout"):
        Rank(monkeypatch, [4, 4], 0, 2).find_pages(replicated=True)


def test_ranks_whose_order_differs_from_their_heads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Rank(monkeypatch, [4], 1, 2)
    run = one.refs[0].mapping.runs[0]
    one.change_mapping(runs=(replace(run, canonical_offset=0),))
    assert one.find_pages() == "vLLM stores the KV heads of layer.0 in another order"


def test_other_partitions_of_a_cache_are_not_mistaken_for_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Rank(monkeypatch, [4], 0, 2)
    one.config = replace(one.config, parallel=replace(one.config.parallel, tp_size=1, pp_size=2))
    assert "the ranks split layers or tokens" in str(one.find_pages())
    one.config = replace(one.config, parallel=replace(one.config.parallel, tp_size=2, pp_size=1, dcp_size=2))
    assert "the ranks split layers or tokens" in str(one.find_pages())
    assert "different numbers of KV heads ([4, 8])" in str(Rank(monkeypatch, [4, 8]).find_pages())
    one = Rank(monkeypatch, [4, 4])
    one.refs.pop()
    assert "share one page" in str(one.find_pages())
    one = Rank(monkeypatch, [4])
    one.vllm_config.cache_config.calculate_kv_scales = True
    assert "calculate_kv_scales" in str(one.find_pages())
    one = Rank(monkeypatch, [4])
    del one.layers["layer.0"].get_kv_cache_spec
    assert "its layers could not be inspected (AttributeError" in str(one.find_pages())
    one = Rank(monkeypatch, [4])
    one.layers["layer.0"].kv_cache = []
    assert one.find_pages() == "the cache of layer.0 is not known"
    monkeypatch.setattr(compat, "current_vllm_config", lambda: None)
    assert "does not pass the configuration" in str(one.find_pages())
