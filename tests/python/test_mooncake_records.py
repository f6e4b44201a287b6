# SPDX-License-Identifier: Apache-2.0
"""kv_offload/tiers/mooncake/records.py: records by sessions and by plain calls, over Mooncake's own store
and over a scripted store.
"""

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_root import paths_in
from mooncake_store import MooncakeProcesses, mooncake_store

from kv_offload.tiers.mooncake.records import (
    BAD_LENGTH,
    NO_OBJECT,
    NOT_COMPLETE,
    NOT_IN_MEMORY,
    OBJECT_EXISTS,
    Records,
)

ROOM = 1 << 16


class Buffer:
    """Memory that a store may register."""

    def __init__(self) -> None:
        self.map = mmap.mmap(-1, ROOM)
        self._anchor = ctypes.c_char.from_buffer(self.map)
        self.address = ctypes.addressof(self._anchor)

    def fill(self, value: bytes) -> int:
        self.map[: len(value)] = value
        return len(value)


class Scripted:
    """Objects in memory. ``answers[call]`` lists results that replace the action of that call, each used
    once. ``calls`` holds the calls in order, with the object name.
    """

    def __init__(self, completes: bool = True) -> None:
        self.objects: dict[str, bytes] = {}
        self.begun: dict[str, bytes] = {}
        self.answers: dict[str, list[int]] = {}
        self.calls: list[tuple[str, str]] = []
        self._completes = completes  # a session writes all copies of an object

    def _said(self, call: str, name: str) -> int | None:
        self.calls.append((call, name))
        waiting = self.answers.get(call)
        return waiting.pop(0) if waiting else None

    def called(self, call: str) -> int:
        return sum(one == call for one, _ in self.calls)

    def is_exist(self, name: str, /) -> int:
        said = self._said("is_exist", name)
        return int(name in self.objects) if said is None else said

    def put_from(self, name: str, address: int, size: int) -> int:
        said = self._said("put_from", name)
        if said is None:
            self.objects.setdefault(name, ctypes.string_at(address, size))
        return said or 0

    def get_into(self, name: str, address: int, room: int) -> int:
        said = self._said("get_into", name)
        if said is not None or name not in self.objects:
            return NO_OBJECT if said is None else said
        value = self.objects[name]
        if len(value) > room:
            return BAD_LENGTH
        ctypes.memmove(address, value, len(value))
        return len(value)

    def get_size(self, name: str, /) -> int:
        return len(self.objects[name]) if name in self.objects else NO_OBJECT

    def remove(self, name: str, force: bool = False) -> int:
        said = self._said("remove", name)
        if said is None and self._completes:
            del self.objects[name]
        return said if said is not None else 0 if self._completes else NOT_COMPLETE

    def batch_put_session_start(self, names: list[str], sizes: list[int]) -> list[int]:
        said = self._said("start", names[0])
        if said is not None:
            return [said]
        if names[0] in self.begun:
            return [BAD_LENGTH]
        if names[0] in self.objects:
            return [OBJECT_EXISTS]
        self.begun[names[0]] = bytes(sizes[0])
        return [0]

    def batch_put_from_multi_buffer_ranges(self, names: Any, at: Any, sizes: Any, offsets: Any) -> list[int]:
        said = self._said("move", names[0])
        if said is None:
            self.begun[names[0]] = ctypes.string_at(at[0][0], sizes[0][0])
        return [sizes[0][0] if said is None else said]

    def batch_put_session_end(self, names: list[str]) -> list[int]:
        said = self._said("end", names[0])
        if said is None:
            self.objects[names[0]] = self.begun.pop(names[0])
        return [said or 0]

    def batch_put_session_revoke(self, names: list[str]) -> list[int]:
        self._said("revoke", names[0])
        return [BAD_LENGTH if self.begun.pop(names[0], None) is None else 0]

    def batch_get_session_start(self, names: list[str]) -> list[int]:
        said = self._said("start_get", names[0])
        return [said if said is not None else 0 if names[0] in self.objects else NO_OBJECT]

    def batch_get_into_multi_buffer_ranges(self, names: Any, at: Any, sizes: Any, offsets: Any) -> list[int]:
        said = self._said("move_get", names[0])
        if said is not None:
            return [said]
        part = self.objects[names[0]][offsets[0][0] :][: sizes[0][0]]
        if len(part) < sizes[0][0]:
            return [BAD_LENGTH]
        ctypes.memmove(at[0][0], part, len(part))
        return [len(part)]

    def batch_get_session_end(self, names: list[str]) -> int:
        self._said("end_get", names[0])
        return 0


