# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.kv_offload``: packs the blocks of several caches into one contiguous buffer, and unpacks them.

The operators are in a separate library, which the first call of ``load()`` (or of a function here) loads;
importing this module does not. They run the CUDA copier's kernels for torch, without host synchronisation: on
the current stream, one launch for each 1,024 pieces of up to 16 KiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from kv_offload import _core
from kv_offload._core import ResourceError

# Next to the extension, which an editable install keeps in another directory than this file.
_DIRECTORY = Path(_core.__file__).parent


def load() -> None:
    """Registers the operators with torch. Idempotent.

    Raises ResourceError if this build of kv_offload has none.
    """
    if hasattr(torch.ops.kv_offload, "pack_blocks"):
        return
    library = _DIRECTORY / "libkv_offload_torch.so"
    if not library.exists():
        raise ResourceError(
            f"{library} does not exist: this build has no torch operators "
            "(build with torch in the build's Python and KV_OFFLOAD_TORCH=ON)"
        )
    torch.ops.load_library(str(library))
    cuda_library = _DIRECTORY / "libkv_offload_torch_cuda.so"
    if torch.version.cuda is not None and cuda_library.exists():
        torch.ops.load_library(str(cuda_library))
    torch.library.register_fake("kv_offload::pack_blocks", _fake_pack_blocks)
    torch.library.register_fake("kv_offload::unpack_blocks", _fake_unpack_blocks)


def pack_blocks(caches: Sequence[torch.Tensor], block_ids: torch.Tensor, packed: torch.Tensor) -> None:
    """Copies blocks of the caches into ``packed``, block after block, and within a block cache after cache.

    caches: each (num_blocks, elements), rows contiguous, any dtype, all on one device.
    block_ids: (n,), int32 or int64, on the CPU.
    packed: contiguous, ``n * sum(row bytes of the caches)`` bytes, on that device or pinned on the CPU.

    On a GPU the copy is enqueued on the current stream and runs after this returns; ``block_ids`` is read
    before it returns. Until the stream reaches the copy (an event, or ``synchronize``), the caller must keep
    a pinned ``packed`` alive and must not write to it: torch does not track this copy, and reuses the memory
    as soon as the tensor is dropped. A GPU tensor created on this stream may be dropped at once; one created
    on another stream needs ``record_stream``.

    Raises RuntimeError for mismatched shapes, ids out of range, and memory that is neither on the caches'
    device nor pinned.
    """
    load()
    torch.ops.kv_offload.pack_blocks(list(caches), block_ids, packed)


def unpack_blocks(packed: torch.Tensor, block_ids: torch.Tensor, caches: Sequence[torch.Tensor]) -> None:
    """Copies in the other direction: ``pack_blocks`` with ``packed`` and ``caches`` exchanged, same rules."""
    load()
    torch.ops.kv_offload.unpack_blocks(packed, block_ids, list(caches))


def _fake_pack_blocks(caches: Sequence[torch.Tensor], block_ids: torch.Tensor, packed: torch.Tensor) -> None:
    row_bytes = sum(cache.size(1) * cache.element_size() for cache in caches)
    torch._check(packed.numel() * packed.element_size() == block_ids.numel() * row_bytes)


def _fake_unpack_blocks(
    packed: torch.Tensor, block_ids: torch.Tensor, caches: Sequence[torch.Tensor]
) -> None:
    _fake_pack_blocks(caches, block_ids, packed)
