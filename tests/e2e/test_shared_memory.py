# SPDX-License-Identifier: Apache-2.0
"""The check for leftover files in /dev/shm ignores concurrent tests."""

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

# Like vLLM's processes, it has a title that overwrites the environment and arguments that /proc shows.
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
    """Locks the file before naming it: servers that start concurrently remove unlocked regions."""
    unnamed = Path(shared_memory.DIRECTORY, f"test-{uuid.uuid4().hex}")
    unnamed.write_bytes(bytes(4096))
    with unnamed.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        path = unnamed.rename(unnamed.with_name(f"{shared_memory.REGION}{uuid.uuid4().hex}"))
        yield path
    path.unlink(missing_ok=True)


@contextmanager
def process_with(file: Path) -> Iterator[int]:
    """Yields the id of a process that maps the file."""
    with subprocess.Popen(
        [sys.executable, "-c", MAP, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"mapped\n"
        yield process.pid
        process.communicate()


def test_a_name_that_outlives_its_process_counts_as_left(region: Path) -> None:
    with process_with(region) as pid:
        files = shared_memory.mapped([pid])
    assert shared_memory.left(files) == {region.name}


def test_an_unlinked_file_does_not_count_nor_does_a_new_file_of_its_name(region: Path) -> None:
    with process_with(region) as pid:
        region.unlink()
        files = shared_memory.mapped([pid])
        region.write_bytes(b"of a test beside")
        assert len(files) == 1
        assert shared_memory.left(files) == set()


def test_files_that_vllm_leaves_do_not_count(region: Path) -> None:
    with process_with(region) as pid:
        files = shared_memory.mapped([pid])
    own = region.with_name(f"{shared_memory.VLLMS_OWN[0]}{uuid.uuid4().hex}")
    region.rename(own)
    try:
        assert shared_memory.left(files) == set()
    finally:
        own.unlink()


def test_processes_without_our_region_are_an_error() -> None:
    with pytest.raises(AssertionError, match="no region of ours"):
        shared_memory.mapped([os.getpid()])
