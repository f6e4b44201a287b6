# SPDX-License-Identifier: Apache-2.0
"""kv_offload/tiers/mooncake/client.py in isolation: each operation, and the messages where a dependency is
missing.

test_bindings_mooncake.py runs it as a process.
"""

import json
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from mooncake_store import free_port, make_fake_package

from kv_offload.tiers.mooncake import client
from kv_offload.tiers.mooncake.config import MooncakeTierConfig
from kv_offload.tiers.mooncake.records import Records

GIVEN = {
    "master": "etcd://nowhere",
    "metadata": "P2PHANDSHAKE",
    "protocol": "tcp",
    "devices": "",
    "local_host": "h",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Imports the fake package of Mooncake's interface."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(make_fake_package(tmp_path)))
    monkeypatch.setenv("MOONCAKE_FAKE", str(tmp_path / "objects"))
    yield tmp_path / "objects"
    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        del sys.modules[name]


class Asked:
    """One channel, as the core uses it."""

    def __init__(self, store: Any, room: int = 4096) -> None:
        self.size = client.NAMES_BYTES + room
        descriptor = os.memfd_create("test")
        os.ftruncate(descriptor, self.size)
        self.map = mmap.mmap(descriptor, self.size)
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.thread = threading.Thread(
            target=client.serve,
            args=(store, Records(store), client.Watch(1e6), theirs, descriptor, self.size),
        )
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
            client.CALL_HEADER.pack(
                verb, len(names) if count is None else count, len(text), len(put) if size is None else size
            )
        )
        self.answer = self.socket.recv(4096)
        return int(struct.unpack("<q", self.answer[:8])[0])

    def object(self, size: int) -> bytes:
        return self.map[client.NAMES_BYTES : client.NAMES_BYTES + size]


def test_each_operation_does_its_task(package: Path) -> None:
    store, _ = client.open_store(GIVEN)
    with Asked(store) as asked:
        assert asked.ask(client.PUT, "a:1", put=b"first") == 5
        assert asked.ask(client.PUT, "a:1", put=b"other") == 0, "an existing object must stay"
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
    assert store.open == {}, "the memory must be unregistered"
    with Asked(store, room=8) as asked:
        assert asked.ask(client.GET, "large") == 4096, "a value longer than the buffer returns its length"


def test_an_invalid_operation_fails_and_the_process_continues(package: Path) -> None:
    store, _ = client.open_store(GIVEN)
    with Asked(store) as asked:
        assert asked.ask(99, "a") == client.FAILED
        assert asked.ask(client.PUT, "a", put=b"x", count=2) == client.FAILED
        assert asked.ask(client.PUT, "a", size=1 << 40) == client.FAILED
        assert asked.ask(client.PUT, "a", put=b"x") == 1


