# SPDX-License-Identifier: Apache-2.0
"""The resources of this machine, checked before any allocation."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kv_offload.config import OffloadConfig
from kv_offload.sizes import format_bytes
from kv_offload.tiers.registry import bounds_of, cautions_of

SHM_DIRECTORY = "/dev/shm"
# The names of the files of keep_host_memory and share_host_memory begin with these.
_KEPT, _SHARED = "kv_offload-kept-", "kv_offload-shared-"
KEPT_REGIONS = f"{SHM_DIRECTORY}/{_KEPT}*"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # as this_boot() in csrc/memory/control_page.cc

Headroom = Callable[[str], tuple[int, str]]


def tier_bounds(config: OffloadConfig) -> tuple[int | None, ...]:
    """Returns the size limit of each tier in bytes; None: its server limits itself."""
    return bounds_of(config.secondary_tiers)


def check_machine(
    config: OffloadConfig,
    *,
    shm_directory: str = "/dev/shm",
    record_bytes: int = 0,
    hosts: int = 1,
    headroom: Headroom | None = None,
) -> list[str]:
    """Returns why this machine cannot serve ``config``, one sentence for each reason; empty if it can.

    Allocates and writes nothing. ``record_bytes``: size of the largest record with its header; 0 if unknown.
    ``hosts``: number of hosts of the engine; each has an equal share of the ranks and of cpu_bytes_to_use.
    ``headroom`` replaces the core's measurement of host memory.
    """
    if headroom is None:
        headroom = host_memory
    problems = []
    available, limited_by = headroom(shm_directory)
    needed = config.cpu_bytes_to_use // hosts
    if needed > available:
        each = f" on each of {hosts} hosts" if hosts > 1 else ""
        problems.append(
            f"cpu_bytes_to_use asks for {format_bytes(needed)} of host memory{each}, "
            f"{format_bytes(available)} are available ({limited_by}): lower cpu_bytes_to_use or "
            f"{_memory_remedy(limited_by)}"
        )
    for tier in config.secondary_tiers:
        problems += tier.problems(record_bytes)
    return problems


def host_memory(shm_directory: str = "/dev/shm") -> tuple[int, str]:
    """Returns (bytes available to a start, the limit that applies). Counts regions that no server holds as
    free, because a start frees them."""
    from kv_offload import _core

    available, limited_by = _core.memory_headroom(shm_directory)
    left = sum(region.bytes for region in regions(shm_directory) if not region.is_held)
    return available + left, limited_by


class Region(NamedTuple):
    """A file of host memory in ``/dev/shm`` that belongs to this user."""

    name: str
    bytes: int  # allocated
    is_held: bool  # a process has it mapped

    @property
    def is_kept(self) -> bool:
        """True if ``keep_host_memory`` made it. Otherwise a region that no process holds is a leftover."""
        return self.name.startswith(_KEPT)

    @property
    def is_shared(self) -> bool:
        """True if ``share_host_memory`` made it."""
        return self.name.startswith(_SHARED)


def regions(shm_directory: str = SHM_DIRECTORY) -> list[Region]:
    """Returns the regions that have a name: kept and shared ones, and those of servers that start."""
    from kv_offload import _core

    return [Region(*each) for each in _core.region_files(shm_directory)]


def shared_names(region: Region, shm_directory: str = SHM_DIRECTORY) -> list[str]:
    """Returns the other names of a kept region that ``share_host_memory`` made. A killed server leaves it."""
    directory = Path(shm_directory)
    try:
        file = (directory / region.name).stat()
        paths = sorted(directory.glob(f"{_SHARED}*"))
        return [path.name for path in paths if os.path.samestat(path.lstat(), file)]
    except OSError:
        return []


def gpus(devices: str = "/dev") -> list[str]:
    """Returns the NVIDIA GPUs of this machine or container, from their device files. Starts no driver."""
    names = (path.name for path in Path(devices).glob("nvidia*"))
    return sorted(name for name in names if re.fullmatch("nvidia[0-9]+", name))


def no_copier(device: str, reason: str) -> str:
    """Returns why a KV cache on ``device`` cannot be served: the error of a server that refuses to start."""
    return f"the KV cache is on {device}, and this build cannot copy from there: {reason}"


def _memory_remedy(limited_by: str) -> str:
    if "cgroup" in limited_by:
        return "raise the memory limit of the container or service"
    if "shm" in limited_by or limited_by.startswith("/"):
        return "enlarge it (docker run --shm-size, Kubernetes: an emptyDir of medium Memory at /dev/shm)"
    return "free memory on this host"


def _boot_id_problem() -> str:
    """Returns why the core cannot tell if the machine was restarted; "" if it can."""
    try:
        return "" if BOOT_ID.read_bytes() else "it is empty"
    except OSError as error:
        return error.strerror or type(error).__name__


def cautions(config: OffloadConfig) -> list[str]:
    """Returns settings that work but are probably mistakes."""
    texts = cautions_of(config.secondary_tiers)
    if config.keep_host_memory and any(
        getattr(tier, "encryption_key_file", None) for tier in config.secondary_tiers
    ):
        texts.append(
            "keep_host_memory leaves the KV cache unencrypted in /dev/shm after the server ends, where other "
            "processes of this user can read it: encryption_key_file encrypts only records"
        )
    if config.keep_host_memory and (problem := _boot_id_problem()):
        texts.append(
            f"keep_host_memory: {BOOT_ID} cannot be read ({problem}). Without it this server and the next "
            "one take over no chunks, because they cannot rule out a restart of the machine: make it readable"
        )
    bounds = config.error_bounds()
    if bounds is not None:
        texts.append(
            f"LOSSY RECORDS: KV cache that is loaded from {', '.join(config.lossy_tiers())} differs from the "
            f"stored one by a relative error of up to {bounds.text()}, so answers may differ. A chunk "
            "that the tier evicts and stores again loses again. All tiers of this server use a separate "
            "namespace, which servers without loss never read"
        )
    for tier in config.secondary_tiers:
        # A tier without its own limit cannot be compared. Other policies write fewer chunks twice.
        bound = getattr(tier, tier.bound_key) if tier.bound_key else None
        if bound is not None and tier.write_policy == "write_through":
            texts += small_tier_notes(tier.label(), bound, config.cpu_bytes_to_use)
    return texts


def small_tier_notes(label: str, bound: int, memory: int) -> list[str]:
    """Returns a warning if a tier is smaller than host memory."""
    if bound >= memory:
        return []
    return [
        f"{label} holds {format_bytes(bound)}, host memory {format_bytes(memory)}: most of its chunks are "
        "in host memory too, so it adds few hits, and only its chunks survive a restart. Give it "
        'more than host memory. write_policy "on_evict" adds hits, but chunks that only host memory holds '
        "are lost at a stop"
    ]
