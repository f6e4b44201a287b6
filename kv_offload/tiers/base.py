# SPDX-License-Identifier: Apache-2.0
"""The settings that every type of tier has, and the interface that a type implements.

This interface hides all differences between kinds: the adapter, the command line and the sizing name no kind.
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol
from urllib.parse import parse_qsl

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from kv_offload.losses import ErrorBounds
from kv_offload.sizes import parse_byte_size

if TYPE_CHECKING:
    from kv_offload._core import TierSpec, WholeRecord
    from kv_offload.namespace import NamespaceIdentity

EVICTION_POLICIES = ("lru", "prefix")  # a test compares it with the core
MAX_REUSE = 127  # the N of write_policy reuse:N; the core counts no further

ByteSize = Annotated[int, BeforeValidator(parse_byte_size)]
Threads = Annotated[int, Field(ge=1, le=256)]
State = Literal["ok", "note", "refused"]


@dataclass(frozen=True)
class Answer:
    """A finding about a tier. ``figures`` are plain numbers in bytes and seconds."""

    state: State
    text: str
    figures: dict[str, Any] | None = None


class MissingNamespaceError(RuntimeError):
    """The namespace no longer exists: it was evicted or purged."""


class Root(Protocol):
    """The records of a tier, for the commands that manage them; servers may use them concurrently."""

    @property
    def where(self) -> str:
        """Its name in output; never contains a password."""

    @property
    def has_hits(self) -> bool:
        """True if the root records which records were used since they were written."""

    def stat(self) -> dict[str, Any]:
        """Returns bytes, records, temporaries, namespaces; None for values that the kind cannot know.

        namespaces: list of {id, json, epoch, bytes, records, oldest, newest, open}. unreadable, if a part of
        the root cannot be read: list of {path, message}; all figures are without it.
        """

    def records(
        self, namespace: str | None = None, failures: list[str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yields {namespace, epoch, key (hex), bytes, mtime (unix seconds), path} in listing order.

        Appends an error to ``failures`` for each part of the root that cannot be read, and yields the other
        records. Raises RuntimeError instead if ``failures`` is None, or if nothing more can be read.
        """

    def with_history(self, record: dict[str, Any]) -> dict[str, Any]:
        """Returns one of ``records`` with ``created`` (unix seconds) and ``hit`` added; None if unknown."""

    def verify(
        self,
        repair: bool,
        progress: Callable[[int, int | None], None],
        key_files: Sequence[str] = (),
    ) -> list[dict[str, Any]]:
        """Returns {path, kind, message, removed} for each damaged record.

        Calls progress(done, total or None). ``key_files``: keys that decrypt encrypted records. Raises
        ValueError if they cannot be used.
        """

    def tenants(self) -> dict[str, Any]:
        """Returns the totals of ``kv_offload.tenants.TenantTotals``. Reads the header of each record.

        Records that are removed meanwhile do not count.
        """

    def allows_loss(self) -> bool:
        """Returns True if a namespace says that its records may be lossy; False where none says anything."""

    def losses(self) -> dict[str, Any]:
        """Returns the totals of ``kv_offload.losses.LossTotals``. Reads the header of each record."""

    def purge(self, namespace: str | None, tenant: str | None = None) -> tuple[int, int]:
        """Removes the records of a namespace, a tenant or both; returns their number and the bytes freed."""

    # ---- for copy

    def use_record_sizes(self) -> None:
        """Makes ``records`` report the bytes of the records themselves, not what they take on a server."""

    def startup_epoch(self, namespace: str) -> int | str | None:
        """Returns the epoch that newly started servers use, as in ``records``; None if there is none."""

    def was_reset(self, namespace: str, epoch: str) -> bool:
        """Returns True if a reset has ended this epoch, which was the ``startup_epoch`` before.

        Raises MissingNamespaceError if the namespace no longer exists, OSError or RuntimeError if the epoch
        cannot be read.
        """

    def epoch_began(self, namespace: str) -> float:
        """Returns when the ``startup_epoch`` began, in unix seconds; 0: unknown.

        Valid after all ``records`` were listed.
        """

    def created(self, namespace: str, handle: Any) -> tuple[float, float]:
        """Returns the earliest and the latest time at which a record can have been created, in unix seconds;
        0: unknown.

        A copy has the time of its original, except in a bucket: there it is the time of the upload.
        """

    def handle(self, record: dict[str, Any]) -> object:
        """Returns the part of one of ``records`` that ``read`` needs."""

    def read(
        self, namespace: str, handle: Any, into: "WholeRecord | None" = None
    ) -> "tuple[str, str, WholeRecord | None]":
        """Reads and verifies a record. Returns (ok | not_found | corrupt | ..., the problem, the record).

        ``into``: a record that is no longer needed, whose memory is used again. For one thread at a time.
        """

    def use_keys(self, key_files: Sequence[str]) -> None:
        """Sets the keys with which ``read`` authenticates encrypted records. Raises ValueError."""

    def remove(self, records: Sequence[dict[str, Any]]) -> int:
        """Removes some of ``records``; returns the number of those that existed."""

    def notes(self) -> list[str]:
        """Returns notes for the user after records were removed."""


