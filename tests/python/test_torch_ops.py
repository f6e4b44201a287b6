# SPDX-License-Identifier: Apache-2.0
"""torch.ops.kv_offload: equal to plain indexing over many layouts, and well-behaved operators."""

from __future__ import annotations

import random

import pytest
import torch

from kv_offload import torch_ops

torch_ops.load()

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
DEVICES = ["cpu", pytest.param("cuda", marks=[gpu, pytest.mark.gpu])]
DTYPES = [torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32]


def draw_caches(draw: random.Random, device: str) -> list[torch.Tensor]:
    """Returns caches of odd widths, padded strides and shifted starts: every alignment occurs."""
    caches = []
    num_blocks = draw.randint(1, 40)
    for _ in range(draw.randint(1, 5)):
        dtype = draw.choice(DTYPES)
        width = draw.randint(1, 300) if draw.random() < 0.7 else draw.choice([16, 64, 1024, 40_000])
        padding = draw.choice([0, 0, 1, 16])
        shift = draw.choice([0, 0, 1, 3])
        noise = torch.randint(0, 256, ((num_blocks * (width + padding) + shift) * dtype.itemsize,))
        memory = noise.to(torch.uint8).to(device).view(dtype)
        caches.append(memory[shift:].view(num_blocks, width + padding)[:, :width])
    return caches


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.uint8)


def reference(caches: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """The simple implementation: index each cache and concatenate the bytes."""
    return torch.cat([as_bytes(cache[ids.long().to(cache.device)]) for cache in caches], dim=1)


def empty_packed(caches: list[torch.Tensor], count: int) -> torch.Tensor:
    width = sum(cache.size(1) * cache.element_size() for cache in caches)
    return torch.zeros((count, width), dtype=torch.uint8, device=caches[0].device)


@pytest.mark.parametrize("device", DEVICES)
def test_pack_equals_plain_indexing_and_unpack_inverts_it(device: str) -> None:
    draw = random.Random(20260731)
    for case in range(200):
        caches = draw_caches(draw, device)
        num_blocks = caches[0].size(0)
        count = draw.randint(0, num_blocks)
        ids = torch.tensor(
            draw.sample(range(num_blocks), count), dtype=draw.choice([torch.int32, torch.int64])
        )
        packed = empty_packed(caches, count)
        torch_ops.pack_blocks(caches, ids, packed)
        expected = reference(caches, ids)
        assert torch.equal(packed, expected), f"case {case}"

        fresh = (torch.randint(0, 256, tuple(packed.shape))).to(torch.uint8).to(device)
        untouched = [i for i in range(num_blocks) if i not in set(ids.tolist())]
        before = reference(caches, torch.tensor(untouched, dtype=torch.int64))
        torch_ops.unpack_blocks(fresh, ids, caches)
        assert torch.equal(reference(caches, ids), fresh), f"case {case}"
        after = reference(caches, torch.tensor(untouched, dtype=torch.int64))
        assert torch.equal(after, before), f"case {case}: a block that was not requested has changed"


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_passes(device: str) -> None:
    caches = [torch.randn(8, 24, device=device), torch.randn(8, 40, device=device)]
    ids = torch.tensor([5, 1, 2])
    packed = empty_packed(caches, 3)
    torch.library.opcheck(torch.ops.kv_offload.pack_blocks, (caches, ids, packed))
    torch.library.opcheck(torch.ops.kv_offload.unpack_blocks, (packed, ids, caches))


def test_invalid_arguments_are_refused() -> None:
    caches = [torch.zeros(8, 24)]
    ids = torch.tensor([5, 1])
    packed = empty_packed(caches, 2)
    with pytest.raises(RuntimeError, match=r"outside 0\.\.7"):
        torch_ops.pack_blocks(caches, torch.tensor([5, 8]), packed)
    with pytest.raises(RuntimeError, match=r"outside 0\.\.7"):
        torch_ops.pack_blocks(caches, torch.tensor([-1, 0]), packed)
    with pytest.raises(RuntimeError, match="must be contiguous and hold 2 blocks of 96 bytes"):
        torch_ops.pack_blocks(caches, ids, packed[:, :-1].contiguous())
    with pytest.raises(RuntimeError, match="int32 or int64"):
        torch_ops.pack_blocks(caches, ids.to(torch.int16), packed)
    with pytest.raises(RuntimeError, match="contiguous rows"):
        torch_ops.pack_blocks([torch.zeros(24, 8).t()], ids, packed)
    with pytest.raises(RuntimeError, match="empty"):
        torch_ops.pack_blocks([], ids, packed)


def test_a_fake_tensor_is_checked_but_never_read() -> None:
    with torch._subclasses.FakeTensorMode():
        caches = [torch.empty(8, 24)]
        torch_ops.pack_blocks(
            caches, torch.empty(2, dtype=torch.int64), torch.empty(2, 96, dtype=torch.uint8)
        )
        with pytest.raises(RuntimeError):
            torch_ops.pack_blocks(
                caches, torch.empty(2, dtype=torch.int64), torch.empty(2, 95, dtype=torch.uint8)
            )
