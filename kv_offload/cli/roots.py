"""Opening a root for a command: what keeps it from being one, and who may change it."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_offload._core import FsRoot

ROOT_FILE = "kv_offload.json"  # kRootFile in csrc/storage/fs/layout.h


class ForeignRootError(RuntimeError):
    """A root of another user, which the command would have changed."""


def open_root(path: str, *, changes: bool = False) -> "FsRoot":
    """The root at ``path``; ``changes``: the command removes records.

    Raises ValueError saying what is there instead, OSError when it cannot be looked at, ForeignRootError
    when it would be changed and belongs to another user.
    """
    from kv_offload import _core

    try:
        opened = _core.FsRoot(path)
    except ValueError as error:
        raise ValueError(what_is_there(path) or str(error)) from error
    if changes:
        refuse_other_user(path)
    return opened


def what_is_there(path: str) -> str:
    """Why ``path`` is not a root; empty when it has the file of one. Raises OSError."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return (
            f"{path} does not exist; the first server that uses it creates it: compare it with root_dir in "
            "the server's configuration"
        )
    except NotADirectoryError:
        return f"{path} is not a directory; give the root_dir of a tier"
    if ROOT_FILE in names:
        return ""
    if not names:
        return f"{path} is an empty directory: no server has used it as root_dir yet"
    for name in sorted(names):
        if os.path.exists(os.path.join(path, name, ROOT_FILE)):
            return f"{path} is not a root, but contains one: give {os.path.join(path, name)}"
    parent = os.path.dirname(os.path.abspath(path))
    if os.path.exists(os.path.join(parent, ROOT_FILE)):
        return f"{path} is a part of the root {parent}: give that"
    return f"{path} is not a root of kv-offload: it holds other files and no {ROOT_FILE}"


def owner_of(path: str) -> int:
    return os.stat(path).st_uid


def refuse_other_user(path: str) -> None:
    """A file that another user makes here (even root: the ledger) is one that the servers cannot open."""
    owner = owner_of(path)
    if owner != os.geteuid():
        raise ForeignRootError(
            f"{path} belongs to user {owner}, this process is user {os.geteuid()}: servers could not open "
            f"the files that it leaves there. Run it as that user: sudo -u '#{owner}' kv-offload ..."
        )
