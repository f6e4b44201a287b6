# SPDX-License-Identifier: Apache-2.0
"""Runs Mooncake's own client in a loop, for mooncake_bench.

    python mooncake_alone.py MASTER plain|sessions WRITERS READERS BYTES RECORDS

Uses put_from and get_into (plain), or sessions (described in kv_offload/tiers/mooncake/records.py). Prints
GB/s of puts and of gets, and this process's CPU time per GB of each. The records are in registered buffers,
as many as the tier has rows; the bytes are not checked. Removes all objects of the store before and after the
run. With RECORDS 0 it only removes them.
"""

import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any


def timed(threads: int, records: int, work: Callable[[int], None]) -> float:
    """Returns the seconds that ``work(record)`` took for all records."""

    left = iter(range(records))  # its next() is atomic under the interpreter lock

    def some() -> None:
        for record in left:
            work(record)

    running = [threading.Thread(target=some) for _ in range(threads)]
    start = time.perf_counter()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return time.perf_counter() - start


def main() -> None:
    master, calls = sys.argv[1:3]
    writers, readers, size, records = map(int, sys.argv[3:7])
    buffers = max(2 * readers, 32)  # bench::at_once
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)  # Mooncake logs to stdout and stderr
    from mooncake.store import MooncakeDistributedStore

    store: Any = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master) == 0
    store.remove_all(True)
    rates = [0.0] * 4
    if records:
        room = (size + 4095) // 4096 * 4096
        memory = mmap.mmap(-1, room * buffers)
        memory.write(b"v" * (room * buffers))
        anchor = ctypes.c_char.from_buffer(memory)
        base = ctypes.addressof(anchor)
        assert store.register_buffer(base, room * buffers) == 0

        def put(record: int) -> None:
            assert store.put_from(f"alone:{record}", base + record % buffers * room, size) == 0

        def get(record: int) -> None:
            assert store.get_into(f"alone:{record}", base + record % buffers * room, size) == size

        def put_in_session(record: int) -> None:
            name, at = [f"alone:{record}"], [[base + record % buffers * room]]
            assert store.batch_put_session_start(name, [size]) == [0]
            assert store.batch_put_from_multi_buffer_ranges(name, at, [[size]], [[0]]) == [size]
            assert store.batch_put_session_end(name) == [0]

        def get_in_session(record: int) -> None:
            name, at = [f"alone:{record}"], [[base + record % buffers * room]]
            assert store.batch_get_session_start(name) == [0]
            assert store.batch_get_into_multi_buffer_ranges(name, at, [[size]], [[0]]) == [size]
            store.batch_get_session_end(name)

        if calls == "sessions":
            put, get = put_in_session, get_in_session
        total = records * size / 1e9
        start = time.process_time()
        writing = timed(writers, records, put)
        written = time.process_time()
        reading = timed(readers, records, get)
        used = (written - start, time.process_time() - written)
        rates = [total / writing, total / reading, used[0] / total, used[1] / total]
        store.remove_all(True)
    print(*rates, file=out, flush=True)
    os._exit(0)


main()
