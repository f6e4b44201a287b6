# SPDX-License-Identifier: Apache-2.0
"""Writes records and reads them back with vLLM's own batch calls, for comparison in fs_bench.py.

    python benchmarks/vllm_fs_io.py DIRECTORY RECORD_BYTES TOTAL_BYTES THREADS MEMORY

Prints one JSON object on stdout: bytes per second. Calls ``vllm.v1.kv_offload.tiering.fs.io`` as vLLM's tier
does: a batch per thread (the C implementation if the installed vLLM has it), O_DIRECT, no checksums, no size
limit on the directory. The files are dropped from the page cache between writing and reading.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm.v1.kv_offload.tiering.fs import io

WARM_UP = 32  # records, as in our program


def main() -> None:
    directory = Path(sys.argv[1])
    record, total, threads = (int(word) for word in sys.argv[2:5])
    count = total // record
    with Path(sys.argv[5]).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    rows = len(memory) // record // threads  # rows are reused; a batch is one call
    view = memoryview(memory)
    parts = [range(number, count, threads) for number in range(threads)]

    def run(batch_call: object, number: int) -> None:
        part = parts[number]
        for first in range(0, len(part), rows):
            batch = part[first : first + rows]
            paths = [str(directory / f"{index % 256:02x}" / f"{index}.bin") for index in batch]
            offsets = [(number * rows + row) * record for row in range(len(batch))]
            batch_call(paths, view, offsets, record, True)  # type: ignore[operator]

    def timed(batch_call: object) -> float:
        with ThreadPoolExecutor(threads) as pool:
            began = time.perf_counter()
            for done in [pool.submit(run, batch_call, number) for number in range(threads)]:
                done.result()
            return count * record / (time.perf_counter() - began)

    for number in range(256):  # as in our program: a directory in use has these subdirectories
        (directory / f"{number:02x}").mkdir(exist_ok=True)
    paths = [str(directory / "00" / f"other-{index}.bin") for index in range(WARM_UP)]
    io.batch_store_block(paths, view, [index % rows * record for index in range(WARM_UP)], record, True)
    os.sync()
    write = timed(io.batch_store_block)
    for path in directory.rglob("*.bin"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    read = timed(io.batch_load_block)
    print(
        json.dumps({"write_bytes_per_second": write, "read_bytes_per_second": read, "in_c": io._HAS_FSIO_C})
    )


if __name__ == "__main__":
    main()
