# SPDX-License-Identifier: Apache-2.0
"""csrc/backends/mooncake/bind_mooncake.cc and kv_offload/tiers/mooncake/client.py: a mooncake tier under a
cache, with its client process. It runs over a real Mooncake master and storage process, and over a fake
package that needs neither.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import small_core
from mooncake_store import MooncakeProcesses, make_fake_package, mooncake_store
from small_core import SHARD_BYTES, attach, keys, store

from kv_offload import _core
from kv_offload.tiers.mooncake.config import MooncakeTierConfig

MISS, HIT = 0, 1


class Namespace:
    """The part of an identity that a tier reads."""

    def __init__(self, name: str) -> None:
        self._name = name

    def namespace_id(self) -> bytes:
        return self._name.encode()[-32:].rjust(32)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeProcesses]:
    with mooncake_store(tmp_path_factory.mktemp("mooncake")) as running:
        yield running


OPENED: list[Any] = []


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Any]:
    """Yields a region and closes the caches over it: a cache that a failed test leaves open would keep
    starting processes, which other tests count.
    """
    yield attach(tmp_path)
    while OPENED:
        OPENED.pop().close()


def make_cache(*args: Any, **options: Any) -> Any:
    OPENED.append(small_core.make_cache(*args, **options))
    return OPENED[-1]


@pytest.fixture
def objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Yields the directory of a store with the fake package; its processes start with that package."""
    monkeypatch.setenv("PYTHONPATH", str(make_fake_package(tmp_path)))
    monkeypatch.setenv("MOONCAKE_FAKE", str(tmp_path / "objects"))
    return tmp_path / "objects"


def spec(request: pytest.FixtureRequest, master: str = "", deadline: float = 240.0, **given: Any) -> Any:
    config = MooncakeTierConfig(
        master=master or "etcd://127.0.0.1:2379", op_timeout_ms=int(deadline * 1000), **given
    )
    return config.make_spec("mooncake", None, Namespace(request.node.nodeid))  # type: ignore[arg-type]


def step_until(cache: Any, done: Callable[[], bool]) -> None:
    """Steps the scheduler, with pauses for the tier's threads, until ``done()``."""
    pause = threading.Event()
    deadline = time.monotonic() + 240
    while not done():
        assert time.monotonic() < deadline, cache.tier_stats(0)
        cache.end_step()
        pause.wait(0.005)


def written(metrics: Any) -> int:
    """Returns the number of records written so far."""
    return int(metrics.value("kv_offload_write_bytes_total", ["mooncake"])) // SHARD_BYTES


def store_until_written(cache: Any, region: Any, metrics: Any, first: int) -> list[bytes]:
    """Stores one chunk after the other until one is written. Returns all of them."""
    stored: list[bytes] = []

    def one_is_written() -> bool:
        wanted = keys(1, first=first + len(stored))
        stored.extend(wanted)
        store(cache, region[1][0], cache.begin_request("r"), wanted)
        return written(metrics) > 0

    step_until(cache, one_is_written)
    return stored


def record(region: Any, opened: Any, count: int = 5, first: int = 1) -> list[bytes]:
    """Stores ``count`` records with a cache that is closed again."""
    metrics = _core.Metrics()
    cache = make_cache(region[0], metrics, tiers=[opened])
    wanted = store(cache, region[1][0], cache.begin_request("r"), keys(count, first))
    step_until(cache, lambda: written(metrics) == count)
    cache.close()
    return wanted


def reader(region: Any, opened: Any, metrics: Any | None = None) -> Any:
    return make_cache(region[0], metrics, tiers=[opened], load_policy="always", lookup_timeout_seconds=240.0)


def looked_up(cache: Any, wanted: list[bytes]) -> Callable[[], list[int]]:
    request = cache.begin_request("r")
    return lambda: [cache.lookup(request, key) for key in wanted]


def processes() -> list[int]:
    """Returns the pids of our Mooncake client processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if b"kv_offload.tiers.mooncake.client" in words and parent == os.getpid():
                found.append(int(path.name))
    return found


def runs(pid: int) -> bool:
    """True if the process runs; False also for a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


