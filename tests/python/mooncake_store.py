# SPDX-License-Identifier: Apache-2.0
"""Starts a Mooncake master and storage process, and makes a fake package of their interface."""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_HOLDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
print(code, flush=True)
sys.stdin.read()
"""
# The functions of mooncake.store that kv_offload/tiers/mooncake/client.py and mooncake/records.py use, over
# files of one directory, which represents the master. While a file "hang" exists there, every call waits.
_FAKE = """
import ctypes, os, time, urllib.parse

class MooncakeDistributedStore:
    def setup(self, host, metadata, segment, buffer, protocol, devices, master):
        self.root = os.environ["MOONCAKE_FAKE"]
        self.open = {}
        self.puts = {}  # sessions
        self.gets = {}
        return int(os.environ.get("MOONCAKE_FAKE_SETUP", "0"))
    def _path(self, key):
        while os.path.exists(self.root + "/hang"):
            time.sleep(0.01)
        return os.path.join(self.root, urllib.parse.quote(key, safe=""))
    def register_buffer(self, at, size):
        self.open[at] = size
        return 0
    def unregister_buffer(self, at):
        del self.open[at]
        return 0
    def is_exist(self, key):
        return int(os.path.exists(self._path(key)))
    def batch_is_exist(self, keys):
        return [self.is_exist(key) for key in keys]
    def put_from(self, key, at, size):
        return 0 if self.is_exist(key) else self.upsert_from(key, at, size)
    def upsert_from(self, key, at, size):
        path = self._path(key)
        with open(f"{path}.{os.getpid()}.tmp", "wb") as file:
            file.write(ctypes.string_at(at, size))
        os.rename(file.name, path)
        return 0
    def get_into(self, key, at, size):
        try:
            with open(self._path(key), "rb") as file:
                value = file.read()
        except FileNotFoundError:
            return -704
        if len(value) > size:
            return -600
        ctypes.memmove(at, value, len(value))
        return len(value)
    def get_size(self, key):
        try:
            return os.path.getsize(self._path(key))
        except FileNotFoundError:
            return -704
    def remove(self, key, force=False):
        try:
            os.unlink(self._path(key))
        except FileNotFoundError:
            return -704
        return 0
    def batch_put_session_start(self, keys, sizes):
        (key,), (size,) = keys, sizes
        if key in self.puts:
            return [-600]
        if self.is_exist(key):
            return [-705]
        self.puts[key] = bytearray(size)
        return [0]
    def batch_put_from_multi_buffer_ranges(self, keys, buffers, sizes, offsets):
        (key,), ((at,),), ((size,),), ((offset,),) = keys, buffers, sizes, offsets
        if key not in self.puts or offset + size > len(self.puts[key]):
            return [-600]
        self.puts[key][offset:offset + size] = ctypes.string_at(at, size)
        return [size]
    def batch_put_session_end(self, keys):
        value = bytes(self.puts.pop(keys[0]))
        return [self.upsert_from(keys[0], value, len(value))]
    def batch_put_session_revoke(self, keys):
        return [-600 if self.puts.pop(keys[0], None) is None else 0]
    def batch_get_session_start(self, keys):
        try:
            with open(self._path(keys[0]), "rb") as file:
                self.gets[keys[0]] = file.read()
        except FileNotFoundError:
            return [-704]
        return [0]
    def batch_get_into_multi_buffer_ranges(self, keys, buffers, sizes, offsets):
        (key,), ((at,),), ((size,),), ((offset,),) = keys, buffers, sizes, offsets
        if key not in self.gets or offset + size > len(self.gets[key]):
            return [-600]
        ctypes.memmove(at, self.gets[key][offset:], size)
        return [size]
    def batch_get_session_end(self, keys):
        self.gets.pop(keys[0], None)
        return 0
    def close(self):
        return 0
"""


def make_fake_package(directory: Path) -> Path:
    """Returns a folder for PYTHONPATH with a fake ``mooncake``; MOONCAKE_FAKE names its storage."""
    package = directory / "site" / "mooncake"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "store.py").write_text(_FAKE)
    (directory / "objects").mkdir()
    return package.parent


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class MooncakeProcesses:
    """A master and a storage process; each may be killed and started again at the same address."""

    def __init__(
        self, directory: Path, holder_bytes: int = 256 << 20, master_options: Sequence[str] = ()
    ) -> None:
        import mooncake

        self._program = Path(mooncake.__file__).parent / "mooncake_master"
        self._directory, self._holder_bytes = directory, holder_bytes
        self._master_options = master_options
        self._port, self._metrics = free_port(), free_port()
        self.address = f"127.0.0.1:{self._port}"
        self.master: subprocess.Popen[bytes] | None = None
        self.holder: subprocess.Popen[bytes] | None = None

    def start_master(self) -> None:
        command = [
            str(self._program),
            f"--rpc_port={self._port}",
            "--rpc_address=127.0.0.1",
            f"--metrics_port={self._metrics}",
            "--client_ttl=2",
            "--logtostderr",
            *self._master_options,
        ]
        with (self._directory / "master.log").open("ab") as log:
            self.master = subprocess.Popen(command, stdout=log, stderr=log)
        give_up = time.monotonic() + 240
        while True:
            assert self.master.poll() is None
            assert time.monotonic() < give_up
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return
            except OSError:
                time.sleep(0.02)

    def start_holder(self) -> None:
        with (self._directory / "holder.log").open("ab") as log:
            self.holder = subprocess.Popen(
                [sys.executable, "-c", _HOLDER, self.address, str(self._holder_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"GLOG_minloglevel": "2"},
            )
        assert self.holder.stdout is not None
        assert self.holder.stdout.readline().strip() == b"0"

    def objects(self) -> int:
        """Returns the number of objects that the master knows."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}/metrics", timeout=240) as answer:
            (line,) = re.findall(rb"^master_key_count (\d+)$", answer.read(), re.MULTILINE)
        return int(line)

    def kill(self, process: "subprocess.Popen[bytes] | None") -> None:
        if process is not None:
            process.kill()
            process.communicate()


@contextmanager
def mooncake_store(
    directory: Path, holder_bytes: int = 256 << 20, master_options: Sequence[str] = ()
) -> Iterator[MooncakeProcesses]:
    """Yields the running processes; ends them by their pids."""
    found = MooncakeProcesses(directory, holder_bytes, master_options)
    try:
        found.start_master()
        found.start_holder()
        yield found
    finally:
        found.kill(found.holder)
        found.kill(found.master)
