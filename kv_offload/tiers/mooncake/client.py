# SPDX-License-Identifier: Apache-2.0
"""The Mooncake client process: talks to Mooncake Store on behalf of the core.

Only the core starts it (csrc/backends/mooncake/client.h), talks to it over descriptor 3 and ends it. So no
thread of the engine process calls Python for a record.

Descriptor 3 first carries the setup, which this process answers with ``ready VERSION``, ``failed SENTENCE``
or ``refused SENTENCE``. It then carries channels: a socket for requests, and memory that both processes map
(csrc/backends/mooncake/channel.h). Each channel has its own thread; Mooncake's calls release the GIL. The
process ends when the other end of descriptor 3 closes.
"""

import contextlib
import ctypes
import json
import mmap
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from kv_offload.tiers.mooncake.records import (
    BAD_LENGTH,
    FAILED,
    HOLDER_GONE,
    NO_OBJECT,
    NO_SPACE_LEFT,
    NOT_COMPLETE,
    Records,
    Store,
)

CONTROL = 3
NAMES_BYTES = 256 << 10
MOST_TEXT = 1000
CALL_HEADER = struct.Struct("<IIQQ")  # verb, names, bytes of the names, bytes of the object
PUT, SET, GET, EXIST, REMOVE = 1, 2, 3, 4, 5
MEMORY_UNUSED = (
    HOLDER_GONE,
    NO_SPACE_LEFT,
    BAD_LENGTH,
    NOT_COMPLETE,
    NO_OBJECT,
)  # only after these results Mooncake no longer uses the memory
LOG = "KV_OFFLOAD_MOONCAKE_LOG"  # the file for Mooncake's log
MOST_SECONDS = 120.0  # limit of a call if the core sets none
_SET_PDEATHSIG = 1
_CONNECT_SECONDS = 2.0
_CLOSE_SECONDS = 0.7
_LOCAL_BUFFER_BYTES = 16 << 20  # Mooncake's own copy buffer, unused here
_MOST_KEPT_BYTES = 256 << 20  # limit of memory that Mooncake may still write to
_MOST_DESCRIPTORS = 1 << 16  # tried one by one if /proc does not list the open ones


class Refused(Exception):
    """A requirement is missing on this host; retrying does not help."""