def assert_ends(pid: int) -> None:
    """Fails unless the process ends soon by itself; ends it in any case."""
    deadline = time.monotonic() + 240
    try:
        while runs(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("kind", ["mooncake", "fake"])
def test_a_new_cache_loads_the_records(request, region, kind) -> None:
    master = request.getfixturevalue("real").address if kind == "mooncake" else ""
    if kind == "fake":
        request.getfixturevalue("objects")
    opened = spec(request, master)
    wanted = record(region, opened)
    cache = reader(region, opened)
    results = looked_up(cache, wanted)
    step_until(cache, lambda: results() == [HIT] * 5)
    assert cache.load_source(wanted[0]) == 0
    assert len(processes()) == 1
    cache.close()
    assert processes() == []


def test_a_damaged_or_truncated_record_is_a_miss_and_removed(request, region, objects) -> None:
    opened = spec(request)
    wanted = record(region, opened)
    paths = {
        key: next(path for path in objects.iterdir() if path.name.endswith(quote(f":{key.hex()}", safe="")))
        for key in wanted
    }
    damaged = bytearray(paths[wanted[1]].read_bytes())
    damaged[5000] ^= 1
    paths[wanted[1]].write_bytes(damaged)
    paths[wanted[2]].write_bytes(paths[wanted[2]].read_bytes()[:5000])
    paths[wanted[3]].write_bytes(paths[wanted[3]].read_bytes() + bytes(1 << 20))
    cache = reader(region, opened)
    results = looked_up(cache, wanted)
    step_until(cache, lambda: results() == [HIT, MISS, MISS, MISS, HIT])
    step_until(cache, lambda: not any(paths[wanted[i]].exists() for i in (1, 2, 3)))
    cache.close()


def test_a_killed_process_is_restarted(request, region, objects) -> None:
    opened = spec(request)
    wanted = record(region, opened)
    metrics = _core.Metrics()
    cache = reader(region, opened, metrics)
    (before,) = processes()
    os.kill(before, signal.SIGKILL)
    step_until(cache, lambda: any(pid != before for pid in processes()))
    # Lookups meanwhile were misses; chunks stored from now on are written as soon as it runs.
    store_until_written(cache, region, metrics, first=11)
    results = looked_up(cache, wanted[:1])
    step_until(cache, lambda: results() == [HIT])
    cache.close()
    assert processes() == []


def test_a_stopped_process_costs_a_deadline_and_is_ended(request, region, objects) -> None:
    wanted = record(region, spec(request))
    cache = reader(region, spec(request, deadline=2.0))
    (before,) = processes()
    os.kill(before, signal.SIGSTOP)
    results = looked_up(cache, wanted)
    step_until(cache, lambda: results() == [MISS] * 5)
    step_until(cache, lambda: not Path(f"/proc/{before}").exists())
    cache.close()


def test_a_store_that_hangs_costs_a_deadline_and_is_used_again(request, region, objects) -> None:
    wanted = record(region, spec(request))
    metrics = _core.Metrics()
    cache = reader(region, spec(request, deadline=2.0), metrics)
    (before,) = processes()
    (objects / "hang").touch()
    results = looked_up(cache, wanted)
    step_until(cache, lambda: results() == [MISS] * 5)
    step_until(cache, lambda: not Path(f"/proc/{before}").exists())
    (objects / "hang").unlink()
    step_until(cache, lambda: any(pid != before for pid in processes()))
    cache.close()


def test_the_process_ends_with_the_engine_after_any_exit(request, region, objects) -> None:
    engine = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; sys.path.insert(0, sys.argv[1])\n"
            "from test_bindings_mooncake import *\n"
            "import tempfile\n"
            "region = attach(Path(tempfile.mkdtemp(dir=sys.argv[2])))\n"
            "config = MooncakeTierConfig(master='etcd://127.0.0.1:2379', op_timeout_ms=60000)\n"
            "cache = make_cache(region[0], tiers=[config.make_spec('mooncake', None, Namespace('n'))])\n"
            "print(processes()[0], flush=True); time.sleep(10000)",
            str(Path(__file__).parent),
            str(objects.parent),
        ],
        stdout=subprocess.PIPE,
    )
    assert engine.stdout is not None
    sibling = int(engine.stdout.readline())
    os.kill(sibling, signal.SIGSTOP)  # stopped, it cannot poll its socket
    engine.kill()
    engine.communicate()
    assert_ends(sibling)


LOOKS_AT_NOTHING = """
import signal
signal.alarm(120)  # in case nothing else ends it
from kv_offload.tiers.mooncake.client import end_with_the_engine
end_with_the_engine()
print("begun", flush=True)
while True:
    pass
"""
ITS_ENGINE = """
import os, socket, subprocess, sys, time
ends = [os.dup(end.fileno()) for end in socket.socketpair()]
os.dup2(ends[1], 3)
sibling = subprocess.Popen([sys.executable, "-c", sys.argv[1]], pass_fds=[3])
print(sibling.pid, flush=True)
time.sleep(10000)
"""


def test_a_process_that_is_busy_in_a_call_ends_with_the_engine() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ITS_ENGINE, LOOKS_AT_NOTHING], stdout=subprocess.PIPE, text=True
    ) as engine:
        try:
            assert engine.stdout is not None
            said = {engine.stdout.readline().strip(), engine.stdout.readline().strip()}
        finally:
            engine.kill()
    (sibling,) = (int(line) for line in said - {"begun"})
    assert_ends(sibling)


def test_a_start_without_the_package_is_refused(request, region, tmp_path, monkeypatch) -> None:
    site = tmp_path / "mooncake"
    site.mkdir()
    (site / "__init__.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(_core.ResourceError, match=r"libibverbs\.so\.1.*also for tcp") as caught:
        make_cache(region[0], tiers=[spec(request)])
    assert "\n" not in str(caught.value)


def test_a_restarted_master_has_no_records(request, region, real) -> None:
    opened = spec(request, real.address)
    wanted = record(region, opened)
    metrics = _core.Metrics()
    cache = reader(region, opened, metrics)
    real.kill(real.master)
    real.start_master()
    results = looked_up(cache, wanted)
    step_until(cache, lambda: results() == [MISS] * 5)
    # The storage process registers with the new master; then records are kept again, and other caches find
    # them.
    stored = store_until_written(cache, region, metrics, first=101)
    # A cache that starts before the epoch's object exists again creates another epoch, and shares nothing
    # with this one.
    quiet = 0

    def epoch_is_back() -> bool:
        nonlocal quiet
        quiet = quiet + 1 if cache.tier_stats(0)["queued_writes"] == 0 else 0
        return quiet > 2 and real.objects() > written(metrics)

    step_until(cache, epoch_is_back)
    other = reader(region, opened)
    again = looked_up(other, stored)
    step_until(other, lambda: HIT in again())
    other.close()
    cache.close()


def test_records_of_a_killed_storage_process_are_misses(request, region, tmp_path) -> None:
    with mooncake_store(tmp_path) as running:
        opened = spec(request, running.address)
        wanted = record(region, opened)
        metrics = _core.Metrics()
        cache = reader(region, opened, metrics)
        running.kill(running.holder)
        results = looked_up(cache, wanted)
        step_until(cache, lambda: results() == [MISS] * 5)
        assert metrics.value("kv_offload_failures_total", ["mooncake", "read", "io"]) > 0
        cache.close()
