# SPDX-License-Identifier: Apache-2.0
"""The records on a server or in a bucket, for the commands that manage them.

Memory use is bounded regardless of the number of records, because records are read one page at a time. Only a
caller that collects ``records`` keeps them all (``ls --limit 0`` in an order other than as found).
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any

from kv_offload.losses import LossTotals
from kv_offload.printable import printable
from kv_offload.tenants import TenantTotals, stored_name, unknown_tenant

if TYPE_CHECKING:
    from kv_offload._core import RemoteRecord, RemoteRecords, WholeRecord

_THREADS = 16  # for kinds that need one round trip per record
_MOST_NAMESPACES = 10_000  # that stat lists separately
_MOST_OTHERS = 10  # shown names that are not records
_MOST_NAME = 120  # characters of such a name
_MOST_DAMAGED = 10_000  # verify stops here
_TIME_RESOLUTION = 1.0  # seconds; of the time of an object in a bucket
_FAILURES_IN_A_ROW = 8  # then the server is considered unreadable
_REACHABLE = ("ok", "corrupt", "unavailable")  # the last: a record of another version, or one that must stay


def shown_name(name: bytes) -> str:
    """Returns a name for display, with unprintable characters escaped."""
    text = name[: 4 * _MOST_NAME].decode("utf-8", "backslashreplace")
    safe = printable(text)
    return safe if len(safe) <= _MOST_NAME else f"{safe[: _MOST_NAME - 1]}…"


class RemoteRoot:
    """``records``: opened by the kind; ``where``: their address without credentials; ``folder``: the prefix
    of each record name."""

    has_hits = False  # every read of a record counts as a use, also by this program

    def __init__(self, records: "RemoteRecords", where: str, folder: str = "") -> None:
        self._records = records
        self._folder = folder
        self.where = where
        self._epoch_times: dict[str, float] = {}  # when the name of an epoch was written; listed by a bucket
        self._versions = 0  # bytes removed that remain as older versions
        self._prefix_was_empty = False  # the full listing under the prefix was empty

    # ---- lists

    def _pages(self, namespace: str | None, sizes: bool) -> Iterator[list["RemoteRecord"]]:
        start = landmark = b""
        pages, next_landmark, names = 0, 1, 0
        while True:
            try:
                page, start = self._records.page(namespace or "", start, sizes)
            except RuntimeError as error:
                raise RuntimeError(f"{self.where}: {error}") from None
            names += len(page)
            yield page
            if not start:
                self._prefix_was_empty = names == 0 and namespace is None
                return
            if start == landmark:
                raise RuntimeError(f"{self.where}: the server keeps listing the same pages")
            # The distance between landmarks doubles, so any cycle of pages eventually contains one.
            pages += 1
            if pages == next_landmark:
                landmark, next_landmark = start, 2 * next_landmark

    def stat(self) -> dict[str, Any]:
        """Returns totals per namespace, and ``others``: keys under the prefix that are not records."""
        spaces: dict[str, dict[str, Any]] = {}
        report: dict[str, Any] = {"bytes": 0, "records": 0, "temporaries": 0, "others": 0, "other_names": []}
        left_out = 0
        for page in self._pages(None, True):
            for record in page:
                if not record.namespace_id:
                    report["others"] += 1
                    if len(report["other_names"]) < _MOST_OTHERS:
                        report["other_names"].append(shown_name(record.name))
                    continue
                if record.key:  # otherwise a key that names an epoch
                    report["bytes"] += record.size
                    report["records"] += 1
                space = spaces.get(record.namespace_id)
                if space is None and len(spaces) < _MOST_NAMESPACES:
                    space = spaces[record.namespace_id] = _new_space(record.namespace_id)
                if space is None:
                    left_out += 1
                elif record.key:
                    _count(space, record)
        report["namespaces"] = [spaces[name] for name in sorted(spaces)]
        if left_out:
            report["records_of_further_namespaces"] = left_out
        return report

    def records(
        self, namespace: str | None = None, failures: list[str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yields records; each has a key ``record``, which ``with_history`` removes.

        Raises RuntimeError for every failure: nothing can be listed after it.
        """
        for page in self._pages(namespace, True):
            for record in page:
                if record.namespace_id and not record.key:
                    self._epoch_times[record.namespace_id] = record.written
                if record.key:
                    yield {
                        "namespace": record.namespace_id,
                        "epoch": record.epoch,
                        "key": record.key,
                        "bytes": record.size,
                        "mtime": record.used or record.written,
                        "path": self._path(record),
                        "record": record,
                    }

    def with_history(self, record: dict[str, Any]) -> dict[str, Any]:
        """``mtime`` is None if the server does not record the last use."""
        found: RemoteRecord = record["record"]
        created = found.written or self._call(lambda: self._records.written(found))
        fields = {name: value for name, value in record.items() if name != "record"}
        return fields | {"mtime": found.used or None, "created": created or None, "hit": None}

    def _call(self, call: Callable[[], float]) -> float:
        try:
            return call()
        except RuntimeError as error:
            raise RuntimeError(f"{self.where}: {error}") from None

    def _path(self, record: "RemoteRecord") -> str:
        return self._folder + record.name.decode("ascii")  # hex below a prefix that is plain text

    # ---- verification and removal

    def verify(
        self, repair: bool, progress: Callable[[int, int | None], None], key_files: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        """Stops early, with an entry that says so, after _MOST_DAMAGED damaged records, and when the server
        fails after damage was found. Raises RuntimeError when the server fails before that."""
        self._records.use_keys(list(key_files))
        damaged: list[dict[str, Any]] = []
        try:
            self._find_damage(repair, progress, damaged)
        except RuntimeError as error:
            if not damaged:
                raise
            message = f"ended early: {str(error).removeprefix(f'{self.where}: ')}"
            damaged.append({"path": self.where, "kind": "io", "message": message, "removed": False})
        return damaged

    def _find_damage(
        self, repair: bool, progress: Callable[[int, int | None], None], damaged: list[dict[str, Any]]
    ) -> None:
        done = failures = 0
        for record, (kind, message, removed) in self._verified(repair):
            if kind == "not_found":
                continue
            done += 1
            progress(done, None)
            failures = failures + 1 if kind not in _REACHABLE else 0
            if failures == _FAILURES_IN_A_ROW:
                # The previous failures report the same cause.
                if all(bad["kind"] not in _REACHABLE for bad in damaged):
                    damaged.clear()
                raise RuntimeError(f"{self.where}: {message}")
            if kind == "ok":
                continue
            damaged.append({"path": self._path(record), "kind": kind, "message": message, "removed": removed})
            if len(damaged) == _MOST_DAMAGED:
                raise RuntimeError(f"{_MOST_DAMAGED:,} records are damaged: run it again for the rest")

    def _verified(self, repair: bool) -> Iterator[tuple["RemoteRecord", tuple[str, str, bool]]]:
        def verified(record: "RemoteRecord") -> tuple[str, str, bool]:
            return self._records.verify(record, repair)

        for page in self._pages(None, False):
            some = [record for record in page if record.key]
            yield from zip(some, self._each(verified, some), strict=True)

    def tenants(self) -> dict[str, dict[str, int]]:
        found = TenantTotals()
        for page in self._pages(None, True):
            some = [record for record in page if record.key]
            for record, tenant in self._with_tenants(some):
                found.add(tenant, record.size)
        return found.by_name()

    def _with_tenants(self, records: list["RemoteRecord"]) -> Iterator[tuple["RemoteRecord", str | None]]:
        try:
            yield from zip(records, self._each(self._records.tenant, records), strict=True)
        except RuntimeError as error:
            raise RuntimeError(f"{self.where}: {error}") from None

    def allows_loss(self) -> bool:
        return False  # namespaces are not described there

    def losses(self) -> dict[str, Any]:
        found = LossTotals()
        try:
            for page in self._pages(None, False):
                for stated in self._each(self._records.loss, [record for record in page if record.key]):
                    found.add(stated)
        except RuntimeError as error:
            raise RuntimeError(f"{self.where}: {error}") from None
        return found.totals()

    def purge(self, namespace: str | None, tenant: str | None = None) -> tuple[int, int]:
        """Bytes that older versions still occupy are not counted as freed.

        Raises RuntimeError if some cannot be read or removed. Records without a valid header may be those of
        the tenant: all others are removed, then it raises RuntimeError.
        """
        records = size = 0
        unknown = ""
        try:
            for page in self._pages(namespace, True):
                some = [record for record in page if record.key]
                if tenant is not None:
                    named = list(self._with_tenants(some))
                    some = [record for record, name in named if name == stored_name(tenant)]
                    unknown = unknown or self._first_unknown(named)
                removed, freed, error = self._remove_in_parts(some)
                records, size = records + removed, size + freed
                if error:
                    raise RuntimeError(f"{self.where}: {error}")
        except RuntimeError as failed:
            raise RuntimeError(f"{failed} ({records:,} records were removed before)") from None
        if unknown:
            raise RuntimeError(
                f"{self.where}: {records:,} records were removed, but records of the tenant may be left: "
                f"{unknown}"
            )
        if self._records.keeps_versions:
            self._versions, size = size, 0
        return records, size

    def _first_unknown(self, named: list[tuple["RemoteRecord", str | None]]) -> str:
        """Returns why the tenant of a record is unknown, for the first one that still exists; "": of none."""
        for record, name in named:
            if name is None and self._records.verify(record, False)[0] != "not_found":
                return unknown_tenant(self._path(record))
        return ""

    # ---- copies

    def use_record_sizes(self) -> None:
        self._records.use_record_sizes()

    def startup_epoch(self, namespace: str) -> str | None:
        try:
            return self._records.startup_epoch(namespace) or None
        except RuntimeError as error:
            raise RuntimeError(f"{self.where}: {error}") from None

    def was_reset(self, namespace: str, epoch: str) -> bool:
        """Returns True if another epoch is stored. A missing name does not count: servers restore it."""
        return self.startup_epoch(namespace) not in (epoch, None)

    def epoch_began(self, namespace: str) -> float:
        began = self._epoch_times.get(namespace, 0.0)
        return began and began + _TIME_RESOLUTION  # records of the second of the reset may be older than it

    def created(self, namespace: str, handle: "RemoteRecord") -> tuple[float, float]:
        """Reads the whole record where a look at its header would count as a use."""
        if handle.written:
            return handle.written, handle.written + _TIME_RESOLUTION
        created = self._call(lambda: self._records.written(handle))
        if not created:
            _, _, whole = self._records.read(handle)
            created = whole.created if whole is not None else 0.0
        return created, created

    def handle(self, record: dict[str, Any]) -> "RemoteRecord":
        found: RemoteRecord = record["record"]
        return found

    def read(
        self, namespace: str, handle: "RemoteRecord", into: "WholeRecord | None" = None
    ) -> "tuple[str, str, WholeRecord | None]":
        return self._records.read(handle, into)

    def use_keys(self, key_files: Sequence[str]) -> None:
        self._records.use_keys(list(key_files))

    def remove(self, records: Sequence[dict[str, Any]]) -> int:
        removed, _, error = self._remove_in_parts([record["record"] for record in records])
        if error:
            raise RuntimeError(f"{self.where}: {error}")
        return removed

    def _remove_in_parts(self, records: list["RemoteRecord"]) -> tuple[int, int, str]:
        """Returns the number and bytes of removed records, and the first error or ""."""
        parts = _THREADS if self._records.takes_threads else 1
        removed = size = 0
        error = ""
        for count, freed, refused in self._each(
            self._records.remove, [records[first::parts] for first in range(parts)]
        ):
            removed, size, error = removed + count, size + freed, error or refused
        return removed, size, error

    def _each(self, ask: Callable[[Any], Any], given: list[Any]) -> Iterable[Any]:
        if not self._records.takes_threads:
            return map(ask, given)
        return self._in_threads(ask, given)

    @staticmethod
    def _in_threads(ask: Callable[[Any], Any], given: list[Any]) -> Iterator[Any]:
        """Limits the calls in flight: a caller that gives up loses few completed results."""
        pool = ThreadPoolExecutor(_THREADS)
        waiting = iter(given)
        asked = deque(pool.submit(ask, each) for each in islice(waiting, 2 * _THREADS))
        try:
            while asked:
                yield asked.popleft().result()
                asked.extend(pool.submit(ask, each) for each in islice(waiting, 1))
        finally:
            pool.shutdown(cancel_futures=True)

    def notes(self) -> list[str]:
        """Returns warnings: there are no records at all, or the bucket keeps versions."""
        if self._prefix_was_empty:
            return [f"no records under {self.where}: check the address and the prefix of the tier"]
        if not self._records.keeps_versions:
            return []
        from kv_offload.sizes import format_bytes

        held = f" ({format_bytes(self._versions)})" if self._versions else ""
        return [
            f"the bucket keeps versions: removed records still take space{held} as older versions, "
            "until a lifecycle rule for noncurrent versions expires them"
        ]


def _new_space(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "json": None,  # a server stores no descriptions
        "epoch": None,
        "bytes": 0,
        "records": 0,
        "oldest": None,
        "newest": None,
        "open": None,
    }


def _count(space: dict[str, Any], record: "RemoteRecord") -> None:
    space["bytes"] += record.size
    space["records"] += 1
    when = record.used or record.written
    if when and when < time.time() + 86_400:
        space["oldest"] = when if space["oldest"] is None else min(space["oldest"], when)
        space["newest"] = when if space["newest"] is None else max(space["newest"], when)
