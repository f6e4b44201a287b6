# SPDX-License-Identifier: Apache-2.0
"""Small parts of an engine for the contract checks: configs, contexts, caches."""

import hashlib
import uuid
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.kv_offload import base, config

TOKENS_PER_BLOCK = 16


def key(number: int, group: int = 3) -> bytes:
    # A digest, as vLLM makes them, with different bytes at the positions that separate keys.
    return bytes(base.make_offload_key(hashlib.sha256(number.to_bytes(8, "big")).digest(), group))


def keys(*numbers: int, group: int = 3) -> list[bytes]:
    return [key(number, group) for number in numbers]


def context(request_id: str = "r", params: dict[str, Any] | None = None, **more: Any) -> Any:
    return base.ReqContext(req_id=request_id, kv_transfer_params=params, **more)


def offloading_config(
    *,
    groups: int = 1,
    world_size: int = 1,
    rank: int = 0,
    blocks_per_chunk: int = 1,
    engine_id: str | None = None,
    events: bool = False,
    windows: Sequence[int | None] = (),
    replicated: bool = False,
    canonical: bool = False,
    **extra: Any,
) -> Any:
    """Returns an OffloadingConfig as this vLLM makes it; group ids start at 3, so that id != position."""
    names = {field.name for field in __import__("dataclasses").fields(config.OffloadingGroupConfig)}
    made = []
    for position in range(groups):
        more: dict[str, Any] = {}
        if "sliding_window_size_in_chunks" in names:
            more["sliding_window_size_in_chunks"] = windows[position] if windows else None
        made.append(
            config.OffloadingGroupConfig(
                tokens_per_block=TOKENS_PER_BLOCK,
                layer_names=(f"layer.{position}",),
                group_id=position + 3,
                **more,
            )
        )
    return config.OffloadingConfig(
        groups=tuple(made),
        worker_kv_bytes_per_block=4096 * groups,
        enable_kv_cache_events=events,
        extra_config={"cpu_bytes_to_use": 1 << 20, **extra},
        engine_id=engine_id or f"contract-{uuid.uuid4()}",
        model=config.OffloadingModelConfig(name="model", dtype="float32"),
        cache=config.OffloadingCacheConfig(
            tokens_per_hash=TOKENS_PER_BLOCK, blocks_per_chunk=blocks_per_chunk
        ),
        parallel=config.OffloadingParallelConfig(
            rank=rank,
            world_size=world_size,
            tp_size=world_size,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
        replicated_layout=replicated,
        canonical_layout=canonical,
        kv_cache_layout="LBHNC",
    )


def kv_caches(groups: int = 1, num_blocks: int = 8, page: int = 4096, stride: int | None = None) -> Any:
    """Returns one tensor per group; block b is filled with the byte (16 * group + b)."""
    tensors, refs = [], []
    for group in range(groups):
        backing = torch.zeros(num_blocks, stride or page, dtype=torch.int8)
        tensor = backing[:, :page]
        for block in range(num_blocks):
            tensor[block].fill_(16 * group + block)
        tensors.append(base.CanonicalKVCacheTensor(tensor=tensor, page_size_bytes=page))
        refs.append([base.CanonicalKVCacheRef(tensor_idx=group, page_size_bytes=page)])
    return base.CanonicalKVCaches(tensors=tensors, group_data_refs=refs)


def blocks(ids: Sequence[int], sizes: Sequence[int] | None = None, starts: Sequence[int] = (0,)) -> Any:
    return base.GPULoadStoreSpec(list(ids), group_sizes=sizes or (len(ids),), block_indices=tuple(starts))