def test_an_exception_of_mooncake_is_reported(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert b"did not register the memory of this process (code -7)" in asked.answer


def test_an_error_of_one_key_is_not_mistaken_for_a_miss(
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


def test_an_unreachable_master_is_reported_at_once(package: Path) -> None:
    with pytest.raises(RuntimeError, match="does not answer: Connection refused"):
        client.open_store(GIVEN | {"master": f"127.0.0.1:{free_port()}"})


def test_the_own_address_is_the_one_that_the_master_sees() -> None:
    assert client.local_address("127.0.0.1:50051") == "127.0.0.1"
    assert client.local_address("etcd://127.0.0.1:2379") == "127.0.0.1"
    assert client.local_address("127.0.0.2:1,127.0.0.3:1").startswith("127.")
    assert client.local_address("etcd://no.such.host.invalid:1;127.0.0.1:2") == "127.0.0.1", (
        "the next address must be tried"
    )


@pytest.mark.parametrize(
    "master", ["etcd://no.such.host.invalid:2379", "etcd://[::bad", "etcd://:2379", "no.such.invalid:1"]
)
def test_an_unknown_own_address_must_be_configured(master: str) -> None:
    with pytest.raises(client.Refused, match=r"set local_host"):
        client.local_address(master)


def test_an_ipv6_address_is_probed_over_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    class Probe:
        def __init__(self, family: int, *_: object) -> None:
            assert family == socket.AF_INET6

        def __enter__(self) -> "Probe":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def connect(self, address: tuple[Any, ...]) -> None:
            assert address[:2] == ("fd00::1", 50051)

        def getsockname(self) -> tuple[Any, ...]:
            return ("fd00::2", 1, 0, 0)

    monkeypatch.setattr(socket, "socket", Probe)
    assert client.local_address("[fd00::1]:50051") == "fd00::2"


def run_with_descriptors(program: str) -> str:
    """Runs a program with some extra open descriptors; returns its output."""
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    try:
        return subprocess.run(
            [sys.executable, "-c", program], pass_fds=held, check=True, capture_output=True, text=True
        ).stdout
    finally:
        for one in held:
            os.close(one)


def test_inherited_descriptors_are_closed_without_counting_to_the_limit() -> None:
    program = (
        "import os; from kv_offload.tiers.mooncake import client\n"
        "os.closerange = None; os.sysconf = lambda _: 10**9\n"
        "client.close_inherited_descriptors()\n"
        "print([one for one in os.listdir('/proc/self/fd') if int(one) > 4])"
    )
    assert run_with_descriptors(program) == "[]\n", "descriptor 4 belongs to the listing"


def test_an_engine_that_has_already_ended_is_detected_first(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    steps = [
        "import os, sys; os.dup2(int(sys.argv[1]), 3)",
        "from kv_offload.tiers.mooncake import client",
    ]
    steps += ["client.ignore_signals = lambda: print('went on', flush=True)", "client.main()"]
    with ours, theirs:
        ours.send(b"{}")
        ours.close()
        ended = subprocess.run(
            [sys.executable, "-c", "\n".join(steps), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            timeout=240,
        )
    assert (ended.returncode, ended.stdout) == (0, b"")


def test_no_module_of_the_working_directory_is_run(package: Path, tmp_path: Path) -> None:
    there = tmp_path / "cwd"
    there.mkdir()
    for name in ("ctypes", "json", "mooncake", "kv_offload"):
        (there / f"{name}.py").write_text("raise SystemExit('a module of the working directory ran')")
    command = MooncakeTierConfig(master="h:1")._command()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()  # the process ends as soon as it polls
    begin = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.execv(sys.argv[2], sys.argv[2:])"
    with theirs:
        ended = subprocess.run(
            [sys.executable, "-c", begin, str(theirs.fileno()), *command],
            pass_fds=[theirs.fileno()],
            cwd=there,
            capture_output=True,
            timeout=240,
        )
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_the_process_ends_after_any_error(package: Path) -> None:
    """Covers a Mooncake thread that does not end."""
    program = (
        "import threading; from kv_offload.tiers.mooncake import client\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "def fails(): raise ValueError('no setup')\n"
        "client.run = fails; client.main()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=240)
    assert ended.returncode == 1
    assert b"ValueError: no setup" in ended.stderr


def test_messages_are_cut_between_characters() -> None:
    for length in range(client.MOST_TEXT - 4, client.MOST_TEXT + 1):
        said = client.as_message("x" * length + "\u20ac" * 5)
        assert len(said) <= client.MOST_TEXT
        assert said.decode().strip("\u20ac") == "x" * length
    assert client.as_message("\udcff") == b"?"


def test_memory_that_mooncake_may_still_write_to_is_kept(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_kept", [])
    store, _ = client.open_store(GIVEN)
    answers = {"get_into": -800}
    monkeypatch.setattr(type(store), "get_into", lambda *_: answers["get_into"])
    for code, kept in ((-704, 0), (-101, 0), (-800, 1), (-704, 1)):
        answers["get_into"] = code
        with Asked(store) as asked:
            assert asked.ask(client.GET, "a") == code
        assert len(client._kept) == len(store.open) == kept
    with Asked(store) as asked:
        monkeypatch.setattr(type(store), "batch_is_exist", lambda *_: [-900])
        assert asked.ask(client.EXIST, "a") == -900
    assert len(client._kept) == 1, "nothing moved"


def test_kept_memory_is_bounded_by_ending_the_process(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    monkeypatch.setattr(client, "_kept", [])
    monkeypatch.setattr(client, "_MOST_KEPT_BYTES", client.NAMES_BYTES * 3)
    monkeypatch.setattr(os, "_exit", ends.append)
    store, _ = client.open_store(GIVEN)
    monkeypatch.setattr(type(store), "get_into", lambda *_: -800)
    for expected in ([], [], [1]):
        with Asked(store) as asked:
            assert asked.ask(client.GET, "a") == -800
        assert ends == expected


def test_a_call_that_does_not_return_ends_the_process(package: Path) -> None:
    program = (
        "import threading; from kv_offload.tiers.mooncake import client\n"
        "watch = client.Watch(0.05)\n"
        "with watch.timed(): pass\n"  # a call that returned
        "def hang():\n"
        "    with watch.timed(): threading.Event().wait()\n"
        "threading.Thread(target=hang, daemon=True).start()\n"
        "watch.run()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert ended.stdout == "a call takes more than 0.05 s: this process is ended\n"


WATCHED = """
import os, socket, struct, sys, threading
from kv_offload.tiers.mooncake import client

def hang(*_):
    print("hangs", flush=True)
    threading.Event().wait()

class Store:
    batch_is_exist = hang
    register_buffer = hang if sys.argv[1] == "register" else lambda *_: 0

ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
threading.Thread(target=client.serve_all, args=(theirs, Store(), 0.05), daemon=True).start()
channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
memory = os.memfd_create("test")
size = client.NAMES_BYTES + 4096
os.ftruncate(memory, size)
os.pwrite(memory, b"a\\n", 0)
socket.send_fds(ours, [struct.pack("<Q", size)], [other.fileno(), memory])
channel.send(client.CALL_HEADER.pack(client.EXIST, 1, 2, 0))
channel.recv(100)
"""


@pytest.mark.parametrize("call", ["register", "exist"])
def test_each_channels_calls_are_watched(call: str) -> None:
    ended = subprocess.run([sys.executable, "-c", WATCHED, call], capture_output=True, text=True, timeout=240)
    assert ended.stdout == "hangs\na call takes more than 0.05 s: this process is ended\n", ended.stderr
    assert ended.returncode == 1


def test_the_watchdog_uses_the_timeout_of_the_core(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def serve_all(control: socket.socket, _store: Any, patience: float) -> None:
        control.close()
        given.append(patience)

    monkeypatch.setattr(client, "serve_all", serve_all)
    for name in ("end_with_the_engine", "ignore_signals", "close_inherited_descriptors", "redirect_logs"):
        monkeypatch.setattr(client, name, lambda: None)
    for setup in ({"patience_seconds": 7.0}, {}):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        monkeypatch.setattr(client, "CONTROL", theirs.detach())
        with ours:
            ours.send(json.dumps(GIVEN | setup).encode())
            client.run()
    assert given == [7.0, client.MOST_SECONDS]


def test_a_call_that_returned_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = client.Watch(0.0)
    with watch.timed():
        pass
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise StopIteration

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail(f"ended with {status}"))
    with pytest.raises(StopIteration):
        watch.run()


def test_the_process_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    client.use_no_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_the_message_layout_matches_the_core() -> None:
    header = (Path(__file__).parents[2] / "csrc/backends/mooncake/channel.h").read_text()
    assert client.CALL_HEADER.size == 24
    assert "sizeof(CallHeader) == 24" in header
    assert f"kNamesBytes = std::size_t{{{client.NAMES_BYTES >> 10}}} << 10" in header
    for name, verb in (
        ("kPut", client.PUT),
        ("kSet", client.SET),
        ("kGet", client.GET),
        ("kExist", client.EXIST),
        ("kRemove", client.REMOVE),
    ):
        assert f"{name} = {verb}," in header
