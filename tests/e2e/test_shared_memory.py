"""What counts as left in /dev/shm by a server's processes, though other tests run beside."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import shared_memory

# Its title lies over what /proc shows of its environment and arguments, as that of vLLM's processes does.
MAP = """import mmap, sys
from setproctitle import setproctitle
with open(sys.argv[1], "r+b") as file:
    held = mmap.mmap(file.fileno(), 0)
setproctitle("VLLM::EngineCore " + "x" * 4000)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def region() -> Iterator[Path]:
    """Locked before it has its name: a server that starts beside removes regions that nobody holds."""
    unnamed = Path(shared_memory.DIRECTORY, f"test-{uuid.uuid4().hex}")
    unnamed.write_bytes(bytes(4096))
    with unnamed.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        path = unnamed.rename(unnamed.with_name(f"{shared_memory.REGION}{uuid.uuid4().hex}"))
        yield path
    path.unlink(missing_ok=True)


@contextmanager
def process_with(file: Path) -> Iterator[int]:
    """Its process id; the file is mapped."""
    with subprocess.Popen(
        [sys.executable, "-c", MAP, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"mapped\n"
        yield process.pid
        process.communicate()


def test_a_name_that_stays_when_its_process_has_ended_is_left(region: Path) -> None:
    with process_with(region) as pid:
        files = shared_memory.mapped([pid])
    assert shared_memory.left(files) == {region.name}


def test_a_file_whose_name_is_gone_is_not_and_another_of_that_name_is_another(region: Path) -> None:
    with process_with(region) as pid:
        region.unlink()
        files = shared_memory.mapped([pid])
        region.write_bytes(b"of a test beside")
        assert len(files) == 1
        assert shared_memory.left(files) == set()


def test_what_vllm_leaves_of_its_own_does_not_count(region: Path) -> None:
    with process_with(region) as pid:
        files = shared_memory.mapped([pid])
    own = region.with_name(f"{shared_memory.VLLMS_OWN[0]}{uuid.uuid4().hex}")
    region.rename(own)
    try:
        assert shared_memory.left(files) == set()
    finally:
        own.unlink()


def test_processes_without_a_region_of_ours_show_nothing() -> None:
    with pytest.raises(AssertionError, match="no region of ours"):
        shared_memory.mapped([os.getpid()])
