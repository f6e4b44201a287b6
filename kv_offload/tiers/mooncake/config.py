# SPDX-License-Identifier: Apache-2.0
"""The kind ``mooncake``: records as objects of a Mooncake Store."""

import importlib.util
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from kv_offload.sizes import format_bytes
from kv_offload.tiers.base import Answer, Root
from kv_offload.tiers.encryption import EncryptedTierConfig

if TYPE_CHECKING:
    from kv_offload._core import MooncakeTier
    from kv_offload.namespace import NamespaceIdentity

_PROBE_RECORD = 2 << 20
_LEAST_PATIENCE_SECONDS = 90.0  # Mooncake waits up to 60 s for bytes
_MOST_PROBE_BYTES = 64 << 20
_INSTALL_HINT = (
    "Mooncake's Python package is not installed: pip install mooncake-transfer-engine, or "
    "mooncake-transfer-engine-non-cuda where there is no CUDA (0.3.13 or newer)"
)
# Not with -m, which searches the engine's working directory first for every module, even Python's own.
_PROGRAM = (
    "import sys; sys.path[:1] = [where for where in sys.path[:1] if where]; "
    "from kv_offload.tiers.mooncake.client import main; main()"
)
_LIST_UNSUPPORTED = (
    "Mooncake Store cannot list its objects, so stat, ls, verify, purge and copy do not support it: "
    "its master's metrics show how full it is, and the store evicts unused objects by itself"
)


