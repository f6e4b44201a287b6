# SPDX-License-Identifier: Apache-2.0
"""The kind ``fs``: records as files below a directory."""

import os
import stat
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Field, field_validator

from kv_offload.sizes import format_bytes
from kv_offload.tiers.base import Answer, ByteSize, TierConfig, known_eviction_policy
from kv_offload.tiers.encryption import EncryptedTierConfig

if TYPE_CHECKING:
    from kv_offload._core import FsTier
    from kv_offload.namespace import NamespaceIdentity
    from kv_offload.tiers.fs.root import DirectoryRoot

DEFAULT_DISK_SHARE = 0.5  # share of (free + already held) bytes for a tier without max_bytes
_HEADER_BYTES = 4096
_SMALLEST_RECORD = 64 << 10  # what must fit when the record size is not known yet
_PROBE_RECORD = 2 << 20
_SMALLEST_PROBE = 8 * _PROBE_RECORD
_MARGIN = 4 << 20  # for directories and headers of a probe
_ROOT_FILE = "kv_offload.json"  # kRootFile in csrc/backends/fs/layout.h
_MEASURE_ELSEWHERE = "measure another directory on its file system with kv-offload bench"
_IN_USE = f"it is open in other processes, and max_bytes is not given; {_MEASURE_ELSEWHERE}"


def existing_part(path: str) -> Path:
    """Returns the path, or its nearest parent that exists."""
    part = Path(path)
    while not part.exists() and part != part.parent:
        part = part.parent
    return part


def free_bytes(root_dir: str) -> int:
    """Returns the bytes that this user may still write on the file system of ``root_dir``."""
    figures = os.statvfs(existing_part(root_dir))
    return figures.f_bavail * figures.f_frsize


def held_bytes(root_dir: str) -> int:
    """Returns the approximate size of all files below ``root_dir``; 0 if it does not exist."""
    from kv_offload import _core

    return _core.directory_usage(root_dir)


