"""``kv-offload stat|ls|verify|purge ROOT``: inspect and repair a root, without vLLM."""

import heapq
import json
import os
import time
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kv_offload.cli.roots import open_root
from kv_offload.cli.terminal import (
    OK,
    PROBLEM,
    USAGE,
    add_row,
    console,
    escape,
    fail,
    plain_errors,
    print_json,
    shortened,
    table,
)

if TYPE_CHECKING:
    from kv_offload._core import FsRoot

Root = Annotated[str, typer.Argument(metavar="ROOT", help="The root_dir of a tier.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", metavar="ID", help="Only this namespace; its first digits are enough."),
]


_SAME_SECONDS = 2.0  # from the header to the end of the file: a last use up to here is the write itself
_SHORT_ID = 12  # digits of a namespace that are shown
_LS_WITHOUT_KEY = 54  # columns that all but the key take in a row of ls


@plain_errors
def stat(root: Root, as_json: Json = False) -> None:
    """Show what a root holds: bytes, records, and each namespace.

    Each model, layout and format has a namespace of its own. With --json each has its description (model,
    revision, dtype, layout) and its generation (how often it was reset) as well.

    \b
    Example:
      kv-offload stat /var/cache/kv --json | jq .bytes

    Exit status: 0 shown; 1 ROOT cannot be read; 2 ROOT is not a root.
    """
    from kv_offload.sizes import format_bytes

    report = open_root(root).stat()
    for space in report["namespaces"]:
        space["description"] = _description(space.pop("json"))
    if as_json:
        print_json(report)
        return
    out = console()
    out.print(
        f"[bold]{escape(root)}[/bold]: {format_bytes(report['bytes'])}, "
        f"{_count(report['records'], 'record')}, {_count(len(report['namespaces']), 'namespace')}, "
        f"{_count(report['temporaries'], 'temporary file')}"
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
            "yes" if space["open"] else "no",
            model_name(space["description"] or {}),
        )
    if report["namespaces"]:
        out.print(shown)


class Order(str, Enum):
    """What ``ls --by`` knows."""

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
        typer.Option(help="newest, oldest: by last use. hits: those hit since they were written first."),
    ] = Order.NEWEST,
    limit: Annotated[
        int,
        typer.Option("--limit", "-l", min=0, metavar="N", help="The first N; 0: all."),
    ] = 50,
    as_json: Json = False,
) -> None:
    """List the records of a root, last used first.

    A record's age is that of its last use: servers write it back to the file once a minute. Whether it was
    used at all since it was written is known from its header, which is read for what is shown, and of all
    records for --by hits; how often is not kept on disk. In a narrow terminal keys are shortened.

    With --json each record is one line: namespace, generation, key, bytes, mtime (last use, unix seconds),
    created, hit, path. With --limit 0 and by newest they come as they are found.

    \b
    Examples:
      kv-offload ls /var/cache/kv --by largest -l 10
      kv-offload ls /var/cache/kv -n 3fa2 --by hits --json

    Exit status: 0 listed; 1 ROOT cannot be read; 2 ROOT is not a root, or has no such namespace.
    """
    from kv_offload.sizes import format_bytes

    opened = open_root(root)
    found: Iterable[dict[str, Any]] = opened.records(full_id(opened, namespace))
    if by is Order.HITS:
        found = map(_with_history, found)
    if limit:
        found = heapq.nsmallest(limit, found, key=_ORDERS[by])
    elif by is not Order.NEWEST:
        found = sorted(found, key=_ORDERS[by])
    if by is not Order.HITS:
        found = map(_with_history, found)
    if as_json:
        for record in found:
            typer.echo(json.dumps(record))
        return
    out = console()
    numbers = ("bytes", "used", "written", "gen")
    shown = table("", "key", *numbers[:3], "hit", "namespace", "gen", right=numbers)
    for record in found:
        add_row(
            shown,
            shortened(record["key"], out.width - _LS_WITHOUT_KEY),
            format_bytes(record["bytes"]),
            age(record["mtime"]),
            age(record["created"]),
            "yes" if record["hit"] else "no",
            record["namespace"][:_SHORT_ID],
            str(record["generation"]),
        )
    out.print(shown if shown.row_count else "no records")


def _with_history(record: dict[str, Any]) -> dict[str, Any]:
    """With when it was written, and whether it was used since."""
    from kv_offload import _core

    created = _core.record_created(record["path"])
    return record | {"created": created, "hit": bool(created) and record["mtime"] > created + _SAME_SECONDS}