def end_with_the_engine() -> None:
    """Has the kernel kill this process with the engine.

    This also works while no thread reads the socket: a call may hold the GIL, or the process may be stopped.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # An engine that ended before prctl() sends no signal, but its end of the socket is closed by now.
    control = select.poll()
    control.register(CONTROL, 0)
    if control.poll(0):
        os._exit(0)


def close_inherited_descriptors() -> None:
    """Closes all descriptors except 0 to 3, without a loop up to the limit, which may be a billion."""
    try:
        opened = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        opened = list(range(min(os.sysconf("SC_OPEN_MAX"), _MOST_DESCRIPTORS)))
    for descriptor in opened:
        if descriptor > CONTROL:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def ignore_signals() -> None:
    """Ignores the signals that end the engine, which Ctrl-C or a service manager sends to this process too.

    The engine needs this process until it has written its records.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def redirect_logs() -> None:
    """Redirects stdout and stderr. Mooncake logs each failed call and would flood the engine's log while the
    master is unreachable."""
    log = os.open(
        os.environ.get(LOG) or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def use_no_gpu() -> None:
    """Hides the GPUs: only host memory is registered, and a CUDA build would create a context on the
    engine's."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def local_address(master: str) -> str:
    """Returns the local address of the route to the master. Raises Refused."""
    for one in master.rpartition("://")[2].replace(";", ",").split(","):
        with contextlib.suppress(OSError, ValueError):
            place = urlsplit(f"//{one.strip()}")
            if not place.hostname:
                continue
            for family, kind, _, _, address in socket.getaddrinfo(
                place.hostname, place.port or 1, type=socket.SOCK_DGRAM
            ):
                with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                    probe.connect(address)
                    return str(probe.getsockname()[0])
    raise Refused(
        f"the address of this host cannot be derived from the master's, {master}: set local_host, a name or "
        "address by which the holders reach this host"
    )


def refuse_a_silent_master(master: str) -> None:
    """Raises OSError if the master does not accept connections; Mooncake's own setup retries for 90 s."""
    host, _, port = master.rpartition(":")
    if "://" in master or "," in master or not port.isdigit():
        return  # behind etcd or similar: only Mooncake can look it up
    socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


def open_store(given: dict[str, Any]) -> tuple[Store, str]:
    """Returns a client of the store and Mooncake's version. Raises Refused, OSError or RuntimeError."""
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise Refused(
            f"Mooncake's Python package cannot be loaded ({error}): pip install mooncake-transfer-engine, or "
            "mooncake-transfer-engine-non-cuda where there is no CUDA; both need libibverbs1 and libnuma1, "
            "also for tcp"
        ) from None
    store = MooncakeDistributedStore()
    missing = [
        name
        for name in ("upsert_from", "batch_is_exist", "batch_put_session_start", "batch_get_session_start")
        if not hasattr(store, name)
    ]
    version = _version()
    if missing:
        raise Refused(
            f"Mooncake {version} is too old (it has no {', '.join(missing)}): install 0.3.13 or newer"
        )
    master = given["master"]
    try:
        refuse_a_silent_master(master)
    except OSError as error:
        raise RuntimeError(
            f"Mooncake's master at {master} does not answer: {error.strerror or error}"
        ) from None
    code = store.setup(
        given["local_host"] or local_address(master),
        given["metadata"],
        0,  # this process contributes no memory: its records would be lost with each engine
        _LOCAL_BUFFER_BYTES,
        given["protocol"],
        given["devices"],
        master,
    )
    if code != 0:
        raise RuntimeError(
            f"Mooncake's client does not start (code {code}): master {master}, metadata {given['metadata']}, "
            f"protocol {given['protocol']}; its log goes to the file that {LOG} names"
        )
    return store, version


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    for kind in ("", "-non-cuda", "-cuda13", "-npu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(f"mooncake-transfer-engine{kind}")
    return "of unknown version"


class Memory:
    """The memory that a channel maps, registered with Mooncake."""

    def __init__(self, store: Store, descriptor: int, size: int) -> None:
        self._store = store
        self.map = mmap.mmap(descriptor, size)
        os.close(descriptor)
        self._anchor: Any = ctypes.c_char.from_buffer(self.map)
        self.address = ctypes.addressof(self._anchor)
        self.room = size - NAMES_BYTES
        self.registered = store.register_buffer(self.address, size)
        self.in_use = False  # Mooncake may still write to it

    def close(self) -> None:
        if self.in_use:
            keep(self)
            return
        if self.registered == 0:
            self._store.unregister_buffer(self.address)
        self._anchor = None
        self.map.close()


_kept: list[Memory] = []
_kept_lock = threading.Lock()


def keep(memory: Memory) -> None:
    """Keeps memory mapped, because Mooncake does not report when it stops using it. Ends the process at the
    limit."""
    with _kept_lock:
        _kept.append(memory)
        if sum(NAMES_BYTES + one.room for one in _kept) > _MOST_KEPT_BYTES:
            print("failed calls left too much memory in use: this process is ended", flush=True)
            os._exit(1)


def answer(store: Store, records: Records, memory: Memory, header: bytes) -> int:
    """Serves one request and returns its result."""
    verb, count, names_bytes, object_bytes = CALL_HEADER.unpack(header)
    names = memory.map[:names_bytes].decode().split("\n")[:-1]
    at = memory.address + NAMES_BYTES
    # The engine's counts are checked: a wrong one would make Mooncake access other memory.
    if len(names) != count or count == 0 or object_bytes > memory.room:
        return FAILED
    if memory.registered != 0:
        raise RuntimeError(f"Mooncake did not register the memory of this process (code {memory.registered})")
    if verb == PUT:
        return records.put(names[0], at, object_bytes)
    if verb == SET:
        code = store.upsert_from(names[0], at, object_bytes)
        return code if code < 0 else object_bytes
    if verb == GET:
        return records.get(names[0], at, memory.room, object_bytes)
    if verb == REMOVE:
        return store.remove(names[0], True)
    if verb != EXIST:
        return FAILED
    found = store.batch_is_exist(names)
    failed = [code for code in found if code < 0]
    if failed or len(found) != count:
        return failed[0] if failed else FAILED
    memory.map[NAMES_BYTES : NAMES_BYTES + count] = bytes(code == 1 for code in found)
    return 0


def moves_bytes(header: bytes) -> bool:
    """True if the request copies bytes between the channel's memory and the store."""
    return CALL_HEADER.unpack(header)[0] in (PUT, SET, GET)


def as_message(text: str) -> bytes:
    """Returns the start of ``text``, cut at a character boundary."""
    return text.encode(errors="replace")[:MOST_TEXT].decode(errors="ignore").encode()


class Watch:
    """Ends the process when a call has not returned after ``seconds``.

    Mooncake's calls may wait for a storage node forever. The core ends the process after its own deadline,
    except for calls that started with too little of the deadline left to judge.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._begun: dict[int, float] = {}  # by thread

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """A call."""
        self._begun[threading.get_ident()] = time.monotonic()
        try:
            yield
        finally:
            del self._begun[threading.get_ident()]

    def run(self) -> None:
        """Checks the calls forever; runs on its own thread."""
        while True:
            time.sleep(self._seconds / 10)
            if any(time.monotonic() - begun > self._seconds for begun in list(self._begun.values())):
                print(f"a call takes more than {self._seconds:g} s: this process is ended", flush=True)
                os._exit(1)


def serve(
    store: Store, records: Records, watch: Watch, channel: socket.socket, descriptor: int, size: int
) -> None:
    """Serves the requests of one channel until its other end closes."""
    with contextlib.ExitStack() as ends:
        ends.enter_context(contextlib.closing(channel))
        with watch.timed():
            memory = ends.enter_context(contextlib.closing(Memory(store, descriptor, size)))
        while header := channel.recv(CALL_HEADER.size):
            text = ""
            try:
                with watch.timed():
                    code = answer(store, records, memory, header)
                memory.in_use = code < 0 and code not in MEMORY_UNUSED and moves_bytes(header)
            except Exception as error:
                code, text = FAILED, f"{type(error).__name__}: {error}"
                memory.in_use = memory.registered == 0 and moves_bytes(header)
            try:
                channel.send(struct.pack("<q", code) + as_message(text))
            except OSError:
                return  # the client stopped waiting


def serve_all(control: socket.socket, store: Store, patience_seconds: float) -> None:
    """Accepts channels until the engine closes its end."""
    records, watch = Records(store), Watch(patience_seconds)
    threading.Thread(target=watch.run, daemon=True).start()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 8, 2)
        if len(message) != 8 or len(descriptors) != 2:
            return
        (size,) = struct.unpack("<Q", message)
        channel = socket.socket(fileno=descriptors[0])
        threading.Thread(
            target=serve, args=(store, records, watch, channel, descriptors[1], size), daemon=True
        ).start()


def main() -> None:
    """Runs until the engine closes its end; abandons the work of Mooncake's threads then."""
    status = 1
    try:
        run()
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # does not wait for Mooncake's threads


def run() -> None:
    """Runs the process up to its exit."""
    end_with_the_engine()
    ignore_signals()
    close_inherited_descriptors()
    use_no_gpu()
    control = socket.socket(fileno=CONTROL)
    given = json.loads(control.recv(65536))
    try:
        redirect_logs()
        store, version = open_store(given)
    except Refused as error:
        said = f"refused {error}"
    except Exception as error:
        said = f"failed {error or type(error).__name__}"
    else:
        ignore_signals()  # again: Mooncake installed its own handlers
        said = f"ready {version}"
    control.send(as_message(said))
    if said.startswith("ready "):
        serve_all(control, store, given.get("patience_seconds", MOST_SECONDS))
        leaving = threading.Thread(target=store.close, daemon=True)  # lets the master remove this client
        leaving.start()
        leaving.join(_CLOSE_SECONDS)


if __name__ == "__main__":
    main()
