"""How the process beside an engine (mooncake_client.py) puts records into Mooncake Store and gets them.

Mooncake has two ways. A plain call does all of it, and one of its threads spins until the bytes are moved. A
session is begun, moves bytes and is ended by calls of its own: it waits without spinning, so that it takes
half the processor time or less, and its beginning tells what a plain put keeps to itself, that the object is
there already (``benchmarks/remote_bench.py mooncake`` compares). Puts are plain where a session does not do
all that a plain put does: it does not write the copy on a shared file system that a master with
``--root_fs_dir`` adds to each object.

Results are lengths in bytes, or below 0 one of Mooncake's error codes.
"""

import threading
import uuid
from typing import Protocol

FAILED, NO_SPACE_LEFT, BAD_LENGTH = -1, -200, -600
HOLDER_GONE, NOT_IN_MEMORY, NOT_COMPLETE = -101, -702, -703
NO_OBJECT, IS_THERE, LEASE_ENDED = -704, -705, -707


class Store(Protocol):
    """What is used of mooncake.store.MooncakeDistributedStore."""

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
    """Of one store. Any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._puts_in_sessions: bool | None = None  # not known yet
        self._lock = threading.Lock()
        self._putting: set[str] = set()  # names that have a session now

    def put(self, name: str, address: int, size: int) -> int:
        """Leaves what is there. NOT_COMPLETE where another began to write it and has not ended, even if that
        one was killed then. Nothing is asked after a session: of a holder that goes away during it, what was
        put may be gone with it all the same. ``address``: of memory that is registered."""
        if self._puts_in_sessions is None:
            self._puts_in_sessions = self._does_a_session_do_it_all(
                f"{name}:probe:{uuid.uuid4().hex}", address
            )
        if not self._puts_in_sessions:
            code = self._store.put_from(name, address, size)
            return code if code < 0 else self._size_if_there(name, size, NOT_COMPLETE)
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
        """The bytes of the object, which are at ``address`` if they are no more than ``room``. ``expected``:
        how many they probably are; 0 when that is not known."""
        if expected:
            got = self._get_in_session(name, address, expected)
            if got is not None:
                return got
        got = self._store.get_into(name, address, room)
        if got != BAD_LENGTH:
            return got
        length = self._store.get_size(name)
        return length if length > room or length < 0 else BAD_LENGTH

    def _size_if_there(self, name: str, size: int, otherwise: int) -> int:
        """After a put that may have met another's."""
        there = self._store.is_exist(name)
        if there == 1:
            return size
        return there if there < 0 else otherwise

    def _put_in_session(self, name: str, address: int, size: int) -> int:
        store = self._store
        (code,) = store.batch_put_session_start([name], [size])
        if code == BAD_LENGTH:  # one of ours may be left that could not be ended
            store.batch_put_session_revoke([name])
            (code,) = store.batch_put_session_start([name], [size])
        if code in (IS_THERE, BAD_LENGTH):
            # BAD_LENGTH: or its end was done, though Mooncake did not hear of it: there is nothing to revoke.
            return self._size_if_there(name, size, NOT_COMPLETE if code == IS_THERE else BAD_LENGTH)
        if code < 0:
            return code
        (moved,) = store.batch_put_from_multi_buffer_ranges([name], [[address]], [[size]], [[0]])
        if moved != size:
            store.batch_put_session_revoke([name])
            # BAD_LENGTH is what is said of a holder that cannot be reached: nothing was moved.
            return HOLDER_GONE if moved == BAD_LENGTH else moved if moved < 0 else FAILED
        (code,) = store.batch_put_session_end([name])
        return code if code < 0 else size

    def _does_a_session_do_it_all(self, name: str, address: int) -> bool | None:
        """Tried with an object of one byte, which can be removed only when all of its copies are written.
        None: that cannot be told now."""
        if self._put_in_session(name, address, 1) != 1:
            return None
        return {0: True, NOT_COMPLETE: False}.get(self._store.remove(name, True))

    def _get_in_session(self, name: str, address: int, expected: int) -> int | None:
        """None: not to be had that way, and nothing is moved any more."""
        store = self._store
        (code,) = store.batch_get_session_start([name])
        if code != 0:
            return None if code == NOT_IN_MEMORY else code
        try:
            (got,) = store.batch_get_into_multi_buffer_ranges([name], [[address]], [[expected]], [[0]])
            if got == BAD_LENGTH:  # it is shorter, or its holder cannot be reached
                return None
            if got != expected:
                return got if got < 0 else FAILED
            # It is longer if one more byte can be had; else nobody is asked for that.
            (more,) = store.batch_get_into_multi_buffer_ranges([name], [[address]], [[1]], [[expected]])
            if more == BAD_LENGTH:
                return expected
            return more if more < 0 and more != LEASE_ENDED else None
        finally:
            store.batch_get_session_end([name])
