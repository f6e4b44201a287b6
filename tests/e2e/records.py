# SPDX-License-Identifier: Apache-2.0
"""Reads a disk tier from outside: its sizes, and records that a test damages on purpose."""

from __future__ import annotations

import struct
import threading
from pathlib import Path
from typing import NamedTuple

import xxhash
from live_root import paths_in, used_bytes

HEADER = 4096
# Offsets in the header.
CODEC = 108  # u32, 0: raw
ENCRYPTION = 652  # u32, 0: none
PAYLOAD_CHECKSUM = 120  # XXH3-64 of the payload
CREATED = 128  # unix nanoseconds
HEADER_CHECKSUM = 4088  # XXH3-64 of all preceding bytes


def files(root: Path) -> list[Path]:
    """Returns all records under ``root`` (files that start with the record magic), oldest first.

    Temporary files do not count: a killed server leaves them and the next server removes them.
    """
    found = []
    for path in paths_in(root):
        if path.name.startswith(".tmp-"):
            continue
        try:
            with path.open("rb") as record:
                header = record.read(HEADER)
        except OSError:  # a directory, or removed meanwhile
            continue
        if header.startswith(b"KVOREC1\n") and len(header) == HEADER:
            found.append((_u64(header, CREATED), path))
    return [path for _, path in sorted(found)]


class Form(NamedTuple):
    encoded: bool
    encrypted: bool


def form(path: Path) -> Form:
    with path.open("rb") as record:
        header = record.read(HEADER)
    codec, encryption = (struct.unpack_from("<I", header, at)[0] for at in (CODEC, ENCRYPTION))
    return Form(encoded=codec != 0, encrypted=encryption != 0)


def flip(path: Path, offset: int) -> None:
    """Inverts one byte, so that the checksum no longer matches."""
    with path.open("r+b") as record:
        record.seek(offset)
        byte = record.read(1)[0]
        record.seek(offset)
        record.write(bytes([byte ^ 0xFF]))


def truncate(path: Path) -> None:
    with path.open("r+b") as record:
        record.truncate(path.stat().st_size // 2)


def plant(path: Path, donor: Path) -> None:
    """Gives ``path`` the payload of ``donor`` with valid checksums.

    Only the answers show that this chunk is wrong.
    """
    header = bytearray(path.read_bytes()[:HEADER])
    payload = donor.read_bytes()[HEADER:]
    assert xxhash.xxh3_64_intdigest(bytes(header[:HEADER_CHECKSUM])) == _u64(header, HEADER_CHECKSUM)
    struct.pack_into("<Q", header, PAYLOAD_CHECKSUM, xxhash.xxh3_64_intdigest(payload))
    struct.pack_into("<Q", header, HEADER_CHECKSUM, xxhash.xxh3_64_intdigest(bytes(header[:HEADER_CHECKSUM])))
    path.write_bytes(bytes(header) + payload)


class UsageWatch:
    """Samples ``used_bytes`` in a thread while the block runs; ``peak`` is the largest sample."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.peak = 0
        self.samples = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.peak = max(self.peak, used_bytes(self.root))
            self.samples += 1

    def __enter__(self) -> UsageWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def _u64(data: bytes | bytearray, offset: int) -> int:
    return int(struct.unpack_from("<Q", data, offset)[0])
