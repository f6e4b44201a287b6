# SPDX-License-Identifier: Apache-2.0
"""A second host of an engine, on this machine: processes with a network, mounts and IPC names of their own.

Both hosts are connected by a pair of virtual network interfaces only. Needs root.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import waiting
from local_server import LocalServer

PATIENCE_SECONDS = 240
_ESTABLISHED = "01"  # in /proc/net/tcp


def problem() -> str:
    """Returns why this machine cannot emulate a host; "": it can."""
    namespaces = ["unshare", "--net", "--mount", "--ipc"]
    pair = ["ip", "link", "add", "kvo-a", "type", "veth", "peer", "name", "kvo-b"]
    try:
        made = subprocess.run([*namespaces, *pair], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return made.stderr.strip() if made.returncode else ""


class SecondHost:
    """The network between both hosts, and the processes on the second one (headless_node.py)."""

    def __init__(self) -> None:
        number = os.getpid() % 16_384
        network, first = f"198.18.{number >> 6}", (number & 63) * 4  # reserved for tests (RFC 2544)
        self.own_address, self.address = f"{network}.{first + 1}", f"{network}.{first + 2}"
        self.own_interface, self.interface = f"kvo{number}a", f"kvo{number}b"
        self.server: LocalServer | None = None

    def connect(self, server: LocalServer) -> None:
        """Connects the host whose first process is that of ``server``, when it has left this one."""
        assert server.process is not None
        self.server = server
        here = Path("/proc/self/ns/net").readlink()
        there = Path(f"/proc/{server.process.pid}/ns/net")
        waiting.until(lambda: there.readlink() != here, PATIENCE_SECONDS, server.log_tail)
        _run("ip", "link", "add", self.own_interface, "type", "veth", "peer", "name", self.interface)
        _run("ip", "link", "set", self.interface, "netns", str(server.process.pid))
        _run("ip", "address", "add", f"{self.own_address}/30", "dev", self.own_interface)
        _run("ip", "link", "set", self.own_interface, "up")
        self._inside("ip", "link", "set", "lo", "up")
        self._inside("ip", "link", "set", self.interface, "up")
        self._inside("ip", "address", "add", f"{self.address}/30", "dev", self.interface)

    def cut(self) -> None:
        """Drops everything between the hosts, until ``mend``. Connections are not ended."""
        self._inside("ip", "link", "set", self.interface, "down")

    def mend(self) -> None:
        self._inside("ip", "link", "set", self.interface, "up")

    def freeze(self) -> None:
        """Stops all processes of the host, until ``thaw``."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def connections(self) -> set[str]:
        """Returns the established connections of this host with the second one, by both ports."""
        there = "".join(f"{int(part):02X}" for part in reversed(self.address.split(".")))
        found = set()
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, remote, state, *_ = line.split()
            if remote.startswith(there) and state == _ESTABLISHED:
                found.add(f"{local} {remote}")
        return found

    def kill(self) -> None:
        if self.server is not None:
            self.server.kill()
        self.server = None
        # The pair disappears with the processes; here it does so at once.
        subprocess.run(["ip", "link", "delete", self.own_interface], stderr=subprocess.DEVNULL, check=False)

    def _inside(self, *command: str) -> None:
        assert self.server is not None
        assert self.server.process is not None
        _run("nsenter", "--target", str(self.server.process.pid), "--net", *command)

    def _signal(self, number: signal.Signals) -> None:
        assert self.server is not None
        for process in self.server.processes():
            os.kill(process.pid, number)


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}: {result.stderr}"
