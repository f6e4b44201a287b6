# SPDX-License-Identifier: Apache-2.0
"""Puts records into Mooncake Store and gets them, for the Mooncake client process (mooncake/client.py).

Mooncake has two interfaces. A plain call does the whole transfer, while one of its threads spins until the
bytes are moved. A session has separate calls to start, transfer and end. It waits without spinning, so it
takes half the CPU time or less, and its start reports that the object already exists, which a plain put does
not (``benchmarks/remote_bench.py mooncake`` compares both). A session does not write the copy on a shared
file system that a master with ``--root_fs_dir`` adds to each object; there, puts use the plain call.

Results are lengths in bytes, or one of Mooncake's error codes if below 0.
"""

import threading
import uuid
from typing import Protocol

FAILED, NO_SPACE_LEFT, BAD_LENGTH = -1, -200, -600
HOLDER_GONE, NOT_IN_MEMORY, NOT_COMPLETE = -101, -702, -703
NO_OBJECT, OBJECT_EXISTS, LEASE_ENDED = -704, -705, -707


class Store(Protocol):
    """The part of mooncake.store.MooncakeDistributedStore that is used here."""

    def is_exist(self, key: str, /) -> int: ...
    def batch_is_exist(self, keys: list[str], /) -> list[int]: ...
    def put_from(self, key: str, buffer_ptr: int, size: int) -> int: ...
    def upsert_from(self, key: str, buffer_ptr: int, size: int) -> int: ...
    def get_into(self, key: str, buffer_ptr: int, size: int) -> int: ...
    def get_size(self, key: str, /) -> int: ...
    def remove(self, key: str, force: bool = False) -> int: ...
    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...
    def unregister_buffer(self, buffer_ptr: int) -> int: ...
    def close(self) -> int: ...
    def batch_put_session_start(self, keys: list[str], sizes: list[int]) -> list[int]: ...
    def batch_put_from_multi_buffer_ranges(
        self, keys: list[str], buffers: list[list[int]], sizes: list[list[int]], offsets: list[list[int]], /
    ) -> list[int]: ...
    def batch_put_session_end(self, keys: list[str]) -> list[int]: ...
    def batch_put_session_revoke(self, keys: list[str]) -> list[int]: ...
    def batch_get_session_start(self, keys: list[str]) -> list[int]: ...
    def batch_get_into_multi_buffer_ranges(
        self, keys: list[str], buffers: list[list[int]], sizes: list[list[int]], offsets: list[list[int]], /
    ) -> list[int]: ...
    def batch_get_session_end(self, keys: list[str]) -> int: ...


class Records:
    """The records of one store. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._puts_in_sessions: bool | None = None  # None: unknown until the first put
        self._lock = threading.Lock()
        self._putting: set[str] = set()  # names with an open session

    def put(self, name: str, address: int, size: int) -> int:
        """Stores a record unless the object exists. Returns its size, or 0 if a session found the object.

        A plain put returns the size also if the object exists. Returns NOT_COMPLETE if another client started
        to write it and has not finished, even if that client was killed. The result of a session is not
        verified: if the storage node disappears during the session, the object may be lost although this
        reports success. ``address`` must be in registered memory.
        """
        if self._puts_in_sessions is None:
            self._puts_in_sessions = self._session_is_all_or_nothing(
                f"{name}:probe:{uuid.uuid4().hex}", address
            )
        if not self._puts_in_sessions:
            code = self._store.put_from(name, address, size)
            return code if code < 0 else self._size_if_present(name, size, NOT_COMPLETE)
        with self._lock:
            if name in self._putting:
                return NOT_COMPLETE
            self._putting.add(name)
        try:
            return self._put_in_session(name, address, size)
        finally:
            with self._lock:
                self._putting.remove(name)

    def get(self, name: str, address: int, room: int, expected: int) -> int:
        """Returns the size of the object, which is copied to ``address`` if it fits in ``room`` bytes.

        ``expected``: its probable size; 0 if unknown.
        """
        if expected:
            got = self._get_in_session(name, address, expected)
            if got is not None:
                return got
        got = self._store.get_into(name, address, room)
        if got != BAD_LENGTH:
            return got
        length = self._store.get_size(name)
        return length if length > room or length < 0 else BAD_LENGTH

    def _size_if_present(self, name: str, size: int, otherwise: int) -> int:
        """Returns the size of the object after a put that may have collided with another client's."""
        there = self._store.is_exist(name)
        if there == 1:
            return size
        return there if there < 0 else otherwise

    def _put_in_session(self, name: str, address: int, size: int) -> int:
        store = self._store
        (code,) = store.batch_put_session_start([name], [size])
        if code == BAD_LENGTH:  # a session of ours may still be open because ending it failed
            store.batch_put_session_revoke([name])
            (code,) = store.batch_put_session_start([name], [size])
        if code == OBJECT_EXISTS:
            return self._size_if_present(name, 0, NOT_COMPLETE)
        if code == BAD_LENGTH:
            # Or the end took effect although its reply was lost: there is nothing to revoke.
            return self._size_if_present(name, size, BAD_LENGTH)
        if code < 0:
            return code
        (moved,) = store.batch_put_from_multi_buffer_ranges([name], [[address]], [[size]], [[0]])
        if moved != size:
            store.batch_put_session_revoke([name])
            # Mooncake returns BAD_LENGTH for an unreachable storage node: no bytes were moved.
            return HOLDER_GONE if moved == BAD_LENGTH else moved if moved < 0 else FAILED
        (code,) = store.batch_put_session_end([name])
        return code if code < 0 else size

    def _session_is_all_or_nothing(self, name: str, address: int) -> bool | None:
        """True if a session does everything that a plain put does; None if that cannot be determined now.

        Tests it with an object of one byte, which can be removed only when all of its copies are written.
        """
        if self._put_in_session(name, address, 1) != 1:
            return None
        return {0: True, NOT_COMPLETE: False}.get(self._store.remove(name, True))

    def _get_in_session(self, name: str, address: int, expected: int) -> int | None:
        """Returns the size; None if a session cannot get the object. No transfer is running then."""
        store = self._store
        (code,) = store.batch_get_session_start([name])
        if code != 0:
            return None if code == NOT_IN_MEMORY else code
        try:
            (got,) = store.batch_get_into_multi_buffer_ranges([name], [[address]], [[expected]], [[0]])
            if got == BAD_LENGTH:  # the object is shorter, or its storage node is unreachable
                return None
            if got != expected:
                return got if got < 0 else FAILED
            # If one more byte can be read, the object is longer than expected.
            (more,) = store.batch_get_into_multi_buffer_ranges([name], [[address]], [[1]], [[expected]])
            if more == BAD_LENGTH:
                return expected
            return more if more < 0 and more != LEASE_ENDED else None
        finally:
            store.batch_get_session_end([name])
