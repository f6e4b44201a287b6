"""kv_offload/mooncake_client.py by itself: what each question does, what is said where something is missing.
test_bindings_mooncake.py runs it as a process."""

import mmap
import os
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from mooncake_store import free_port, make_fake_package

from kv_offload import mooncake_client as client

GIVEN = {
    "master": "etcd://nowhere",
    "metadata": "P2PHANDSHAKE",
    "protocol": "tcp",
    "devices": "",
    "local_host": "h",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of Mooncake's interface, to be imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(make_fake_package(tmp_path)))
    monkeypatch.setenv("FAKE_MOONCAKE", str(tmp_path / "objects"))
    yield tmp_path / "objects"
    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        del sys.modules[name]


class Asked:
    """One channel, as the core has it."""

    def __init__(self, store: Any, room: int = 4096) -> None:
        self.size = client.NAMES_BYTES + room
        descriptor = os.memfd_create("test")
        os.ftruncate(descriptor, self.size)
        self.map = mmap.mmap(descriptor, self.size)
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.thread = threading.Thread(target=client.serve, args=(store, theirs, descriptor, self.size))
        self.thread.start()

    def __enter__(self) -> "Asked":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.thread.join()
        self.map.close()

    def ask(
        self, verb: int, *names: str, put: bytes = b"", count: int | None = None, size: int | None = None
    ) -> int:
        text = "".join(f"{name}\n" for name in names).encode()
        self.map[: len(text)] = text
        self.map[client.NAMES_BYTES : client.NAMES_BYTES + len(put)] = put
        self.socket.send(
            client.QUESTION.pack(
                verb, len(names) if count is None else count, len(text), len(put) if size is None else size
            )
        )
        self.answer = self.socket.recv(4096)
        return int(struct.unpack("<q", self.answer[:8])[0])

    def object(self, size: int) -> bytes:
        return self.map[client.NAMES_BYTES : client.NAMES_BYTES + size]


def test_each_question_does_what_it_says(package: Path) -> None:
    store, _ = client.open_store(GIVEN)
    with Asked(store) as asked:
        assert asked.ask(client.PUT, "a:1", put=b"first") == 5
        assert asked.ask(client.PUT, "a:1", put=b"other") == 0, "it is there"
        assert asked.ask(client.GET, "a:1") == 5
        assert asked.object(5) == b"first"
        assert asked.ask(client.SET, "a:1", put=b"second") == 6
        assert asked.ask(client.GET, "a:1") == 6
        assert asked.object(6) == b"second"
        assert asked.ask(client.EXIST, "no", "a:1", "neither") == 0
        assert asked.object(3) == bytes([0, 1, 0])
        assert asked.ask(client.REMOVE, "a:1") == 0
        assert asked.ask(client.GET, "a:1") == -704
        assert asked.ask(client.PUT, "large", put=b"x" * 4096) == 4096
    assert store.open == {}, "its memory is Mooncake's no more"
    with Asked(store, room=8) as asked:
        assert asked.ask(client.GET, "large") == 4096, "longer than there is room: its length"


def test_what_fits_no_question_fails_and_ends_nothing(package: Path) -> None:
    store, _ = client.open_store(GIVEN)
    with Asked(store) as asked:
        assert asked.ask(99, "a") == client.FAILED
        assert asked.ask(client.PUT, "a", put=b"x", count=2) == client.FAILED
        assert asked.ask(client.PUT, "a", size=1 << 40) == client.FAILED
        assert asked.ask(client.PUT, "a", put=b"x") == 1


def test_what_mooncake_raises_is_said(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = client.open_store(GIVEN)

    def fails(*_: object) -> int:
        raise OverflowError("no such size")

    monkeypatch.setattr(type(store), "get_into", fails)
    with Asked(store) as asked:
        assert asked.ask(client.GET, "a") == client.FAILED
        assert asked.answer[8:] == b"OverflowError: no such size"
    monkeypatch.setattr(type(store), "register_buffer", lambda *_: -7)
    with Asked(store) as asked:
        assert asked.ask(client.EXIST, "a") == client.FAILED
        assert b"does not take the memory of this process (code -7)" in asked.answer


def test_a_put_after_which_nothing_is_there_is_none(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Mooncake does beside one that was begun and not ended."""
    store, _ = client.open_store(GIVEN)
    monkeypatch.setattr(type(store), "put_from", lambda *_: 0)
    with Asked(store) as asked:
        assert asked.ask(client.PUT, "a", put=b"x") == client.NOT_COMPLETE
    monkeypatch.setattr(type(store), "is_exist", lambda *_: -900)
    with Asked(store) as asked:
        assert asked.ask(client.PUT, "a", put=b"x") == -900


def test_an_error_of_one_key_is_not_taken_for_an_absent_one(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = client.open_store(GIVEN)
    monkeypatch.setattr(type(store), "batch_is_exist", lambda *_: [1, -900])
    with Asked(store) as asked:
        assert asked.ask(client.EXIST, "a", "b") == -900


def test_a_package_that_is_too_old_is_refused(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mooncake.store import MooncakeDistributedStore

    monkeypatch.delattr(MooncakeDistributedStore, "upsert_from")
    with pytest.raises(client.Refused, match=r"no upsert_from\): install 0.3.13 or newer"):
        client.open_store(GIVEN)


def test_a_master_that_does_not_answer_is_told_at_once(package: Path) -> None:
    with pytest.raises(RuntimeError, match="does not answer: Connection refused"):
        client.open_store(GIVEN | {"master": f"127.0.0.1:{free_port()}"})


def test_its_own_address_is_the_one_that_the_master_sees() -> None:
    assert client.own_address("127.0.0.1:50051") == "127.0.0.1"
    assert client.own_address("etcd://nowhere") == "127.0.0.1"


def test_the_layout_of_a_question_is_the_cores() -> None:
    header = (Path(__file__).parents[2] / "csrc/storage/mooncake/channel.h").read_text()
    assert client.QUESTION.size == 24
    assert "sizeof(Question) == 24" in header
    assert f"kNamesBytes = std::size_t{{{client.NAMES_BYTES >> 10}}} << 10" in header
    for name, verb in (
        ("kPut", client.PUT),
        ("kSet", client.SET),
        ("kGet", client.GET),
        ("kExist", client.EXIST),
    ):
        assert f"{name} = {verb}," in header
