# SPDX-License-Identifier: Apache-2.0
"""Limits the bandwidth of processes to the block device of a directory, in bytes per second.

Uses the kernel's block I/O controller (root only): ``blkio.throttle.*`` of cgroup v1, ``io.max`` of v2. The
limit applies to I/O that reaches the device, not to page cache hits.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")


def device_of(directory: Path) -> str:
    """Returns MAJOR:MINOR of the whole disk that contains the directory.

    Raises SystemExit if the directory is not on a block device (tmpfs, overlay, a network file system).
    """
    number = directory.stat().st_dev
    found = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not found.exists():
        raise SystemExit(f"{directory} is not on a block device; name a directory of a local disk")
    resolved = found.resolve()
    return ((resolved.parent if (resolved / "partition").exists() else resolved) / "dev").read_text().strip()


@contextmanager
def throttled(directory: Path, bytes_per_second: int | None) -> Iterator[list[str]]:
    """Yields a command prefix that limits reads and writes to that speed each; None: no limit.

    Raises SystemExit if there is no controller, or no permission to use it.
    """
    if bytes_per_second is None:
        yield []
        return
    device, name = device_of(directory), f"throttled-{uuid.uuid4().hex[:8]}"
    v1 = (CONTROL_GROUPS / "blkio").is_dir()
    group = CONTROL_GROUPS / "blkio" / name if v1 else CONTROL_GROUPS / name
    limits = (
        {f"blkio.throttle.{way}_bps_device": f"{device} {bytes_per_second}" for way in ("read", "write")}
        if v1
        else {"io.max": f"{device} rbps={bytes_per_second} wbps={bytes_per_second}"}
    )
    try:
        group.mkdir()
    except OSError as error:
        raise SystemExit(f"no block I/O controller at {group} ({error}); run as root on the host") from error
    try:
        for file, limit in limits.items():
            (group / file).write_text(limit)
        yield ["sh", "-c", f'echo $$ > {group / "cgroup.procs"} && exec "$@"', "throttled"]
    except OSError as error:
        raise SystemExit(f"{group} takes no limit for {device}: {error}") from error
    finally:
        group.rmdir()
