# SPDX-License-Identifier: Apache-2.0
"""The copies of the installed vLLM between a cache on the GPU and pinned host memory.

vLLM's worker chooses between a batched DMA call and a Triton kernel by direction and page size. This module
uses the worker's own functions and its own choice.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

ROUNDS = 6  # the first one compiles and is not counted


class VllmCopies:
    """Measures vLLM's copies. ``missing``: the reason why it cannot; "" if it can."""

    def __init__(self) -> None:
        self.missing = ""
        self.version = ""
        try:
            import torch
            import vllm
            from vllm.v1.kv_offload.cpu import gpu_worker
        except ImportError as error:
            self.missing = f"vLLM is not here ({error})"
            return
        if not torch.cuda.is_available():
            self.missing = "the torch that is installed has no CUDA device"
            return
        self.version = vllm.__version__
        self._torch, self._worker = torch, gpu_worker
        self._stream = torch.cuda.Stream()
        self._bytes = 0
        self._cache: Any = None
        self._rows: Any = None

    def rates(self, row: dict[str, Any]) -> dict[str, float]:
        """Returns bytes per second for a row: with the worker's choice ("vllm"), and batched ("vllm_dma")."""
        store = row["direction"] == "store"
        src, dst, sizes = self._descriptors(row, store)
        refs = [[SimpleNamespace(page_size_bytes=row["page_bytes"])]]
        chosen = self._worker._select_swap_blocks_fn(refs, store)
        batched = self._worker.ops.swap_blocks_batch
        total = int(sizes.sum())
        return {
            name: total / min(self._seconds(copy, src, dst, sizes, store) for _ in range(ROUNDS))
            for name, copy in (("vllm", chosen), ("vllm_dma", batched))
        }

    def _seconds(self, copy: Any, src: Any, dst: Any, sizes: Any, store: bool) -> float:
        self._stream.synchronize()
        begun = time.perf_counter()
        with self._torch.cuda.stream(self._stream):
            copy(src, dst, sizes, is_src_access_order_any=not store)
        self._stream.synchronize()
        return time.perf_counter() - begun

    def _descriptors(self, row: dict[str, Any], store: bool) -> tuple[Any, Any, Any]:
        """Returns vLLM's copy descriptors, one per page.

        Blocks are in shuffled runs of ``row["run"]`` (0: all in order).
        """
        torch = self._torch
        page, layers, blocks = row["page_bytes"], row["layers"], row["blocks"]
        self._make_room(page * layers * blocks)
        run = row["run"] or blocks
        order = torch.randperm(blocks // run, generator=torch.Generator().manual_seed(1))
        ids = (order[:, None] * run + torch.arange(run)).flatten()
        layer = torch.arange(layers) * (page * blocks)
        cache = (self._cache.data_ptr() + ids[:, None] * page + layer).flatten()
        rows = self._rows.data_ptr() + torch.arange(len(cache)) * page
        sizes = torch.full((len(cache),), page, dtype=torch.int64)
        src, dst = (cache, rows) if store else (rows, cache)
        return src.pin_memory(), dst.pin_memory(), sizes.pin_memory()

    def _make_room(self, size: int) -> None:
        if size <= self._bytes:
            return
        self._cache = self._rows = None
        self._cache = self._torch.empty(size, dtype=self._torch.uint8, device="cuda")
        self._rows = self._torch.empty(size, dtype=self._torch.uint8, pin_memory=True)
        self._bytes = size