def options_of(address: str, known: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Splits an address at its "?" into the address and its options by name.

    Raises ValueError, which shows no value because one may be a password.
    """
    bare, _, query = address.partition("?")
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known or name in options or not value:
            # Before an "@" it may be part of a password that contains a "?".
            plain = re.fullmatch(r"[a-z_]{1,40}", name) and f"{name}=" in query and "@" not in query
            named = f" {name}" if plain else ""
            raise ValueError(
                f"the address has an option{named} that is unknown, empty or repeated; "
                f"possible after the ?: {', '.join(f'{each}=...' for each in known)}"
            )
        options[name] = value
    return bare, options


def known_eviction_policy(value: str) -> str:
    """Returns the value. Raises ValueError, which lists the policies, if it is unknown."""
    if value not in EVICTION_POLICIES:
        raise ValueError(f"is {value!r}; possible: {', '.join(EVICTION_POLICIES)}")
    return value


class TierConfig(BaseModel):
    """One tier below host memory. A kind derives from it, gives ``type`` its name and is registered
    (``kv_offload.tiers.registry.register``)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # ---- class variables of a kind; the first line of its docstring describes it
    example: ClassVar[Mapping[str, Any]]  # an entry of secondary_tiers
    place_key: ClassVar[str]  # the field that holds its place
    bound_key: ClassVar[str | None] = None  # the field that limits its size; None: its server limits itself
    # without bound_key: the limit, and where to set it
    bounded_by: ClassVar[str] = "its server limits its size; remove this key"
    option: ClassVar[str | None] = None  # command-line option for its places: "disk" for --disk
    default_locality: ClassVar[Literal["LOCAL", "REMOTE"]] = "LOCAL"
    schemes: ClassVar[tuple[str, ...]] = ()  # of addresses on the command line: "redis" for redis://host
    # engines whose ranks span several hosts can use it: its core numbers epochs and removes single records
    works_on_several_hosts: ClassVar[bool] = False
    # its core finds removals by other servers at any time, not only with an op
    finds_removals: ClassVar[bool] = False
    address_options: ClassVar[tuple[str, ...]] = ()  # fields allowed after the "?" of an address

    type: str = Field(description="type of the tier; required, as in vLLM's own configuration")
    write_policy: str = Field(
        default="write_through",
        description='"write_through": write every stored chunk, and chunks read from a slower tier; '
        '"on_evict": '
        'write chunks that host memory evicts; "reuse:N": write chunks at their Nth request, which reduces '
        'SSD wear; "read_only": only read',
    )
    n_read_threads: Threads = Field(default=4, description="reader threads, for the whole engine")
    n_write_threads: Threads = Field(default=2, description="writer threads, for the whole engine")
    op_timeout_ms: int = Field(
        default=10_000,
        ge=1,
        description="time limit of a read or write, in ms. A tier that exceeds it is taken out of service "
        "and retried later",
    )
    locality: Literal["LOCAL", "REMOTE"] | None = Field(
        default=None,
        description="locality in `kv_load_tiers` and in the tier's KV events: LOCAL (storage of this host) "
        "or REMOTE (shared; Dynamo drops REMOTE events). Default: by the type of the tier; events of shared "
        "storage then state no locality",
    )
    enable_kv_events: bool = Field(
        default=True, description="publish KV events of this tier if vLLM publishes KV events"
    )

    @field_validator("write_policy")
    @classmethod
    def _known_write_policy(cls, value: str) -> str:
        reuse = re.fullmatch(r"reuse:([0-9]{1,3})", value)
        if value not in ("write_through", "on_evict", "read_only") and (
            reuse is None or not 1 <= int(reuse.group(1)) <= MAX_REUSE
        ):
            raise ValueError(
                f"is {value!r}; possible: write_through, on_evict, reuse:N (N = 1 to {MAX_REUSE}: at "
                "the Nth request), read_only"
            )
        return value

    @property
    def op_timeout_seconds(self) -> float:
        return self.op_timeout_ms / 1000

    @property
    def load_locality(self) -> str:
        """Returns LOCAL or REMOTE for vLLM's ``kv_load_tiers``: the setting, or the default of the kind."""
        return self.locality or self.default_locality

    @property
    def published_locality(self) -> str | None:
        """Returns the locality in KV events; None: unspecified.

        Shared storage is REMOTE only if the setting says so: Dynamo drops REMOTE events.
        """
        return self.locality or ("LOCAL" if self.default_locality == "LOCAL" else None)

    # ---- the interface for the rest of the package

    @property
    def place(self) -> str:
        """The location of its records, unique among the tiers."""
        return str(getattr(self, self.place_key))

    @classmethod
    def entry(cls, place: str, bound: str | int | None = None) -> dict[str, Any]:
        """Returns its entry in secondary_tiers. Raises ValueError for a bound if the kind takes none."""
        entry: dict[str, Any] = {"type": str(cls.model_fields["type"].default), cls.place_key: place}
        if bound is None:
            return entry
        if cls.bound_key is None:
            raise ValueError(f"a tier of type {entry['type']!r} takes no size: its server limits it")
        return entry | {cls.bound_key: bound}

    @classmethod
    def entry_of_address(cls, address: str) -> dict[str, Any]:
        """Returns its entry in secondary_tiers for an address with one of its ``schemes``. Raises
        ValueError."""
        bare, options = options_of(address, cls.address_options)
        return cls.entry(bare) | options

    def open_root(self, *, changes: bool, given: str = "") -> Root:
        """Opens its records for the commands that manage them.

        ``changes``: the command removes records; ``given``: the place as the user wrote it. Raises ValueError
        if the place does not exist or the kind does not support these commands; OSError or RuntimeError if
        the records cannot be read or must not be changed.
        """
        raise ValueError(f"{self.label()}: this command does not support this type of tier")

    def is_unused(self) -> bool:
        """Returns True if the tier does not exist yet, or is an empty directory."""
        return False

    def label(self) -> str:
        """Returns its name in output about this machine."""
        return f"{self.type} {self.place}"

    def portable(self) -> dict[str, Any]:
        """Returns the keys that must be written out for another working directory or host."""
        return {}

    @classmethod
    def bounds(cls, tiers: "Sequence[TierConfig]") -> "list[int | None]":
        """Returns the size limit of each tier, in bytes; None: its server limits itself.

        Called once with all tiers of this kind, because tiers without a limit may share the free space.
        """
        return [None for _ in tiers]

    def problems(self, record_bytes: int = 0) -> list[str]:
        """Returns why this host cannot use it: one sentence each, with requested, available and the setting.

        Changes nothing. ``record_bytes``: size of the largest record with its header; 0 if unknown.
        """
        return []

    def cautions(self) -> list[str]:
        """Returns settings that work but are probably mistakes."""
        return []

    @classmethod
    def cautions_together(cls, tiers: "Sequence[TierConfig]") -> "list[str]":
        """Returns settings of several tiers of this kind that are probably mistakes together, even if each of
        them is none."""
        return []

    def traits(self) -> list[str]:
        """Returns its properties for the startup summary, after its size; one or two words each."""
        return [self.write_policy]

    def error_bounds(self) -> ErrorBounds | None:
        """Returns the largest relative errors that its records may have; None: they are exact."""
        return None

    def summary(self) -> Answer:
        """Returns one line about it without a measurement. refused: a server would not start with it; note: a
        server would start, but not use it for now."""
        return Answer("ok", "can be used")

    def findings(self) -> list[Answer]:
        """Returns the lines that ``doctor`` prints after the summary."""
        return []

    def measure(self, total_bytes: int) -> Answer | None:
        """Measures its speed by writing and reading that many bytes next to its records; None: not
        possible."""
        return None

    def measured(self, figures: Mapping[str, Any]) -> list[Answer]:
        """Returns what the ``figures`` of ``measure`` mean for its settings."""
        return []

    def raw_speed(self, total_bytes: int) -> Mapping[str, Any] | None:
        """Returns {write,read}_bytes_per_second of the same place without the core, to compare with
        ``measure``."""
        return None

    def other_namespaces(self, own: "NamespaceIdentity") -> list[str]:
        """Returns how other namespaces in the same place differ from ``own``, one text each."""
        return []

    def spec(self, name: str, bound: int | None, identity: "NamespaceIdentity") -> "TierSpec":
        """Returns the tier that TieredCache opens under the label ``name``."""
        spec = self.make_spec(name, bound, identity)
        spec.write_policy = self.write_policy
        return spec

    @abstractmethod
    def make_spec(self, name: str, bound: int | None, identity: "NamespaceIdentity") -> "TierSpec":
        """Returns the kind's part of ``spec``: an object of its class in the core."""
