# SPDX-License-Identifier: Apache-2.0
"""The kind ``redis``: records as values of a Redis or Valkey server or cluster."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import unquote, urlsplit

from pydantic import Field, field_validator, model_validator

from kv_offload.sizes import format_bytes
from kv_offload.tiers.base import Answer, options_of
from kv_offload.tiers.encryption import EncryptedTierConfig

if TYPE_CHECKING:
    from kv_offload._core import RedisServer, RedisTier
    from kv_offload.namespace import NamespaceIdentity
    from kv_offload.tiers.remote_root import RemoteRoot

DEFAULT_PORT = 6379
_FORMS = (
    "redis://[user@]host[:port][/db], rediss://... (TLS), unix:///path[?db=N]; valkey:// and valkeys:// alike"
)
_SAME_SCHEMES = {"valkey": "redis", "valkeys": "rediss"}
_SENTINEL_SCHEMES = (
    "redis-sentinel",
    "rediss-sentinel",
    "redis+sentinel",
    "valkey-sentinel",
    "valkeys-sentinel",
)
_PROBE_RECORD = 2 << 20
_MOST_PROBE_BYTES = 64 << 20
_PROBE_SECONDS = 2.0


@dataclass(frozen=True)
class Url:
    """Address and user of a server. Never contains a password."""

    host: str = ""
    port: int = DEFAULT_PORT
    unix_socket: str = ""
    database: int = 0
    tls: bool = False
    user: str = ""


def parse_url(text: str) -> Url:
    """Parses an address. Raises ValueError, which never shows the text because it may hold a password."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError(f"is not a server address; possible: {_FORMS}") from None
    # The errors from the most specific one on, so that each has the advice that helps.
    if parts.password is not None:
        raise ValueError(
            "contains a password, which would appear in logs and process lists: remove it and name an "
            "environment variable (password_env) or a file (password_file) that has it"
        )
    if parts.scheme in _SENTINEL_SCHEMES:
        raise ValueError(
            "is the address of a Sentinel, and looking up its primary is not supported: give the "
            "address of the primary, or of a proxy or service that always leads to it, or use a cluster"
        )
    scheme = _SAME_SCHEMES.get(parts.scheme, parts.scheme)
    if scheme not in ("redis", "rediss", "unix") or parts.fragment:
        raise ValueError(f"is not a server address; possible: {_FORMS}")
    user = unquote(parts.username or "")
    # A socket has its path in the URL's path, so the database is in the query.
    if scheme == "unix":
        found = re.fullmatch(r"(db=([0-9]{1,5}))?", parts.query)
        if found is None or parts.hostname or not parts.path.startswith("/"):
            raise ValueError("is not a socket address; write unix:///path/of/socket or unix:///path?db=N")
        return Url(unix_socket=unquote(parts.path), database=int(found.group(2) or 0), user=user)
    database = re.fullmatch(r"/?([0-9]{0,5})", parts.path)
    if database is None or parts.query:
        raise ValueError(f"must end with the port or a database number; possible: {_FORMS}")
    # urlsplit() accepts port 0, which no server can have.
    if not parts.hostname or port == 0:
        raise ValueError(f"names no host; possible: {_FORMS}")
    return Url(
        host=parts.hostname,
        port=port or DEFAULT_PORT,
        database=int(database.group(1) or 0),
        tls=scheme == "rediss",
        user=user,
    )


def parse_node(text: str) -> tuple[str, int]:
    """Parses ``HOST[:PORT]``. Raises ValueError, which never shows the text."""
    try:
        parts = urlsplit(f"//{text}")
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    netloc = parts.netloc == text and "@" not in text and not text.endswith(":")
    if not netloc or not parts.hostname or port == 0:
        raise ValueError("must list nodes as HOST or HOST:PORT; all other settings come from url")
    return parts.hostname, port or DEFAULT_PORT


