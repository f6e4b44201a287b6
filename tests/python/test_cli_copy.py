# SPDX-License-Identifier: Apache-2.0
"""kv-offload copy: between directories, Redis servers and buckets that caches of the core fill and read."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from live_root import records_in, used_bytes
from redis_server import RedisClient, redis_server
from s3_server import ACCESS, BUCKET, SECRET, S3Server
from small_core import SHARD_BYTES, attach, key, make_cache
from typer.testing import CliRunner
from unprivileged import hidden
from written_root import FACTS

from kv_offload import _core, copying
from kv_offload.cli import app
from kv_offload.config import tier_at
from kv_offload.copy_limits import RateLimit, RecordMemory
from kv_offload.tiers.remote_root import RemoteRoot

NAMESPACE = FACTS.namespace_id()
DESCRIPTION = FACTS.readable_json()
MAX_BYTES = 8 << 20
MISS, HIT = 0, 1
ROW_UNIT = 4096  # rows are given in pages of an area
PATIENCE_SECONDS = 240.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Increases the timeouts: the servers run next to other tests."""
    monkeypatch.setattr(
        "kv_offload.tiers.base.TierConfig.op_timeout_seconds", property(lambda _: PATIENCE_SECONDS)
    )


# ---- a server


def content(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns the bytes of a chunk; three quarters of them are zeros, so that the codec has an effect."""
    whole = np.zeros(SHARD_BYTES, np.uint8)
    whole[: SHARD_BYTES // 4] = np.random.default_rng(number).integers(0, 256, SHARD_BYTES // 4, np.uint8)
    return whole


class Engine:
    """A cache over one tier, as a server has. The content of a chunk follows from its number."""

    def __init__(self, shm: Path, label: str, spec: Any) -> None:
        self.region, (self.worker,) = attach(shm, 4 << 20)
        self.metrics = _core.Metrics()
        self.label = label
        self.requests = 0
        self.cache = make_cache(
            self.region,
            self.metrics,
            tiers=[spec],
            load_policy="always",
            lookup_timeout_seconds=PATIENCE_SECONDS,
        )

    def store(self, numbers: Iterable[int]) -> None:
        """Stores one after another, and waits each time until the tier has it."""
        for number in numbers:
            before = self._written()
            request = self._begin()
            accepted, ticket, rows, *_ = self.cache.prepare_store(request, [key(number)])
            self._bytes_at(rows[0])[:] = content(number)
            self.worker.report(0, ticket, 0)
            self.cache.complete_store(accepted)
            self.cache.end_request(request)
            self.step_until(lambda before=before: self._written() > before)

    def finds(self, numbers: Iterable[int]) -> list[int]:
        """Returns the chunks that it can load, with the right bytes."""
        hits = []
        for number in numbers:
            request = self._begin()
            answer = [MISS]

            def answered(request: int = request, number: int = number, answer: list[int] = answer) -> bool:
                answer[0] = self.cache.lookup(request, key(number))
                return answer[0] in (MISS, HIT)

            self.step_until(answered)
            if answer[0] == HIT:
                ticket, rows, _ = self.cache.prepare_load(request, [key(number)])
                assert (self._bytes_at(rows[0]) == content(number)).all()
                self.worker.report(0, ticket, 0)
                self.cache.complete_load([key(number)])
                hits.append(number)
            self.cache.end_request(request)
        return hits

    def finds_in_time(self, numbers: Sequence[int]) -> None:
        """Waits until it finds all of them: what it missed a moment ago, it looks up again after a second."""
        self.step_until(lambda: self.finds(numbers) == list(numbers))

    def reset(self) -> None:
        self.cache.reset()
        self.step_until(lambda: bool(self.cache.tier_stats(0)["writable"]))

    def step_until(self, done: Callable[[], bool]) -> None:
        pause = threading.Event()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            self.cache.end_step()
            if done():
                return
            assert time.monotonic() < deadline, self.cache.tier_stats(0)
            pause.wait(0.001)

    def _written(self) -> int:
        return int(self.metrics.value("kv_offload_write_bytes_total", [self.label]))

    def _begin(self) -> int:
        self.requests += 1
        return int(self.cache.begin_request(f"r{self.requests}"))

    def _bytes_at(self, row: Any) -> Any:
        at = int(row) * ROW_UNIT
        return self.region.area(0)[at : at + SHARD_BYTES]


def wait_for_the_next_second() -> None:
    """The times of a bucket have whole seconds: what happens in one second has no order there."""
    second, pause = int(time.time()), threading.Event()
    while int(time.time()) == second:
        pause.wait(0.01)


class Place:
    """A tier: its address on the command line, and engines over it."""

    label: str
    address: str

    def spec(self) -> Any:
        raise NotImplementedError

    @contextmanager
    def engine(self, shm: Path, keys: Sequence[Path] = (), compress: str = "none") -> Iterator[Engine]:
        spec = self.spec()
        spec.encryption_key_files = [str(path) for path in keys]
        spec.compress = compress
        spec.elements = ["bytes"]
        engine = Engine(shm, self.label, spec)
        if self.label == "s3":
            wait_for_the_next_second()  # its records are newer than its epoch
        try:
            yield engine
        finally:
            engine.cache.close()

    def fill(self, shm: Path, numbers: Iterable[int], **options: Any) -> None:
        with self.engine(shm, **options) as engine:
            engine.store(numbers)

    def found(self, shm: Path, numbers: Iterable[int], **options: Any) -> list[int]:
        """Returns what a server that starts now finds."""
        with self.engine(shm, **options) as engine:
            return engine.finds(numbers)

    def damage(self, number: int) -> None:
        """Flips a bit in the payload of a record."""
        raise NotImplementedError


def flipped(record: bytes) -> bytes:
    return record[:5000] + bytes([record[5000] ^ 1]) + record[5001:]


class Directory(Place):
    label = "fs"

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self.address = str(path)
        self.max_bytes = max_bytes

    def spec(self) -> Any:
        return _core.FsTier(
            root_dir=str(self.path),
            max_bytes=self.max_bytes,
            namespace_id=NAMESPACE,
            namespace_json=DESCRIPTION,
            op_timeout_seconds=PATIENCE_SECONDS,
        )

    def files(self) -> list[Path]:
        return records_in(self.path)

    def file(self, number: int) -> Path:
        (path,) = records_in(self.path, key(number).hex())
        return path

    def damage(self, number: int) -> None:
        self.file(number).write_bytes(flipped(self.file(number).read_bytes()))


class Redis(Place):
    label = "redis"

    def __init__(self, socket: Path) -> None:
        self.client = RedisClient(socket)
        self.address = f"unix://{socket}"
        self._socket = socket

    def spec(self) -> Any:
        server = _core.RedisServer(unix_socket=str(self._socket))
        return _core.RedisTier(server=server, namespace_id=NAMESPACE, op_timeout_seconds=PATIENCE_SECONDS)

    def damage(self, number: int) -> None:
        (name,) = self.client.ask("KEYS", f"*:{key(number).hex()}")
        self.client.ask("SET", name, flipped(self.client.ask("GET", name)))


class Bucket(Place):
    label = "s3"

    def __init__(self, server: S3Server, prefix: str) -> None:
        self.server = server
        self.prefix = prefix
        self.address = f"s3://{BUCKET}/{prefix}?endpoint={server.endpoint}"

    def spec(self) -> Any:
        bucket = _core.S3Bucket(
            name=BUCKET,
            endpoint=self.server.endpoint,
            path_style=True,
            access_key=ACCESS,
            secret_key=SECRET,
        )
        return _core.S3Tier(
            bucket=bucket, namespace_id=NAMESPACE, prefix=self.prefix, op_timeout_seconds=PATIENCE_SECONDS
        )

    def damage(self, number: int) -> None:
        (name,) = (name for name in self.server.records(self.prefix) if name.endswith(key(number).hex()))
        self.server.overwrite(name, flipped(self.server.read(name)))


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    running = S3Server(tmp_path_factory.mktemp("s3"))
    try:
        running.start()
        yield running
    finally:
        running.kill()


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    path = tmp_path / "shm"
    path.mkdir()
    return path


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that makes an empty tier of a kind: fs, redis or s3."""
    with ExitStack() as stack:

        def make(kind: str, name: str) -> Place:
            if kind == "fs":
                return Directory(tmp_path / name)
            if kind == "redis":
                (tmp_path / name).mkdir()
                server = Redis(stack.enter_context(redis_server(tmp_path / name, "--maxmemory", "200mb")))
                stack.enter_context(server.client)
                return server
            for variable in [each for each in os.environ if each.startswith("AWS_")]:
                monkeypatch.delenv(variable)
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
            return Bucket(request.getfixturevalue("s3_server"), f"{tmp_path.name}-{name}")

        yield make


# ---- the command


def run(*arguments: Any, status: int = 0) -> Any:
    result = CliRunner().invoke(app, ["copy", *(str(argument) for argument in arguments)])
    assert result.exit_code == status, f"{result.output}\n{result.stderr}\n{result.exception!r}"
    assert "Traceback" not in result.output
    return result


def copied(source: Place, destination: Place, *options: Any, status: int = 0) -> dict[str, Any]:
    bound = ["--dst-max-bytes", destination.max_bytes] if isinstance(destination, Directory) else []
    result = run(source.address, destination.address, *bound, *options, "--json", status=status)
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def other_command(*arguments: Any, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.output


PAIRS = [("fs", "fs"), ("fs", "redis"), ("redis", "fs"), ("fs", "s3"), ("s3", "fs"), ("redis", "s3")]
NUMBERS = range(1, 13)


@pytest.mark.parametrize(("kind_from", "kind_to"), PAIRS)
def test_a_server_that_starts_after_the_copy_finds_every_record(
    place: Any, shm: Path, kind_from: str, kind_to: str
) -> None:
    source, destination = place(kind_from, "from"), place(kind_to, "to")
    source.fill(shm, NUMBERS)
    wait_for_the_next_second()
    report = copied(source, destination)
    assert (report["ended"], report["copied"], report["present"]) == ("complete", len(NUMBERS), 0)
    assert destination.found(shm, NUMBERS) == list(NUMBERS)
    other_command("verify", destination.address)
    again = copied(source, destination)
    assert (again["copied"], again["present"]) == (0, len(NUMBERS))


def test_a_copy_names_unreadable_directories_and_fails(tmp_path: Path, shm: Path) -> None:
    source, destination = Directory(tmp_path / "from"), Directory(tmp_path / "to")
    source.fill(shm, NUMBERS)
    unreadable = source.file(3).parent
    with hidden(unreadable):
        planned = copied(source, destination, "--dry-run", status=1)
        report = copied(source, destination, status=1)
    for each in (planned, report):
        assert each["ended"] == "complete"
        assert f"{unreadable} cannot be read" in each["message"]
        assert len(each["unreadable"]) == 1
    assert report["copied"] == planned["to_copy"] == len(records_in(destination.path)) < len(NUMBERS)
    with hidden(destination.file(1).parent):
        assert "cannot be read" in run(source.address, destination.address, status=1).stderr
    assert copied(source, destination)["copied"] == len(NUMBERS) - report["copied"]


def test_a_copy_does_not_take_the_only_readable_namespace_for_the_only_one(tmp_path: Path, shm: Path) -> None:
    source, destination = Directory(tmp_path / "from"), Directory(tmp_path / "to")
    source.fill(shm, NUMBERS)
    other = source.path / ("5" * 64)
    other.mkdir()
    with hidden(other):
        assert f"{other} cannot be read" in run(source.address, destination.address, status=1).stderr
        report = copied(source, destination, "--namespace", NAMESPACE.hex())
    assert report["copied"] == len(NUMBERS)


@pytest.mark.parametrize("kind", ["fs", "redis", "s3"])
def test_a_server_that_runs_meanwhile_finds_the_copies(place: Any, shm: Path, kind: str) -> None:
    source, destination = place("fs", "from"), place(kind, "to")
    source.fill(shm, NUMBERS)
    with destination.engine(shm) as server:
        server.store([100])
        assert server.finds(NUMBERS) == []
        assert copied(source, destination)["copied"] == len(NUMBERS)
        server.finds_in_time(NUMBERS)
        assert server.finds([100]) == [100]


@pytest.mark.parametrize(("kind_from", "kind_to"), [("fs", "redis"), ("redis", "fs"), ("fs", "fs")])
def test_encrypted_and_compressed_records_are_copied_unchanged(
    place: Any, shm: Path, tmp_path: Path, kind_from: str, kind_to: str
) -> None:
    secret = tmp_path / "key"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    source, destination = place(kind_from, "from"), place(kind_to, "to")
    source.fill(shm, NUMBERS, keys=[secret], compress="zstd")
    report = copied(source, destination, "--encryption-key-file", secret)
    assert report["copied"] == len(NUMBERS)
    assert report["copied_bytes"] < len(NUMBERS) * (SHARD_BYTES + 4096), "not compressed"
    assert destination.found(shm, NUMBERS, keys=[secret]) == list(NUMBERS)
    assert destination.found(shm, NUMBERS) == [], "a server without the key"
    other_command("verify", destination.address, "--encryption-key-file", secret)


@pytest.mark.parametrize("first", ["plain", "encrypted"])
def test_records_of_the_other_form_are_reported_and_not_copied(
    place: Any, shm: Path, tmp_path: Path, first: str
) -> None:
    secret = tmp_path / "key"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    source, destination = place("fs", "from"), place("redis", "to")
    plain, encrypted = list(range(1, 7)), list(range(7, 11))
    source.fill(shm, plain)
    source.fill(shm, encrypted, keys=[secret])
    keys = {"plain": [], "encrypted": [secret]}[first]
    own, other = (plain, encrypted) if first == "plain" else (encrypted, plain)
    destination.fill(shm, [100], keys=keys)
    report = copied(source, destination, status=1)
    assert (report["copied"], report["other_form"], report["failed"]) == (len(own), len(other), 0)
    form = "encrypted" if first == "plain" else "not encrypted"
    assert f"{source.address}: records not copied because they are {form}: {len(other)}" in report["message"]
    again = copied(source, destination, status=1)
    assert (again["copied"], again["present"], again["other_form"]) == (0, len(own), len(other))
    assert destination.found(shm, [*own, 100], keys=keys) == [*own, 100]


def test_the_most_recent_record_gives_an_empty_destination_its_form(
    place: Any, shm: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "key"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    source, destination = place("fs", "from"), place("fs", "to")
    source.fill(shm, [1, 2, 3])
    for path in source.files():
        os.utime(path, (1e9, 1e9))
    source.fill(shm, [4, 5], keys=[secret])
    for expected in ((2, 0), (0, 2)):
        report = copied(source, destination, status=1)
        assert (report["copied"], report["present"]) == expected
        assert report["other_form"] == 3


@pytest.mark.parametrize("kind", ["fs", "redis"])
def test_records_are_read_into_the_memory_of_earlier_ones(
    place: Any, shm: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    source, destination = place(kind, "from"), place("fs", "to")
    source.fill(shm, NUMBERS)
    source.damage(11)
    found: list[Any] = []

    def read(number: int, read: Callable[[], Any]) -> Any:
        answer = read()
        if answer[2] is not None:
            found.append(answer[2])
        return answer

    with_reads(monkeypatch, read)
    assert copied(source, destination, "--jobs", 1, status=1)["failed"] == 1
    assert len(found) == len(NUMBERS) - 1
    assert len({id(record) for record in found}) <= 3, "two at a time, and one after the damaged record"
    assert destination.found(shm, NUMBERS) == [number for number in NUMBERS if number != 11]


@pytest.mark.parametrize("kind", ["fs", "redis", "s3"])
def test_a_damaged_record_is_reported_and_not_copied(place: Any, shm: Path, kind: str) -> None:
    source, destination = place(kind, "from"), place("fs", "to")
    source.fill(shm, NUMBERS)
    source.damage(5)
    report = copied(source, destination, status=1)
    assert (report["ended"], report["copied"], report["failed"]) == ("complete", len(NUMBERS) - 1, 1)
    assert report["message"] == "1 record could not be copied"
    (failure,) = report["failures"]
    assert failure["kind"] == "corrupt"
    assert key(5).hex() in failure["path"]
    assert destination.found(shm, NUMBERS) == [number for number in NUMBERS if number != 5]
    assert source.file(5).exists() if kind == "fs" else True, "the source is not repaired"


def test_an_encrypted_record_that_fails_its_tag_is_found_with_the_key(
    place: Any, shm: Path, tmp_path: Path
) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for number, path in enumerate((right, wrong)):
        path.write_bytes(bytes([number]) * 32)
        path.chmod(0o600)
    source, destination = place("fs", "from"), place("fs", "to")
    source.fill(shm, [1], keys=[right])
    report = copied(source, destination, "--encryption-key-file", wrong, status=1)
    assert (report["copied"], report["failures"][0]["kind"]) == (0, "unavailable")


# ---- a destination that fails


class FaultyImporter:
    """The importer of a copy with faults: ``write`` gets the number of a write and the write itself."""

    def __init__(self, importer: Any, write: Callable[[int, Callable[[], Any]], Any]) -> None:
        self._importer = importer
        self._write = write
        self._numbers = iter(range(1 << 20))
        self.epoch = importer.epoch

    def write(self, record: Any, used: float) -> Any:
        return self._write(next(self._numbers), lambda: self._importer.write(record, used))

    def close(self) -> None:
        self._importer.close()


def with_writes(monkeypatch: pytest.MonkeyPatch, write: Callable[[int, Callable[[], Any]], Any]) -> None:
    original = copying.open_importer
    monkeypatch.setattr(copying, "open_importer", lambda *given: FaultyImporter(original(*given), write))


def with_reads(monkeypatch: pytest.MonkeyPatch, read: Callable[[int, Callable[[], Any]], Any]) -> None:
    """``read`` gets the number of a read of the copy's threads, and the read itself."""
    original = copying.Copier._read
    numbers = iter(range(1 << 20))

    def numbered(self: copying.Copier, entry: copying.Entry, into: Any) -> Any:
        return read(next(numbers), lambda: original(self, entry, into))

    monkeypatch.setattr(copying.Copier, "_read", numbered)


def test_a_destination_that_stays_unavailable_ends_the_copy(
    place: Any, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = range(1, 41)
    source, destination = place("fs", "from"), place("fs", "to")
    source.fill(shm, many)
    monkeypatch.setattr(copying, "_COUNTING_SECONDS", 0.01)
    with_writes(monkeypatch, lambda *_: ("unavailable", "writes are disabled", False))
    report = copied(source, destination, status=1)
    assert report["ended"] == "failed"
    assert report["message"] == f"{destination.address}: writes are disabled"
    assert 8 <= report["failed"] < len(many)


def test_all_records_wait_once_for_a_count_of_the_destination(
    place: Any, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = place("fs", "from"), place("fs", "to")
    source.fill(shm, NUMBERS)
    monkeypatch.setattr(copying, "_COUNTING_PAUSE", 0.0)

    def counting(number: int, write: Callable[[], Any]) -> Any:
        return ("unavailable", "it is being counted", False) if number < 5 else write()

    with monkeypatch.context() as patch:
        with_writes(patch, counting)
        assert copied(source, destination)["ended"] == "complete"
    # The clock of a copy that waited for the whole time.
    monkeypatch.setattr(copying, "_COUNTING_SECONDS", 0.0)
    with_writes(monkeypatch, lambda number, write: counting(number + 4, write))
    destination = place("fs", "other")
    report = copied(source, destination, "--jobs", 1, status=1)
    assert (report["ended"], report["failed"], report["copied"]) == ("complete", 1, len(NUMBERS) - 1)


# ---- reads run ahead of writes

RECORD_BYTES = SHARD_BYTES + 4096


def when_reads_wait(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Returns an event that is set when a reader thread has to wait for memory."""
    event = threading.Event()
    original = RecordMemory._has_room

    def has_room(self: RecordMemory, size: int) -> bool:
        found = original(self, size)
        if not found:
            event.set()
        return found

    monkeypatch.setattr(RecordMemory, "_has_room", has_room)
    return event


@pytest.mark.parametrize(
    ("memory", "most"), [(1, 2), (3 * RECORD_BYTES, 3), (4 * RECORD_BYTES - 1, 3), (1 << 30, 4)]
)
def test_reads_run_ahead_within_the_memory(
    place: Any, shm: Path, monkeypatch: pytest.MonkeyPatch, memory: int, most: int
) -> None:
    source, destination = place("fs", "from"), place("fs", "to")
    source.fill(shm, NUMBERS)
    monkeypatch.setattr(copying, "_MEMORY_BYTES", memory)
    ahead, lock = when_reads_wait(monkeypatch), threading.Lock()
    begun, ended, peak = 0, 0, 0

    def read(number: int, read: Callable[[], Any]) -> Any:
        nonlocal begun, peak
        with lock:
            begun += 1
            peak = max(peak, begun - ended)
            if begun == len(NUMBERS):
                ahead.set()
        return read()

    def write(number: int, write: Callable[[], Any]) -> Any:
        nonlocal ended
        if number < 2:
            assert ahead.wait(PATIENCE_SECONDS)
        found = write()
        with lock:
            ended += 1
        return found

    with_reads(monkeypatch, read)
    with_writes(monkeypatch, write)
    assert copied(source, destination, "--jobs", 2)["copied"] == len(NUMBERS)
    assert peak == most
    assert destination.found(shm, NUMBERS) == list(NUMBERS)


def test_unused_memory_of_records_is_bounded(place: Any, shm: Path) -> None:
    source = place("fs", "from")
    source.fill(shm, [1])
    root = source_root(source)
    (handle,) = (root.handle(record) for record in root.records(NAMESPACE.hex()))
    memory = RecordMemory(4, 2 * RECORD_BYTES)
    slots = [memory.take(RECORD_BYTES) for _ in range(4)]
    for slot in slots:
        assert slot is not None
        slot.record = root.read(NAMESPACE.hex(), handle)[2]
        memory.give_back(slot)
    again = [memory.take(RECORD_BYTES) for _ in range(4)]
    assert sum(slot is not None and slot.record is not None for slot in again) == 2
    memory.close()
    assert memory.take(1) is None


def test_a_slot_that_is_given_back_ends_its_share_of_the_memory() -> None:
    class WithoutWaits(RecordMemory):
        def _has_room(self, size: int) -> bool:
            assert super()._has_room(size)
            return True

    memory = WithoutWaits(1, 2 * RECORD_BYTES)
    for _ in range(3):
        for slot in [memory.take(RECORD_BYTES), memory.take(RECORD_BYTES)]:
            assert slot is not None
            memory.give_back(slot)


def test_a_full_destination_gets_no_record_that_was_read_ahead(
    place: Any, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = place("fs", "from"), place("fs", "to")
    source.fill(shm, NUMBERS)
    ahead = when_reads_wait(monkeypatch)
    writes: list[int] = []

    def write(number: int, write: Callable[[], Any]) -> Any:
        writes.append(number)
        assert ahead.wait(PATIENCE_SECONDS)
        return "no_space", "no byte is left", False

    with_writes(monkeypatch, write)
    report = copied(source, destination, "--jobs", 1, status=1)
    assert (report["ended"], report["copied"], report["failed"]) == ("full", 0, 0)
    assert writes == [0]


def test_a_failed_read_ahead_does_not_hide_or_lose_the_write_in_progress(
    place: Any, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = place("redis", "from"), place("fs", "to")
    source.fill(shm, NUMBERS)
    writing, failed = threading.Event(), threading.Event()

    def read(number: int, read: Callable[[], Any]) -> Any:
        if number != 1:
            return read()
        assert writing.wait(PATIENCE_SECONDS)
        failed.set()
        raise RuntimeError("the source cannot be opened")

    def write(number: int, write: Callable[[], Any]) -> Any:
        writing.set()
        assert failed.wait(PATIENCE_SECONDS)
        return write()

    with_reads(monkeypatch, read)
    with_writes(monkeypatch, write)
    report = copied(source, destination, "--jobs", 1, status=1)
    assert report["ended"] == "failed"
    assert report["message"].endswith(": the source cannot be opened")
    assert (report["copied"], report["failed"]) == (1, 1)
    assert len(destination.files()) == 1


def test_a_source_that_stays_unavailable_ends_the_copy(
    place: Any, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = range(1, 41)
    source, destination = place("fs", "from"), place("fs", "to")
    source.fill(shm, many)

    def read(number: int, read: Callable[[], Any]) -> Any:
        return read() if number < 3 else ("io", "no answer", None)

    with_reads(monkeypatch, read)
    report = copied(source, destination, "--jobs", 1, status=1)
    assert (report["ended"], report["message"]) == ("failed", f"{source.address}: no answer")
    assert report["copied"] == len(destination.files()) <= 3
    assert 8 <= report["failed"] < len(many) - 3


def test_a_thread_that_dies_does_not_leave_the_others_waiting(
    place: Any, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = place("fs", "from"), place("fs", "to")
    source.fill(shm, NUMBERS)

    ahead, third = when_reads_wait(monkeypatch), threading.Event()

    def read(number: int, read: Callable[[], Any]) -> Any:
        if number == 2:  # in the slot that the first write has given back
            ahead.clear()
            third.set()
        return read()

    def settle(self: copying.Copier, outcome: copying.Outcome) -> None:
        assert third.wait(PATIENCE_SECONDS)
        assert ahead.wait(PATIENCE_SECONDS)
        raise RuntimeError("a defect")

    with_reads(monkeypatch, read)
    monkeypatch.setattr(copying.Copier, "_settle", settle)
    report = copied(source, destination, "--jobs", 1, status=1)
    assert (report["ended"], report["message"]) == ("failed", "a defect")


# ---- interruption


def in_a_process(*arguments: Any) -> subprocess.Popen[bytes]:
    code = "from kv_offload.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "copy", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("kind", ["fs", "redis"])
def test_a_copy_that_is_killed_leaves_whole_records_and_continues(
    place: Any, shm: Path, tmp_path: Path, kind: str
) -> None:
    many = range(1, 101)
    source, destination = place("fs", "from"), place(kind, "to")
    source.fill(shm, many)
    bound = ["--dst-max-bytes", MAX_BYTES] if kind == "fs" else []

    def held() -> int:
        if kind == "fs":
            return len(destination.files())
        return len(destination.client.ask("KEYS", "*:*:*:*"))

    with in_a_process(source.address, destination.address, *bound, "--rate", "1MiB", "--jobs", 2) as process:
        give_up = time.monotonic() + PATIENCE_SECONDS
        while held() < 10:
            assert process.poll() is None
            assert time.monotonic() < give_up
        process.send_signal(signal.SIGKILL)
    before = held()
    assert 10 <= before < len(many)
    other_command("verify", destination.address)
    report = copied(source, destination)
    assert (report["present"], report["copied"]) == (before, len(many) - before)
    assert destination.found(shm, many) == list(many)
    other_command("verify", destination.address)


def at_the_end(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Returns an event that is set when a copy begins to wait for its threads."""
    ending = threading.Event()
    original = copying.Copier._end

    def end(self: copying.Copier, pool: Any) -> None:
        ending.set()
        original(self, pool)

    monkeypatch.setattr(copying.Copier, "_end", end)
    return ending


def test_ctrl_c_ends_after_the_records_in_progress(
    place: Any, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = place("fs", "from"), place("fs", "to")
    source.fill(shm, NUMBERS)
    ahead, asked = when_reads_wait(monkeypatch), threading.Event()

    def write(number: int, write: Callable[[], Any]) -> Any:
        if number == 3:
            assert ahead.wait(PATIENCE_SECONDS)
            asked.set()
            assert ending.wait(PATIENCE_SECONDS)
        ahead.clear()
        return write()

    def interrupt(_: copying.Totals) -> None:
        if asked.is_set():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        ending = at_the_end(patch)
        with_writes(patch, write)
        original = copying.Copier.run
        patch.setattr(copying.Copier, "run", lambda self, entries, _: original(self, entries, interrupt))
        report = copied(source, destination, "--jobs", 1, status=1)
    assert report["ended"] == "interrupted"
    assert report["copied"] == len(destination.files()) == 4, "what was only read is left out"
    assert copied(source, destination)["copied"] == len(NUMBERS) - 4


def test_further_ctrl_c_waits_for_the_records_in_progress(
    place: Any, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = place("fs", "from"), place("fs", "to")
    source.fill(shm, NUMBERS)
    main = threading.main_thread().ident
    assert main is not None
    ending, closed = at_the_end(monkeypatch), threading.Event()
    running: set[int] = set()
    running_at_close: list[int] = []

    def write(number: int, write: Callable[[], Any]) -> Any:
        running.add(number)
        if number == 2:
            signal.pthread_kill(main, signal.SIGINT)
            assert ending.wait(PATIENCE_SECONDS)
            signal.pthread_kill(main, signal.SIGINT)
            closed.wait(0.5)  # ends early if the importer is closed too early
        found = write()
        running.remove(number)
        return found

    def close(self: FaultyImporter, close: Callable[[FaultyImporter], None] = FaultyImporter.close) -> None:
        running_at_close.append(len(running))
        closed.set()
        close(self)

    with_writes(monkeypatch, write)
    monkeypatch.setattr(FaultyImporter, "close", close)
    result = run(source.address, destination.address, "--dst-max-bytes", MAX_BYTES, "--json", status=1)
    report = json.loads(result.stdout)
    assert running_at_close[0] == 0
    assert report["ended"] == "interrupted"
    assert report["copied"] == len(destination.files()) >= 3
    assert result.stderr.count("waiting for the records in progress") == 1


# ---- the threads of a copy, with tiers in this process

ENTRIES = [copying.Entry(bytes([number]), 10, 0.0, str(number)) for number in range(20)]


class FakeRecord:
    size = 10
    encryption_key_id = ""


class FakeTier:
    """Both tiers of a copy, which is interrupted when ``interrupted`` is set. ``read`` and ``write`` get the
    number of a call from 0 on."""

    where = "tier"
    epoch = "1"

    def __init__(self, *, jobs: int = 1, **options: Any) -> None:
        self.read_numbers: list[int] = []  # of the entries, in the order of the reads
        self.writes = 0
        self.on_read: Callable[[int], None] = lambda _: None
        self.on_write: Callable[[int], str] = lambda _: "ok"
        self.on_check: Callable[[], bool] = lambda: False
        self.interrupted = cast(Any, threading.Event())
        tier: Any = self
        self.copier = copying.Copier(
            "",
            lambda: tier,
            "1",
            tier,
            tier,
            jobs=jobs,
            encrypted=None,
            interrupts=self.interrupted,
            **options,
        )

    def was_reset(self, *_: Any) -> bool:
        return self.on_check()

    def read(self, namespace: str, handle: str, into: Any) -> Any:
        self.read_numbers.append(int(handle))
        self.on_read(len(self.read_numbers) - 1)
        return "ok", "", FakeRecord()

    def write(self, record: Any, used: float) -> Any:
        self.writes += 1
        return self.on_write(self.writes - 1), "", True

    def run(self, entries: Iterable[copying.Entry] = ENTRIES, **options: Any) -> None:
        """Runs the copy. Fails if threads are left."""
        before = set(threading.enumerate())
        try:
            self.copier.run(entries, **options)
        finally:
            left = set(threading.enumerate()) - before
            self.copier._end_threads()  # else the threads that a defect leaves would keep pytest from its end
            self.copier._end_writers()
            assert not left


@pytest.mark.parametrize(
    ("error", "raised"), [(BrokenPipeError(), KeyboardInterrupt), (ValueError("closed file"), ValueError)]
)
def test_ctrl_c_ends_the_threads_although_its_notice_fails(
    error: Exception, raised: type[BaseException]
) -> None:
    has_ended: list[bool] = []

    def notice(_: str) -> None:
        has_ended.append(tier.copier._stop.is_set())
        raise error

    tier = FakeTier(notice=notice)
    tier.interrupted.set()
    with pytest.raises((KeyboardInterrupt, OSError, ValueError)) as caught:
        tier.run()
    assert caught.type is raised
    assert has_ended == [True]


@pytest.mark.parametrize("later", ["ctrl_c", "unreadable_epoch"])
def test_what_happens_after_a_failure_does_not_replace_it(
    monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    monkeypatch.setattr(copying, "_INTERRUPT_SECONDS", 0.01)
    monkeypatch.setattr(copying, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(copying, "_LOOK_PAUSES", ())
    ending = at_the_end(monkeypatch)
    tier = FakeTier()

    def read(number: int) -> None:
        if number > 0:  # the read in progress, for which the copy waits
            assert ending.wait(PATIENCE_SECONDS)

    def check() -> bool:
        if later == "unreadable_epoch" and tier.copier._failure is not None and not ending.is_set():
            raise RuntimeError("no answer")
        return False

    def progress(_: copying.Totals) -> None:
        if later == "ctrl_c" and tier.copier._failure is not None:
            tier.interrupted.set()

    tier.on_read, tier.on_check = read, check
    tier.on_write = lambda _: "no_space"
    with pytest.raises((copying.CopyError, KeyboardInterrupt)) as raised:
        tier.run(progress=progress)
    assert isinstance(raised.value, copying.CopyError)
    assert raised.value.ended == "full"


def test_no_later_record_passes_one_that_waits_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = FakeTier(jobs=2)
    second_reader, lock = threading.Event(), threading.Lock()
    begun = 0
    begun_at_takes: list[int] = []

    class Lock:
        """A lock that shows when a thread waits for it."""

        def __enter__(self) -> None:
            if not lock.acquire(blocking=False):
                second_reader.set()
                lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    def entries() -> Iterator[copying.Entry]:
        nonlocal begun
        for begun, entry in enumerate(ENTRIES, 1):
            if begun == 2:
                second_reader.set()
            yield entry

    def take(size: int, take: Callable[[int], Any] = tier.copier._memory.take) -> Any:
        assert second_reader.wait(PATIENCE_SECONDS)
        begun_at_takes.append(begun)
        return take(size)

    monkeypatch.setattr(tier.copier, "_entry_lock", Lock())
    monkeypatch.setattr(tier.copier._memory, "take", take)
    tier.run(entries())
    assert begun_at_takes == [entry.key[0] + 1 for entry in ENTRIES]


class CountedLimit:
    """A limit of reads that counts the records that it lets through."""

    def __init__(self, on_wait: Callable[[int], object] = lambda _: None) -> None:
        self.passed = 0
        self._on_wait = on_wait

    def wait(self, _: int) -> None:
        self._on_wait(self.passed)
        self.passed += 1


def test_a_read_that_waits_for_memory_has_not_passed_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = when_reads_wait(monkeypatch)
    tier, limit = FakeTier(), CountedLimit()
    has_room = RecordMemory._has_room
    passed_while_waiting: list[tuple[int, int]] = []

    def checked(self: RecordMemory, size: int) -> bool:
        found = has_room(self, size)
        if not found:
            passed_while_waiting.append((limit.passed, len(tier.read_numbers)))
        return found

    def write(_: int) -> str:
        assert ahead.wait(PATIENCE_SECONDS)
        return "ok"

    tier.on_write = write
    monkeypatch.setattr(RecordMemory, "_has_room", checked)
    monkeypatch.setattr(tier.copier, "_read_limit", limit)
    tier.run()
    assert passed_while_waiting
    assert all(passed == reads for passed, reads in passed_while_waiting)
    assert limit.passed == len(ENTRIES)


def test_a_read_that_waits_for_the_rate_does_not_follow_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = FakeTier()

    def wait(passed: int) -> None:
        if passed == 1:
            tier.interrupted.set()
            assert tier.copier._stop.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(copying, "_INTERRUPT_SECONDS", 0.01)
    monkeypatch.setattr(tier.copier, "_read_limit", CountedLimit(wait))
    with pytest.raises(KeyboardInterrupt):
        tier.run()
    assert tier.read_numbers == [0]


# ---- bounds


def test_a_full_directory_ends_the_copy_and_keeps_its_records(shm: Path, tmp_path: Path) -> None:
    bound = 1 << 20
    many = range(1, 151)
    own = range(1000, 1020)
    source, destination = Directory(tmp_path / "from"), Directory(tmp_path / "to", bound)
    source.fill(shm, many)
    with destination.engine(shm) as server:
        server.store(own)
        report = copied(source, destination, status=1)
        assert report["ended"] == "full"
        assert "is full" in report["message"]
        assert 0 < report["copied"] < len(many)
        assert used_bytes(destination.path) <= bound
        assert len(destination.files()) == len(own) + report["copied"]
        assert server.finds(own) == list(own)


def test_a_directory_that_servers_use_needs_their_limit(shm: Path, tmp_path: Path) -> None:
    source, destination = Directory(tmp_path / "from"), Directory(tmp_path / "to", 1 << 20)
    source.fill(shm, NUMBERS)
    with destination.engine(shm) as server:
        server.store([100])
        result = run(source.address, destination.address, status=2)
        assert "is open in other processes" in result.stderr
        assert "give the same limit as --dst-max-bytes" in result.stderr
        assert len(destination.files()) == 1
    run(source.address, destination.address)
    assert len(destination.files()) == 1 + len(NUMBERS)


def test_a_full_server_ends_the_copy_and_evicts_nothing(shm: Path, tmp_path: Path) -> None:
    many = range(1, 301)
    own = range(1000, 1020)
    source = Directory(tmp_path / "from")
    source.fill(shm, many)
    (tmp_path / "to").mkdir()
    options = ("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru")
    with redis_server(tmp_path / "to", *options) as socket:
        destination = Redis(socket)
        with destination.client, destination.engine(shm) as server:
            server.store(own)
            report = copied(source, destination, status=1)
            assert report["ended"] == "full"
            assert 0 < report["copied"] < len(many)
            assert b"evicted_keys:0\r" in destination.client.ask("INFO", "stats")
            assert server.finds(own) == list(own)


# ---- order, limits, rate


def age(source: Directory, numbers: Iterable[int]) -> None:
    """Makes each record less recently used than the one after it; all were used since their write."""
    now = time.time_ns()
    for number in numbers:
        os.utime(source.file(number), ns=(now, now + (number + 100) * 1_000_000_000))


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the command run after the times that age() sets."""
    monkeypatch.setattr(copying, "_now", lambda: time.time() + 1000.0)


def test_a_time_in_the_future_counts_as_now(shm: Path, tmp_path: Path) -> None:
    source, destination = Directory(tmp_path / "from"), Directory(tmp_path / "to")
    times = {1: 4e9, 2: 12e9, 3: -1000.0}  # the second overflows 64 bits of nanoseconds
    source.fill(shm, times)
    for number, seconds in times.items():
        os.utime(source.file(number), (seconds, seconds))
    before = time.time()
    assert copied(source, destination)["copied"] == len(times)
    for number in times:
        assert before - 1.0 <= destination.file(number).stat().st_mtime <= time.time()


@pytest.mark.usefixtures("later")
def test_the_newest_records_are_copied_first_and_keep_their_time(shm: Path, tmp_path: Path) -> None:
    source, destination = Directory(tmp_path / "from"), Directory(tmp_path / "to")
    source.fill(shm, NUMBERS)
    age(source, NUMBERS)
    record_bytes = SHARD_BYTES + 4096
    # A limit is at least 1 MiB, so the plan is made here.
    root = source_root(source)
    plan = copying.make_plan(root, NAMESPACE.hex(), "1", {}, copying.Order.NEWEST, 5 * record_bytes + 1)
    assert [entry.key for entry in plan.entries] == [key(number) for number in reversed(NUMBERS)][:5]
    assert (plan.selected, plan.selected_bytes) == (5, 5 * record_bytes)
    there = {key(12): record_bytes, key(11): record_bytes - 4096}
    again = copying.make_plan(root, NAMESPACE.hex(), "1", there, copying.Order.NEWEST, 5 * record_bytes)
    assert [entry.key for entry in again.entries] == [key(number) for number in (11, 10, 9, 8)]
    assert (again.selected, again.present) == (5, 1), "records that are there count to the limit"
    copied(source, destination)
    for number in NUMBERS:
        times = [each.file(number).stat().st_mtime_ns for each in (source, destination)]
        assert times[0] == pytest.approx(times[1], abs=1000)


def test_max_bytes_limits_the_copied_bytes(shm: Path, tmp_path: Path) -> None:
    source, destination = Directory(tmp_path / "from"), Directory(tmp_path / "to")
    source.fill(shm, range(1, 91))
    report = copied(source, destination, "--max-bytes", "1MiB")
    assert (report["ended"], report["copied"]) == ("complete", (1 << 20) // (SHARD_BYTES + 4096))
    assert copied(source, destination, "--max-bytes", "1MiB")["copied"] == 0


def source_root(source: Directory) -> Any:
    from kv_offload.cli.roots import open_root

    return open_root(source.address)


@pytest.mark.usefixtures("later")
def test_records_that_were_hit_come_first(shm: Path, tmp_path: Path) -> None:
    source = Directory(tmp_path / "from")
    source.fill(shm, [1, 2, 3, 4])
    written = time.time_ns()
    for number, seconds in ((1, 100), (2, 200), (3, 300), (4, 400)):
        os.utime(source.file(number), ns=(written, written + seconds * 1_000_000_000))
    root = source_root(source)
    known = root.with_history
    # 3 and 4 were written shortly before they were last used: they were never hit.
    root.with_history = lambda record: known(record) | {"hit": record["mtime"] < written / 1e9 + 250}
    for order, expected in ((copying.Order.MOST_USED, [2, 1, 4, 3]), (copying.Order.NEWEST, [4, 3, 2, 1])):
        plan = copying.make_plan(root, NAMESPACE.hex(), "1", {}, order, None)
        assert [entry.key for entry in plan.entries] == [key(number) for number in expected]
    root.with_history = known
    plan = copying.make_plan(root, NAMESPACE.hex(), "1", {}, copying.Order.MOST_USED, None)
    assert [entry.key for entry in plan.entries] == [key(number) for number in (4, 3, 2, 1)]


def test_most_used_needs_a_tier_that_records_hits(place: Any, shm: Path, tmp_path: Path) -> None:
    source = place("redis", "from")
    source.fill(shm, [1])
    result = run(source.address, tmp_path / "to", "--order", "most-used", status=2)
    assert "hits are not recorded there, only times; use --order newest" in result.stderr


def test_the_rate_spreads_bytes_over_time() -> None:
    now, pauses = [100.0], []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    limit = RateLimit(1000, pause, lambda: now[0])
    for count in (500, 2000, 1000):
        limit.wait(count)
    assert pauses == [0.5, 2.0]
    now[0] += 10.0
    limit.wait(1000)
    assert pauses == [0.5, 2.0], "unused time is not made up for, and costs nothing"
    RateLimit(None, pause, lambda: now[0]).wait(1 << 40)
    assert pauses == [0.5, 2.0]


def test_the_rate_limits_the_reads_and_the_writes(
    place: Any, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = place("fs", "from"), place("fs", "to")
    source.fill(shm, NUMBERS)
    waits: dict[Any, int] = {}
    monkeypatch.setattr(
        RateLimit, "wait", lambda self, count: waits.update({self: waits.get(self, 0) + count})
    )
    size = copied(source, destination, "--jobs", 1, "--rate", "1GiB")["copied_bytes"]
    assert list(waits.values()) == [size, size]
    assert {limit._rate for limit in waits} == {1 << 30}


def test_a_dry_run_changes_nothing(place: Any, shm: Path) -> None:
    source, destination = place("fs", "from"), place("fs", "to")
    source.fill(shm, NUMBERS)
    report = copied(source, destination, "--dry-run")
    assert (report["dry_run"], report["to_copy"], report["copied"]) == (True, len(NUMBERS), 0)
    assert not destination.path.exists()
    destination.fill(shm, [1, 2])
    before = sorted((path, path.stat().st_mtime_ns) for path in destination.path.rglob("*"))
    report = copied(source, destination, "--dry-run")
    assert (report["present"], report["to_copy"]) == (2, len(NUMBERS) - 2)
    assert sorted((path, path.stat().st_mtime_ns) for path in destination.path.rglob("*")) == before
    text = run(source.address, destination.address, "--dry-run").stdout
    assert text.splitlines() == [
        f"12 records (144.0 KiB) selected: 2 already in {destination.address}",
        "10 records (120.0 KiB) would be copied",
    ]


# ---- resets


def during_the_copy(monkeypatch: pytest.MonkeyPatch, after: int, act: Callable[[], None]) -> None:
    """Calls ``act`` before the write of record number ``after``; needs --jobs 1."""
    writes = iter(range(1 << 20))
    original = copying.Copier._write

    def write(self: copying.Copier, record: Any, used: float) -> Any:
        if next(writes) == after:
            act()
        return original(self, record, used)

    monkeypatch.setattr(copying.Copier, "_write", write)


@pytest.mark.parametrize("checks", ["often", "at the end"])
@pytest.mark.parametrize(
    ("kind_from", "kind_to"), [("fs", "fs"), ("redis", "fs"), ("fs", "s3"), ("s3", "redis")]
)
def test_a_reset_of_the_source_removes_the_copies(
    place: Any,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind_from: str,
    kind_to: str,
    checks: str,
) -> None:
    source, destination = place(kind_from, "from"), place(kind_to, "to")
    monkeypatch.setattr(copying, "CHECK_SECONDS", 0.02 if checks == "often" else 1000.0)
    with source.engine(shm) as server:
        server.store(NUMBERS)
        other = shm / "other"
        other.mkdir()
        wait_for_the_next_second()
        destination.fill(other, [3, 100])  # newer than the records of the source
        during_the_copy(monkeypatch, 5, server.reset)
        report = copied(source, destination, "--jobs", 1, status=1)
    assert report["ended"] == "reset"
    assert report["copied"] >= 5
    assert report["removed"] == report["copied"]
    assert "copied records were removed again" in report["message"]
    assert destination.found(shm, [*NUMBERS, 100]) == [3, 100], "what it had before stays"


def test_an_interrupted_removal_names_the_purge_command(
    place: Any, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = place("fs", "from"), place("fs", "to")

    def remove(_: copying.Copier) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(copying.Copier, "_remove_attempted", remove)
    with source.engine(shm) as server:
        server.store(NUMBERS)
        during_the_copy(monkeypatch, 5, server.reset)
        report = copied(source, destination, "--jobs", 1, status=1)
    assert report["ended"] == "reset"
    assert "interrupted: run `kv-offload purge" in report["message"]
    assert "run it again" not in report["message"]


@pytest.mark.parametrize(("kind_from", "kind_to"), [("fs", "fs"), ("redis", "fs"), ("fs", "redis")])
def test_copies_from_before_a_reset_are_replaced(
    place: Any, shm: Path, monkeypatch: pytest.MonkeyPatch, kind_from: str, kind_to: str
) -> None:
    source, destination = place(kind_from, "from"), place(kind_to, "to")
    destination.fill(shm, [100])
    with source.engine(shm) as server:
        server.store(NUMBERS)
        with monkeypatch.context() as patch:
            patch.setattr(copying.Copier, "_undo", lambda _: "killed")
            during_the_copy(patch, 5, server.reset)
            first = copied(source, destination, "--jobs", 1, status=1)
    assert first["copied"] >= 5
    source.fill(shm, NUMBERS)
    dry = copied(source, destination, "--dry-run")
    assert (dry["outdated"], dry["to_copy"]) == (first["copied"], len(NUMBERS))
    report = copied(source, destination)
    assert (report["outdated"], report["copied"]) == (first["copied"], len(NUMBERS))
    times = [newest_creation(place) for place in (source, destination)]
    assert times[0] == times[1]
    again = copied(source, destination)
    assert (again["outdated"], again["copied"], again["present"]) == (0, 0, len(NUMBERS))
    assert destination.found(shm, [*NUMBERS, 100]) == [*NUMBERS, 100]


@pytest.mark.parametrize(("kind_from", "kind_to"), [("s3", "fs"), ("fs", "s3")])
def test_with_a_bucket_copies_from_before_a_reset_are_replaced(
    place: Any, shm: Path, monkeypatch: pytest.MonkeyPatch, kind_from: str, kind_to: str
) -> None:
    source, destination = place(kind_from, "from"), place(kind_to, "to")
    with source.engine(shm) as server:
        server.store(NUMBERS)
        with monkeypatch.context() as patch:
            patch.setattr(copying.Copier, "_undo", lambda _: "killed")
            during_the_copy(patch, 5, server.reset)
            first = copied(source, destination, "--jobs", 1, status=1)
    assert first["copied"] >= 5
    source.fill(shm, NUMBERS)
    report = copied(source, destination)
    assert report["outdated"] == first["copied"]
    assert report["copied"] == len(NUMBERS)
    assert written_in_headers(destination) == written_in_headers(source)


def written_in_headers(place: Place) -> dict[str, float]:
    """Returns the creation time in each record that a newly started server finds: the listing of a bucket has
    only the time at which it was stored."""
    root = tier_at(place.address).open_root(changes=False, given=place.address)
    epoch = str(root.startup_epoch(NAMESPACE.hex()))
    return {
        record["key"]: root.read(NAMESPACE.hex(), root.handle(record))[2].created
        for record in root.records(NAMESPACE.hex())
        if str(record["epoch"]) == epoch
    }


def newest_creation(place: Place) -> dict[str, float]:
    """Returns the creation time of each record of NUMBERS that a newly started server finds."""
    root = tier_at(place.address).open_root(changes=False, given=place.address)
    epoch = str(root.startup_epoch(NAMESPACE.hex()))
    wanted = {key(number).hex() for number in NUMBERS}
    return {
        record["key"]: root.created(NAMESPACE.hex(), root.handle(record))[0]
        for record in root.records(NAMESPACE.hex())
        if str(record["epoch"]) == epoch and record["key"] in wanted
    }


def test_a_source_that_was_evicted_was_not_reset(
    place: Any, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = place("fs", "from"), place("fs", "to")
    source.fill(shm, NUMBERS)

    def evict() -> None:
        _core.FsRoot(source.address).evict(target_bytes=0, dead_before=time.time() + 1e6)

    during_the_copy(monkeypatch, 8, evict)
    report = copied(source, destination, "--jobs", 1, status=1)
    assert (report["ended"], report["removed"]) == ("failed", 0)
    assert report["message"].startswith(
        f"{source.address}: the namespace {NAMESPACE.hex()} no longer exists: it was evicted or purged"
    )
    assert len(destination.files()) == report["copied"] >= 8


def test_a_source_whose_epoch_cannot_be_read_was_not_reset(
    place: Any, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = place("fs", "from"), place("fs", "to")
    source.fill(shm, NUMBERS)
    monkeypatch.setattr(copying, "_LOOK_PAUSES", (0.0, 0.0))

    def hide() -> None:
        space = source.path / NAMESPACE.hex()
        space.rename(source.path / "aside")
        space.touch()

    during_the_copy(monkeypatch, 8, hide)
    report = copied(source, destination, "--jobs", 1, status=1)
    assert (report["ended"], report["removed"]) == ("failed", 0)
    assert "cannot be read" in report["message"]
    assert f"purge {destination.address} --namespace {NAMESPACE.hex()}" in report["message"]
    assert len(destination.files()) == report["copied"] >= 8


def test_a_failed_look_at_an_epoch_is_repeated(
    place: Any, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = place("fs", "from"), place("redis", "to")
    source.fill(shm, NUMBERS)
    monkeypatch.setattr(copying, "_LOOK_PAUSES", (0.0, 0.0))
    original = RemoteRoot.was_reset
    errors = [RuntimeError("connection reset by peer")] * 2

    def was_reset(self: RemoteRoot, namespace: str, epoch: str) -> bool:
        if errors:
            raise errors.pop()
        return original(self, namespace, epoch)

    monkeypatch.setattr(RemoteRoot, "was_reset", was_reset)
    report = copied(source, destination)
    assert (report["ended"], report["copied"], errors) == ("complete", len(NUMBERS), [])


def test_an_error_of_a_thread_ends_with_a_report(
    place: Any, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "key"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    source, destination = place("fs", "from"), place("fs", "to")
    source.fill(shm, NUMBERS, keys=[secret])
    during_the_copy(monkeypatch, 5, secret.unlink)
    report = copied(source, destination, "--jobs", 1, "--encryption-key-file", secret, status=1)
    assert (report["ended"], report["failed"]) == ("failed", 1)
    assert 6 <= report["copied"] == len(destination.files()) <= 7, "one may have been read before"
    assert str(secret) in report["message"]


@pytest.mark.parametrize("kind", ["fs", "redis", "s3"])
@pytest.mark.parametrize("arrives", ["before the removal", "after the removal"])
def test_a_write_without_an_answer_is_removed_too(
    place: Any, shm: Path, monkeypatch: pytest.MonkeyPatch, kind: str, arrives: str
) -> None:
    source, destination = place("redis", "from"), place(kind, "to")
    late: list[Callable[[], Any]] = []

    def timed_out(number: int, write: Callable[[], Any]) -> Any:
        if number != 2:
            return write()
        if arrives == "before the removal":
            assert write()[0] == "ok"
        else:
            late.append(write)
        return "timeout", "no answer within the time limit", False

    def sleep(_: float) -> None:
        for write in late:
            assert write() == ("ok", "", True)
        late.clear()

    def read(self: Any, namespace: str, handle: Any, into: Any = None) -> Any:
        return self._records.read(handle)  # into new memory: the late write needs its record

    with_writes(monkeypatch, timed_out)
    monkeypatch.setattr(RemoteRoot, "read", read)
    monkeypatch.setattr(copying, "_sleep", sleep)
    with source.engine(shm) as server:
        server.store(NUMBERS)
        during_the_copy(monkeypatch, 5, server.reset)
        report = copied(source, destination, "--jobs", 1, status=1)
    assert (report["ended"], report["removed"]) == ("reset", report["copied"] + 1)
    assert "Writes without an answer: 1" in report["message"]
    assert f"purge {report['destination']} --namespace {NAMESPACE.hex()}" in report["message"]
    assert destination.found(shm, NUMBERS) == []


@pytest.mark.parametrize("kind", ["fs", "redis", "s3"])
def test_after_a_reset_of_the_destination_its_servers_find_no_copies(
    place: Any, shm: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    source, destination = place("fs", "from"), place(kind, "to")
    source.fill(shm, NUMBERS)
    with destination.engine(shm) as server:
        server.store([100])
        during_the_copy(monkeypatch, 5, server.reset)
        report = copied(source, destination, "--jobs", 1, status=1)
        assert report["ended"] == "reset"
        assert "its servers do not find the copies. Run the command again" in report["message"]
        assert server.finds([*NUMBERS, 100]) == []
    assert destination.found(shm, [*NUMBERS, 100]) == []
    monkeypatch.undo()


def test_only_the_current_epoch_is_copied(place: Any, shm: Path) -> None:
    source, destination = place("redis", "from"), place("fs", "to")
    with source.engine(shm) as server:
        server.store([1, 2])
        server.reset()
        server.store([3])  # in an epoch of its own
    source.fill(shm, [4, 5])
    assert copied(source, destination)["copied"] == 2
    assert destination.found(shm, range(1, 6)) == [4, 5]


# ---- wrong use


def test_wrong_arguments_are_explained(place: Any, shm: Path, tmp_path: Path) -> None:
    source, redis = place("fs", "from"), place("redis", "redis")
    missing = run(tmp_path / "missing", tmp_path / "to", status=2)
    assert "does not exist; the first server that uses it creates it" in missing.stderr
    empty = run(redis.address, tmp_path / "to", status=2)
    assert "holds no records" in empty.stderr
    source.fill(shm, [1])
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    for arguments, part in (
        ((source.address, source.address), "SRC and DST are the same tier"),
        ((source.address, tmp_path / "photos"), "is not a root of kv-offload"),
        ((source.address, tmp_path / "to", "-n", "ffff"), "no namespace starts with ffff"),
        ((source.address, tmp_path / "to", "--rate", "fast"), "'fast'"),
        ((source.address, tmp_path / "to", "--rate", "0"), "--rate is 0; give at least 1MiB"),
        ((source.address, tmp_path / "to", "--max-bytes", "0MiB"), "--max-bytes is 0MiB; give at least 1MiB"),
        ((source.address, tmp_path / "to", "--dst-max-bytes", "0"), "--dst-max-bytes is 0; give at least"),
        ((source.address, redis.address, "--dst-max-bytes", "1GiB"), "a tier of type 'redis' takes no size"),
        ((source.address, tmp_path / "to", "--encryption-key-file", tmp_path / "no"), "/no"),
        (("mooncake=127.0.0.1:1", tmp_path / "to"), "purge and copy do not support it"),
        ((source.address, "mooncake=127.0.0.1:1"), "purge and copy do not support it"),
    ):
        result = run(*arguments, status=2)
        assert part in result.stderr, (arguments, result.stderr)
    assert not (tmp_path / "to").exists()


def test_several_namespaces_need_a_choice(shm: Path, tmp_path: Path) -> None:
    source = Directory(tmp_path / "from")
    source.fill(shm, [1, 2])
    other = _core.FsTier(
        root_dir=str(source.path), max_bytes=MAX_BYTES, namespace_id=bytes(32), namespace_json="{}"
    )
    engine = Engine(shm, "fs", other)
    engine.store([7])
    engine.cache.close()
    result = run(source.address, tmp_path / "to", status=2)
    listed = ", ".join(sorted(("0" * 12, NAMESPACE.hex()[:12])))
    assert f"holds records of 2 namespaces; choose one with --namespace: {listed}" in result.stderr
    destination = Directory(tmp_path / "to")
    assert copied(source, destination, "-n", NAMESPACE.hex()[:6])["copied"] == 2
    (description,) = destination.path.glob("*/namespace.json")
    assert description.read_text() == DESCRIPTION


def test_a_namespace_that_a_server_cannot_describe_is_described_by_the_first_server(
    place: Any, shm: Path
) -> None:
    source, destination = place("redis", "from"), place("fs", "to")
    source.fill(shm, [1])
    copied(source, destination)
    assert list(destination.path.glob("*/namespace.json")) == []
    assert destination.found(shm, [1]) == [1]
    (description,) = destination.path.glob("*/namespace.json")
    assert description.read_text() == DESCRIPTION
