"""What counts as left in /dev/shm, though other tests may run beside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import shared_memory

HOLD = """import fcntl, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_SH)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def file() -> Iterator[Path]:
    path = Path(f"/dev/shm/kv_offload_test_{os.getpid()}")
    path.touch()
    yield path
    path.unlink()


def seen_while_held(file: Path, worker: str | None) -> bool:
    environment = {key: value for key, value in os.environ.items() if key != shared_memory.WORKER}
    if worker is not None:
        environment[shared_memory.WORKER] = worker
    command = [sys.executable, "-c", HOLD, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        return file.name in shared_memory.names()


def test_what_nobody_holds_counts(file: Path) -> None:
    assert file.name in shared_memory.names()


def test_what_our_own_processes_hold_counts(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shared_memory.WORKER, "gw5")
    assert seen_while_held(file, "gw5")
    monkeypatch.delenv(shared_memory.WORKER)
    assert seen_while_held(file, None)


def test_what_tests_beside_hold_does_not(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shared_memory.WORKER, "gw5")
    assert not seen_while_held(file, "gw6")


def test_a_lock_on_a_file_of_another_device_says_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, inode = file.stat().st_dev, file.stat().st_ino
    monkeypatch.setenv(shared_memory.WORKER, "gw5")
    monkeypatch.setattr(shared_memory, "LOCKS", file)
    other = f"{os.major(device) + 1:02x}:{os.minor(device):02x}:{inode}"
    environment = os.environ | {shared_memory.WORKER: "gw6"}
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment
    ) as holder:
        file.write_text(f"1: FLOCK  ADVISORY  READ {holder.pid} {other} 0 EOF\n")
        assert file.name in shared_memory.names()
        file.write_text(
            file.read_text().replace(other, f"{os.major(device):02x}:{os.minor(device):02x}:{inode}")
        )
        assert file.name not in shared_memory.names()
        holder.communicate(b"\n")
