# SPDX-License-Identifier: Apache-2.0
"""Copies the records of a namespace from one tier into another, for ``kv-offload copy``.

Records are copied as they are stored: payloads and names stay unchanged. Servers may use both tiers
meanwhile. The destination's own write path makes each record complete or absent, and keeps the bound.

Epochs: only records that a newly started server would find in the source are copied, into the epoch that a
newly started server uses in the destination. A reset of the source makes all of them invalid, so the records
that this run has copied are removed again.

Threads: reader threads run ahead of the writer threads, so that neither tier waits for the other one.
``RecordMemory`` bounds the records between them.

Memory use is about 0.6 KB per record of a source directory, 1.2 KB per record of a source server or bucket,
and 0.2 KB per record of the destination, plus the records between the threads.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from kv_offload.copy_limits import RateLimit, RecordMemory, Slot
from kv_offload.interrupts import Interrupts
from kv_offload.sizes import format_bytes
from kv_offload.tiers.base import MissingNamespaceError

if TYPE_CHECKING:
    from kv_offload._core import RecordImporter, WholeRecord
    from kv_offload.namespace import NamespaceIdentity
    from kv_offload.tiers.base import Root, TierConfig

CHECK_SECONDS = 1.0  # interval between epoch checks
_LOOK_PAUSES = (0.1, 0.5, 2.0)  # before each retry of a failed check
_INTERRUPT_SECONDS = 0.2  # interval between checks for Ctrl-C
_MEMORY_BYTES = 512 << 20  # of records between reader and writer threads; see RecordMemory
_FAILURES_IN_A_ROW = 8  # then a tier is considered out of service
_MOST_LISTED = 1_000  # failed records that a report lists
_MOST_SAMPLES = 8  # records of a tier that are read to see whether they are encrypted
_COUNTING_SECONDS = 600.0  # longest wait for another process that counts the destination
_COUNTING_PAUSE = 0.2
_REMOVED_AT_ONCE = 1_000
_SETTLED = ("ok", "no_space", "cancelled")  # results of a write that cannot be carried out later
_DAMAGED = ("corrupt", "unavailable")  # unavailable: another record version, or no given key decrypts it

_sleep = time.sleep
_now = time.time


class Order(str, Enum):
    """The values of ``--order``."""

    NEWEST = "newest"
    MOST_USED = "most-used"


class CopyError(RuntimeError):
    """The copy ended early. ``ended``: the value of ``ended`` in the report."""

    def __init__(self, ended: str, message: str) -> None:
        super().__init__(message)
        self.ended = ended


@dataclass(frozen=True)
class CopiedNamespace:
    """The part of a NamespaceIdentity that a tier needs. ``description``: namespace.json; "" if unknown."""

    id: str
    description: str

    def namespace_id(self) -> bytes:
        return bytes.fromhex(self.id)

    def readable_json(self) -> str:
        return self.description


@dataclass(frozen=True, slots=True)
class Entry:
    """A record of the source."""

    key: bytes
    bytes: int
    used: float  # unix seconds of the last use, or of the write, not after now; 0: unknown
    handle: object


@dataclass
class Plan:
    """The records to copy, in order. selected: those within the size limit; present: those of them that the
    destination has."""

    entries: list[Entry]
    selected: int = 0
    selected_bytes: int = 0
    present: int = 0
    present_bytes: int = 0
    there: dict[bytes, Entry] = field(default_factory=dict)  # the present ones, by key
    outdated: list[dict[str, Any]] = field(default_factory=list)  # records of the destination to be replaced
    is_ordered: bool = True  # False: the source stores no times
    unreadable: list[str] = field(default_factory=list)  # parts of the source, whose records are missing here

    @property
    def bytes(self) -> int:
        return self.selected_bytes - self.present_bytes


@dataclass
class Totals:
    """Results of the copy so far."""

    copied: int = 0
    copied_bytes: int = 0
    present: int = 0  # written by another process since the plan was made
    vanished: int = 0  # evicted from the source meanwhile
    other_form: int = 0  # encrypted unlike the records of the destination
    failed: int = 0
    failures: list[dict[str, str]] = field(default_factory=list)  # {path, kind, message}, the first ones
    removed: int = 0  # copied records that were removed after a reset of the source

    @property
    def done(self) -> int:
        return self.copied + self.present + self.vanished + self.other_form + self.failed


def source_epoch(root: "Root", namespace: str) -> str:
    """Returns the epoch whose records are copied. Raises CopyError if there is none."""
    epoch = root.startup_epoch(namespace)
    if epoch is None:
        raise CopyError(
            "failed",
            f"{root.where}: a newly started server finds no records of this namespace, because it was reset "
            "or its epoch was lost: there is nothing to copy",
        )
    return str(epoch)


def sizes_in(root: "Root", namespace: str, epoch: str) -> dict[bytes, int]:
    """Returns the size of each record of an epoch, by its key."""
    return {
        bytes.fromhex(record["key"]): record["bytes"]
        for record in root.records(namespace)
        if str(record["epoch"]) == epoch
    }


def make_plan(
    source: "Root", namespace: str, epoch: str, there: dict[bytes, int], order: Order, max_bytes: int | None
) -> Plan:
    """Selects the first records in ``order`` up to ``max_bytes``, and leaves out those that are ``there``.

    Lists the parts of the source that cannot be read in ``Plan.unreadable``. Raises ValueError if the source
    does not record what the order needs.
    """
    if order is Order.MOST_USED and not source.has_hits:
        raise ValueError(
            f"{source.where}: hits are not recorded there, only times; use --order {Order.NEWEST.value}"
        )
    now = _now()
    unreadable: list[str] = []
    found: list[tuple[bool, Entry]] = []
    seen: set[bytes] = set()  # a listing of a server may contain a record twice
    for record in source.records(namespace, unreadable):
        key = bytes.fromhex(record["key"])
        if str(record["epoch"]) != epoch or key in seen:
            continue
        seen.add(key)
        unused = order is Order.MOST_USED and not source.with_history(record)["hit"]
        used = min(max(float(record["mtime"] or 0.0), 0.0), now)
        found.append((unused, Entry(key, record["bytes"], used, source.handle(record))))
    found.sort(key=lambda each: (each[0], -each[1].used))
    plan = Plan([], is_ordered=any(entry.used for _, entry in found) or not found, unreadable=unreadable)
    for _, entry in found:
        if max_bytes is not None and plan.selected_bytes + entry.bytes > max_bytes:
            break
        plan.selected += 1
        plan.selected_bytes += entry.bytes
        if there.get(entry.key) == entry.bytes:
            plan.present += 1
            plan.present_bytes += entry.bytes
            plan.there[entry.key] = entry
        else:
            plan.entries.append(entry)
    return plan


def outdated_records(
    source: "Root", destination: "Root", namespace: str, epoch: str, there: dict[bytes, Entry]
) -> list[dict[str, Any]]:
    """Returns records of the destination that may be copies from before a reset of the source.

    The source creates all its records after the reset. So a record that is older than the source's record of
    the same key, or than the epoch of the source if that is known, is no copy of it.
    """
    began = source.epoch_began(namespace)
    outdated = []
    for record in destination.records(namespace):
        entry = there.get(bytes.fromhex(record["key"]))
        if entry is None or str(record["epoch"]) != epoch:
            continue
        oldest = began or source.created(namespace, entry.handle)[1]
        created, _ = destination.created(namespace, destination.handle(record))
        if not oldest or not created or created < oldest:
            outdated.append(record)
    return outdated


def is_encrypted(root: "Root", namespace: str, handles: Iterable[object]) -> bool | None:
    """Returns whether records are encrypted, by the first readable one; None if none is."""
    for handle in islice(handles, _MOST_SAMPLES):
        _, _, whole = root.read(namespace, handle)
        if whole is not None:
            return bool(whole.encryption_key_id)
    return None


def handles_in(root: "Root", namespace: str, epoch: str) -> Iterator[object]:
    """Yields what ``Root.read`` needs of each record of an epoch."""
    return (root.handle(record) for record in root.records(namespace) if str(record["epoch"]) == epoch)


def open_importer(tier: "TierConfig", namespace: CopiedNamespace, bound: int | None) -> "RecordImporter":
    """Opens the destination for writing, as a server would, but without eviction."""
    from kv_offload import _core

    # make_spec uses only what both classes have.
    return _core.RecordImporter(tier.make_spec("copy", bound, cast("NamespaceIdentity", namespace)))


@dataclass(frozen=True)
class Outcome:
    """The result of copying one entry. status: copied, present, vanished, other_form, failed, or a reason to
    stop: full, reset, error (unexpected)."""

    entry: Entry
    status: str
    bytes: int = 0
    kind: str = ""
    message: str = ""
    at_source: bool = True


class Copier:
    """Copies the entries of a plan. ``open_source`` opens the source for one thread."""

    def __init__(
        self,
        namespace: str,
        open_source: Callable[[], "Root"],
        epoch: str,
        destination: "Root",
        importer: "RecordImporter",
        *,
        jobs: int,
        rate: int | None = None,
        encrypted: bool | None,
        is_counted: bool = False,
        op_timeout: float = 0.0,
        interrupts: Interrupts | None = None,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``jobs``: number of reader threads, and of writer threads. ``is_counted``: the destination may be
        unavailable while another process counts its bytes. ``op_timeout``: time limit of its
        operations, in seconds. ``notice`` shows a sentence."""
        self._namespace = namespace
        self._open_source = open_source
        self._source = open_source()
        self._epoch = epoch
        self._destination = destination
        self._importer = importer
        self._jobs = jobs
        self._encrypted = encrypted  # the records of the destination; None: unknown
        self._stop = threading.Event()
        # Two limits, because writes would exceed the rate after a wait for the destination.
        self._read_limit = RateLimit(rate, self._stop.wait)
        self._write_limit = RateLimit(rate, self._stop.wait)
        self._memory = RecordMemory(jobs, _MEMORY_BYTES)
        self._to_write: SimpleQueue[tuple[Entry, Slot] | None] = SimpleQueue()  # None: ends a thread
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._entry_lock = threading.Lock()
        self._counting_ends = math.inf if is_counted else 0.0  # monotonic; inf: no write has been refused yet
        self._op_timeout = op_timeout
        self._interrupts = interrupts or Interrupts()
        self._notice = notice
        self._attempted: set[bytes] = set()  # keys of records that this run may have written
        self._unsettled = 0  # attempts that ended without the destination's answer
        self._failures_in_a_row = 0
        self._failure: CopyError | None = None  # the first one that ended the copy
        self._next_check = time.monotonic() + CHECK_SECONDS
        self.totals = Totals()

    def run(self, entries: Iterable[Entry], progress: Callable[[Totals], None] = lambda _: None) -> None:
        """Copies the entries. Raises CopyError if it ends early; KeyboardInterrupt passes through.

        No thread writes any more when it returns or raises. After a reset of the source, what was copied is
        removed again.
        """
        pool = ThreadPoolExecutor(2 * self._jobs)
        failure: BaseException | None = None
        try:
            self._run(pool, iter(entries), progress)
        except BaseException as error:
            # A failure that has ended the copy comes first: errors may follow while reads and writes end.
            failure = self._failure or error
        try:
            self._end_threads()
            if isinstance(failure, KeyboardInterrupt):
                self._notice("waiting for the records in progress")
        except OSError:  # e.g. stderr is a broken pipe: the copy is interrupted anyway
            pass
        finally:
            self._end(pool)
        if isinstance(failure, OSError | RuntimeError) and not isinstance(failure, CopyError):
            failure = CopyError("failed", str(failure))
        # Asked after all threads have ended, whatever the result: a reset makes every copy useless or wrong.
        try:
            reset = self._reset_tier()
        except CopyError as error:  # it cannot be found out: report both failures
            if isinstance(failure, CopyError) and failure.ended != "reset" and str(failure) != str(error):
                raise CopyError(failure.ended, f"{failure}. {error}") from None
            raise
        if reset is self._source:
            raise CopyError("reset", f"{reset.where} was reset while it was copied; {self._undo()}") from None
        if reset is not None or (isinstance(failure, CopyError) and failure.ended == "reset"):
            raise CopyError(
                "reset",
                f"{self._destination.where} was reset while it was filled: its servers do not find the "
                "copies. Run the command again",
            ) from None
        if failure is not None:
            raise failure

    def problems(self) -> str:
        """Returns what was not copied by a copy that is complete; "" if there is nothing."""
        problems = []
        failed, other_form = self.totals.failed, self.totals.other_form
        if failed:
            problems.append(f"{failed:,} record{'s' if failed != 1 else ''} could not be copied")
        if other_form:
            ours, theirs = ("", "not ") if self._encrypted else ("not ", "")
            where = self._destination.where
            problems.append(
                f"{self._source.where}: records not copied because they are {theirs}encrypted: "
                f"{other_form:,}. The records of {where} are {ours}encrypted, so its servers would not find "
                "them"
            )
        return ". ".join(problems)

    def _end(self, pool: ThreadPoolExecutor) -> None:
        """Waits for the threads. Records that were read and not yet written are left out."""
        self._end_threads()
        self._end_writers()
        pool.shutdown(cancel_futures=True)

    def _end_threads(self) -> None:
        """Lets the threads end after the read or write in progress."""
        self._stop.set()
        self._memory.close()

    def _end_writers(self) -> None:
        """Lets the writer threads end after the records that were read."""
        for _ in range(self._jobs):
            self._to_write.put(None)

    def _run(
        self, pool: ThreadPoolExecutor, entries: Iterator[Entry], progress: Callable[[Totals], None]
    ) -> None:
        readers = {pool.submit(self._in_thread, self._read_entries, entries) for _ in range(self._jobs)}
        writers = {pool.submit(self._in_thread, self._write_records) for _ in range(self._jobs)}
        self._wait_for(readers, progress)
        self._end_writers()
        self._wait_for(writers, progress)
        if self._failure is not None:
            raise self._failure

    def _wait_for(self, threads: set[Future[None]], progress: Callable[[Totals], None]) -> None:
        # It is not woken for each record: it would compete with the threads for the interpreter lock.
        while threads:
            until_check = max(self._next_check - time.monotonic(), 0.0)
            done, threads = wait(threads, min(_INTERRUPT_SECONDS, until_check))
            for thread in done:
                thread.result()
            progress(self.totals)
            if self._interrupts.is_set():
                raise KeyboardInterrupt
            if time.monotonic() >= self._next_check:
                if self._reset_tier() is not None:
                    raise CopyError("reset", "")
                self._next_check = time.monotonic() + CHECK_SECONDS

    def _reset_tier(self) -> "Root | None":
        """Returns the tier that was reset since the copy began. Raises CopyError if that is unknown."""
        for root, epoch in ((self._source, self._epoch), (self._destination, self._importer.epoch)):
            if self._was_reset(root, epoch):
                return root
        return None

    def _was_reset(self, root: "Root", epoch: str) -> bool:
        for pause in (*_LOOK_PAUSES, None):
            try:
                return root.was_reset(self._namespace, epoch)
            except MissingNamespaceError as error:
                raise CopyError(
                    "failed",
                    f"{error}: it was evicted or purged. Copied records stay. If they are invalid, "
                    f"{self._purge}",
                ) from None
            except (OSError, RuntimeError) as error:
                if pause is None:
                    raise CopyError(
                        "failed",
                        f"{root.where}: its epoch cannot be read ({error}). Copied records stay. If "
                        f"{self._source.where} was reset, {self._purge}",
                    ) from None
            _sleep(pause)
        raise AssertionError

    @property
    def _purge(self) -> str:
        return f"run `kv-offload purge {self._destination.where} --namespace {self._namespace}`"

    # ---- in the threads

    def _in_thread(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException:
            self._end_threads()  # the others may wait for this thread
            raise

    def _read_entries(self, entries: Iterator[Entry]) -> None:
        while not self._stop.is_set():
            with self._entry_lock:  # until there is memory, so that no later entry takes it first
                entry = next(entries, None)
                if entry is None:
                    return
                slot = self._memory.take(entry.bytes)
            if slot is None:
                return
            try:
                outcome = self._read_one(entry, slot)
            except Exception as error:
                outcome = Outcome(entry, "error", 0, "error", str(error))
            if outcome is not None:
                self._settle(outcome)

    def _read_one(self, entry: Entry, slot: Slot) -> Outcome | None:
        """Returns None if the writers have the record now, or if the copy has ended."""
        is_passed_on = False
        try:
            self._read_limit.wait(entry.bytes)  # after the wait for memory: else reads follow it at once
            if self._stop.is_set():
                return None
            into, slot.record = slot.record, None  # a record that cannot be read keeps no memory
            kind, message, slot.record = self._read(entry, into)
            if slot.record is None:
                return Outcome(entry, "vanished" if kind == "not_found" else "failed", 0, kind, message)
            if self._encrypted is not None and bool(slot.record.encryption_key_id) != self._encrypted:
                return Outcome(entry, "other_form")
            is_passed_on = True
            self._to_write.put((entry, slot))
            return None
        finally:
            if not is_passed_on:
                self._memory.give_back(slot)

    def _read(self, entry: Entry, into: "WholeRecord | None") -> "tuple[str, str, WholeRecord | None]":
        own = self._of_thread
        if not hasattr(own, "root"):
            own.root = self._open_source()
        return cast("Root", own.root).read(self._namespace, entry.handle, into)

    def _write_records(self) -> None:
        while (read := self._to_write.get()) is not None:
            entry, slot = read
            try:
                outcome = self._write_one(entry, cast("WholeRecord", slot.record))
            except Exception as error:
                outcome = Outcome(entry, "error", 0, "error", str(error))
            finally:
                self._memory.give_back(slot)
            if outcome is not None:
                self._settle(outcome)

    def _write_one(self, entry: Entry, record: "WholeRecord") -> Outcome | None:
        """Returns None if the copy has ended."""
        self._write_limit.wait(record.size)
        if self._stop.is_set():  # also while it waited
            return None
        with self._lock:
            self._attempted.add(entry.key)
        kind, message, written = self._write(record, entry.used)
        with self._lock:
            if kind == "ok" and not written:
                self._attempted.discard(entry.key)
            self._unsettled += kind not in _SETTLED
        if kind == "ok":
            return Outcome(entry, "copied" if written else "present", record.size)
        ended = {"no_space": "full", "cancelled": "reset"}.get(kind, "failed")
        return Outcome(entry, ended, 0, kind, message, at_source=False)

    def _write(self, record: "WholeRecord", used: float) -> tuple[str, str, bool]:
        while True:
            kind, message, written = self._importer.write(record, used)
            if kind != "unavailable" or not self._may_be_counting() or self._stop.wait(_COUNTING_PAUSE):
                return kind, message, written

    def _may_be_counting(self) -> bool:
        """Returns True until _COUNTING_SECONDS after the first call: the wait is shared by all records."""
        with self._lock:
            now = time.monotonic()
            self._counting_ends = min(self._counting_ends, now + _COUNTING_SECONDS)
            return now < self._counting_ends

    def _settle(self, outcome: Outcome) -> None:
        """Counts an outcome. Ends the copy if nothing more can be copied."""
        with self._lock:
            self._count(outcome)
            failure = self._failure_of(outcome)
            if failure is None or self._failure is not None:
                return
            self._failure = failure
        self._end_threads()

    # ---- with the lock

    def _count(self, outcome: Outcome) -> None:
        totals = self.totals
        if outcome.status == "copied":
            totals.copied += 1
            totals.copied_bytes += outcome.bytes
        elif outcome.status == "present":
            totals.present += 1
        elif outcome.status == "vanished":
            totals.vanished += 1
        elif outcome.status == "other_form":
            totals.other_form += 1
        elif outcome.status in ("failed", "error"):
            totals.failed += 1
            if len(totals.failures) < _MOST_LISTED:
                totals.failures.append(
                    {"path": self._shown(outcome), "kind": outcome.kind, "message": outcome.message}
                )

    def _shown(self, outcome: Outcome) -> str:
        """Returns the record's path at the source, or its key at the destination."""
        handle: Any = outcome.entry.handle
        if not outcome.at_source:
            return f"{self._destination.where}: {outcome.entry.key.hex()}"
        return handle if isinstance(handle, str) else handle.name.decode("ascii", "backslashreplace")

    def _failure_of(self, outcome: Outcome) -> CopyError | None:
        where = self._destination.where
        if outcome.status == "full":
            return CopyError(
                "full",
                f"{where} is full: {outcome.message}. Nothing is evicted for a copy: remove records there, "
                "raise its limit, or copy less with --max-bytes",
            )
        if outcome.status == "reset":
            return CopyError("reset", outcome.message)
        if outcome.status == "error":
            return CopyError("failed", f"{self._shown(outcome)}: {outcome.message}")
        is_damaged = outcome.at_source and outcome.kind in _DAMAGED
        is_outage = outcome.status == "failed" and not is_damaged
        self._failures_in_a_row = self._failures_in_a_row + 1 if is_outage else 0
        if self._failures_in_a_row == _FAILURES_IN_A_ROW:
            place = self._source.where if outcome.at_source else where
            return CopyError("failed", f"{place}: {outcome.message}")
        return None

    # ---- after the threads have ended

    def _undo(self) -> str:
        """Removes what this run has copied; returns a sentence about it."""
        where = self._destination.where
        if not self._attempted:
            return "no record had been copied"
        try:
            self._remove_attempted()
            if self._unsettled:
                # The destination may still carry out a write until its time limit.
                _sleep(self._op_timeout)
                self._remove_attempted()
        except (OSError, RuntimeError) as error:
            return f"the copied records could not all be removed ({error}): {self._purge}"
        except KeyboardInterrupt:
            return f"the removal of the copied records was interrupted: {self._purge}"
        removed = (
            f"the {self.totals.removed:,} copied records were removed again from {where}. Servers of {where} "
            "may have loaded some of them: reset these servers"
        )
        if self._unsettled:
            removed += (
                f". Writes without an answer: {self._unsettled:,}. They may still be carried out: then "
                f"{self._purge}"
            )
        return removed

    def _remove_attempted(self) -> None:
        failures: list[str] = []
        copies = (
            record
            for record in self._destination.records(self._namespace, failures)
            if str(record["epoch"]) == self._importer.epoch
            and bytes.fromhex(record["key"]) in self._attempted
        )
        while some := list(islice(copies, _REMOVED_AT_ONCE)):
            self.totals.removed += self._destination.remove(some)
        if failures:
            raise RuntimeError(failures[0])


def describe_size(records: int, size: int) -> str:
    """Returns 1 record (2.0 MiB)."""
    return f"{records:,} record{'s' if records != 1 else ''} ({format_bytes(size)})"