@pytest.fixture
def buffer() -> Buffer:
    return Buffer()


@pytest.mark.parametrize("sessions", [True, False])
def test_put_records_are_read_back_and_existing_ones_stay(buffer: Buffer, sessions: bool) -> None:
    store = Scripted(completes=sessions)
    records = Records(store)
    assert records.put("a", buffer.address, buffer.fill(b"first")) == 5
    again = records.put("a", buffer.address, buffer.fill(b"other"))
    assert again == (0 if sessions else 5), "only a session reports that it sent nothing"
    assert store.objects["a"] == b"first"
    for expected in (0, 3, 5, 9):
        buffer.fill(bytes(9))
        assert records.get("a", buffer.address, ROOM, expected) == 5, expected
        assert buffer.map[:9] == b"first" + bytes(4)
    assert records.get("a", buffer.address, 3, 3) == 5, "a value longer than the buffer returns its length"
    assert records.get("none", buffer.address, ROOM, 5) == NO_OBJECT
    assert (store.called("put_from") == 0) == sessions
    # Plain calls where the length is not given; one retry where it differs.
    assert store.called("get_into") == 4
    assert store.called("start_get") == 5
    assert store.called("end_get") == 4, "every started session must end"


def test_a_get_that_fails_halfway_is_not_retried_into_the_same_memory(buffer: Buffer) -> None:
    store = Scripted()
    store.objects["a"] = b"value"
    for call, codes in (
        ("start_get", [-900]),
        ("move_get", [-800]),
        ("move_get", [3]),
        ("move_get", [5, -800]),
    ):
        store.answers[call] = [*codes]
        assert Records(store).get("a", buffer.address, ROOM, 5) == min(codes[-1], -1)
    assert store.called("get_into") == 0
    store.answers["start_get"] = [NOT_IN_MEMORY]
    assert Records(store).get("a", buffer.address, ROOM, 5) == 5, "on a disk only"
    assert store.called("get_into") == 1


@pytest.mark.parametrize("sessions", [True, False])
def test_a_put_during_an_unfinished_put_stores_nothing(buffer: Buffer, sessions: bool) -> None:
    store = Scripted(completes=sessions)
    records = Records(store)
    assert records.put("first", buffer.address, 1) == 1
    store.answers = {"start": [OBJECT_EXISTS], "put_from": [0]}
    assert records.put("a", buffer.address, 1) == NOT_COMPLETE
    store.answers = {"start": [OBJECT_EXISTS], "put_from": [0], "is_exist": [-900]}
    assert records.put("a", buffer.address, 1) == -900
    assert "a" not in store.objects


@pytest.mark.parametrize(
    ("call", "code", "result"),
    [("move", -800, -800), ("move", BAD_LENGTH, -101), ("move", 0, -1), ("move", 4, -1), ("end", -900, -900)],
)
def test_a_failed_session_stores_nothing_and_the_next_put_starts_again(
    buffer: Buffer, call: str, code: int, result: int
) -> None:
    store = Scripted()
    records = Records(store)
    assert records.put("first", buffer.address, 1) == 1
    store.answers[call] = [code]
    assert records.put("a", buffer.address, buffer.fill(b"value")) == result
    assert "a" not in store.objects
    assert records.put("a", buffer.address, buffer.fill(b"value")) == 5
    assert store.objects["a"] == b"value"
    assert store.begun == {}


