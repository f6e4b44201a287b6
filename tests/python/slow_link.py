# SPDX-License-Identifier: Apache-2.0
"""A connection to a server that can be throttled to a number of bytes per second."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType

PIECE = 64 * 1024  # bytes forwarded at a time


class SlowLink:
    """Listens on loopback, at ``port``, and forwards data to and from the server at ``target`` (the path of a
    Unix socket, or a host and port). Use it as a context manager.

    ``bytes_per_second`` limits all data from the server, over all connections; with ``both_ways``, the data
    in both directions together. 0, the default, means unthrottled. It may be set at any time.
    """

    def __init__(self, target: str | tuple[str, int], *, both_ways: bool = False) -> None:
        self.bytes_per_second = 0
        self._target = target
        self._both_ways = both_ways
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._free_at = 0.0  # time at which the last accepted byte has passed
        self._open: list[socket.socket] = []
        self._is_cut = False
        self._may_pass = {"to": threading.Event(), "from": threading.Event()}
        self.release()
        self._acceptor = threading.Thread(target=self._accept)
        self._threads: list[threading.Thread] = []  # two per connection

    def __enter__(self) -> SlowLink:
        self._acceptor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bytes_per_second = 0
        self.release()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        self._acceptor.join()
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in [self._listener, *self._open]:
            end.close()

    def cut(self) -> None:
        """Ends all connections, and each new one at once, until ``restore``."""
        self._is_cut = True
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def restore(self) -> None:
        """Accepts connections again."""
        self._is_cut = False

    def hold(self, *directions: str) -> None:
        """Forwards no data, and keeps all connections open, until ``release``.

        ``directions``: "to" the server or "from" it; without any, both.
        """
        for direction in directions or self._may_pass:
            self._may_pass[direction].clear()

    def release(self) -> None:
        """Forwards data again, starting with the data that was held."""
        for direction in self._may_pass.values():
            direction.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(client)
            family = socket.AF_UNIX if isinstance(self._target, str) else socket.AF_INET
            server = socket.socket(family, socket.SOCK_STREAM)
            self._open.append(server)
            try:
                server.connect(self._target)
                if self._is_cut:
                    server.shutdown(socket.SHUT_RDWR)
                    raise ConnectionAbortedError
            except OSError:
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)
                continue
            for source, sink, slow, way in (
                (client, server, self._both_ways, "to"),
                (server, client, True, "from"),
            ):
                may_pass = self._may_pass[way]
                thread = threading.Thread(target=self._pass_on, args=(source, sink, slow, may_pass))
                self._threads.append(thread)
                thread.start()

    def _pass_on(
        self, source: socket.socket, sink: socket.socket, slow: bool, may_pass: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE):
                may_pass.wait()
                if slow:
                    self._wait_for(len(piece))
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _wait_for(self, count: int) -> None:
        rate = self.bytes_per_second
        if rate == 0:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / rate
            until = self._free_at
        time.sleep(max(0.0, until - time.monotonic()))