@plain_errors
def verify(
    root: Root,
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is proven bad.")] = False,
    as_json: Json = False,
) -> None:
    """Check every record of a root: length, header, key, checksums.

    Also finds records that no server can find, because their name or directory is wrong, and namespaces
    whose namespace.json does not match their id. --repair removes what is proven bad, nothing else: what is
    removed is computed again. Records that cannot be read (an I/O error, permissions) are named and kept.
    Servers may use the root meanwhile. --repair must run as the user that the root belongs to.

    \b
    Example:
      kv-offload verify /var/cache/kv --repair --json

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

        def show(done: int, total: int) -> None:
            nonlocal checked
            checked = done
            progress.update(bar, completed=done, total=total)

        damaged = opened.verify(repair, show) + damaged_descriptions(root, opened, repair)
    if as_json:
        print_json({"checked": checked, "damaged": damaged})
    else:
        _print_damage(checked, damaged, repair)
    raise typer.Exit(PROBLEM if damaged else OK)


def damaged_descriptions(root: str, opened: "FsRoot", repair: bool) -> list[dict[str, Any]]:
    """Namespaces whose id is not the digest of their namespace.json, in the form of ``verify``'s results."""
    from kv_offload.namespace import described_id

    damaged = []
    for space in opened.stat()["namespaces"]:
        if not space["json"] or described_id(space["json"]) == space["id"]:
            continue
        path = os.path.join(root, space["id"], "namespace.json")
        if repair:
            os.unlink(path)
        message = "it describes another namespace than its directory's name says"
        damaged.append({"path": path, "kind": "corrupt", "message": message, "removed": repair})
    return damaged


def _print_damage(checked: int, damaged: list[dict[str, Any]], repair: bool) -> None:
    out = console()
    if not damaged:
        out.print(f"{_count(checked, 'record')}, all good")
        return
    shown = table("", "record", "kind", "what", "removed", fold=("record", "what"))
    for bad in damaged:
        add_row(shown, bad["path"], bad["kind"], bad["message"], "yes" if bad["removed"] else "no")
    out.print(shown)
    removed = sum(1 for bad in damaged if bad["removed"])
    advice = f"{removed:,} removed" if repair else "run again with --repair to remove what is proven bad"
    out.print(f"{_count(checked, 'record')}, {len(damaged):,} damaged; {advice}")


@plain_errors
def purge(
    root: Root,
    namespace: Namespace = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove the records of one namespace, or of all.

    Servers may use the root meanwhile: what they no longer find they compute again. Must run as the user
    that the root belongs to.

    \b
    Example:
      kv-offload purge /var/cache/kv --namespace 3fa2 --yes

    Exit status: 0 removed; 1 not confirmed, or refused; 2 ROOT is not a root, or has no such namespace.
    """
    from kv_offload.sizes import format_bytes

    opened = open_root(root, changes=True)
    chosen = full_id(opened, namespace)
    if not yes:
        if as_json:
            fail("--json does not ask; give --yes as well", USAGE)
        report = opened.stat()
        spaces = [space for space in report["namespaces"] if chosen in (None, space["id"])]
        records = sum(space["records"] for space in spaces)
        if any(space["open"] for space in spaces):
            typer.echo(
                "A server uses it: it keeps running, and computes again what it no longer finds.", err=True
            )
        size = sum(space["bytes"] for space in spaces)
        typer.confirm(
            f"Remove {_count(records, 'record')} ({format_bytes(size)}, {_count(len(spaces), 'namespace')}) "
            f"from {root}?",
            abort=True,
        )
    records, size = opened.purge(chosen)
    if as_json:
        print_json({"records": records, "bytes": size})
    else:
        console().print(f"{_count(records, 'record')} removed, {format_bytes(size)}")


def full_id(root: "FsRoot", prefix: str | None) -> str | None:
    """The one namespace whose id starts with ``prefix``. Raises ValueError naming those there are."""
    if prefix is None:
        return None
    ids = [str(space["id"]) for space in root.stat()["namespaces"]]
    found = [known for known in ids if known.startswith(prefix.lower())]
    if len(found) == 1:
        return found[0]
    there = ", ".join(known[:12] for known in ids) or "none"
    raise ValueError(
        f"{'no' if not found else 'more than one'} namespace starts with {prefix}; there are: {there}"
    )


def age(unix_seconds: float | None) -> str:
    """How long ago, in one unit: 12 s, 5 min, 3 h, 8 d."""
    if not unix_seconds:
        return "-"
    seconds = max(0, int(time.time() - unix_seconds))
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds // size} {unit}"
    return f"{seconds // 86_400} d"


def model_name(description: dict[str, Any]) -> str:
    """The model of a namespace and the dtype of its cache, for people."""
    model = description.get("model", {})
    name = str(model.get("architecture") or "?")
    if "name" in model:
        name = f"{model['name']}@{str(model.get('revision', '?'))[:8]}"
    return f"{name} {description.get('kv_dtype', '?')}"


def _description(text: Any) -> dict[str, Any] | None:
    """What a namespace.json says; None when it is damaged or missing."""
    try:
        parsed = json.loads(text)
    except (TypeError, ValueError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _count(number: int, name: str) -> str:
    plural = f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"
    return f"{number:,} {name if number == 1 else plural}"
