# SPDX-License-Identifier: Apache-2.0
"""Two hosts and one directory, through real mounts. Each host has its own file system over the directory
(tests/slow_disk, FUSE), its own boot id and its own process. tests/cpp/.../nfs_test.cc simulates the worst
behaviour of NFS; this test runs through the kernel, and needs root.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from live_root import used_bytes

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "slow_disk"))

from slow_disk import NoFuseError, SlowDisk, build  # noqa: E402

MAX_BYTES = 3 << 20  # a third of it for directories
FILL = 300  # records: more than fit
ON_DISK = 8192 + 4096  # of one record
WARNED = "do not keep other hosts out"
PATIENCE_SECONDS = 240  # for actions that a host performs about once a second


class Host:
    """A process that serves from its mount, in a mount namespace where the kernel has another boot id."""

    def __init__(self, folder: Path, mountpoint: Path) -> None:
        boot = folder / f"boot-{mountpoint.name}"
        boot.write_text(f"{uuid.uuid4()}\n")
        self.log = folder / f"log-{mountpoint.name}"
        script = 'mount --bind "$1" /proc/sys/kernel/random/boot_id && shift && exec "$@"'
        driver = [sys.executable, str(Path(__file__).with_name("shared_host.py"))]
        command = ["unshare", "--mount", "sh", "-c", script, "sh", str(boot), *driver]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, str(mountpoint / "root"), str(MAX_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def wait_until_ready(self) -> None:
        self._answer()

    def store_first_accepted(self, numbers: Iterable[int]) -> int:
        """Stores one number after another until the tier takes one, and returns it.

        The tier takes none while it counts a root of another boot, and while a full root has no record of its
        epoch and the other host has not made room yet.
        """
        give_up = time.monotonic() + PATIENCE_SECONDS
        for number in numbers:
            if self.store([number]) == 1:
                return number
            if time.monotonic() > give_up:
                break
            self.do("step", seconds=0.05)
        return pytest.fail(f"the host does not write\n{self.log.read_text()}")

    def __enter__(self) -> Host:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._process as process:  # closes its pipes
            process.kill()

    def begin(self, verb: str, **more: Any) -> Callable[[], dict[str, Any]]:
        assert self._process.stdin is not None
        print(json.dumps({"do": verb, **more}), file=self._process.stdin, flush=True)
        return self._answer

    def do(self, verb: str, **more: Any) -> dict[str, Any]:
        return self.begin(verb, **more)()

    def store(self, numbers: Sequence[int]) -> int:
        return int(self.do("store", numbers=list(numbers))["written"])

    def finds(self, numbers: Sequence[int]) -> list[int]:
        answer = self.do("find", numbers=list(numbers))
        assert answer["wrong"] == []
        return list(answer["hits"])

    def finds_in_time(self, numbers: Sequence[int]) -> bool:
        """Retries: a missing record is looked up again after a moment."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while self.finds(numbers) != list(numbers):
            if time.monotonic() > give_up:
                return False
            self.do("step", seconds=0.02)
        return True

    def warned(self) -> bool:
        return WARNED in self.log.read_text()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.log.read_text()
        return dict(json.loads(line))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.geteuid() != 0:
        pytest.skip("no shared mounts: mounting needs root")
    return build(tmp_path_factory.mktemp("program"))


class Shared:
    def __init__(self, folder: Path, disks: Sequence[SlowDisk], hosts: Sequence[Host]) -> None:
        self.directory = folder / "directory" / "root"
        self.disks, self.hosts = disks, hosts