def _direct_mode(value: object) -> object:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class FsTierConfig(EncryptedTierConfig):
    """Records are files in a directory, which several servers may share."""

    example: ClassVar[dict[str, Any]] = {"type": "fs", "root_dir": "/var/cache/kv", "max_bytes": "500GiB"}
    place_key: ClassVar[str] = "root_dir"
    bound_key: ClassVar[str] = "max_bytes"
    option: ClassVar[str] = "disk"
    works_on_several_hosts: ClassVar[bool] = True
    finds_removals: ClassVar[bool] = True

    type: Literal["fs"] = Field(
        default="fs", description="type of the tier; required, as in vLLM's own configuration"
    )
    root_dir: str = Field(
        description="directory of the records. Created if missing; must be owned by the user that runs vLLM"
    )
    max_bytes: ByteSize | None = Field(
        default=None,
        gt=0,
        description="hard limit on everything in the directory, for all servers that share it together. "
        "Default: half of the sum of the free space and what the directory already holds",
    )
    eviction_policy: str = Field(
        default="prefix",
        description='eviction order at max_bytes: "prefix" (ends of prompts first, by predicted reuse) '
        'or "lru"',
    )
    fsync: Literal["none", "data", "full"] = Field(
        default="none",
        description="what a power failure can do. none: records may be missing or torn, and torn records are "
        "detected; data: records may be missing; full: no record is lost",
    )
    o_direct: Annotated[Literal["auto", "on", "off"], BeforeValidator(_direct_mode)] = Field(
        default="auto", description="bypass the page cache. auto: if the file system supports it"
    )

    @field_validator("root_dir")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("is empty; name a directory")
        return os.path.abspath(os.path.expanduser(value))

    @field_validator("eviction_policy")
    @classmethod
    def _known_eviction_policy(cls, value: str) -> str:
        return known_eviction_policy(value)

    def label(self) -> str:
        """Its directory."""
        return f"disk {self.root_dir}"

    def portable(self) -> dict[str, Any]:
        """Returns the absolute path, because the server may start in another directory."""
        return super().portable() | {"root_dir": self.root_dir}

    @classmethod
    def bounds(cls, tiers: Sequence[TierConfig]) -> list[int | None]:
        """Returns max_bytes of each tier. The default is half of the free space of its file system plus the
        bytes it already holds, split among the tiers there without a limit; so a restart gets the same."""
        own = cast("Sequence[FsTierConfig]", tiers)
        unbounded = Counter(tier._device() for tier in own if tier.max_bytes is None)
        return [
            int(tier._space() * DEFAULT_DISK_SHARE / unbounded[tier._device()])
            if tier.max_bytes is None
            else tier.max_bytes
            for tier in own
        ]

    def _device(self) -> int:
        return existing_part(self.root_dir).stat().st_dev

    def _space(self) -> int:
        return free_bytes(self.root_dir) + held_bytes(self.root_dir)

    def problems(self, record_bytes: int = 0) -> list[str]:
        """Makes the same checks as the core when it opens the root, but creates nothing."""
        root = self.root_dir
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
                "chown it, or name a directory below it that this user creates"
            )
        elif os.statvfs(there).f_flag & os.ST_RDONLY:
            problems.append(
                f"{asked}: the file system of {there} is mounted read-only, and a server writes lock files "
                "there even with write_policy read_only: mount it writable, or choose another root_dir"
            )
        elif not os.access(there, os.W_OK | os.X_OK):
            problems.append(
                f"{asked}: user {os.geteuid()} may not write in {there}: chmod or chown it, or choose "
                "another root_dir"
            )
        return problems + self._problems_of_space(asked, record_bytes) + self.key_problems()

    def _problems_of_space(self, asked: str, record_bytes: int) -> list[str]:
        problems = []
        needed = max(record_bytes, _SMALLEST_RECORD + _HEADER_BYTES)
        if self.max_bytes is not None and self.max_bytes < needed:
            problems.append(
                f"{asked}: max_bytes is {format_bytes(self.max_bytes)}, one record takes "
                f"{format_bytes(needed)}: raise max_bytes"
            )
        free = free_bytes(self.root_dir)
        if free < needed and self._space() < needed:  # a full root still serves and evicts
            problems.append(
                f"{asked}: {format_bytes(free)} free on its file system, one record takes "
                f"{format_bytes(needed)}: free space there or choose another root_dir"
            )
        return problems

    def cautions(self) -> list[str]:
        """Warns of a limit that exceeds the file system."""
        space = self._space()
        if self.max_bytes is None or self.max_bytes <= space:
            return []
        return [
            f"root_dir {self.root_dir}: max_bytes is {format_bytes(self.max_bytes)}, its file system can "
            f"hold {format_bytes(space)}; writes will be dropped when it is full"
        ]

    @classmethod
    def cautions_together(cls, tiers: Sequence[TierConfig]) -> list[str]:
        """Warns of limits that each fit into the file system, and exceed it together."""
        own = cast("Sequence[FsTierConfig]", tiers)
        bounds = dict(zip((tier.root_dir for tier in own), cls.bounds(tiers), strict=True))
        texts = []
        for device in dict.fromkeys(tier._device() for tier in own):
            there = [tier for tier in own if tier._device() == device and tier.write_policy != "read_only"]
            limit = sum(bounds[tier.root_dir] or 0 for tier in there)
            if len(there) < 2 or limit <= (free := free_bytes(there[0].root_dir)):
                continue
            space = free + sum(held_bytes(tier.root_dir) for tier in there)
            if limit <= space or any(tier.cautions() for tier in there):
                continue
            roots = ", ".join(tier.root_dir for tier in there)
            texts.append(
                f"root_dir {roots}: max_bytes is {format_bytes(limit)} together, their file system can hold "
                f"{format_bytes(space)}; writes will be dropped when it is full"
            )
        return texts

    def summary(self) -> Answer:
        """Returns the free space."""
        return Answer("ok", f"{format_bytes(free_bytes(self.root_dir))} free")

    def measure(self, total_bytes: int) -> Answer:
        """Writes and reads temporary records: in a directory with records within its limit and without
        eviction, elsewhere in a separate directory. The core removes them."""
        from kv_offload import _core

        if problem := self._enclosed():
            return Answer("note", f"speed not measured: {problem}")
        bound, room = self._room()
        if bound is None:
            return Answer("note", f"speed not measured: {_IN_USE}")
        # At most a quarter of the free space: other programs may need it meanwhile.
        total = min(total_bytes, free_bytes(self.root_dir) // 4, room) // _PROBE_RECORD * _PROBE_RECORD
        if total < _SMALLEST_PROBE:
            full = "max_bytes is reached" if room < _SMALLEST_PROBE else "too little free space"
            return Answer("note", f"speed not measured: {full}; {_MEASURE_ELSEWHERE}")
        # In a root, the records count within max_bytes, as those of a server do.
        if self._is_root():
            measured = _core.probe_root(self.root_dir, bound, total, _PROBE_RECORD)
            if measured is None:
                text = "speed not measured: max_bytes is reserved, or its bytes are still being counted"
                return Answer("note", f"{text}; {_MEASURE_ELSEWHERE}")
            figures = measured
        else:
            figures = _core.probe_disk(str(existing_part(self.root_dir)), total, _PROBE_RECORD)
        direct = "O_DIRECT" if figures["o_direct"] else "buffered (no O_DIRECT support)"
        if self.o_direct == "on" and not figures["o_direct"]:
            text = 'o_direct is "on", but the file system does not support it: set "auto"'
            return Answer("refused", text, figures)
        write, read = (
            f"{format_bytes(int(figures[f'{verb}_bytes_per_second']))}/s" for verb in ("write", "read")
        )
        size = f"{format_bytes(total)} of {format_bytes(_PROBE_RECORD)} records"
        return Answer(
            "ok" if figures["o_direct"] or self.o_direct == "off" else "note",
            f"writes {write}, reads {read}, {direct}; {size}",
            figures,
        )

    def raw_speed(self, total_bytes: int) -> dict[str, Any]:
        """Measures plain system calls on one temporary file. Raises RuntimeError if it does not fit."""
        from kv_offload import _core
        from kv_offload.raw_speed import raw_disk

        if problem := self._enclosed():
            raise RuntimeError(f"{self.root_dir}: {problem}")
        bound, room = self._room()
        if bound is None:
            raise RuntimeError(f"{self.root_dir}: {_IN_USE}")
        total = max(min(total_bytes, room), _SMALLEST_PROBE)
        reserved = _core.ReservedSpace(self.root_dir, bound, total + _MARGIN) if self._is_root() else None
        speeds = raw_disk(str(existing_part(self.root_dir)), total)
        del reserved  # after the measurement
        return speeds

    def _enclosed(self) -> str:
        """Returns why nothing may be written here, if it is inside another root; "" if it is in none."""
        for outer in Path(self.root_dir).parents:
            if os.path.exists(outer / _ROOT_FILE):
                return (
                    f"it is inside the tier directory {outer}, whose max_bytes includes it and could be "
                    f"exceeded; {_MEASURE_ELSEWHERE}"
                )
        return ""

    def _is_root(self) -> bool:
        return os.path.exists(os.path.join(self.root_dir, _ROOT_FILE))

    def _room(self) -> tuple[int | None, int]:
        """Returns the limit of the directory (None: only its servers know it), and what is free within it."""
        from kv_offload import _core

        if not self._is_root():
            return 0, 1 << 62
        if self.max_bytes is None and _core.FsRoot(self.root_dir).is_open():
            return None, 0
        bound = self.bounds([self])[0]
        assert bound is not None
        return bound, bound - held_bytes(self.root_dir) - _MARGIN

    def other_namespaces(self, own: "NamespaceIdentity") -> list[str]:
        """Compares with the newest namespaces in the root."""
        from kv_offload.namespace import other_namespaces

        return other_namespaces(self.root_dir, own)

    def is_unused(self) -> bool:
        """Returns True for a missing or an empty directory."""
        try:
            with os.scandir(self.root_dir) as names:
                return next(names, None) is None
        except FileNotFoundError:
            return True
        except NotADirectoryError:
            return False

    def open_root(self, *, changes: bool, given: str = "") -> "DirectoryRoot":
        """Opens the directory; output shows it as the user wrote it."""
        from kv_offload.tiers.fs.root import DirectoryRoot

        same = bool(given) and os.path.abspath(given) == self.root_dir
        return DirectoryRoot(given if same else self.root_dir, changes=changes)

    def make_spec(self, name: str, bound: int | None, identity: "NamespaceIdentity") -> "FsTier":
        """Returns a file tier; ``bound`` is never None."""
        from kv_offload import _core

        assert bound is not None
        return _core.FsTier(
            root_dir=self.root_dir,
            max_bytes=bound,
            namespace_id=identity.namespace_id(),
            namespace_json=identity.readable_json(),
            name=name,
            fsync=self.fsync,
            o_direct=self.o_direct,
            n_read_threads=self.n_read_threads,
            n_write_threads=self.n_write_threads,
            op_timeout_seconds=self.op_timeout_seconds,
            eviction_policy=self.eviction_policy,
        )
