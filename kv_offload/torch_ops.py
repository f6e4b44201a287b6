# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.kv_offload``: pack the blocks of several caches into one stretch of bytes, and back.

The operators live in a library of their own, which is loaded by the first call of ``load()`` (or of one
of the functions here) and not by importing this module. They are what the CUDA copier's kernels do, for
torch: no host synchronisation, and on the current stream a launch for each 1,024 pieces of up to 16 KiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from kv_offload import _core
from kv_offload._core import ResourceError

# Beside the extension: in an editable install that is not where this file is.
_DIRECTORY = Path(_core.__file__).parent


def load() -> None:
    """Register the operators with torch; does nothing the second time.

    Raises ResourceError when this build of kv_offload has none.
    """
    if hasattr(torch.ops.kv_offload, "pack_blocks"):
        return
    library = _DIRECTORY / "libkv_offload_torch.so"
    if not library.exists():
        raise ResourceError(
            f"{library} is not there: this build has no torch operators "
            "(build with torch in the build's Python and KV_OFFLOAD_TORCH=ON)"
        )
    torch.ops.load_library(str(library))
    cuda_library = _DIRECTORY / "libkv_offload_torch_cuda.so"
    if torch.version.cuda is not None and cuda_library.exists():
        torch.ops.load_library(str(cuda_library))
    torch.library.register_fake("kv_offload::pack_blocks", _fake_pack_blocks)
    torch.library.register_fake("kv_offload::unpack_blocks", _fake_unpack_blocks)


def pack_blocks(caches: Sequence[torch.Tensor], block_ids: torch.Tensor, packed: torch.Tensor) -> None:
    """Copy blocks out of the caches into ``packed``, block after block, in a block the caches in order.

    caches: each (num_blocks, elements), rows contiguous, any dtype, all on one device.
    block_ids: (n,), int32 or int64, on the CPU.
    packed: contiguous, ``n * sum(row bytes of the caches)`` bytes, on that device or pinned on the CPU.

    On a GPU the copy is enqueued on the current stream and runs after this has returned; ``block_ids`` is
    read before. Until the stream has come there (an event, or ``synchronize``) the caller keeps ``packed``
    where it is pinned, and does not write to it: torch knows of no copy that uses it, and hands its memory
    out again as soon as it is dropped. A tensor of the GPU that was made on this stream may be dropped at
    once; one that was made on another needs ``record_stream``.

    Raises RuntimeError for shapes that do not fit, ids out of range, and memory that is neither of the
    caches' device nor pinned.
    """
    load()
    torch.ops.kv_offload.pack_blocks(list(caches), block_ids, packed)


def unpack_blocks(packed: torch.Tensor, block_ids: torch.Tensor, caches: Sequence[torch.Tensor]) -> None:
    """The way back: ``pack_blocks`` with ``packed`` and ``caches`` exchanged, under the same rules."""
    load()
    torch.ops.kv_offload.unpack_blocks(packed, block_ids, list(caches))


def _fake_pack_blocks(caches: Sequence[torch.Tensor], block_ids: torch.Tensor, packed: torch.Tensor) -> None:
    row_bytes = sum(cache.size(1) * cache.element_size() for cache in caches)
    torch._check(packed.numel() * packed.element_size() == block_ids.numel() * row_bytes)


def _fake_unpack_blocks(
    packed: torch.Tensor, block_ids: torch.Tensor, caches: Sequence[torch.Tensor]
) -> None:
    _fake_pack_blocks(caches, block_ids, packed)
