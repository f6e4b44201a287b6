"""``kv-offload stat|ls|verify|purge ROOT``: read and mend a root, without vLLM."""

import heapq
import json
import os
import time
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kv_offload.cli.terminal import OK, PROBLEM, USAGE, add_row, console, fail, print_json, table, told
from kv_offload.namespace import described_id
from kv_offload.sizes import format_bytes

if TYPE_CHECKING:
    from kv_offload._core import FsRoot

Root = Annotated[str, typer.Argument(metavar="ROOT", help="A root_dir of an fs tier.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", metavar="ID", help="Only this namespace; its first digits suffice."),
]


_SAME_SECONDS = 2.0  # from the header to the end of the file: a last use up to here is the write itself


def open_root(path: str) -> "FsRoot":
    """The root at ``path``. Raises ValueError when it is none of this project."""
    from kv_offload import _core

    return _core.FsRoot(path)


@told
def stat(root: Root, as_json: Json = False) -> None:
    """Show what a root holds: bytes, records, and each namespace (one per model, layout and format).

    [bold]Example[/bold]: kv-offload stat /var/cache/kv --json | jq .bytes

    Exit status: 0 shown; 2 ROOT is no root.
    """
    facts = open_root(root).stat()
    if as_json:
        print_json(facts)
        return
    out = console()
    out.print(
        f"[bold]{escape(root)}[/bold]: {format_bytes(facts['bytes'])} in {facts['records']:,} records, "
        f"{facts['temporaries']:,} temporaries, {_count(facts['namespaces'], 'namespace')}"
    )
    shown = table(
        "", "namespace", "model", "kv dtype", "generation", "records", "bytes", "oldest", "newest", "in use",
        right=("generation", "records", "bytes", "oldest", "newest"),
    )  # fmt: skip
    for space in facts["namespaces"]:
        meaning = _meaning(space["json"])
        add_row(
            shown,
            space["id"][:12],
            model_name(meaning),
            str(meaning.get("kv_dtype", "?")),
            str(space["generation"]),
            f"{space['records']:,}",
            format_bytes(space["bytes"]),
            age(space["oldest"]),
            age(space["newest"]),
            "yes" if space["open"] else "no",
        )
    if facts["namespaces"]:
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


@told
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
    hit at all since it was written is known (from its header, which is read for what is shown, and of all
    records for [bold]--by hits[/bold]); how often is not kept on disk.

    With [bold]--json[/bold] each record is one line: namespace, generation, key, bytes, mtime (last use, unix
    seconds), created, hit, path. With [bold]--limit 0[/bold] and by newest they come as they are found.

    [bold]Examples[/bold]

      kv-offload ls /var/cache/kv --by largest -l 10

      kv-offload ls /var/cache/kv -n 3fa2 --by hits --json

    Exit status: 0 listed; 2 ROOT is no root, or has no such namespace.
    """
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
    numbers = ("bytes", "last used", "written", "generation")
    shown = table("", "key", *numbers[:3], "hit", "namespace", "generation", right=numbers)
    for record in found:
        add_row(
            shown,
            record["key"],
            format_bytes(record["bytes"]),
            age(record["mtime"]),
            age(record["created"]),
            "yes" if record["hit"] else "no",
            record["namespace"][:12],
            str(record["generation"]),
        )
    console().print(shown if shown.row_count else "no records")


def _with_history(record: dict[str, Any]) -> dict[str, Any]:
    """With when it was written, and whether it was used since."""
    from kv_offload import _core

    created = _core.record_created(record["path"])
    return record | {"created": created, "hit": bool(created) and record["mtime"] > created + _SAME_SECONDS}


@told
def verify(
    root: Root,
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is proven bad.")] = False,
    as_json: Json = False,
) -> None:
    """Open every record and check its length, header, key and checksums.

    Finds as well records that no server can find, because their name or directory is wrong, and
    namespaces whose namespace.json is not what their id was made of (a server refuses to start with one;
    without it, it writes it again). [bold]--repair[/bold] removes all that is proven bad, nothing else:
    what is removed is computed again. A server that uses the root may keep running: it checks each record
    again when it reads it. Records that cannot be read (an I/O error, permissions) are named but never
    removed.

    [bold]Example[/bold]: kv-offload verify /var/cache/kv --repair --json

    Exit status: 0 all is well; 1 something is damaged, repaired or not; 2 ROOT is no root.
    """
    opened = open_root(root)
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
    """A namespace's id is the digest of its namespace.json: those where it is not, as ``verify`` tells."""
    damaged = []
    for space in opened.stat()["namespaces"]:
        if not space["json"] or described_id(space["json"]) == space["id"]:
            continue
        path = os.path.join(root, space["id"], "namespace.json")
        if repair:
            os.unlink(path)
        message = "it describes another namespace than the one whose directory it is in"
        damaged.append({"path": path, "kind": "corrupt", "message": message, "removed": repair})
    return damaged


def _print_damage(checked: int, damaged: list[dict[str, Any]], repair: bool) -> None:
    out = console()
    if not damaged:
        out.print(f"{checked:,} records, all good")
        return
    shown = table("", "record", "kind", "what", "removed")
    for bad in damaged:
        add_row(shown, bad["path"], bad["kind"], bad["message"], "yes" if bad["removed"] else "no")
    out.print(shown)
    removed = sum(1 for bad in damaged if bad["removed"])
    advice = f"{removed:,} removed" if repair else "run again with --repair to remove what is proven bad"
    out.print(f"{checked:,} records, {len(damaged):,} damaged; {advice}")


@told
def purge(
    root: Root,
    namespace: Namespace = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove the records of one namespace, or of all.

    A server that uses the root may keep running: what it no longer finds it computes again.

    [bold]Example[/bold]: kv-offload purge /var/cache/kv --namespace 3fa2 --yes

    Exit status: 0 removed; 1 not confirmed; 2 ROOT is no root, or has no such namespace.
    """
    opened = open_root(root)
    chosen = full_id(opened, namespace)
    if not yes:
        if as_json:
            fail("--json does not ask; give --yes as well", USAGE)
        facts = opened.stat()
        spaces = [space for space in facts["namespaces"] if chosen in (None, space["id"])]
        records = sum(space["records"] for space in spaces)
        if any(space["open"] for space in spaces):
            typer.echo(
                "A server has it open: it goes on, and computes again what it no longer finds.", err=True
            )
        size = sum(space["bytes"] for space in spaces)
        typer.confirm(
            f"Remove {records:,} records ({format_bytes(size)}, {_count(spaces, 'namespace')}) from {root}?",
            abort=True,
        )
    records, size = opened.purge(chosen)
    if as_json:
        print_json({"records": records, "bytes": size})
    else:
        console().print(f"{records:,} records removed, {format_bytes(size)}")


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
        f"namespace {prefix} is {'not there' if not found else 'not the only one that starts so'}; "
        f"there are: {there}"
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


def model_name(meaning: dict[str, Any]) -> str:
    """The model of a namespace.json, for people."""
    model = meaning.get("model", {})
    if "name" in model:
        return f"{model['name']}@{str(model.get('revision', '?'))[:8]}"
    return str(model.get("architecture") or "?")


def _meaning(text: Any) -> dict[str, Any]:
    try:
        parsed = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _count(things: list[Any], name: str) -> str:
    return f"{len(things):,} {name}{'' if len(things) == 1 else 's'}"
