# SPDX-License-Identifier: Apache-2.0
"""A root of the kind ``fs``, for the commands that manage it: checks of the directory and its owner, its
records and the descriptions of its namespaces.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from kv_offload.losses import LossTotals, allows_loss
from kv_offload.tenants import TenantTotals, stored_name, unknown_tenant
from kv_offload.tiers.base import MissingNamespaceError

if TYPE_CHECKING:
    from kv_offload._core import FsRoot, WholeRecord

ROOT_FILE = "kv_offload.json"  # kRootFile in csrc/backends/fs/layout.h
_EPOCH = re.compile(r"g[0-9]+")  # an epoch's directory
_REMOVED_AT_ONCE = 1000  # records of a tenant
_SAME_SECONDS = 2.0  # duration of a write: a last use within this time is the write itself


class ForeignRootError(RuntimeError):
    """The command would change a root of another user."""


def open_root(path: str, *, changes: bool = False) -> "FsRoot":
    """Opens the root at ``path``; ``changes``: the command removes records.

    Raises ValueError naming what exists there instead, OSError or RuntimeError if it cannot be read,
    ForeignRootError if ``changes`` is set and it belongs to another user.
    """
    from kv_offload import _core

    try:
        opened = _core.FsRoot(path)
    except ValueError as error:
        raise ValueError(describe_contents(path) or str(error)) from error
    if changes:
        refuse_other_user(path)
    return opened


def describe_contents(path: str) -> str:
    """Returns why ``path`` is not a root; empty if it contains the root file. Raises OSError."""
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
        return f"{path} is part of the root {parent}: give that directory"
    return f"{path} is not a root of kv-offload: it holds other files and no {ROOT_FILE}"


def owner_of(path: str) -> int:
    return os.stat(path).st_uid


def refuse_other_user(path: str) -> None:
    """Refuses other users, even root: servers cannot open files that they create here, such as the ledger."""
    owner = owner_of(path)
    if owner != os.geteuid():
        raise ForeignRootError(
            f"{path} belongs to user {owner}, this process is user {os.geteuid()}: servers could not open "
            f"the files that it leaves there. Run it as that user: sudo -u '#{owner}' kv-offload ..."
        )


def _tenant_in(path: str) -> str | None:
    """Returns the tenant in a record's header; None if it is missing, or has no valid header."""
    from kv_offload import _core

    name = _core.record_tenant(path)
    if name is None and os.path.lexists(path):  # evicted while it was read, and written again?
        name = _core.record_tenant(path)
    return name


