"""What this machine can give: asked before anything is allocated."""

import os
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kv_offload.config import DEFAULT_DISK_SHARE, FsTierConfig, OffloadConfig
from kv_offload.sizes import format_bytes

_HEADER_BYTES = 4096
_SMALLEST_RECORD = 64 << 10  # what must fit when the record size is not known yet

Headroom = Callable[[str], tuple[int, str]]


def existing_part(path: str) -> Path:
    """The path itself, or its nearest parent that is there."""
    part = Path(path)
    while not part.exists() and part != part.parent:
        part = part.parent
    return part


def free_bytes(root_dir: str) -> int:
    """Bytes that this user may still write on the file system of ``root_dir``."""
    figures = os.statvfs(existing_part(root_dir))
    return figures.f_bavail * figures.f_frsize


def held_bytes(root_dir: str) -> int:
    """Bytes that the files below ``root_dir`` take, about; 0 when it is not there."""
    from kv_offload import _core

    return _core.directory_usage(root_dir)


def tier_bounds(config: OffloadConfig) -> tuple[int, ...]:
    """max_bytes of each tier. One without a bound gets half of what is free on its file system plus what
    it already holds, shared with the other unbounded tiers there; a restart gets the same again."""
    unbounded = Counter(_device(tier) for tier in config.secondary_tiers if tier.max_bytes is None)
    return tuple(_bound(tier, unbounded[_device(tier)]) for tier in config.secondary_tiers)


def _device(tier: FsTierConfig) -> int:
    return existing_part(tier.root_dir).stat().st_dev


def _bound(tier: FsTierConfig, sharing: int) -> int:
    if tier.max_bytes is not None:
        return tier.max_bytes
    room = free_bytes(tier.root_dir) + held_bytes(tier.root_dir)
    return int(room * DEFAULT_DISK_SHARE / sharing)


def check_machine(
    config: OffloadConfig,
    *,
    shm_directory: str = "/dev/shm",
    record_bytes: int = 0,
    headroom: Headroom | None = None,
) -> list[str]:
    """Why this machine cannot serve ``config``: one sentence for each reason; none when it can.

    Allocates and writes nothing. ``record_bytes``: of the largest record, header included, when known.
    ``headroom`` replaces the core's measure of host memory.
    """
    if headroom is None:
        from kv_offload import _core

        headroom = _core.memory_headroom
    problems = []
    available, limited_by = headroom(shm_directory)
    if config.cpu_bytes_to_use > available:
        problems.append(
            f"cpu_bytes_to_use asks for {format_bytes(config.cpu_bytes_to_use)} of host memory, "
            f"{format_bytes(available)} are available ({limited_by}): lower cpu_bytes_to_use or "
            f"{_memory_remedy(limited_by)}"
        )
    for tier in config.secondary_tiers:
        problems += check_root(tier, record_bytes)
    return problems


def _memory_remedy(limited_by: str) -> str:
    if "cgroup" in limited_by:
        return "raise the memory limit of the container or service"
    if "shm" in limited_by or limited_by.startswith("/"):
        return "enlarge it (docker run --shm-size, Kubernetes: an emptyDir of medium Memory at /dev/shm)"
    return "free memory on this host"


def check_root(tier: FsTierConfig, record_bytes: int = 0) -> list[str]:
    """Why this root cannot be used, each naming what was asked, what is there and the setting.

    The same refusals as the core's when it opens the root, before anything is made.
    """
    root = tier.root_dir
    there = existing_part(root)
    asked = f"root_dir {root}"
    if not there.is_dir():
        return [f"{asked}: {there} is not a directory; choose another root_dir"]
    if Path(root).is_symlink():
        return [f"{asked} is a symbolic link; give the directory it points to: {os.path.realpath(root)}"]
    problems = []
    if there == Path(root) and there.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problems.append(
            f"{asked} can be written by other users: chmod 700 it, or name a directory below it, "
            f"such as {root}/kv"
        )
    elif there == Path(root) and there.stat().st_uid != os.geteuid():
        problems.append(
            f"{asked} belongs to user {there.stat().st_uid}, this process is user {os.geteuid()}: "
            "chown it, or name a directory below it that this user makes"
        )
    elif not os.access(there, os.W_OK | os.X_OK):
        problems.append(
            f"{asked}: user {os.geteuid()} may not write in {there}: chmod or chown it, or choose another "
            "root_dir"
        )
    needed = max(record_bytes, _SMALLEST_RECORD + _HEADER_BYTES)
    if tier.max_bytes is not None and tier.max_bytes < needed:
        problems.append(
            f"{asked}: max_bytes is {format_bytes(tier.max_bytes)}, one record takes {format_bytes(needed)}: "
            "raise max_bytes"
        )
    room = free_bytes(root)
    if room < needed and room + held_bytes(root) < needed:  # a full root still serves and evicts
        problems.append(
            f"{asked}: {format_bytes(room)} free on its file system, one record takes "
            f"{format_bytes(needed)}: free space there or choose another root_dir"
        )
    return problems


def cautions(config: OffloadConfig) -> list[str]:
    """What will work but is hardly meant: bounds above what the file system can hold."""
    found = []
    for tier in config.secondary_tiers:
        room = free_bytes(tier.root_dir) + held_bytes(tier.root_dir)
        if tier.max_bytes is not None and tier.max_bytes > room:
            found.append(
                f"root_dir {tier.root_dir}: max_bytes is {format_bytes(tier.max_bytes)}, its file system can "
                f"hold {format_bytes(room)}; writes will be dropped when it is full"
            )
    return found