@pytest.fixture
def shared(request: pytest.FixtureRequest, program: Path, tmp_path: Path) -> Iterator[Shared]:
    disks = [
        SlowDisk(tmp_path / "directory", tmp_path / name, program, locks=request.param) for name in ("a", "b")
    ]
    entered: list[SlowDisk | Host] = []
    try:
        for disk in disks:
            try:
                entered.append(disk.__enter__())
            except NoFuseError as error:
                pytest.skip(f"no shared mounts: {error}")
        hosts = []
        for disk in disks:
            hosts.append(Host(tmp_path, disk.mountpoint))
            entered.append(hosts[-1])
            hosts[-1].wait_until_ready()
            hosts[-1].store_first_accepted(itertools.count(9000 + 1000 * len(hosts)))
            disk.tell(remembers_names=1)
        yield Shared(tmp_path, disks, hosts)
    finally:
        for disk in disks:
            if disk in entered:
                disk.tell(frozen=0)  # a thread in a frozen call cannot be killed
        for one in reversed(entered):
            one.__exit__(None, None, None)


with_locks = pytest.mark.parametrize("shared", [True], indirect=True, ids=["locks"])
without_locks = pytest.mark.parametrize("shared", [False], indirect=True, ids=["local_lock"])


@with_locks
def test_a_host_finds_records_of_the_other_after_a_negative_lookup(shared: Shared) -> None:
    one, other = shared.hosts
    assert other.store([1]) == 1
    assert one.finds_in_time([1])
    for first in (10, 20):
        numbers = range(first, first + 5)
        assert other.finds(numbers) == []
        assert one.store(numbers) == 5
        assert other.finds_in_time(numbers)
        one, other = other, one


@with_locks
def test_both_hosts_fill_evict_and_reset_within_the_bound(shared: Shared) -> None:
    one, other = shared.hosts
    for first in (0, FILL // 2):
        answers = [
            host.begin("store", numbers=list(range(start, start + FILL // 2)))
            for host, start in ((one, first), (other, first + 1000))
        ]
        for answer in answers:
            assert answer()["written"] == FILL // 2
        assert used_bytes(shared.directory) <= MAX_BYTES + 2 * ON_DISK
    assert sum(host.do("stats")["tier"]["evicted_bytes"] for host in shared.hosts) > 0
    assert one.finds_in_time([1000 + FILL - 1])
    one.do("reset")
    assert one.finds([FILL - 1, 1000 + FILL - 1]) == [], "records of the old weights must miss"
    stored = one.store_first_accepted(reversed(range(FILL)))
    assert one.finds([stored]) == [stored]
    kept = other.finds(range(1000 + FILL // 2, 1000 + FILL))
    assert len(kept) > FILL // 4, "the other host keeps its epoch, except what it evicted for this host"
    assert used_bytes(shared.directory) <= MAX_BYTES + 2 * ON_DISK
    for host in shared.hosts:
        assert [failure for failure in host.do("stats")["failures"] if failure[0] != ["fs", "declined"]] == []
        assert not host.warned()


@with_locks
def test_a_host_with_a_hanging_mount_blocks_no_other_and_recovers(shared: Shared) -> None:
    one, other = shared.hosts
    assert other.store(range(5)) == 5
    shared.disks[1].tell(frozen=1)
    stuck = other.begin("store", numbers=[50])
    assert one.store(range(100, 100 + FILL)) == FILL, "more records than fit: the host must evict"
    shared.disks[1].tell(frozen=0)
    stuck()
    assert used_bytes(shared.directory) <= MAX_BYTES + 2 * ON_DISK
    assert other.finds_in_time([100 + FILL - 1])
    assert other.store([51]) == 1
    assert one.finds_in_time([51])
    assert not one.warned()
    assert not other.warned()


@without_locks
def test_locks_that_do_not_reach_the_other_host_are_reported_and_disable_writes(shared: Shared) -> None:
    hosts = shared.hosts
    number = 0

    def quiet(host: Host) -> bool:
        nonlocal number
        number += 1
        return host.warned() and host.store([number]) == 0

    for _ in range(60):
        # Both write at once: each detects the other by a file that both write to.
        answers = []
        for host in hosts:
            number += 20
            answers.append(host.begin("store", numbers=list(range(number - 20, number))))
        for answer in answers:
            answer()
        # One of them continues alone: no other host overwrites its records.
        if any([quiet(host) for host in hosts]):
            break
    else:
        pytest.fail("no host detected the other")
