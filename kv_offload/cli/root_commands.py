# SPDX-License-Identifier: Apache-2.0
"""``kv-offload stat|ls|verify|purge ROOT``: inspect and repair a root of any kind, without vLLM."""

import heapq
import json
import re
import time
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Annotated, Any

import typer

from kv_offload import losses
from kv_offload.cli.roots import open_root
from kv_offload.cli.terminal import (
    OK,
    PROBLEM,
    USAGE,
    add_row,
    console,
    echo,
    escape,
    fail,
    plain_errors,
    print_json,
    shortened,
    table,
)

Root = Annotated[
    str,
    typer.Argument(
        metavar="ROOT",
        help="The root_dir of a tier, or its address: redis://..., s3://...",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace", "-n", metavar="ID", help="Only this namespace. The first digits of its id are enough."
    ),
]


_SHORT_ID = 12  # shown digits of a namespace
_MOST_NAMED = 50  # namespaces listed in an error
_MOST_UNREADABLE = 20  # directories listed in an error
_SHORT_EPOCH = 4  # shown digits of an epoch; numbers have fewer
_LS_WITHOUT_KEY = 55  # width of a row of ls without the key


@plain_errors
def stat(
    root: Root,
    tenants: Annotated[
        bool,
        typer.Option("--tenants", help="Also show the bytes of each tenant. Reads a part of every record."),
    ] = False,
    loss: Annotated[
        bool,
        typer.Option("--loss", help="Also show the loss of lossy records. Reads a part of every record."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what a root holds: bytes, records, and each namespace.

    Each model, layout and format has its own namespace. With --json each one also has its description (model,
    revision, dtype, layout) and its epoch (the number of resets). For a server or a bucket these and
    the open state are unknown: "-", or null with --json.

    With --tenants it also shows the records of each tenant, whether it is still configured or not. Records of
    requests without a tenant belong to "other". In a bucket this sends a request for each record.

    With --loss it also shows how many records are lossy (compress lossy:E or lossy:KEYS:VALUES), their
    ratio, and the relative errors that were measured when they were written. These are the root mean square
    over the records, and the largest of 64 elements, of keys and values separately if known. In a bucket this
    sends a request for each record, too.

    ROOT is a directory, or the address of a server or a bucket. Tier settings follow its "?".

    \b
    Examples:
      kv-offload stat /var/cache/kv --json | jq .bytes
      kv-offload stat "redis://cache.internal:6379/0?password_env=REDIS_PASSWORD"
      kv-offload stat "s3://kv-cache/kv_offload?region=eu-west-1"

    Exit status: 0 shown; 1 ROOT or a part of it cannot be read; 2 ROOT is not a root.
    """

    opened = open_root(root)
    report = opened.stat()
    for space in report["namespaces"]:
        space["description"] = _description(space.pop("json"))
    if tenants:
        report["tenants"] = opened.tenants()
    if loss:
        report["loss"] = opened.losses()
    unreadable = [
        f"{each['path']} cannot be read: {each['message']}" for each in report.get("unreadable", ())
    ]
    if as_json:
        print_json(report)
    else:
        _print_stat(opened.where, report, loss)
    _end(unreadable)


def _end(unreadable: list[str]) -> None:
    """Ends a command: names the unreadable directories, and exits with 1 if there are any."""
    if not unreadable:
        return
    for each in unreadable[:_MOST_UNREADABLE]:
        echo(each)
    more = len(unreadable) - _MOST_UNREADABLE
    if more > 0:
        echo(f"and {more:,} more directories cannot be read")
    raise typer.Exit(PROBLEM)


def _print_stat(where: str, report: dict[str, Any], loss: bool) -> None:
    from kv_offload.sizes import format_bytes

    out = console()
    out.print(
        f"[bold]{escape(where)}[/bold]: {format_bytes(report['bytes'])}, "
        f"{_count(report['records'], 'record')}, {_count(len(report['namespaces']), 'namespace')}, "
        + _other_contents(report)
    )
    numbers = ("bytes", "records", "oldest", "newest")
    shown = table("", "namespace", *numbers, "in use", "model", right=numbers, fold=("model",))
    for space in report["namespaces"]:
        add_row(
            shown,
            space["id"][:_SHORT_ID],
            format_bytes(space["bytes"]),
            f"{space['records']:,}",
            age(space["oldest"]),
            age(space["newest"]),
            _yes_or_no(space["open"]),
            "-" if space["open"] is None else model_name(space["description"] or {}),
        )
    if report["namespaces"]:
        out.print(shown)
    if report.get("tenants"):
        amounts = ("bytes", "records")
        shown = table("", "tenant", *amounts, right=amounts)
        for name, total in report["tenants"].items():
            add_row(shown, name, format_bytes(total["bytes"]), f"{total['records']:,}")
        out.print(shown)
    if loss:
        out.print(losses.text_of(report["loss"]))
    for name in report.get("other_names", ()):
        out.print(f"not a record: {escape(name)}")
    further = report.get("records_of_further_namespaces", 0)
    if further:
        out.print(f"{_count(further, 'record')} in further namespaces, which are not listed separately")


def _other_contents(report: dict[str, Any]) -> str:
    """Counts temporary files in a directory, or foreign keys under a prefix."""
    if "others" in report:
        return _count(report["others"], "key") + " not from kv-offload"
    return _count(report["temporaries"], "temporary file")


def _yes_or_no(fact: bool | None) -> str:
    return "-" if fact is None else "yes" if fact else "no"


class Order(str, Enum):
    """The values of ``ls --by``."""

    NEWEST = "newest"
    OLDEST = "oldest"
    LARGEST = "largest"
    SMALLEST = "smallest"
    NAMESPACE = "namespace"
    HITS = "hits"


# Smallest first.
_ORDERS: dict[Order, Callable[[dict[str, Any]], Any]] = {
    Order.NEWEST: lambda record: -record["mtime"],
    Order.OLDEST: lambda record: record["mtime"],
    Order.LARGEST: lambda record: (-record["bytes"], -record["mtime"]),
    Order.SMALLEST: lambda record: (record["bytes"], -record["mtime"]),
    Order.NAMESPACE: lambda record: (record["namespace"], -record["mtime"]),
    Order.HITS: lambda record: (not record["hit"], -record["mtime"]),
}


@plain_errors
def ls(
    root: Root,
    namespace: Namespace = None,
    by: Annotated[
        Order,
        typer.Option(
            help="Order of the list. newest and oldest: by last use; hits: records hit since their write "
            "first."
        ),
    ] = Order.NEWEST,
    limit: Annotated[
        int,
        typer.Option("--limit", "-l", min=0, metavar="N", help="List the first N records; 0: all."),
    ] = 50,
    as_json: Json = False,
) -> None:
    """List the records of a root, most recently used first.

    The age of a record is the time since its last use, which servers write to the file once a minute. Its
    header shows if it was hit since its first write; headers are read for the listed records, and for all
    records with --by hits. The number of hits is not stored. In a narrow terminal keys are shortened.

    With --json each record is one line: namespace, epoch, key, bytes, mtime (last use, unix seconds),
    created, hit, path. With --limit 0 and --by newest, the order
    is that in which records are found.

    On a server or in a bucket hits are unknown, and epochs have names instead of numbers. A Redis
    server has no last use where its maxmemory-policy is LFU, and a bucket never; unknown values are "-".

    \b
    Examples:
      kv-offload ls /var/cache/kv --by largest -l 10
      kv-offload ls /var/cache/kv -n 3fa2 --by hits --json

    Exit status: 0 listed; 1 ROOT or a part of it cannot be read; 2 ROOT is not a root, or has no such
    namespace.
    """
    from kv_offload.sizes import format_bytes

    opened = open_root(root)
    if by is Order.HITS and not opened.has_hits:
        raise ValueError(f"{opened.where}: hits are not recorded there; choose another --by")
    chosen = None if namespace is None else full_id(opened.stat(), namespace)
    unreadable: list[str] = []
    found: Iterable[dict[str, Any]] = opened.records(chosen, unreadable)
    # Hits are in the headers of the records: reads them before sorting, and otherwise only of listed records.
    if by is Order.HITS:
        found = map(opened.with_history, found)
    # Keeps `limit` records in memory instead of all.
    if limit:
        found = heapq.nsmallest(limit, found, key=_ORDERS[by])
    elif by is not Order.NEWEST:
        found = sorted(found, key=_ORDERS[by])
    if by is not Order.HITS:
        found = map(opened.with_history, found)
    if as_json:
        for record in found:
            typer.echo(json.dumps(record))
        return _end(unreadable)
    out = console()
    numbers = ("bytes", "used", "written", "epoch")
    shown = table("", "key", *numbers[:3], "hit", "namespace", "epoch", right=numbers)
    for record in found:
        add_row(
            shown,
            shortened(record["key"], out.width - _LS_WITHOUT_KEY),
            format_bytes(record["bytes"]),
            age(record["mtime"]),
            age(record["created"]),
            _yes_or_no(record["hit"]),
            record["namespace"][:_SHORT_ID],
            str(record["epoch"])[:_SHORT_EPOCH],
        )
    out.print(shown if shown.row_count else "no records")
    _end(unreadable)


@plain_errors
def verify(
    root: Root,
    repair: Annotated[bool, typer.Option("--repair", help="Remove records that are proven damaged.")] = False,
    encryption_key_file: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Key of encrypted records. May be repeated.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every record of a root: length, header, key, checksums.

    Also finds records that no server can find, because their name or directory is wrong, and namespaces
    whose namespace.json does not match their id. --repair removes only records that are proven damaged;
    servers compute them again. Records and directories that cannot be read (an I/O error, permissions) are
    named and kept. Servers may use the root meanwhile. --repair must run as the user that the root belongs
    to.

    Encrypted records are authenticated only with --encryption-key-file; without it, everything else is
    checked. A record that none of the keys decrypts is reported and kept.

    On a server or in a bucket each record is read over the network. A record that was replaced during the
    check is never removed; if the store cannot rule that out, the record is reported and kept.

    If a namespace of a directory allows lossy records (compress lossy:E or lossy:KEYS:VALUES), the command
    also shows their loss, like stat --loss. The loss was measured at the write: it cannot be checked without
    the exact KV cache.

    \b
    Examples:
      kv-offload verify /var/cache/kv --repair --json
      kv-offload verify rediss://cache.internal:6380/0?password_file=/run/secrets/redis

    Exit status: 0 all is well; 1 something is damaged (repaired or not) or refused; 2 ROOT is not a root.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    opened = open_root(root, changes=repair)
    with Progress(
        TextColumn("verifying"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console(stderr=True),
        transient=True,
    ) as progress:
        bar = progress.add_task("", total=None)
        checked = 0

        def show(done: int, total: int | None) -> None:
            nonlocal checked
            checked = done
            progress.update(bar, completed=done, total=total)

        damaged = opened.verify(repair, show, encryption_key_file or ())
    found = {"loss": opened.losses()} if opened.allows_loss() else {}
    if as_json:
        print_json({"checked": checked, "damaged": damaged} | found)
    else:
        _print_damage(opened.where, checked, damaged, repair)
        if found:
            console().print(losses.text_of(found["loss"]))
    if any(bad["removed"] for bad in damaged):
        _print_notes(opened.notes())
    raise typer.Exit(PROBLEM if damaged else OK)


def _print_damage(where: str, checked: int, damaged: list[dict[str, Any]], repair: bool) -> None:
    out = console()
    if not damaged and not checked:
        out.print(f"no records at {escape(where)}: nothing was checked")
        return
    if not damaged:
        out.print(f"{_count(checked, 'record')}, all good")
        return
    shown = table("", "record", "kind", "what", "removed", fold=("record", "what"))
    for bad in damaged:
        add_row(shown, bad["path"], bad["kind"], bad["message"], "yes" if bad["removed"] else "no")
    out.print(shown)
    removed = sum(1 for bad in damaged if bad["removed"])
    advice = f"{removed:,} removed" if repair else "run again with --repair to remove proven damage"
    out.print(f"{_count(checked, 'record')}, {len(damaged):,} damaged; {advice}")


@plain_errors
def purge(
    root: Root,
    namespace: Namespace = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            "--tenant", "-t", metavar="NAME", help="Only records of this tenant.", show_default=False
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Remove the records of one namespace, of one tenant, or of all.

    Servers may use the root meanwhile, and compute missing records again. The command must run as the owner
    of the root. On a server or in a bucket only records are removed: the small keys that name epochs stay,
    and so does everything that is not a record.

    --tenant removes the records that were written for a tenant, and reads a part of every record to find
    them. "other" stands for requests without a tenant. A server with "tenants" may write records of the
    tenant again from its host memory: stop it first, or send no more requests and reset its cache.

    \b
    Examples:
      kv-offload purge /var/cache/kv --namespace 3fa2 --yes
      kv-offload purge s3://kv-cache/kv_offload --tenant acme
      kv-offload purge unix:///run/redis.sock -n 3fa2

    Exit status: 0 removed; 1 not confirmed, refused, or some records cannot be removed; 2 ROOT is not a root,
    or has no such namespace.
    """
    from kv_offload.sizes import format_bytes

    opened = open_root(root, changes=True)
    if as_json and not yes:
        fail("--json cannot ask for confirmation; give --yes as well", USAGE)
    # Counting takes a pass over all records, and is needed for the question and for a prefix only.
    report = {} if yes and namespace is None else opened.stat()
    chosen = full_id(report, namespace)
    if not yes:
        spaces = [space for space in report["namespaces"] if chosen in (None, space["id"])]
        if any(space["open"] for space in spaces):
            typer.echo("A server is using it: it keeps running and recomputes missing records.", err=True)
        elif any(space["open"] is None for space in spaces):
            typer.echo("Servers that use it recompute missing records.", err=True)
        extent = _extent(report, spaces, chosen)
        if tenant is not None:
            extent = f"the records of tenant {tenant} among {extent}"
        typer.confirm(f"Remove {extent} from {opened.where}?", abort=True)
    records, size = opened.purge(chosen, tenant)
    if as_json:
        print_json({"records": records, "bytes": size})
    else:
        console().print(f"{_count(records, 'record')} removed, {format_bytes(size)}")
    _print_notes(opened.notes())


def _extent(report: dict[str, Any], spaces: list[dict[str, Any]], chosen: str | None) -> str:
    """Describes what a purge would remove; a remote root may not list every namespace."""
    from kv_offload.sizes import format_bytes

    further = report.get("records_of_further_namespaces", 0)
    if further and chosen is None:
        records, size = report["records"], report["bytes"]
        namespaces = f"more than {_count(len(spaces), 'namespace')}"
    elif further and not spaces:
        return f"the records of namespace {chosen}, one of those that are not listed separately,"
    else:
        records = sum(space["records"] for space in spaces)
        size = sum(space["bytes"] for space in spaces)
        namespaces = _count(len(spaces), "namespace")
    return f"{_count(records, 'record')} ({format_bytes(size)}, {namespaces})"


def _print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        echo(note)


def full_id(report: dict[str, Any], prefix: str | None) -> str | None:
    """Returns the only namespace id that starts with ``prefix``. Raises ValueError listing the ids."""
    if prefix is None:
        return None
    # Namespaces that are not listed may have the prefix too, so only a complete id is certain.
    if report.get("records_of_further_namespaces"):
        if re.fullmatch(r"[0-9a-f]{64}", prefix.lower()):
            return prefix.lower()
        raise ValueError(
            f"there are too many namespaces to list, so others may start with {prefix} as well: "
            "give all 64 digits"
        )
    ids = [str(space["id"]) for space in report["namespaces"]]
    found = [known for known in ids if known.startswith(prefix.lower())]
    if len(found) == 1:
        return found[0]
    there = ", ".join(known[:12] for known in ids[:_MOST_NAMED]) or "none"
    if len(ids) > _MOST_NAMED:
        there += f" and {len(ids) - _MOST_NAMED:,} more"
    raise ValueError(
        f"{'no' if not found else 'more than one'} namespace starts with {prefix}; existing: {there}"
    )


def age(unix_seconds: float | None) -> str:
    """Returns the age in one unit: 12 s, 5 min, 3 h, 8 d."""
    if not unix_seconds:
        return "-"
    seconds = max(0, int(time.time() - unix_seconds))
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds // size} {unit}"
    return f"{seconds // 86_400} d"


def model_name(description: dict[str, Any]) -> str:
    """Returns the model of a namespace and the dtype of its cache, for display."""
    model = description.get("model")
    if not isinstance(model, dict):
        model = {}
    name = str(model.get("architecture") or "?")
    if "name" in model:
        name = f"{model['name']}@{str(model.get('revision', '?'))[:8]}"
    return f"{name} {description.get('kv_dtype', '?')}"


def _description(text: Any) -> dict[str, Any] | None:
    """Parses a namespace.json; None if it is damaged or missing."""
    try:
        parsed = json.loads(text)
    except (TypeError, ValueError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"