class DirectoryRoot:
    """A directory with the interface of all roots (``kv_offload.tiers.base.Root``)."""

    has_hits = True

    def __init__(self, path: str, *, changes: bool) -> None:
        self._root = open_root(path, changes=changes)
        self._key_files: list[str] = []
        self._temporaries = 0  # left by a purge of a tenant
        self.where = path

    def stat(self) -> dict[str, Any]:
        return self._root.stat()

    def records(
        self, namespace: str | None = None, failures: list[str] | None = None
    ) -> Iterator[dict[str, Any]]:
        found = self._root.records(namespace, strict=True)
        while True:
            try:
                record = next(found)
            except StopIteration:
                return
            except RuntimeError as error:  # the next call continues after the directory
                if failures is None:
                    raise
                failures.append(str(error))
                continue
            yield record

    def with_history(self, record: dict[str, Any]) -> dict[str, Any]:
        """Adds its creation time and whether it was used since."""
        from kv_offload import _core

        created = _core.record_created(record["path"])
        return record | {
            "created": created,
            "hit": bool(created) and record["mtime"] > created + _SAME_SECONDS,
        }

    def verify(
        self, repair: bool, progress: Callable[[int, int | None], None], key_files: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        damaged = self._root.verify(repair, progress, list(key_files))
        return damaged + damaged_descriptions(self.where, self._root, repair)

    def tenants(self) -> dict[str, dict[str, int]]:
        from kv_offload import _core

        found = TenantTotals()
        for record in self._root.records(None, all_epochs=True, strict=True):
            found.add(_core.record_tenant(record["path"]), record["bytes"])
        return found.by_name()

    def allows_loss(self) -> bool:
        return any(allows_loss(space["json"] or "") for space in self._root.stat()["namespaces"])

    def losses(self) -> dict[str, Any]:
        from kv_offload import _core

        found = LossTotals()
        for record in self._root.records(None, all_epochs=True):
            found.add(_core.record_loss(record["path"]))
        return found.totals()

    def purge(self, namespace: str | None, tenant: str | None = None) -> tuple[int, int]:
        """Records of a tenant are removed from all epochs, like those of a namespace.

        Raises RuntimeError if some cannot be read or removed; all others are removed.
        """
        if tenant is None:
            return self._root.purge(namespace)
        records = size = 0
        failures: list[str] = []
        own = self._records_of(stored_name(tenant), namespace, failures)
        while some := list(islice(own, _REMOVED_AT_ONCE)):
            try:
                removed = self._root.remove([record["path"] for record in some])
            except RuntimeError as error:
                failures.append(str(error))
                continue
            records += removed
            # A server may have evicted some meanwhile.
            size += sum(record["bytes"] for record in some) * removed // len(some)
        if failures:
            raise RuntimeError(f"others were removed, but records of the tenant may be left: {failures[0]}")
        self._temporaries = self._root.stat()["temporaries"]
        return records, size

    def _records_of(
        self, stored: str, namespace: str | None, failures: list[str]
    ) -> Iterator[dict[str, Any]]:
        """Yields the records with this name of a tenant. Appends an error to ``failures`` for each record and
        directory that cannot be read, and for each record without a valid header: it may be the tenant's."""

        found = self._root.records(namespace, all_epochs=True, strict=True)
        while True:
            try:
                record = next(found)
                name = _tenant_in(record["path"])
            except StopIteration:
                return
            except RuntimeError as error:  # the next call continues behind it
                failures.append(str(error))
                continue
            if name is None and os.path.lexists(record["path"]):
                failures.append(unknown_tenant(record["path"]))
            elif name == stored:
                yield record

    def use_record_sizes(self) -> None:
        """Does nothing: the size of a file is that of its record."""

    def startup_epoch(self, namespace: str) -> int | None:
        return self._root.startup_epoch(namespace)

    def was_reset(self, namespace: str, epoch: str) -> bool:
        existed = self._has_epoch(namespace)
        now = self.startup_epoch(namespace)
        # None with an epoch: a reset made it. A lower number: the namespace was created again.
        missing = now is None and not (existed and self._has_epoch(namespace))
        if missing or (now is not None and now < int(epoch)):
            raise MissingNamespaceError(f"{self.where}: the namespace {namespace} no longer exists")
        return str(now) != epoch

    def _has_epoch(self, namespace: str) -> bool:
        try:
            names = os.listdir(os.path.join(self.where, namespace))
        except FileNotFoundError:
            return False
        return any(_EPOCH.fullmatch(name) for name in names)

    def epoch_began(self, namespace: str) -> float:
        return 0.0

    def created(self, namespace: str, handle: str) -> tuple[float, float]:
        from kv_offload import _core

        created = _core.record_created(handle)
        return created, created

    def handle(self, record: dict[str, Any]) -> str:
        return str(record["path"])

    def read(
        self, namespace: str, handle: str, into: "WholeRecord | None" = None
    ) -> "tuple[str, str, WholeRecord | None]":
        from kv_offload import _core

        return _core.read_record_file(handle, namespace, self._key_files, into)

    def use_keys(self, key_files: Sequence[str]) -> None:
        from kv_offload.tiers.encryption import key_ids

        if key_files:
            key_ids(tuple(key_files))  # raises for keys that cannot be used
        self._key_files = list(key_files)

    def remove(self, records: Sequence[dict[str, Any]]) -> int:
        return self._root.remove([record["path"] for record in records])

    def notes(self) -> list[str]:
        if not self._temporaries:
            return []
        return [
            f"temporary files of unfinished writes that are left: {self._temporaries:,}. They may have "
            "bytes of the tenant. A running server removes those of killed servers"
        ]


def damaged_descriptions(root: str, opened: "FsRoot", repair: bool) -> list[dict[str, Any]]:
    """Returns namespaces whose id is not the digest of their namespace.json, in the form of ``verify``'s
    results."""
    from kv_offload.namespace import described_id

    damaged = []
    for space in opened.stat()["namespaces"]:
        if not space["json"] or described_id(space["json"]) == space["id"]:
            continue
        path = os.path.join(root, space["id"], "namespace.json")
        # stat() may take minutes, in which a server writes the file again or removes the namespace.
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                if described_id(file.read()) == space["id"]:
                    continue
            if repair:
                os.unlink(path)
        except FileNotFoundError:
            continue
        message = "it describes a different namespace than its directory name"
        damaged.append({"path": path, "kind": "corrupt", "message": message, "removed": repair})
    return damaged
