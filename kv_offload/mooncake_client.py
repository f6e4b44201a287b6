"""The process beside an engine that speaks to Mooncake Store, for the core.

The core begins it (csrc/storage/mooncake/client.h), speaks to it over descriptor 3 and ends it; nobody else
runs it. No thread of the engine's process calls Python for a record.

On descriptor 3 come the setup, which is answered by ``ready VERSION``, ``failed SENTENCE`` or ``refused
SENTENCE``, and then channels: a socket for questions and the memory that both sides have mapped
(csrc/storage/mooncake/channel.h). Each is served by a thread of its own; Mooncake's calls give the GIL up.
When the other end closes, this process ends.
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

from kv_offload.mooncake_records import (
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
QUESTION = struct.Struct("<IIQQ")  # verb, names, bytes of the names, bytes of the object
PUT, SET, GET, EXIST, REMOVE = 1, 2, 3, 4, 5
NOTHING_IN_USE = (
    HOLDER_GONE,
    NO_SPACE_LEFT,
    BAD_LENGTH,
    NOT_COMPLETE,
    NO_OBJECT,
)  # after these, and after none else
LOG = "KV_OFFLOAD_MOONCAKE_LOG"  # names a file for what Mooncake logs
MOST_SECONDS = 120.0  # that a call takes, where the core says nothing
_SET_PDEATHSIG = 1
_CONNECT_SECONDS = 2.0
_TO_LEAVE_SECONDS = 0.7
_LOCAL_BUFFER_BYTES = 16 << 20  # of Mooncake's own copies, which are not used here
_MOST_KEPT_BYTES = 256 << 20  # of memory that Mooncake may still write to
_MOST_DESCRIPTORS = 1 << 16  # that are tried one by one, where nothing tells which are open


class Refused(Exception):
    """Something is missing on this side; another try will not help."""


def end_with_the_engine() -> None:
    """Also when nobody here looks at the socket: a call may hold the GIL, or this process be stopped."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # One that ended before sends no signal any more; its end of the socket was closed before it ended.
    control = select.poll()
    control.register(CONTROL, 0)
    if control.poll(0):
        os._exit(0)


def close_what_was_inherited() -> None:
    """All but 0 to 3. Not up to the limit, which may be a billion."""
    try:
        opened = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        opened = list(range(min(os.sysconf("SC_OPEN_MAX"), _MOST_DESCRIPTORS)))
    for descriptor in opened:
        if descriptor > CONTROL:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def ignore_signals() -> None:
    """What ends the engine by Ctrl-C, or by its service manager, goes to this process, too; it is needed
    until the engine has written what it has."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def log_elsewhere() -> None:
    """Mooncake logs each call that fails: the engine's log would be full of it while the master is away."""
    log = os.open(
        os.environ.get(LOG) or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def use_no_gpu() -> None:
    """Only host memory is registered here; a package for CUDA would make a context on the engine's GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def own_address(master: str) -> str:
    """The address of this host that a packet to the master leaves from. Raises Refused."""
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
    """Mooncake's own setup tries for a minute and a half. Raises OSError."""
    host, _, port = master.rpartition(":")
    if "://" in master or "," in master or not port.isdigit():
        return  # found by etcd or the like: only Mooncake knows how
    socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


def open_store(given: dict[str, Any]) -> tuple[Store, str]:
    """A client of the store, and Mooncake's version. Raises Refused, OSError or RuntimeError."""
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
        given["local_host"] or own_address(master),
        given["metadata"],
        0,  # no memory of this process: what it holds would be lost with each engine
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
    """What a channel has mapped, made known to Mooncake."""

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
_keeping = threading.Lock()


def keep(memory: Memory) -> None:
    """Nothing tells when Mooncake is done with it. As that would grow, the process ends some time."""
    with _keeping:
        _kept.append(memory)
        if sum(NAMES_BYTES + one.room for one in _kept) > _MOST_KEPT_BYTES:
            print("failed calls left too much memory in use: this process is ended", flush=True)
            os._exit(1)


def answer(store: Store, records: Records, memory: Memory, question: bytes) -> int:
    """What is asked, done."""
    verb, count, names_bytes, object_bytes = QUESTION.unpack(question)
    names = memory.map[:names_bytes].decode().split("\n")[:-1]
    at = memory.address + NAMES_BYTES
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


def moves_bytes(question: bytes) -> bool:
    """Between the channel's memory and the store's."""
    return QUESTION.unpack(question)[0] in (PUT, SET, GET)


def as_message(text: str) -> bytes:
    """Its beginning, in whole characters."""
    return text.encode(errors="replace")[:MOST_TEXT].decode(errors="ignore").encode()


class Watch:
    """Ends the process when a call has not come back after ``seconds``. Mooncake's own calls may wait for a
    holder for ever; the core ends the process after its deadline, but for calls that it left with too little
    of that to tell."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._begun: dict[int, float] = {}  # by thread

    @contextlib.contextmanager
    def over(self) -> Iterator[None]:
        """A call."""
        self._begun[threading.get_ident()] = time.monotonic()
        try:
            yield
        finally:
            del self._begun[threading.get_ident()]

    def run(self) -> None:
        """For ever, on a thread of its own."""
        while True:
            time.sleep(self._seconds / 10)
            if any(time.monotonic() - begun > self._seconds for begun in list(self._begun.values())):
                print(f"a call takes more than {self._seconds:g} s: this process is ended", flush=True)
                os._exit(1)


def serve(
    store: Store, records: Records, watch: Watch, channel: socket.socket, descriptor: int, size: int
) -> None:
    """Answers one channel's questions until its other end closes."""
    with contextlib.ExitStack() as ends:
        ends.enter_context(contextlib.closing(channel))
        with watch.over():
            memory = ends.enter_context(contextlib.closing(Memory(store, descriptor, size)))
        while question := channel.recv(QUESTION.size):
            text = ""
            try:
                with watch.over():
                    code = answer(store, records, memory, question)
                memory.in_use = code < 0 and code not in NOTHING_IN_USE and moves_bytes(question)
            except Exception as error:
                code, text = FAILED, f"{type(error).__name__}: {error}"
                memory.in_use = memory.registered == 0 and moves_bytes(question)
            try:
                channel.send(struct.pack("<q", code) + as_message(text))
            except OSError:
                return  # nobody waits for it any more


def serve_all(control: socket.socket, store: Store, patience_seconds: float) -> None:
    """Takes channels until the engine closes its end."""
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
    """Until the engine closes its end; what Mooncake's threads are at then is given up."""
    status = 1
    try:
        run()
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # no thread of Mooncake's keeps it


def run() -> None:
    """All of it but its end."""
    end_with_the_engine()
    ignore_signals()
    close_what_was_inherited()
    use_no_gpu()
    control = socket.socket(fileno=CONTROL)
    given = json.loads(control.recv(65536))
    try:
        log_elsewhere()
        store, version = open_store(given)
    except Refused as error:
        said = f"refused {error}"
    except Exception as error:
        said = f"failed {error or type(error).__name__}"
    else:
        ignore_signals()  # Mooncake has set its own
        said = f"ready {version}"
    control.send(as_message(said))
    if said.startswith("ready "):
        serve_all(control, store, given.get("patience_seconds", MOST_SECONDS))
        leaving = threading.Thread(target=store.close, daemon=True)  # so that the master forgets this client
        leaving.start()
        leaving.join(_TO_LEAVE_SECONDS)


if __name__ == "__main__":
    main()
