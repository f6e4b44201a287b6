# SPDX-License-Identifier: Apache-2.0
"""Runs some kinds of the oracle with a core that was built with sanitizers.

The stages ``asan`` and ``tsan`` of tests/run.sh run this: they preload the sanitizer libraries, name the core
in KV_OFFLOAD_TEST_CORE and the sanitizer in KV_OFFLOAD_TEST_SANITIZER.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import adapter
import pytest

adapter.use_specs()

from kv_offload import _core  # noqa: E402
from oracle.check_oracle import KINDS, STEPS, Rates, kinds, live, with_disk  # noqa: E402

PRELUDE = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
block = ctypes.c_void_p(libc.malloc(64))
"""
WRITES_WHAT_IT_FREED = """
libc.free(block)
libc.memset(block, 0, 64)
"""
# Two unordered threads race, whichever runs first. Python's own threads do not race reliably: the
# interpreter's lock orders them unless both happen to run at once.
WRITES_FROM_TWO_THREADS = """
writes = ctypes.cast(libc.time, ctypes.c_void_p)  # time(time_t*), as a thread's void* (*)(void*)
threads = [ctypes.c_ulong() for _ in range(2)]
for thread in threads: assert libc.pthread_create(ctypes.byref(thread), None, writes, block) == 0
for thread in threads: assert libc.pthread_join(thread, None) == 0
"""


class Sanitizer(NamedTuple):
    symbols: tuple[str, ...]  # present in a core that was built with this sanitizer
    fault: str
    complaint: str


SANITIZER = {
    "asan": Sanitizer(
        ("__asan_report_load8", "__ubsan_handle_pointer_overflow"),
        WRITES_WHAT_IT_FREED,
        "AddressSanitizer: heap-use-after-free",
    ),
    "tsan": Sanitizer(("__tsan_write8",), WRITES_FROM_TWO_THREADS, "ThreadSanitizer: data race"),
}[os.environ["KV_OFFLOAD_TEST_SANITIZER"]]


def test_the_core_is_built_with_the_sanitizer() -> None:
    path = _core.__file__
    assert path == os.environ["KV_OFFLOAD_TEST_CORE"]
    content = Path(path).read_bytes()
    for symbol in SANITIZER.symbols:
        assert symbol.encode() in content
        assert hasattr(ctypes.CDLL(None), symbol), "the sanitizer is not in this process"


def test_the_sanitizer_detects_a_fault() -> None:
    """Negative control."""
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE + SANITIZER.fault],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.returncode != 0
    assert SANITIZER.complaint in result.stderr


@pytest.mark.parametrize(
    "kind", kinds("hybrid, packed, two ranks", "events", "mamba-like", "two blocks a chunk")
)
def test_random_requests_in_memory_pass_the_sanitizer(kind: str) -> None:
    live(KINDS[kind], seed=17)


@pytest.mark.parametrize("kind", ["two ranks", "hybrid"])
def test_random_requests_with_damaged_records_pass_the_sanitizer(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    live(with_disk(KINDS[kind], root), 18, STEPS, Rates(reset=0.01), root=root)
