# SPDX-License-Identifier: Apache-2.0
"""The raw speed of disk and memory: the limits that ``kv-offload bench`` compares with.

Uses plain system calls and memcpy from Python threads; both release the GIL during a transfer.
"""

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

BLOCK_BYTES = 2 << 20
IN_FLIGHT = 8  # same as in the core's probe
_PASSES = 4


def raw_disk(directory: str, total_bytes: int) -> dict[str, float | bool]:
    """Writes and reads one file in blocks of 2 MiB, eight at a time, with O_DIRECT if possible.

    The file has no name, so nothing is left if this process is killed. Returns {o_direct,
    write_bytes_per_second, read_bytes_per_second}. Raises OSError.
    """
    blocks = max(IN_FLIGHT, total_bytes // BLOCK_BYTES)
    handle, path = tempfile.mkstemp(prefix=".kv_offload_raw_", dir=directory)  # kRawPrefix in layout.h
    try:
        with contextlib.suppress(FileNotFoundError):  # a server that starts now may have removed it
            os.unlink(path)
        fd, direct = _open_direct(f"/proc/self/fd/{handle}")
        try:
            write = _speed(blocks, lambda buffer, offset: os.pwritev(fd, [buffer], offset))
            if not direct:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            read = _speed(blocks, lambda buffer, offset: os.preadv(fd, [buffer], offset))
        finally:
            os.close(fd)
    finally:
        os.close(handle)
    return {"o_direct": direct, "write_bytes_per_second": write, "read_bytes_per_second": read}


def _open_direct(path: str) -> tuple[int, bool]:
    with contextlib.suppress(OSError), contextlib.ExitStack() as refused:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        refused.callback(os.close, fd)
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            os.pwritev(fd, [page], 0)
        refused.pop_all()
        return fd, True
    return os.open(path, os.O_RDWR), False


def _speed(blocks: int, transfer: Callable[[mmap.mmap, int], int]) -> float:
    """Returns the bytes per second of ``transfer(buffer, offset)`` over all blocks."""

    def lane(first: int) -> None:
        with mmap.mmap(-1, BLOCK_BYTES) as buffer:  # page-aligned, as O_DIRECT requires
            buffer.write(os.urandom(4096) * (BLOCK_BYTES // 4096))
            for block in range(first, blocks, IN_FLIGHT):
                if transfer(buffer, block * BLOCK_BYTES) != BLOCK_BYTES:
                    raise OSError(f"a transfer of {BLOCK_BYTES} bytes ended early; is the disk full?")

    started = time.perf_counter()
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(lane, range(IN_FLIGHT)))
    return blocks * BLOCK_BYTES / (time.perf_counter() - started)


def raw_copy(total_bytes: int, threads: int) -> float:
    """Returns the bytes per second of memcpy between two buffers of ``total_bytes``; best of four passes."""
    source, target = np.ones(total_bytes, np.uint8), np.empty(total_bytes, np.uint8)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_PASSES):
            started = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(*pair), parts))
            best = max(best, total_bytes / (time.perf_counter() - started))
    return best
