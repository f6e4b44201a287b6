"""Some kinds of the oracle with a core that was built with sanitizers; run by stage ``asan`` of tests/run.sh,
which preloads their libraries and names the core in KV_OFFLOAD_TEST_CORE."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import adapter
import pytest

adapter.use_specs()

from kv_offload import _core  # noqa: E402
from oracle.check_oracle import KINDS, STEPS, Rates, kinds, live, with_disk  # noqa: E402

READS_WHAT_IT_FREED = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
block = ctypes.c_void_p(libc.malloc(64))
libc.free(block)
libc.memset(block, 0, 64)
"""


def test_the_core_is_the_one_with_sanitizers() -> None:
    path = _core.__file__
    assert path == os.environ["KV_OFFLOAD_TEST_CORE"]
    content = Path(path).read_bytes()
    assert b"__asan_report_load8" in content
    assert b"__ubsan_handle_pointer_overflow" in content
    assert ctypes.CDLL(None).__asan_report_load8, "and the sanitizers are in this process"


def test_what_is_written_after_it_was_freed_is_seen_in_a_process_like_this() -> None:
    """The control."""
    result = subprocess.run(
        [sys.executable, "-c", READS_WHAT_IT_FREED], capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert "AddressSanitizer: heap-use-after-free" in result.stderr


@pytest.mark.parametrize(
    "kind", kinds("hybrid, packed, two ranks", "events", "mamba-like", "two blocks a chunk")
)
def test_a_life_in_memory(kind: str) -> None:
    live(KINDS[kind], seed=17)


@pytest.mark.parametrize("kind", ["two ranks", "hybrid"])
def test_a_life_over_a_disk_whose_records_are_damaged(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    live(with_disk(KINDS[kind], root), 18, STEPS, Rates(reset=0.01), root=root)