class MooncakeTierConfig(EncryptedTierConfig):
    """One tier of records in a Mooncake Store, the pooled memory of several hosts, shared by all engines."""

    example: ClassVar[Mapping[str, Any]] = {"type": "mooncake", "master": "mooncake.internal:50051"}
    place_key: ClassVar[str] = "master"
    bounded_by: ClassVar[str] = (
        "the store limits its size; "
        "set --global_segment_size of mooncake_client, the memory that each node contributes"
    )
    default_locality: ClassVar[Literal["LOCAL", "REMOTE"]] = "REMOTE"
    works_on_several_hosts: ClassVar[bool] = True

    type: Literal["mooncake"] = Field(
        default="mooncake", description="type of the tier; required, as in vLLM's own configuration"
    )
    master: str = Field(
        max_length=512,
        description="host:port of mooncake_master. With several masters: the address that Mooncake takes, "
        "such as etcd://host:port",
    )
    metadata: str = Field(
        default="P2PHANDSHAKE",
        pattern=r"^(P2PHANDSHAKE|(https?|etcd|redis)://[^\s@]+)$",
        max_length=512,
        description="metadata service of the store, the same for all its clients: P2PHANDSHAKE, "
        "http://host:port/metadata or etcd://host:port",
    )
    protocol: Literal["tcp", "rdma"] = Field(default="tcp", description="transport of the records")
    devices: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9_.,-]{0,256}$",
        description="for rdma: names of the adapters, separated by commas. Default: Mooncake chooses",
    )
    local_host: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9_.:\[\]-]{0,255}$",
        description="name or address of this host for the store's memory nodes. Default: the local address "
        "of the route to the master",
    )
    key_prefix: str = Field(
        default="kv_offload",
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="first part of every object name",
    )

    @field_validator("master")
    @classmethod
    def _an_address(cls, value: str) -> str:
        scheme, _, rest = value.rpartition("://")
        try:
            parts = urlsplit(f"//{rest}")
            found = bool(parts.hostname) and (bool(parts.port) or bool(scheme))
        except ValueError:
            found = "," in rest or ";" in rest  # several addresses
        if not found or "@" in value or any(char.isspace() for char in value):
            raise ValueError("is not a master address; write host:port, such as mooncake.internal:50051")
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> "MooncakeTierConfig":
        if self.devices and self.protocol != "rdma":
            raise ValueError('devices is given but protocol is not "rdma", so they would be unused')
        return self

    def _command(self) -> list[str]:
        return [
            sys.executable,
            "-c",
            _PROGRAM,
            "kv_offload.tiers.mooncake.client",
        ]  # the last is only visible in process lists

    def _setup(self) -> str:
        """Returns the setup, the first message to the client process
        (kv_offload/tiers/mooncake/client.py)."""
        names = ("master", "metadata", "protocol", "devices", "local_host")
        patience = max(_LEAST_PATIENCE_SECONDS, 2 * self.op_timeout_seconds)
        return json.dumps({name: getattr(self, name) for name in names} | {"patience_seconds": patience})

    def open_root(self, *, changes: bool, given: str = "") -> Root:
        """Raises ValueError: Mooncake cannot list its objects."""
        raise ValueError(f"{self.label()}: {_LIST_UNSUPPORTED}")

    def problems(self, record_bytes: int = 0) -> list[str]:
        """Returns the problems of this host; the store is contacted when it is opened."""
        missing = importlib.util.find_spec("mooncake") is None
        return [f"{self.label()}: {_INSTALL_HINT}"] * missing + self.key_problems()

    def _probe(self, records: int = 0) -> dict[str, Any]:
        """Probes the store. Raises RuntimeError if it does not answer, ValueError for problems of this
        host."""
        from kv_offload import _core

        return _core.probe_mooncake(
            command=self._command(),
            setup=self._setup(),
            place=self.master,
            key_prefix=self.key_prefix,
            record_bytes=_PROBE_RECORD,
            records=records,
            deadline_seconds=self.op_timeout_seconds,
        )

    def cautions(self) -> list[str]:
        """Warns if the store does not answer."""
        if self.problems():
            return []
        try:
            self._probe()
        except ValueError:
            return []  # refused: summary() and the start report the reason
        except RuntimeError as error:
            return [f"{self.label()} is not used until it answers: {error}"]
        return []

    def summary(self) -> Answer:
        """Returns its version, transport and latency."""
        try:
            return Answer("ok", self._described(self._probe()))
        except ValueError as error:
            return Answer("refused", str(error))
        except RuntimeError as error:
            return Answer("note", f"does not answer: {error}")

    def _described(self, found: Mapping[str, Any]) -> str:
        return (
            f"Mooncake {found['version']} by {self.protocol}, "
            f"answers in {found['answer_seconds'] * 1e3:.2f} ms, "
            f"its client process starts in {found['start_seconds']:.1f} s"
        )

    def measure(self, total_bytes: int) -> Answer:
        """Writes and reads temporary objects, one at a time."""
        records = max(1, min(total_bytes, _MOST_PROBE_BYTES) // _PROBE_RECORD)
        try:
            found = self._probe(records)
        except (RuntimeError, ValueError) as error:
            return Answer("refused", str(error))
        if found["write_refused"]:
            state: Literal["note", "refused"] = "note" if self.write_policy == "read_only" else "refused"
            return Answer(state, f"{self._described(found)}; {found['write_refused']}", found)
        write, read = (
            f"{format_bytes(int(found[f'{verb}_bytes_per_second']))}/s" for verb in ("write", "read")
        )
        size = f"{records} objects of {format_bytes(_PROBE_RECORD)}, one at a time"
        return Answer("ok", f"writes {write}, reads {read}, {self._described(found)}; {size}", found)

    def make_spec(self, name: str, bound: int | None, identity: "NamespaceIdentity") -> "MooncakeTier":
        """Returns a Mooncake tier."""
        from kv_offload import _core

        return _core.MooncakeTier(
            command=self._command(),
            setup=self._setup(),
            namespace_id=identity.namespace_id(),
            name=name,
            place=self.master,
            key_prefix=self.key_prefix,
            n_read_threads=self.n_read_threads,
            n_write_threads=self.n_write_threads,
            op_timeout_seconds=self.op_timeout_seconds,
        )
