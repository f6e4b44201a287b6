"""What every kind of tier has in the configuration, and what a kind says of itself.

All that differs between kinds is asked here: the adapter, the command line and the sizing name none.
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol
from urllib.parse import parse_qsl

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from kv_offload.sizes import parse_byte_size

if TYPE_CHECKING:
    from kv_offload._core import TierSpec
    from kv_offload.namespace import NamespaceIdentity

EVICTION_POLICIES = ("lru", "prefix")  # a test compares it with what the core has
MAX_REUSE = 127  # the N of write_policy reuse:N; the core counts no further

ByteSize = Annotated[int, BeforeValidator(parse_byte_size)]
Threads = Annotated[int, Field(ge=1, le=256)]
State = Literal["ok", "note", "refused"]


@dataclass(frozen=True)
class Answer:
    """What was found out about a tier. ``figures`` are plain numbers in bytes and seconds."""

    state: State
    text: str
    figures: dict[str, Any] | None = None


class Root(Protocol):
    """The records of a tier as the commands look after them, while servers use them or not."""

    @property
    def where(self) -> str:
        """What it is called in answers; never a password."""

    @property
    def knows_hits(self) -> bool:
        """Is it known there which records were used since they were written."""

    def stat(self) -> dict[str, Any]:
        """bytes, records, temporaries, namespaces; None where the kind cannot know.

        namespaces: list of {id, json, generation, bytes, records, oldest, newest, open}.
        """

    def records(self, namespace: str | None = None) -> Iterator[dict[str, Any]]:
        """{namespace, generation, key (hex), bytes, mtime (unix seconds), path} of each, as found."""

    def with_history(self, record: dict[str, Any]) -> dict[str, Any]:
        """One of ``records`` with ``created`` (unix seconds) and ``hit``; None where that is not known."""

    def verify(
        self,
        repair: bool,
        progress: Callable[[int, int | None], None],
        key_files: Sequence[str] = (),
    ) -> list[dict[str, Any]]:
        """{path, kind, message, removed} of each that is damaged. progress(done, in all if that is known).
        ``key_files``: keys that open what is sealed; ValueError when they cannot be used."""

    def purge(self, namespace: str | None) -> tuple[int, int]:
        """Records removed, and bytes that are free by that."""

    def notes(self) -> list[str]:
        """What is to be said after records were removed."""


def options_of(address: str, known: Sequence[str]) -> tuple[str, dict[str, str]]:
    """An address without what follows its "?", and that by name.

    Raises ValueError that repeats no value: one may be a password.
    """
    bare, _, query = address.partition("?")
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known or name in options or not value:
            # Before an "@" it may be a part of a password with a "?" in it.
            plain = re.fullmatch(r"[a-z_]{1,40}", name) and f"{name}=" in query and "@" not in query
            named = f" {name}" if plain else ""
            raise ValueError(
                f"the address has an option{named} that is unknown, empty or repeated; "
                f"possible after the ?: {', '.join(f'{each}=...' for each in known)}"
            )
        options[name] = value
    return bare, options


def known_eviction_policy(value: str) -> str:
    """The value; ValueError naming the policies there are."""
    if value not in EVICTION_POLICIES:
        raise ValueError(f"is {value!r}; possible: {', '.join(EVICTION_POLICIES)}")
    return value


class TierConfig(BaseModel):
    """One tier below host memory. A kind derives from it, gives ``type`` its name and is registered
    (``kv_offload.tiers.register``)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # ---- what a kind says of itself, beside its fields; the first line of its docstring describes it
    example: ClassVar[Mapping[str, Any]]  # an entry of secondary_tiers
    place_key: ClassVar[str]  # the field that names its place
    bound_key: ClassVar[str | None] = None  # the field that bounds it; None: its server bounds itself
    bounded_by: ClassVar[str] = "its server bounds itself"  # where bound_key is None; and what to set there
    option: ClassVar[str | None] = None  # of the command line, that takes such a place: "disk" of --disk
    default_locality: ClassVar[Literal["LOCAL", "REMOTE"]] = "LOCAL"
    schemes: ClassVar[tuple[str, ...]] = ()  # of addresses that commands are given: "redis" of redis://host
    address_options: ClassVar[tuple[str, ...]] = ()  # its fields that may follow the "?" of such an address

    type: str = Field(description="type of the tier; required, as in vLLM's own configuration")
    write_policy: str = Field(
        default="through",
        description='"through": write every stored chunk, and chunks read from a slower tier; "on_evict": '
        'write chunks that host memory evicts; "reuse:N": write chunks at their Nth request, which reduces '
        'SSD wear; "never": only read',
    )
    n_read_threads: Threads = Field(default=4, description="reader threads, for the whole engine")
    n_write_threads: Threads = Field(default=2, description="writer threads, for the whole engine")
    op_deadline_ms: int = Field(
        default=10_000,
        ge=1,
        description="time limit of a read or write, in ms. A tier that exceeds it is taken out of service "
        "and retried later",
    )
    locality: Literal["LOCAL", "REMOTE"] | None = Field(
        default=None,
        description="locality in the tier's KV events: LOCAL (storage of this host) or REMOTE (shared). "
        "Default: by the type of the tier",
    )
    enable_kv_events: bool = Field(
        default=True, description="publish KV events of this tier if vLLM publishes KV events"
    )

    @field_validator("write_policy")
    @classmethod
    def _known_write_policy(cls, value: str) -> str:
        reuse = re.fullmatch(r"reuse:([0-9]{1,3})", value)
        if value not in ("through", "on_evict", "never") and (
            reuse is None or not 1 <= int(reuse.group(1)) <= MAX_REUSE
        ):
            raise ValueError(
                f"is {value!r}; possible: through, on_evict, reuse:N (N = 1 to {MAX_REUSE}: at "
                "the Nth request), never"
            )
        return value

    @property
    def op_deadline_seconds(self) -> float:
        return self.op_deadline_ms / 1000

    @property
    def events_locality(self) -> str:
        """LOCAL or REMOTE, as given or as the kind is."""
        return self.locality or self.default_locality

    # ---- what the others ask

    @property
    def place(self) -> str:
        """Where its records are. No two tiers have the same."""
        return str(getattr(self, self.place_key))

    @classmethod
    def entry(cls, place: str, bound: str | int | None = None) -> dict[str, Any]:
        """Its table in secondary_tiers. Raises ValueError for a bound where the kind takes none."""
        entry: dict[str, Any] = {"type": str(cls.model_fields["type"].default), cls.place_key: place}
        if bound is None:
            return entry
        if cls.bound_key is None:
            raise ValueError(f"a tier of type {entry['type']!r} takes no size: its server limits it")
        return entry | {cls.bound_key: bound}

    @classmethod
    def entry_of_address(cls, address: str) -> dict[str, Any]:
        """Its table in secondary_tiers for an address of one of its ``schemes``. Raises ValueError."""
        bare, options = options_of(address, cls.address_options)
        return cls.entry(bare) | options

    def open_root(self, *, changes: bool, given: str = "") -> Root:
        """Its records, for the commands that look after them; ``changes``: some will be removed;
        ``given``: how its place was written.

        Raises ValueError when there is no such place, or the kind has no such commands; OSError or
        RuntimeError when they cannot be looked at, or not be changed.
        """
        raise ValueError(f"{self.label()}: this command does not support this kind of tier")

    def label(self) -> str:
        """What it is called in answers about this machine."""
        return f"{self.type} {self.place}"

    def portable(self) -> dict[str, Any]:
        """Those of its keys that must be written out for another working directory or host."""
        return {}

    @classmethod
    def bounds(cls, tiers: "Sequence[TierConfig]") -> "list[int | None]":
        """The most bytes that each of the tiers, all of this kind, may hold; None: its server bounds itself.

        Asked once with all of them, because those without a bound may share what there is.
        """
        return [None for _ in tiers]

    def problems(self, record_bytes: int = 0) -> list[str]:
        """Why it cannot be used from here: a sentence each, naming asked, available and the setting.

        Changes nothing. ``record_bytes``: of the largest record, header included, when known.
        """
        return []

    def cautions(self) -> list[str]:
        """What will work but is probably a mistake."""
        return []

    def traits(self) -> list[str]:
        """What the boot line says of it behind its size, a word or two each."""
        return [self.write_policy]

    def summary(self) -> Answer:
        """One line about it without a measurement. refused: a server would not start with it; note: it would
        start, and not use it for now."""
        return Answer("ok", "can be used")

    def findings(self) -> list[Answer]:
        """What ``doctor`` says beside the summary."""
        return []

    def measure(self, total_bytes: int) -> Answer | None:
        """Its speed, measured by writing and reading so many bytes beside its records; None: not possible."""
        return None

    def measured(self, figures: Mapping[str, Any]) -> list[Answer]:
        """What follows from the ``figures`` of ``measure`` for its settings."""
        return []

    def raw_speed(self, total_bytes: int) -> Mapping[str, Any] | None:
        """{write,read}_bytes_per_second of the same place without the core, to compare ``measure`` with."""
        return None

    def other_namespaces(self, own: "NamespaceIdentity") -> list[str]:
        """How other namespaces in the same place differ from ``own``, a text each."""
        return []

    def spec(self, name: str, bound: int | None, identity: "NamespaceIdentity") -> "TierSpec":
        """What TieredCache opens, under the label ``name``."""
        spec = self.make_spec(name, bound, identity)
        spec.write_policy = self.write_policy
        return spec

    @abstractmethod
    def make_spec(self, name: str, bound: int | None, identity: "NamespaceIdentity") -> "TierSpec":
        """The kind's part of ``spec``: its own class of the core."""
