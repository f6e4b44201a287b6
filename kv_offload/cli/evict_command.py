# SPDX-License-Identifier: Apache-2.0
"""``kv-offload evict ROOT``: keeps a root below a limit from outside, once or continuously."""

import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kv_offload.cli.root_commands import Json
from kv_offload.cli.terminal import OK, PROBLEM, console, echo, plain_errors, print_json
from kv_offload.tiers.fs.root import open_root

if TYPE_CHECKING:
    from kv_offload._core import FsRoot

Root = Annotated[str, typer.Argument(metavar="ROOT", help="The root_dir of a tier.", show_default=False)]

_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86_400}
_NO_TARGET = 1 << 62
_WALK_EVERY_SECONDS = 3600.0  # in between, the root's own ledger is trusted
_MOST_PASSES = 16  # per eviction: servers may write as fast as it removes
_BACK_OFF_SECONDS = 60.0  # after a walk that removed nothing: the ledger is too high, or no file is a record


class Stopped(Exception):
    """A signal requested the end."""


@dataclass(frozen=True)
class Bound:
    """Limits in bytes between which eviction starts and stops, and the age of dead namespaces."""

    max_bytes: int
    start_above: int
    stop_at: int
    dead_after_seconds: float


@plain_errors
def evict(
    root: Root,
    max_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Limit on everything in the root: 500GiB.", show_default=False)
    ],
    high: Annotated[
        float,
        typer.Option(
            min=1, max=100, metavar="PERCENT", help="Start to evict above this share of --max-bytes."
        ),
    ] = 95,
    low: Annotated[
        float,
        typer.Option(min=0, max=100, metavar="PERCENT", help="Evict down to this share of --max-bytes."),
    ] = 90,
    dead_after: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="First evict namespaces that no server has open and that were unused this long: 30min, "
            "12h, 7d.",
        ),
    ] = "1h",
    watch: Annotated[bool, typer.Option("--watch", help="Run until SIGTERM or SIGINT.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="With --watch: time between two checks.")
    ] = 5,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Report what would be evicted, and remove nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove records until a root is below its limit.

    Runs alongside the servers that use the root. Records that no server can hit any more are evicted first:
    those from before a reset, and namespaces (another model, revision or layout) that no server has open
    and that were not used for --dead-after. Then records of all namespaces, least recently used first;
    servers write the time of last use once a minute.

    Servers enforce their own max_bytes and do not need this command. It is for volumes that several servers
    share, where one process sees all records. Run it on any host that mounts the volume, as the owner of the
    root. It takes no lock that a server waits for. Give servers a max_bytes at or above this limit.

    --watch reads the root's ledger every few seconds, which is cheap, walks the root once an
    hour and when it evicts, and waits for a ROOT that does not exist yet. Each eviction is one line.

    \b
    Examples:
      kv-offload evict /mnt/kv --max-bytes 500GiB --dry-run
      kv-offload evict /mnt/kv --max-bytes 2TiB --high 95 --low 85 --watch --json

    Exit status: 0 the root is below its limit, or a signal ended --watch; 1 it is still above its limit, or
    the command was refused; 2 wrong usage, or ROOT is not a root.
    """
    from kv_offload.sizes import parse_byte_size
    from kv_offload.tiers.registry import kind_of_tier, refuse_address

    refuse_address(root, kind_of_tier("disk"))
    size = parse_byte_size(max_bytes)
    if low > high:
        raise ValueError(f"--low {low:g} is above --high {high:g}; eviction would never start or never stop")
    bound = Bound(size, int(size * high / 100), int(size * low / 100), parse_duration(dead_after))
    show = print_line if as_json else print_sentence
    if watch:
        if dry_run:
            raise ValueError("--watch and --dry-run cannot be used together")
        Watch(root, bound, interval, show).run()
        return
    report = evict_once(open_root(root, changes=not dry_run), bound, dry_run=dry_run)
    if as_json:
        print_json(report)
    else:
        show(report)
    raise typer.Exit(OK if report["below_limit"] else PROBLEM)


def evict_once(
    root: "FsRoot", bound: Bound, *, dry_run: bool = False, progress: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Evicts down to the low mark if the root is above the high mark. Always walks the root."""
    used = _walked_bytes(root)
    report: dict[str, Any] = {
        "bytes_before": used, "bytes_freed": 0, "dead_bytes": 0, "records": 0, "dead_namespaces": [],
    }  # fmt: skip
    after, passes = used, 0
    # A removed record counts with at least its size, but the root with its blocks, which may be fewer (ZFS,
    # Btrfs). So another pass may be needed.
    while after > bound.start_above and passes < _MOST_PASSES:
        passes += 1
        found = root.evict(
            target_bytes=bound.stop_at,
            dead_before=time.time() - bound.dead_after_seconds,
            dry_run=dry_run,
            progress=progress,
        )
        for amount in ("bytes_freed", "dead_bytes", "records"):
            report[amount] += found[amount]
        report["dead_namespaces"] = report["dead_namespaces"] or found["dead_namespaces"]
        after = max(0, used - report["bytes_freed"]) if dry_run else _walked_bytes(root)
        if dry_run or not found["bytes_freed"]:
            break
    return report | {
        "bytes_after": after,
        "max_bytes": bound.max_bytes,
        "below_limit": after <= bound.max_bytes,
        "dry_run": dry_run,
    }


def _walked_bytes(root: "FsRoot") -> int:
    return int(root.evict(target_bytes=_NO_TARGET, dry_run=True)["bytes_before"])


class Watch:
    """The loop of ``--watch``. ``run`` returns after SIGTERM or SIGINT."""

    def __init__(
        self, path: str, bound: Bound, interval: float, show: Callable[[dict[str, Any]], None]
    ) -> None:
        self._path = path
        self._bound = bound
        self._interval = interval
        self._show = show
        self._ended = threading.Event()
        self._next_walk = 0.0  # the first look is a walk: the ledger may be older than the files
        self._back_off_until = 0.0

    def run(self) -> None:
        before = {number: signal.signal(number, self._end) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._watch_until_stopped()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch_until_stopped(self) -> None:
        from kv_offload._core import ResourceError

        reported_waiting = False
        while not self._ended.is_set():
            try:
                self.check()
            except ValueError as error:  # no root yet: the first server creates it
                if not reported_waiting:
                    echo(f"waiting: {error}")
                reported_waiting = True
            except Stopped:
                return
            except (OSError, ResourceError) as error:  # the volume may be unavailable for a while
                echo(str(error))
            self._ended.wait(self._interval)

    def check(self) -> None:
        """Runs one check. Reads only the ledger while the root is below its high mark."""
        from kv_offload.tiers.fs.config import held_bytes

        root = open_root(self._path, changes=True)
        now = time.monotonic()
        walks = now >= self._next_walk
        if not walks and now < self._back_off_until:
            return
        above = held_bytes(self._path) > self._bound.start_above
        if not walks and not above:
            return
        self._next_walk = now + _WALK_EVERY_SECONDS
        report = evict_once(root, self._bound, progress=self._raise_if_stopped)
        if above and not report["bytes_freed"]:
            self._back_off_until = now + _BACK_OFF_SECONDS
        if report["bytes_freed"] or not report["below_limit"]:
            self._show(report)

    def _raise_if_stopped(self, _: int) -> None:
        if self._ended.is_set():
            raise Stopped

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._ended.set()


def print_line(report: dict[str, Any]) -> None:
    print_json({"time": time.time()} | report, indent=None)


def print_sentence(report: dict[str, Any]) -> None:
    from kv_offload.sizes import format_bytes

    dead = len(report["dead_namespaces"])
    would = "would be " if report["dry_run"] else ""
    parts = [f"{report['records']:,} records by age"]
    if report["dead_bytes"]:
        parts.append(f"{format_bytes(report['dead_bytes'])} of {dead} dead namespaces and old epochs")
    console().print(
        f"{format_bytes(report['bytes_before'])} of {format_bytes(report['max_bytes'])}; "
        f"{would}removed: {format_bytes(report['bytes_freed'])}"
        + (f" ({', '.join(parts)})" if report["bytes_freed"] else "")
        + f"; {format_bytes(report['bytes_after'])} left"
        + ("" if report["below_limit"] else ", ABOVE THE LIMIT: the remaining files are not records")
    )


def parse_duration(text: str) -> float:
    """Seconds meant by ``90``, ``30min``, ``12h``, ``7d``. Raises ValueError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|h|d)?", text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write seconds, or a number with s, min, h or d: 12h")
    return float(match.group(1)) * _UNITS[match.group(2) or "s"]
