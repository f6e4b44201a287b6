# SPDX-License-Identifier: Apache-2.0
"""``kv-offload copy SRC DST``: copies the records of a namespace from one tier into another."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kv_offload.cli.root_commands import full_id
from kv_offload.cli.terminal import OK, PROBLEM, console, echo, plain_errors, print_json
from kv_offload.copying import Order

if TYPE_CHECKING:
    from kv_offload.copying import CopiedNamespace, Copier, Plan, Totals
    from kv_offload.tiers.base import Root, TierConfig

_MOST_FAILURES_SHOWN = 5
_MOST_NAMED = 50  # namespaces listed in an error
_SHORT_ID = 12


@plain_errors
def copy(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="The root_dir of a tier, or its address: redis://..., s3://...",
            show_default=False,
        ),
    ],
    destination: Annotated[
        str,
        typer.Argument(
            metavar="DST", help="The tier to copy into: a root_dir or an address.", show_default=False
        ),
    ],
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            metavar="ID",
            help="The namespace to copy; the first digits of its id are enough. Default: the only one.",
        ),
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Copy the first records up to this size in total. Records that are already in DST count "
            "towards it.",
            show_default=False,
        ),
    ] = None,
    order: Annotated[
        Order,
        typer.Option(
            help="newest: last used first. most-used: records hit since their write first, then the others; "
            "directories only."
        ),
    ] = Order.NEWEST,
    rate: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Copy at most this much per second: 200MiB.", show_default=False),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs", "-j", metavar="N", min=1, max=64, help="Number of records copied concurrently."
        ),
    ] = 8,
    dst_max_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="If DST is a directory: the max_bytes of its servers; required while a process has DST "
            "open. Default: half of what is free and what DST holds, as for a server.",
            show_default=False,
        ),
    ] = None,
    encryption_key_file: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="Also authenticate encrypted records. May be repeated.", show_default=False
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be copied. Changes nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of sentences.")] = False,
) -> None:
    """Copy the records of a namespace from one tier into another.

    Records are copied unchanged, including compressed and encrypted ones. Servers of DST find them if their
    namespace and encryption_key_file are equal. Each record is verified first. Damaged records are
    reported and not copied. Records that DST already has are skipped, so a second run continues an
    interrupted copy. Servers may use both tiers meanwhile.

    Nothing is evicted from DST: the copy ends when DST is full. The most recently used records are copied
    first; a bucket stores only the time of the write. A directory keeps the copies' time of last use: a
    running server treats copies as just used; after its next start their time of last use counts.

    Only records that a newly started server would find are copied. If SRC is reset meanwhile, the copy ends
    and removes what it has copied.

    \b
    Examples:
      kv-offload copy s3://kv-cache/kv_offload /var/cache/kv --dst-max-bytes 500GiB
      kv-offload copy /var/cache/kv "redis://cache:6379/0?password_env=PW" --max-bytes 50GiB --rate 200MiB
      kv-offload copy /var/cache/kv s3://kv-cache/kv_offload -n 3fa2 --dry-run

    Exit status: 0 all selected records are in DST, or were evicted from SRC meanwhile; 1 some were not
    copied, and a message gives the reason; 2 wrong usage.
    """
    from kv_offload.config import tier_at

    from_tier = tier_at(source)
    to_tier = tier_at(destination)
    if from_tier == to_tier:
        raise ValueError("SRC and DST are the same tier")
    command = Command(
        from_tier,
        to_tier,
        source,
        destination,
        order=order,
        max_bytes=_size("--max-bytes", max_bytes),
        rate=_size("--rate", rate),
        jobs=jobs,
        bound=_bound(to_tier, destination, _size("--dst-max-bytes", dst_max_bytes)),
        key_files=encryption_key_file or [],
    )
    report = command.run(namespace, dry_run)
    if as_json:
        print_json(report)
    else:
        _print(report)
    if report["message"]:
        echo(report["message"])
    raise typer.Exit(OK if report["ended"] == "complete" and not report["message"] else PROBLEM)


def _size(option: str, given: str | None) -> int | None:
    from kv_offload.sizes import parse_byte_size

    size = None if given is None else parse_byte_size(given)
    if size == 0:
        raise ValueError(f"{option} is {given}; give at least 1MiB, or leave the option out")
    return size


def _bound(tier: "TierConfig", place: str, given: int | None) -> int | None:
    """Returns the bound of the destination. Raises ValueError if it needs that of its servers."""
    from kv_offload.tiers.registry import bounds_of

    if given is None:
        if tier.bound_key is not None and not tier.is_unused():
            spaces = tier.open_root(changes=False, given=place).stat()["namespaces"]
            if any(space["open"] for space in spaces):
                raise ValueError(
                    f"{place} is open in other processes, which limit it by their {tier.bound_key}: give the "
                    "same limit as --dst-max-bytes"
                )
        return bounds_of([tier])[0]
    if tier.bound_key is None:
        raise ValueError(f"--dst-max-bytes: a tier of type {tier.type!r} takes no size: {tier.bounded_by}")
    return given


class Command:
    """One copy, from its arguments to its report."""

    def __init__(
        self,
        from_tier: "TierConfig",
        to_tier: "TierConfig",
        source: str,
        destination: str,
        *,
        order: Order,
        max_bytes: int | None,
        rate: int | None,
        jobs: int,
        bound: int | None,
        key_files: list[str],
    ) -> None:
        self._from_tier = from_tier
        self._to_tier = to_tier
        self._given = (source, destination)
        self._order = order
        self._max_bytes = max_bytes
        self._rate = rate
        self._jobs = jobs
        self._bound = bound
        self._key_files = key_files

    def run(self, prefix: str | None, dry_run: bool) -> dict[str, Any]:
        """Copies, or only plans; returns the report."""
        from kv_offload.copying import CopyError, source_epoch

        source = self._open_source()
        destination = self._open_destination(changes=not dry_run)
        namespace = _chosen(source, prefix)
        report: dict[str, Any] = {
            "source": source.where,
            "destination": self._given[1] if destination is None else destination.where,
            "namespace": namespace.id,
            "dry_run": dry_run,
            "ended": "complete",
            "message": "",
        }
        report |= _figures(None, None, 0.0)
        try:
            epoch = source_epoch(source, namespace.id)
            if dry_run:
                there = None if destination is None else destination.startup_epoch(namespace.id)
                plan = self._plan(source, destination, namespace.id, epoch, there)
                return report | {"message": _unread(source, plan)} | _figures(plan, None, 0.0)
            return self._copy(source, namespace, epoch, report)
        except CopyError as error:
            return report | {"ended": error.ended, "message": str(error)}

    def _open_source(self) -> "Root":
        root = self._from_tier.open_root(changes=False, given=self._given[0])
        root.use_record_sizes()
        root.use_keys(self._key_files)
        return root

    def _open_destination(self, *, changes: bool) -> "Root | None":
        """Returns None if a server would create the destination."""
        if self._to_tier.is_unused():
            return None
        root = self._to_tier.open_root(changes=changes, given=self._given[1])
        root.use_record_sizes()
        return root

    def _plan(
        self, source: "Root", destination: "Root | None", namespace: str, epoch: str, there: Any
    ) -> "Plan":
        from kv_offload.copying import make_plan, outdated_records, sizes_in

        sizes: dict[bytes, int] = {}
        if destination is not None and there is not None:
            sizes = sizes_in(destination, namespace, str(there))
        plan = make_plan(source, namespace, epoch, sizes, self._order, self._max_bytes)
        if destination is None or not plan.there:
            return plan
        outdated = outdated_records(source, destination, namespace, str(there), plan.there)
        if outdated:
            for record in outdated:
                sizes.pop(bytes.fromhex(record["key"]), None)
            plan = make_plan(source, namespace, epoch, sizes, self._order, self._max_bytes)
            plan.outdated = outdated
        return plan

    def _copy(
        self, source: "Root", namespace: "CopiedNamespace", epoch: str, report: dict[str, Any]
    ) -> dict[str, Any]:
        from kv_offload.copying import Copier, CopyError, open_importer
        from kv_offload.interrupts import Interrupts

        importer = open_importer(self._to_tier, namespace, self._bound)
        try:
            destination = self._open_destination(changes=True)
            if destination is None:
                raise CopyError("failed", f"{self._given[1]} was removed meanwhile")
            plan = self._plan(source, destination, namespace.id, epoch, importer.epoch)
            if plan.outdated:
                destination.remove(plan.outdated)  # an existing record would not be overwritten
                there = importer.epoch
                importer.close()
                importer = open_importer(self._to_tier, namespace, self._bound)  # it knew the removed records
                if importer.epoch != there:
                    raise CopyError("reset", f"{destination.where} was reset. Run the command again")
            interrupts = Interrupts()
            copier = Copier(
                namespace.id,
                self._open_source,
                epoch,
                destination,
                importer,
                jobs=self._jobs,
                rate=self._rate,
                encrypted=self._form(source, destination, namespace.id, importer.epoch, plan),
                is_counted=self._to_tier.bound_key is not None,
                op_timeout=self._to_tier.op_timeout_seconds,
                interrupts=interrupts,
                notice=echo,
            )
            began = time.monotonic()
            with interrupts:
                ended, message = self._run(copier, plan)
                importer.close()
            message = ". ".join(filter(None, (message, _unread(source, plan))))
            seconds = time.monotonic() - began
        finally:
            importer.close()
        return report | {"ended": ended, "message": message} | _figures(plan, copier.totals, seconds)

    @staticmethod
    def _form(source: "Root", destination: "Root", namespace: str, epoch: str, plan: "Plan") -> bool | None:
        """Returns whether copies are encrypted: like the records of the destination, or the first copied."""
        from kv_offload.copying import handles_in, is_encrypted

        form = is_encrypted(destination, namespace, handles_in(destination, namespace, epoch))
        if form is None:
            form = is_encrypted(source, namespace, (entry.handle for entry in plan.entries))
        return form

    def _run(self, copier: "Copier", plan: "Plan") -> tuple[str, str]:
        """Returns how it ended, and a sentence about that unless it is complete."""
        from kv_offload.copying import CopyError

        try:
            with _progress(plan) as show:
                copier.run(plan.entries, show)
        except CopyError as error:
            return error.ended, str(error)
        except KeyboardInterrupt:
            return "interrupted", "interrupted; run it again to continue"
        return "complete", copier.problems()


def _unread(source: "Root", plan: "Plan") -> str:
    """Returns a message about unreadable directories of the source; "" if there are none."""
    if not plan.unreadable:
        return ""
    return (
        f"{source.where}: {len(plan.unreadable):,} directories cannot be read, so their records are not "
        f"copied. The first error: {plan.unreadable[0]}"
    )


def _chosen(source: "Root", prefix: str | None) -> "CopiedNamespace":
    """Returns the namespace that ``prefix`` names, or the only one. Raises ValueError listing them."""
    from kv_offload.copying import CopiedNamespace
    from kv_offload.namespace import described_id

    report = source.stat()
    spaces = {str(space["id"]): space for space in report["namespaces"]}
    if prefix is None:
        held = [name for name, space in spaces.items() if space["records"]]
        for each in report.get("unreadable", ()):
            if not any(f"/{name}" in each["path"] for name in held):
                raise RuntimeError(
                    f"{each['path']} cannot be read ({each['message']}), and may hold records of another "
                    "namespace: choose one with --namespace"
                )
        if not held:
            raise ValueError(f"{source.where} holds no records")
        if len(held) > 1:
            more = f" and {len(held) - _MOST_NAMED:,} more" if len(held) > _MOST_NAMED else ""
            names = ", ".join(name[:_SHORT_ID] for name in held[:_MOST_NAMED])
            raise ValueError(
                f"{source.where} holds records of {len(held):,} namespaces; choose one with --namespace: "
                f"{names}{more}"
            )
        chosen = held[0]
    else:
        chosen = full_id(report, prefix) or ""
    # Servers and buckets store no description; a damaged one is not copied.
    text = (spaces.get(chosen) or {}).get("json") or ""
    return CopiedNamespace(chosen, text if text and described_id(text) == chosen else "")


def _figures(plan: "Plan | None", totals: "Totals | None", seconds: float) -> dict[str, Any]:
    from kv_offload.copying import Plan, Totals

    plan, totals = plan or Plan([]), totals or Totals()
    return {
        "selected": plan.selected,
        "selected_bytes": plan.selected_bytes,
        "present": plan.present + totals.present,
        "to_copy": len(plan.entries),
        "to_copy_bytes": plan.bytes,
        "outdated": len(plan.outdated),
        "copied": totals.copied,
        "copied_bytes": totals.copied_bytes,
        "vanished": totals.vanished,
        "other_form": totals.other_form,
        "failed": totals.failed,
        "removed": totals.removed,
        "seconds": seconds,
        "is_ordered": plan.is_ordered,
        "failures": totals.failures,
        "unreadable": plan.unreadable,
    }


@contextmanager
def _progress(plan: "Plan") -> "Iterator[Callable[[Totals], None]]":
    """Shows a progress bar on a terminal."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    out = console(stderr=True)
    with Progress(
        TextColumn("copying"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=out,
        transient=True,
        disable=not out.is_terminal,
    ) as progress:
        bar = progress.add_task("", total=plan.bytes)
        yield lambda totals: progress.update(bar, completed=totals.copied_bytes)


def _print(report: dict[str, Any]) -> None:
    from kv_offload.copying import describe_size
    from kv_offload.sizes import format_bytes

    selected = describe_size(report["selected"], report["selected_bytes"])
    there = f"{report['present']:,} already in {report['destination']}"
    # Reports what would be done, or what was done; then each group of records that was not simply copied.
    if report["dry_run"]:
        lines = [f"{selected} selected: {there}"]
        lines.append(f"{describe_size(report['to_copy'], report['to_copy_bytes'])} would be copied")
    else:
        copied = describe_size(report["copied"], report["copied_bytes"])
        speed = format_bytes(int(report["copied_bytes"] / report["seconds"])) if report["seconds"] else "0 B"
        lines = [f"{selected} selected: {there}"]
        lines.append(f"{copied} copied in {report['seconds']:.1f} s, {speed}/s")
    if report["outdated"]:
        verb = "would be" if report["dry_run"] else "were"
        lines.append(
            f"{report['outdated']:,} records of {report['destination']} {verb} replaced: they are older than "
            f"those of {report['source']}. If {report['source']} was reset after an earlier copy, other "
            "copies are invalid too: purge the destination first"
        )
    if report["vanished"]:
        lines.append(f"{report['vanished']:,} were evicted from {report['source']} meanwhile")
    if report["other_form"]:
        lines.append(f"{report['other_form']:,} are encrypted unlike the records of {report['destination']}")
    if report["failed"]:
        lines.append(f"{report['failed']:,} could not be copied:")
        shown = report["failures"][:_MOST_FAILURES_SHOWN]
        lines += [f"  {each['path']}: {each['kind']}: {each['message']}" for each in shown]
        if report["failed"] > len(shown):
            lines.append(f"  and {report['failed'] - len(shown):,} more; --json lists them")
    if not report["is_ordered"]:
        lines.append(
            f"{report['source']} stores no times of use: records are copied in the order of its list"
        )
    out = console()
    for line in lines:
        out.print(line, markup=False)