def test_a_session_that_cannot_be_ended_costs_no_existing_record(buffer: Buffer) -> None:
    """The session ended, and only the reply was lost."""
    store = Scripted()
    records = Records(store)
    assert records.put("a", buffer.address, 1) == 1
    for name, result in (("a", 1), ("b", BAD_LENGTH)):
        store.answers["start"] = [BAD_LENGTH, BAD_LENGTH]
        assert records.put(name, buffer.address, 1) == result


def test_two_puts_of_one_name_do_not_share_a_session(buffer: Buffer) -> None:
    store = Scripted()
    records = Records(store)
    assert records.put("first", buffer.address, 1) == 1
    answers: list[int] = []
    move = store.batch_put_from_multi_buffer_ranges

    def meanwhile(*given: Any) -> list[int]:
        answers.append(records.put("a", buffer.address, 1))
        return move(*given)

    store.batch_put_from_multi_buffer_ranges = meanwhile  # type: ignore[method-assign]
    assert records.put("a", buffer.address, 1) == 1
    assert answers == [NOT_COMPLETE]
    assert store.called("revoke") == 0


def test_puts_are_plain_where_a_session_leaves_a_copy_unwritten(buffer: Buffer) -> None:
    store = Scripted(completes=False)
    records = Records(store)
    for name in ("a", "b"):
        assert records.put(name, buffer.address, 1) == 1
    assert [name for call, name in store.calls if call == "put_from"] == ["a", "b"]
    assert store.called("remove") == 1, "tried once"


@pytest.mark.parametrize(("call", "code"), [("start", -200), ("remove", -900)])
def test_puts_are_plain_until_session_support_is_known(buffer: Buffer, call: str, code: int) -> None:
    store = Scripted()
    records = Records(store)
    store.answers[call] = [code]
    assert records.put("a", buffer.address, 1) == 1
    assert records.put("b", buffer.address, 1) == 1
    assert [name for call, name in store.calls if call == "put_from"] == ["a"]


# ---- Mooncake's own


@pytest.fixture(scope="module", params=[False, True], ids=["memory", "root_fs_dir"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("mooncake")
    files = directory / "files"
    files.mkdir()
    options = [f"--root_fs_dir={files}"] if request.param else []
    with mooncake_store(directory, master_options=options) as running:
        yield running, files if request.param else None


def opened(running: MooncakeProcesses, buffer: Buffer) -> Any:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", running.address) == 0
    assert store.register_buffer(buffer.address, ROOM) == 0
    return store


def wait_until_there_is_a_file_below(directory: Path) -> None:
    pause, deadline = threading.Event(), time.monotonic() + 240
    while not any(path.is_file() for path in paths_in(directory)):
        assert time.monotonic() < deadline
        pause.wait(0.01)


def test_mooncakes_own_store_behaves_as_the_scripted_one(
    real: tuple[MooncakeProcesses, Path | None], buffer: Buffer
) -> None:
    running, files = real
    store = opened(running, buffer)
    records = Records(store)
    value = bytes(range(256)) * 100
    assert records.put("a", buffer.address, buffer.fill(value)) == len(value)
    assert records._puts_in_sessions == (files is None)
    again = records.put("a", buffer.address, buffer.fill(bytes(len(value))))
    assert again == (0 if files is None else len(value))
    for expected in (0, len(value) - 1, len(value), len(value) + 1):
        buffer.fill(bytes(ROOM))
        assert records.get("a", buffer.address, ROOM, expected) == len(value), expected
        assert buffer.map[:ROOM] == value + bytes(ROOM - len(value))
    assert records.get("none", buffer.address, ROOM, 5) == NO_OBJECT
    # Sessions that another client started.
    assert store.batch_put_session_start(["b"], [5]) == [0]
    memory = Buffer()
    other = Records(opened(running, memory))
    assert other.put("b", memory.address, memory.fill(b"other")) == NOT_COMPLETE
    if files is not None:
        wait_until_there_is_a_file_below(files)  # the copy on the shared file system
    else:
        assert records.put("b", buffer.address, buffer.fill(b"value")) == 5, (
            "its own unfinished session must not block it"
        )
        assert other.get("b", memory.address, ROOM, 5) == 5
        assert memory.map[:5] == b"value"
    store.close()
    other._store.close()
