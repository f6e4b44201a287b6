# SPDX-License-Identifier: Apache-2.0
"""Starts a test's redis-server, on a socket of its own."""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def redis_server(directory: Path, *options: str) -> Iterator[Path]:
    """Yields the path of its socket; ends it by its pid."""
    path = directory / "s"
    command = [
        "redis-server",
        "--port",
        "0",
        "--unixsocket",
        str(path),
        "--save",
        "",
        "--dir",
        str(directory),
    ]
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
    try:
        wait_for(process, path)
        yield path
    finally:
        process.kill()
        process.wait()


def command(path: Path, *words: str) -> bytes:
    """Returns the raw reply of the server at this socket; for short replies only."""
    text = b"".join(b"$%d\r\n%s\r\n" % (len(word), word.encode()) for word in words)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(240)
        client.connect(str(path))
        client.sendall(b"*%d\r\n%s" % (len(words), text))
        return client.recv(65536)


def wait_for(process: subprocess.Popen[bytes], path: Path) -> None:
    """Waits until it accepts connections: the socket file exists slightly earlier."""
    give_up = time.monotonic() + 240
    while True:
        assert process.poll() is None
        assert time.monotonic() < give_up
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(path))
                return
            except OSError:
                time.sleep(0.01)


class RedisClient:
    """A client on the server's socket that is independent of the project's code."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(240)
        self._socket.connect(str(path))
        self._answers = self._socket.makefile("rb")

    def __enter__(self) -> "RedisClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.close()
        self._socket.close()

    def ask(self, *words: str | bytes | int) -> Any:
        """Returns the reply: bytes, int, None or a list; raises AssertionError on an error reply."""
        parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        command = b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
        self._socket.sendall(b"*%d\r\n" % len(parts) + command)
        return self._answer()

    def _answer(self) -> Any:
        line = self._answers.readline()[:-2]
        kind, rest = line[:1], line[1:]
        assert kind != b"-", rest
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"*":
            return [self._answer() for _ in range(int(rest))]
        length = int(rest)
        return None if length < 0 else self._answers.read(length + 2)[:-2]
