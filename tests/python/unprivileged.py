# SPDX-License-Identifier: Apache-2.0
"""Makes directories unreadable, even if the tests run as root."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
_IGNORE_PERMISSIONS = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextmanager
def hidden(directory: Path) -> Iterator[None]:
    """Makes ``directory`` unreadable for this thread and the threads that it starts."""
    header = (ctypes.c_uint32 * 2)(_VERSION, 0)
    own = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their upper halves
    _call("capget", header, own)
    fewer = (ctypes.c_uint32 * 6)(*own)
    fewer[0] &= ~_IGNORE_PERMISSIONS
    mode = directory.stat().st_mode & 0o7777
    directory.chmod(0)
    _call("capset", header, fewer)
    try:
        yield
    finally:
        _call("capset", header, own)
        directory.chmod(mode)


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