class RedisTierConfig(EncryptedTierConfig):
    """One tier of records on a Redis or Valkey server or cluster, shared by all engines that use it."""

    example: ClassVar[Mapping[str, Any]] = {"type": "redis", "url": "redis://cache.internal:6379/0"}
    place_key: ClassVar[str] = "url"
    bounded_by: ClassVar[str] = (
        "the server limits its size; set its maxmemory, and maxmemory-policy allkeys-lru"
    )
    default_locality: ClassVar[Literal["LOCAL", "REMOTE"]] = "REMOTE"
    works_on_several_hosts: ClassVar[bool] = True
    finds_removals: ClassVar[bool] = True
    schemes: ClassVar[tuple[str, ...]] = ("redis", "rediss", "unix", *_SAME_SCHEMES, *_SENTINEL_SCHEMES)
    address_options: ClassVar[tuple[str, ...]] = (
        "key_prefix",
        "password_env",
        "password_file",
        "ca_file",
        "op_timeout_ms",
    )

    type: Literal["redis"] = Field(
        default="redis", description="type of the tier; required, as in vLLM's own configuration"
    )
    url: str = Field(
        description=f"address of the server, or of any node of a cluster, without a password: {_FORMS}"
    )
    other_nodes: tuple[str, ...] = Field(
        default=(),
        max_length=64,
        description="more nodes of the cluster, each HOST or HOST:PORT, used when the node in url is not "
        "reachable at start. User, password and TLS are those of url",
    )
    password_env: str | None = Field(
        default=None, min_length=1, description="name of the environment variable that holds the password"
    )
    password_file: str | None = Field(
        default=None, min_length=1, description="file that contains only the password"
    )
    ca_file: str | None = Field(
        default=None,
        min_length=1,
        description="for rediss: PEM file of the certificate authorities to trust. Default: the system's. "
        "The certificate and its name are always verified",
    )
    ttl_seconds: int | None = Field(
        default=None,
        ge=1,
        le=31_536_000,
        description="lifetime of a record after its last write, in seconds. Default: unlimited",
    )
    key_prefix: str = Field(
        default="kv_offload",
        pattern=r"^[A-Za-z0-9_.{}-]{1,64}$",
        description="first part of every key",
    )

    @field_validator("url")
    @classmethod
    def _an_address(cls, value: str) -> str:
        parse_url(value)
        return value

    @field_validator("other_nodes")
    @classmethod
    def _nodes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for node in value:
            parse_node(node)
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> "RedisTierConfig":
        if self.password_env is not None and self.password_file is not None:
            raise ValueError("both password_env and password_file are given: give one of them")
        if self.ca_file is not None and not self.parts.tls:
            raise ValueError(
                "ca_file is given but url is not rediss:// or valkeys://, so nothing would be verified"
            )
        if self.other_nodes and self.parts.unix_socket:
            raise ValueError("other_nodes is given but url is a unix socket: give the url of a node instead")
        if self.other_nodes and self.parts.database:
            raise ValueError("other_nodes is given but url names a database: a cluster has only one")
        return self

    @property
    def parts(self) -> Url:
        """Returns the parts of ``url``."""
        return parse_url(self.url)

    def _password(self) -> str:
        """Reads the password when needed and stores no copy. Raises ValueError naming the setting."""
        if self.password_env is not None:
            value = os.environ.get(self.password_env, "")
            if not value:
                raise ValueError(f"password_env {self.password_env}: the variable is unset or empty")
            return value
        if self.password_file is not None:
            try:
                value = Path(self.password_file).read_text().rstrip("\r\n")
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "not text"
                raise ValueError(f"password_file {self.password_file}: {reason}") from None
            if not value:
                raise ValueError(f"password_file {self.password_file} is empty")
            return value
        if self.parts.user:
            raise ValueError("url names a user: set password_env or password_file")
        return ""

    def _server(self, host: str = "", port: int = 0) -> "RedisServer":
        """Returns the server of url, or of another node."""
        from kv_offload import _core

        at = self.parts
        return _core.RedisServer(
            host=host or at.host,
            port=port or at.port,
            unix_socket=at.unix_socket,
            database=at.database,
            tls=at.tls,
            ca_file=self.ca_file or "",
            user=at.user,
            password=self._password(),
        )

    def _others(self) -> "list[RedisServer]":
        return [self._server(*parse_node(node)) for node in self.other_nodes]

    @classmethod
    def entry_of_address(cls, address: str) -> dict[str, Any]:
        """Handles db, which is part of the url of a socket."""
        socket = address.lower().startswith("unix:")
        bare, options = options_of(address, (*(("db",) if socket else ()), *cls.address_options))
        database = options.pop("db", None)
        return cls.entry(bare if database is None else f"{bare}?db={database}") | options

    def open_root(self, *, changes: bool, given: str = "") -> "RemoteRoot":
        """Opens the records under its prefix."""
        from kv_offload import _core
        from kv_offload.tiers.remote_root import RemoteRoot

        refused = self.problems()
        if refused:
            raise ValueError(refused[0])
        default = type(self).model_fields["key_prefix"].default
        mark = "&" if "?" in self.url else "?"
        where = self.url if self.key_prefix == default else f"{self.url}{mark}key_prefix={self.key_prefix}"
        records = _core.redis_records(
            self._server(), key_prefix=self.key_prefix, deadline_seconds=self.op_timeout_seconds
        )
        return RemoteRoot(records, where)

    def problems(self, record_bytes: int = 0) -> list[str]:
        """Returns the problems of this host; the server is contacted when it is opened."""
        from kv_offload import _core

        problems = []
        try:
            self._password()
        except ValueError as error:
            problems.append(f"{self.label()}: {error}")
        if self.parts.tls and not _core.redis_has_tls():
            problems.append(
                f"{self.label()}: this build has no TLS; rebuild it with OpenSSL's headers (libssl-dev)"
            )
        if self.ca_file is not None and not os.access(self.ca_file, os.R_OK):
            problems.append(f"{self.label()}: ca_file {self.ca_file} cannot be read")
        return problems + self.key_problems()

    def _probe(self, records: int = 0) -> dict[str, Any]:
        """Probes the server. Raises RuntimeError if it does not answer, ValueError if it refuses access."""
        from kv_offload import _core

        seconds = min(self.op_timeout_seconds, _PROBE_SECONDS) if records == 0 else self.op_timeout_seconds
        return _core.probe_redis(
            self._server(), self.key_prefix, _PROBE_RECORD, records, seconds, self._others()
        )

    def cautions(self) -> list[str]:
        """Warns if the server does not answer, is a replica, or has no limit or cannot enforce one."""
        try:
            found = self._probe()
        except ValueError:
            return []  # refused: summary() and the start report the reason
        except RuntimeError as error:
            return [f"{self.label()} is not used until it answers: {error}"]
        return [f"{self.label()}: {text}" for text in self._cautions_of(found)]

    def _cautions_of(self, found: Mapping[str, Any]) -> list[str]:
        """Returns the warnings; each one for a cluster names its nodes."""
        about: dict[str, list[str]] = {}
        for node in found["nodes"]:
            for text in self._cautions_of_node(node):
                about.setdefault(text, []).append(node["address"].partition("://")[2].removesuffix("/0"))
        texts = [f"{', '.join(nodes)}: {text}" if found["cluster"] else text for text, nodes in about.items()]
        if found["cluster"] and re.match(r"[^{]*\{[^}]+\}", self.key_prefix):
            texts.append(
                f"key_prefix {self.key_prefix} has a hash tag, which puts all records on one node: leave out "
                "the braces"
            )
        return texts

    def _cautions_of_node(self, found: Mapping[str, Any]) -> list[str]:
        if found["failure"]:
            return [f"its records are not used until it answers: {found['failure']}"]
        texts = []
        if found["role"] == "slave" and self.write_policy != "read_only":
            texts.append(
                'it is a read-only replica: give the address of its primary, or set write_policy "read_only"'
            )
        if found["eviction_policy"] and not found["max_bytes"]:
            texts.append("maxmemory is not set, so it may use all memory of its host; set it")
        elif found["eviction_policy"] == "noeviction" and self.ttl_seconds is None:
            texts.append(
                "its maxmemory-policy is noeviction: it refuses writes when it is full; set allkeys-lru"
            )
        elif found["eviction_policy"].startswith("volatile-") and self.ttl_seconds is None:
            texts.append(
                f"its maxmemory-policy is {found['eviction_policy']}, which evicts only keys that expire: "
                "set ttl_seconds, or allkeys-lru"
            )
        return texts

    def summary(self) -> Answer:
        """Returns its version, memory and latency."""
        try:
            return Answer("ok", self._described(self._probe()))
        except ValueError as error:
            return Answer("refused", str(error))
        except RuntimeError as error:
            return Answer("note", f"does not answer: {error}")

    def _described(self, found: Mapping[str, Any]) -> str:
        # Only nodes that answered count. One without maxmemory makes the whole cluster unbounded.
        nodes = [node for node in found["nodes"] if not node["failure"]]
        used, bounds = sum(node["used_bytes"] for node in nodes), [node["max_bytes"] for node in nodes]
        bounded = bool(bounds) and all(bounds)
        memory = format_bytes(used) + (
            f" of {format_bytes(sum(bounds))} used" if bounded else " used, no maxmemory"
        )
        away = len(found["nodes"]) - len(nodes)
        count = f"{len(found['nodes'])} node{'s' if len(found['nodes']) != 1 else ''}"
        cluster = f"cluster of {count}" + (f", {away} of them unreachable" if away else "")
        parts = (
            " and ".join(sorted({node["version"] for node in nodes})),
            cluster if found["cluster"] else "",
            f"answers in {found['ping_seconds'] * 1e3:.2f} ms",
            memory,
            " and ".join(sorted({node["eviction_policy"] for node in nodes})),
            "TLS" if self.parts.tls else "no TLS",
        )
        return ", ".join(part for part in parts if part)

    def measure(self, total_bytes: int) -> Answer:
        """Writes and reads temporary records on one connection.

        Uses at most a quarter of the server's free memory, so that the server evicts nothing.
        """
        records = max(1, min(total_bytes, _MOST_PROBE_BYTES) // _PROBE_RECORD)
        try:
            found = self._probe(records)
        except (RuntimeError, ValueError) as error:
            return Answer("refused", str(error))
        notes = self._cautions_of(found)
        if found["write_refused"]:
            state: Literal["ok", "note", "refused"] = (
                "note" if self.write_policy == "read_only" else "refused"
            )
            return Answer(state, f"{self._described(found)}; {found['write_refused']}", found)
        if not found["records"]:
            return self._memory_full_answer(found, notes)
        write, read = (
            f"{format_bytes(int(found[f'{verb}_bytes_per_second']))}/s" for verb in ("write", "read")
        )
        size = f"{found['records']} records of {format_bytes(_PROBE_RECORD)} on one connection"
        taken = found["bytes_per_record"]
        if taken > _PROBE_RECORD * 1.1:  # its allocator rounds up
            size += f", each takes {format_bytes(taken)} of its memory"
        text = "; ".join((f"writes {write}, reads {read}, {self._described(found)}", size, *notes))
        return Answer("note" if notes else "ok", text, found)

    def _memory_full_answer(self, found: dict[str, Any], notes: list[str]) -> Answer:
        """Returns the result without a measurement; refused if the tier could not write either."""
        free = min(node["free_bytes"] for node in found["nodes"] if node["free_bytes"] is not None)
        full = free < _PROBE_RECORD and all(
            node["eviction_policy"] == "noeviction" for node in found["nodes"]
        )
        text = f"not measured, it could evict records: {format_bytes(free)} free; {self._described(found)}"
        if full and self.write_policy != "read_only":
            return Answer("refused", "; ".join((text, *notes)), found)
        return Answer("note", "; ".join((text, *notes)), found)

    def make_spec(self, name: str, bound: int | None, identity: "NamespaceIdentity") -> "RedisTier":
        """Returns a Redis tier."""
        from kv_offload import _core

        return _core.RedisTier(
            server=self._server(),
            namespace_id=identity.namespace_id(),
            name=name,
            key_prefix=self.key_prefix,
            ttl_seconds=self.ttl_seconds or 0,
            n_read_threads=self.n_read_threads,
            n_write_threads=self.n_write_threads,
            op_timeout_seconds=self.op_timeout_seconds,
            other_nodes=self._others(),
        )
