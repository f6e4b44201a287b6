# SPDX-License-Identifier: Apache-2.0
"""The C++ core. No logic lives in the bindings; every call that can take time releases the GIL.

Errors: ValueError for wrong arguments, ResourceError for missing resources of the machine.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__version__: str
tier_interface: str  # of the headers that the core was compiled with; see bindings/tier_spec.h

class ResourceError(RuntimeError):
    """A missing resource: names the requested and available amounts and the setting to change."""

class MetricDefinition:
    name: str
    type: str  # "counter", "gauge", "histogram"
    documentation: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...]
    worker: bool  # only on a worker's own /metrics

def parse_byte_size(text: str) -> int:
    """Returns the bytes meant by ``"32GiB"``, ``"32Gi"``, ``"32G"`` (10^9), ``"1048576"``; see
    kv_offload.sizes."""

def format_bytes(count: int) -> str: ...
def metric_definitions() -> list[MetricDefinition]: ...
def eviction_policy_names() -> list[str]: ...
def cuda_unavailable_reason() -> str:
    """Returns "" if the CUDA copier can run here, else the reason (such as an old driver) in one sentence."""

def cuda_numa_node(device: int) -> int:
    """Returns the NUMA node of a CUDA device; -1 if unknown. Creates no CUDA context."""

def describe_cuda_copier(device: int = -1) -> str:
    """Measures and returns the copy path for each size on this device (-1: the current one).

    Raises ResourceError where there is no CUDA.
    """

def memory_headroom(shm_directory: str = "/dev/shm") -> tuple[int, str]: ...
def region_files(shm_directory: str = "/dev/shm") -> list[tuple[str, int, bool]]: ...  # name, bytes, held
def sweep_leftovers(shm_directory: str = "/dev/shm") -> list[str]: ...
def measure_copy(total_bytes: int, threads: int) -> float:
    """Returns the bytes per second of the host copier between two buffers of ``total_bytes``."""

class Metrics:
    def __init__(self) -> None: ...
    def drain(self) -> list[tuple[str, str, tuple[str, ...], float | list[float]]]:
        """Returns the changes since the last call: (name, type, label values, increase | value |
        observations)."""
    def add(self, name: str, labels: Sequence[str], increase: float = 1) -> None: ...
    def set(self, name: str, labels: Sequence[str], value: float) -> None: ...
    def observe(self, name: str, labels: Sequence[str], value: float) -> None: ...
    def value(self, name: str, labels: Sequence[str] = ()) -> float: ...
    def text(self) -> str: ...
    def expose(self, address: str) -> int: ...

class HostRegion:
    @staticmethod
    def attach_scheduler(
        engine_id: str,
        bytes: int,
        num_areas: int,
        num_workers: int,
        shm_directory: str = "/dev/shm",
        huge_pages: bool = True,
        keep_for: str = "",  # not empty: may be taken over by the next engine that gives the same
        share_for: str = "",  # not empty: engines that give the same find each other; not with keep_for
    ) -> HostRegion: ...
    @staticmethod
    def attach_worker(
        engine_id: str,
        bytes: int,
        num_areas: int,
        num_workers: int,
        rank: int,
        shard_bytes: Sequence[int],
        fingerprint: str,
        shm_directory: str = "/dev/shm",
        huge_pages: bool = True,
        keep_for: str = "",  # not empty: may be taken over by the next engine that gives the same
        share_for: str = "",  # not empty: engines that give the same find each other; not with keep_for
        first_rank: int = 0,  # of this host
        local_ranks: int = 0,  # of this host; 0: all ranks run here
    ) -> HostRegion: ...
    def wait_for_ranks(self, timeout_seconds: float) -> None:
        """Raises ResourceError naming the ranks that did not attach in time."""
    def geometry(self, rank: int) -> tuple[list[int], str]: ...
    @property
    def num_areas(self) -> int:
        """Of the engine. The scheduler of an engine on several hosts learns it from a worker."""
    @property
    def ranks_per_area(self) -> int:
        """The number of consecutive ranks that share an area; the first of them stores."""
    @property
    def area_bytes(self) -> int: ...
    def set_endpoint(self, rank: int, endpoint: str) -> None:
        """Rank 0: passes another host's HostAgent.endpoint to the scheduler. ``rank``: its first one."""
    @property
    def local_ranks(self) -> int:
        """The number of ranks on this host. The scheduler learns it from a worker that attached before it."""
    @property
    def cut_off(self) -> bool:
        """Scheduler: True while a host is not connected (HostLinks); nothing is loaded or stored then."""
    @property
    def shared_number(self) -> int | None:
        """The number under which other engines know this region; None if it is not shared (any more)."""
    @property
    def swept(self) -> list[str]: ...
    def area(self, index: int) -> npt.NDArray[np.uint8]:
        """Returns the area's bytes: shape (area_bytes,), writable, not a copy. For tests and tools."""
    def prefer_node(self, index: int, node: int) -> str:
        """Binds the area's memory to a NUMA node; call it before ``prefault``. Returns "" or why it
        failed."""
    def prefault(
        self, index: int, threads: int, progress: Callable[[int, int], None] | None = None
    ) -> None: ...
    @property
    def fetching(self) -> bool:
        """True while a request waits for a tier's records. The scheduler's cache publishes it to all
        processes."""
    def report(self, rank: int, ticket: int, failed_groups: int) -> None: ...
    def result(self, ticket: int) -> int | None:
        """Returns None while the ticket is pending, else the bit set of failed group positions."""

class HostAgent:
    """Reports what the ranks of this host finish to the scheduler on another host."""

    def __init__(
        self,
        region: HostRegion,  # of a worker
        *,
        address: str,  # IPv4 or IPv6 of this host, numeric
        version: str,  # of this package
        silence_seconds: float = 3.0,  # a scheduler that sends nothing for so long is lost
    ) -> None: ...
    @property
    def endpoint(self) -> str:
        """Address, port and secret, for the scheduler only. Do not log it."""
    @property
    def is_closed(self) -> bool: ...
    def wait_for_tiers(self, timeout_seconds: float) -> tuple[int, list[tuple[int, bool, int]], str] | None:
        """Waits until the scheduler orders this host to open its tiers; None: timeout, or closed.

        Returns (round, the epoch of each tier, the text of the scheduler). Pass the first two on.
        """
    def open_tiers(
        self,
        round: int,
        # (id of a new epoch, whether one with another id is refused, the id that a shared store replaces)
        epochs: Sequence[tuple[int, bool, int]],
        tiers: Sequence[TierSpec],
        *,
        tenants: Sequence[tuple[str, float]] = (),  # as of TieredCache
    ) -> None:
        """Opens the tiers and answers the scheduler. Raises like TieredCache; then call ``refuse_tiers``."""
    def refuse_tiers(self, round: int, problem: str) -> None: ...
    def close(self) -> None: ...

def hosts_problem() -> str:
    """Returns why this build cannot connect the hosts of an engine (it has no OpenSSL); "" if it can."""

class HostLinks:
    """The scheduler's connections to the other hosts of its engine."""

    def __init__(
        self,
        region: HostRegion,
        hosts: Sequence[tuple[int, int]],  # (first rank, number of ranks) of each other host
        *,
        version: str,  # of this package
        silence_seconds: float = 3.0,  # a host that sends nothing for so long is lost
    ) -> None: ...
    def wait_until_connected(self, timeout_seconds: float) -> None:
        """Raises ResourceError naming the hosts that are missing or do not fit, and why."""
    def keep_memory(self, timeout_seconds: float) -> tuple[str, list[str], list[str]]:
        """Lets the regions of the other hosts outlive the engine. Call it once, before the cache is made.

        Returns (text that identifies the regions of all hosts, for TieredCache's keep_identity; hosts without
        their part of the earlier engine's memory, and why; hosts whose region ends with the engine). Raises
        ResourceError naming the hosts that have not confirmed it. The regions need keep_for. Ctrl-C ends the
        wait.
        """
    @property
    def num_hosts(self) -> int:
        """Returns the number of other hosts."""
    @property
    def lost_hosts(self) -> list[int]:
        """Returns the numbers of the hosts that are not connected now; 1 is the first of ``hosts``."""
    def take_events(self) -> list[str]:
        """Returns lines about hosts that were lost or came back since the last call."""
    def close(self) -> None: ...

class TierSpec:
    """A tier that TieredCache opens and checks in its constructor."""

    write_policy: str  # write_through | on_evict | reuse:N | read_only; default: "write_through"
    encryption_key_files: list[str]  # 32 bytes each, read when opened; the first encrypts, all decrypt
    tenant_key_files: list[list[str]]  # by tenant; [] for a tenant without keys of its own
    compress: str  # auto | none | zstd | lossy:E | lossy:KEYS:VALUES, relative errors; default: "none"
    # Largest relative errors, (keys, values), of a record that may be read; default: those of compress.
    accepted_errors: tuple[float, float]
    # (bytes of keys, bytes of values) of the runs of which each shard consists, by group position; default
    # and (0, 0): unknown; the keys' bound then applies to all elements.
    kv_runs: Sequence[tuple[int, int]]
    # bfloat16 | float16 | float8_e4m3fn | float8_e5m2 | bytes, by group position; default: bytes
    elements: Sequence[str]
    exact_groups: Sequence[bool]  # by group position: always stored without loss; default: False

    def set_bound_factors(
        self, factors: Sequence[tuple[Sequence[Sequence[tuple[float, int]]], bytes] | None]
    ) -> None:
        """Lowers the bounds of ``lossy:...``, but not below 0.02.

        ``factors``: by group position; None: none. Its shards have for each 64 neighbouring elements of a
        block a factor, and a row of weights, from 1; 0: none. A row is 64 bytes: the steps of the channels
        relative to each other, 8 + i for 2^i, at most 16. Records that do not have these shards, of whole
        blocks, are stored without loss, and so is fp8 with weights. Raises ValueError unless each factor is
        above 0 and at most 1, and for impossible rows.
        """
    memory_outlives: bool  # the region is kept: no read may continue after the process ends. Default: False
    watch_removals: bool  # looks for removals by other servers all the time (fs). Default: False

def measure_codec() -> tuple[float, float]:
    """Returns the bytes per second at which one core encodes and decodes typical bfloat16 K and V."""

def codec_advice(
    *,
    encode_bytes_per_second: float,
    decode_bytes_per_second: float,
    read_bytes_per_second: float,
    write_bytes_per_second: float,
) -> str:
    """Returns the decision of compress "auto" for a tier of this speed, and the reason."""

def encryption_key_ids(paths: list[str]) -> list[str]:
    """Returns the id of each key, in hex. Raises RuntimeError or ValueError, with a remedy, for an unusable
    file."""

class FsTier(TierSpec):
    """A tier of records in files."""

    def __init__(
        self,
        *,
        root_dir: str,
        max_bytes: int,
        namespace_id: bytes,  # 32 bytes
        namespace_json: str,
        name: str = "fs",
        fsync: str = "none",  # none | data | full
        o_direct: str = "auto",  # auto | on | off
        n_read_threads: int = 4,
        n_write_threads: int = 2,
        op_timeout_seconds: float = 10.0,
        eviction_policy: str = "lru",
        write_policy: str = "write_through",  # write_through | on_evict | reuse:N | read_only
    ) -> None: ...

class RedisServer:
    """Address and credentials of a Redis or Valkey server. Its repr shows neither user nor password."""

    def __init__(
        self,
        *,
        host: str = "",  # or unix_socket
        port: int = 6379,
        unix_socket: str = "",
        database: int = 0,
        tls: bool = False,
        ca_file: str = "",
        user: str = "",
        password: str = "",
    ) -> None: ...

class RedisTier(TierSpec):
    """A tier of records on a Redis or Valkey server. With write_policy "read_only" it also removes
    nothing there."""

    def __init__(
        self,
        *,
        server: RedisServer,
        namespace_id: bytes,  # 32 bytes
        name: str = "redis",
        key_prefix: str = "kv_offload",
        ttl_seconds: int = 0,  # 0: unlimited
        n_read_threads: int = 4,
        n_write_threads: int = 2,
        op_timeout_seconds: float = 10.0,
        other_nodes: Sequence[RedisServer] = (),  # of the same cluster
    ) -> None: ...

def probe_redis(
    server: RedisServer,
    key_prefix: str,
    record_bytes: int,
    records: int,
    deadline_seconds: float,
    other_nodes: Sequence[RedisServer] = (),
) -> dict[str, Any]:
    """Probes a server or the nodes of its cluster: properties, speed, and the size of a record there.
    records=0: writes nothing. Raises RuntimeError if the server refuses access or does not answer."""

def redis_has_tls() -> bool: ...

class RemoteRecord:
    """An entry of a listing. A record has all three parts, in hex; the name of an epoch has only
    namespace_id; a foreign key has none."""

    @property
    def name(self) -> bytes: ...
    @property
    def namespace_id(self) -> str: ...
    @property
    def epoch(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def size(self) -> int:
        """The bytes that it uses on the server."""

    @property
    def used(self) -> float:
        """Unix seconds of the last use; 0: the server does not report it."""

    @property
    def written(self) -> float: ...

class WholeRecord:
    """A record as it is stored: header and stored bytes."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def key(self) -> str:
        """In hex."""

    @property
    def created(self) -> float:
        """The write time in its header, in unix seconds."""

    @property
    def encryption_key_id(self) -> str:
        """In hex; "" if the record is not encrypted."""

class RecordImporter:
    """Writes whole records into a tier, in the epoch that newly started processes use. Evicts nothing."""

    def __init__(self, spec: TierSpec) -> None:
        """May take minutes: a directory is counted. Raises like the tier, RuntimeError if there is no epoch,
        ValueError if records cannot be copied into this type of tier."""

    @property
    def epoch(self) -> str: ...
    def write(self, record: WholeRecord, used: float) -> tuple[str, str, bool]:
        """Writes the record; several threads may call it. ``used``: unix seconds of the last use; 0: now.

        Returns (ok | no_space | cancelled (it was reset) | ..., error message, False if the tier already had
        it).
        """

    def close(self) -> None:
        """No write may be running."""

class RemoteRecords:
    """Records under a prefix of a server or a bucket, for the commands. Raises RuntimeError if it refuses
    access or does not answer."""

    def page(self, namespace_id: str, start: bytes, sizes: bool) -> tuple[list[RemoteRecord], bytes]:
        """Returns a page of one namespace (of all for ""), and the start of the next page (b"" at the
        end)."""

    def written(self, record: RemoteRecord) -> float:
        """Returns the write time in its header, in unix seconds; 0: unknown, or a look would count as a
        use."""

    def tenant(self, record: RemoteRecord) -> str | None:
        """Returns the tenant in its header, even if the look counts as a use; "": none. None if the record is
        missing or has no valid header."""

    def loss(self, record: RemoteRecord) -> tuple[bool, int, int, float, float, float] | None:
        """Returns what its header says, the fields of ``kv_offload.losses.StatedLoss``, even if the look
        counts as a use. None if the record is missing or has no valid header."""

    def verify(self, record: RemoteRecord, repair: bool) -> tuple[str, str, bool]:
        """Reads the whole record. Returns (ok | not_found | corrupt | ..., the problem, True if it was
        removed)."""

    def read(
        self, record: RemoteRecord, into: WholeRecord | None = None
    ) -> tuple[str, str, WholeRecord | None]:
        """Reads and verifies the whole record. Returns (ok | not_found | corrupt | ..., the problem, the
        record); None unless it is ok. ``into``: the record to return, whose memory is used again; its bytes
        are lost whatever the result."""

    def startup_epoch(self, namespace_id: str) -> str:
        """Returns the epoch that newly started processes use; "" if there is none."""

    def use_record_sizes(self) -> None:
        """Lists the bytes of records from now on, not the memory that they take."""

    def use_keys(self, encryption_key_files: list[str]) -> None:
        """Sets the keys with which verify() and read() decrypt records."""

    def remove(self, records: list[RemoteRecord]) -> tuple[int, int, str]:
        """Returns (records, bytes) removed, and the error that stopped it; "" if all were removed."""

    @property
    def takes_threads(self) -> bool: ...
    @property
    def keeps_versions(self) -> bool: ...

def redis_records(
    server: RedisServer, *, key_prefix: str, deadline_seconds: float, page: int = 512
) -> RemoteRecords:
    """Opens the records of a server or of its cluster, for one thread at a time. Raises RuntimeError if it
    does not answer or refuses access."""

class S3Bucket:
    """Address and credentials of a bucket. Its repr shows no keys."""

    def __init__(
        self,
        *,
        name: str,
        endpoint: str = "",
        region: str = "us-east-1",
        path_style: bool = False,
        ca_file: str = "",
        access_key: str = "",
        secret_key: str = "",
        session_token: str = "",
    ) -> None: ...
    def renewer(self) -> S3Renewer: ...

class S3Renewer:
    """Replaces the keys of a bucket in all its users. Thread-safe. Does not keep the bucket alive."""

    @property
    def is_used(self) -> bool:
        """False if nothing uses the bucket any more; it never becomes True again."""

    def set(self, access_key: str, secret_key: str, session_token: str = "") -> None: ...

class S3Tier(TierSpec):
    """A tier of records in a bucket. With write_policy "read_only" it also removes nothing there."""

    def __init__(
        self,
        *,
        bucket: S3Bucket,
        namespace_id: bytes,
        name: str = "s3",
        prefix: str = "kv_offload",
        n_read_threads: int = 8,
        n_write_threads: int = 4,
        op_timeout_seconds: float = 10.0,
    ) -> None: ...

def probe_s3(
    bucket: S3Bucket, prefix: str, record_bytes: int, records: int, deadline_seconds: float
) -> dict[str, Any]:
    """Probes a bucket and its speed; records=0: writes nothing. Raises RuntimeError if the store refuses
    access or does not answer."""

def ask_s3_bucket(bucket: S3Bucket, query: str, deadline_seconds: float) -> tuple[int, str, bytes]:
    """Queries the bucket's settings ("lifecycle=" or "versioning="). Returns the status, the error code and
    the text. Raises RuntimeError if the store does not answer."""

class MooncakeTier(TierSpec):
    """A tier of objects in a Mooncake Store, through a client process: ``command``, which first receives
    ``setup``. With write_policy "read_only" it also removes nothing there."""

    def __init__(
        self,
        *,
        command: list[str],
        setup: str,
        namespace_id: bytes,
        name: str = "mooncake",
        place: str = "",
        key_prefix: str = "kv_offload",
        n_read_threads: int = 4,
        n_write_threads: int = 2,
        op_timeout_seconds: float = 10.0,
    ) -> None: ...

def probe_mooncake(
    command: list[str],
    setup: str,
    place: str,
    key_prefix: str,
    record_bytes: int,
    records: int,
    deadline_seconds: float,
) -> dict[str, Any]:
    """Probes a store and its speed; records=0: writes nothing. Raises RuntimeError if it is unusable."""

def s3_unavailable_reason() -> str:
    """Returns why this process cannot use buckets: built without OpenSSL, or no libcurl. Empty if it can."""

def s3_library_version() -> str:
    """Returns the loaded libcurl, such as "7.88.1 (/usr/lib/libcurl.so.4)"; empty without one."""

def s3_records(bucket: S3Bucket, *, prefix: str, deadline_seconds: float, page: int = 1000) -> RemoteRecords:
    """Usable from any thread. Raises RuntimeError if this build has no s3 tier."""

class RequestReport:
    """The outcome of a request, and when its parts happened.

    Times are nanoseconds of CLOCK_MONOTONIC; 0: it did not happen.
    """

    def __init__(self, packed: bytes) -> None:
        """``packed``: a result of end_traced_request in this process. Raises ValueError otherwise."""

    @property
    def hit_tokens(self) -> tuple[int, ...]:
        """Tokens by source: host memory, then the tiers by index."""
    @property
    def miss_tokens(self) -> dict[str, int]:
        """{reason: tokens}, without zeros."""
    choice: str  # load, partial, recompute; empty: no decision was needed
    load_seconds: float  # estimates of the decision; 0: unknown
    compute_seconds: float
    waited_seconds: float
    @property
    def begun(self) -> int: ...
    @property
    def ended(self) -> int: ...
    @property
    def first_lookup(self) -> int: ...
    @property
    def last_lookup(self) -> int:
        """Start of the last pass of lookups."""
    @property
    def decided(self) -> int: ...
    @property
    def reads(self) -> list[tuple[int, int, int, str, int, int, int]]:
        """(tier index, chunks that arrived, chunks that failed, last failure, bytes, begin, end) of each tier
        with reads that ended while the request waited for them."""
    unfinished_reads: int  # cancelled, or in flight when the request stopped waiting
    @property
    def loads(self) -> list[tuple[int, int]]:
        """(begin, end) of the first 4 copies from host memory to the device; end 0: the request ended
        before the copy."""

class TieredCache:
    def __init__(
        self,
        region: HostRegion,
        metrics: Metrics,
        *,
        group_ids: Sequence[int],
        tokens_per_chunk: Sequence[int],
        shard_bytes: Sequence[Sequence[int]],  # [group position][area]
        full_attention: Sequence[bool] = (),  # empty: unknown
        tiers: Sequence[TierSpec] = (),
        eviction_policy: str = "lru",
        load_policy: str = "auto",
        lookup_timeout_seconds: float = 5.0,
        keep_events: bool = False,
        cache_blocks: int = 0,  # of the cache that vLLM computes in; 0: unknown
        blocks_per_chunk: int = 1,
        shards_per_area: int = 1,  # of a record, each of shard_bytes; more than one in the canonical layout
        keep_identity: str = "",  # not empty: host memory outlives the cache; the region needs keep_for
        max_sessions: int = 4096,  # remembered for hints
        max_pinned_bytes: int = 0,  # of host memory, by hints; at most half of it
        tenants: Sequence[tuple[str, float]] = (),  # (name, share of host memory); the first: all others
        share_identity: str = "",  # not empty: engines with the same share chunks; the region needs share_for
        neighbour_interval_seconds: float = 1.0,  # between searches; 0: end_step() searches
        hosts: HostLinks | None = None,  # of an engine on several hosts: each has its part of every tier
        hosts_text: str = "",  # for the process of each other host that opens its tiers
        hosts_timeout_seconds: float = 120.0,  # for all of them to open their tiers
    ) -> None: ...
    def begin_request(
        self,
        request_id: str,
        *,
        load_from_cpu: bool = True,
        load_tiers: int = 255,
        skip_store: bool = False,
        load_policy: str | None = None,
        priority: int = 0,
        remote_wait_seconds: float = 0.0,
        family: int = 0,  # 32 bits of the session's name; 0: none
        client: int = 0,  # 64 bits of the client's name
        returns_in: float = 0.0,  # seconds until the session's next request; inf: none; 0: unknown
        tenant: int = 0,  # index in the constructor's ``tenants``
    ) -> int: ...
    def apply_hints(self, hints: Sequence[tuple[str, bytes, bytes, float, int]]) -> list[str]:
        """Executes hints about other sessions: (resume | prefetch | release | retain | pin, target, trunk,
        seconds, bytes).

        Sessions are 16 bytes, or b"" for none. ``trunk``: chunks that it shares with the target are not
        released. Returns accepted, clipped, rejected or missing for each.
        """
    def end_turn(
        self,
        request: int,
        session: bytes,
        client: int,
        hints: Sequence[tuple[str, bytes, bytes, float, int]],
    ) -> list[str]:
        """Ends the request's turn of its session, and executes hints about it. Call it before end_request.

        The hints are as above, and about this prompt; ``("supersede", target, b"", 0, 0)``: the newest
        earlier prompt of the target (b"": of this session) is replaced.
        """
    def end_request(self, request: int) -> None: ...
    def end_traced_request(self, request: int) -> bytes:
        """Ends the request and returns its packed report, an argument for RequestReport in this process."""
    def admit(self, request: int) -> None:
        """The request was scheduled and waits for no more records. Loads and stores imply it."""
    def preempt(self, request: int) -> None:
        """The request was preempted: a wait from before it last ran is over, and its span is asked for again.

        Has no effect on a request that was looked up in this step, as happens after a reset.
        """
    def make_lookup(
        self,
        results: tuple[Any, Any, Any, Any],
        handle_of: Callable[[Any], int],
        span_of: Callable[[Any, bytes], tuple[int, int] | None] | None = None,
        part_of: Callable[[Any, bytes], int] | None = None,
    ) -> Callable[[bytes, Any], Any]:
        """A builtin ``lookup(key, context)`` returning one of results = (miss, hit, pending, retry).

        ``handle_of(context)`` returns the request handle. The builtin calls it only when the context object
        differs from that of the previous call. It then calls ``span_of(context, key)``, unless the result is
        known, for the ends, in tokens, of this chunk and of the request's last whole chunk.
        ``part_of(context, key)``, if given, is called for each key; it returns the tokens of a partial
        chunk, 0 for a whole chunk. Call ``forget_context`` when a request ends.
        """
    def report(self, request: int) -> dict[str, Any]:
        """Returns the outcome of a request, even after its end until another one begins.

        hit_tokens: {tier: tokens}, miss_tokens: {reason: tokens}, choice: load, partial, recompute or "",
        load_seconds and compute_seconds (the estimates behind the choice, 0 = unknown), waited_seconds.
        """
    def take_neighbour_problems(self) -> list[str]:
        """Returns the reasons why host memory of other engines is not used, each once."""
    def lookup_counts(self) -> list[tuple[int, int]]:
        """Returns (found chunks, missed chunks) of all lookups since the start, per group position."""
    def tenant_stats(self) -> list[tuple[str, int, int]]:
        """Returns (name, bytes in host memory, bytes of its share) of each tenant; empty without tenants."""
    def forget_context(self) -> None: ...
    def lookup(self, request: int, key: bytes) -> int:
        """Returns 0 miss, 1 hit, 2 pending, 3 retry. Slower than make_lookup's function."""
    def load_source(self, key: bytes) -> int:
        """Returns the source of a hit's bytes: -1 for host memory, else the index of the tier."""
    def prepare_load(
        self, request: int, keys: Sequence[bytes]
    ) -> tuple[int, npt.NDArray[np.uint32], tuple[int, ...]]:
        """Returns (ticket, rows in the order of the keys, rows per group position)."""
    def complete_load(self, keys: Sequence[bytes] | set[bytes], request: int = -1) -> None:
        """``request``: the one that loads; -1: it has ended. Loads of several requests may have the same
        keys."""
    def prepare_store(
        self, request: int, keys: Sequence[bytes], depths: Sequence[int] | None = None
    ) -> tuple[list[bytes], int, npt.NDArray[np.uint32], tuple[int, ...], list[bytes]]:
        """Returns (accepted keys, ticket, rows, rows per group position, evicted keys)."""
    def complete_store(self, keys: Sequence[bytes] | set[bytes], success: bool = True) -> None: ...
    def end_step(self) -> None: ...
    def has_pending_work(self) -> bool: ...
    def has_removals(self) -> bool: ...  # any thread
    def reset(self) -> None: ...
    def abandon_jobs(self) -> None:
        """Discards stores in flight, pins chunks being loaded until the ranks have reported, and keeps the
        rest."""
    def absent(self, keys: Iterable[bytes]) -> list[bytes]:
        """Returns the keys that are neither in host memory nor being fetched."""
    def take_events(self) -> list[tuple[list[bytes], bool, bool, str]]:
        """Returns (keys, on storage, removed, tier name) of each event.

        Chunks of a neighbour are only reported as removed, when no request uses them any more.
        """
    def publish_gauges(self) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def tier_stats(self, tier: int) -> dict[str, Any]:
        """Returns the figures of one tier. Two are totals since the start: "rebuilds", how often its
        directory or a file that it needs was recreated after another program had removed it, and
        "lost_bytes", the bytes of records that other programs removed."""
    def close(self) -> None: ...

class Trace:
    """Prompts as block numbers, for replays without memory and storage."""

    def __init__(self, ends: npt.NDArray[np.uint32], blocks: npt.NDArray[np.uint64]) -> None:
        """``blocks``: those of all requests, concatenated; ``ends``: the end of each request's part."""
    def __len__(self) -> int: ...
    @property
    def blocks(self) -> int:
        """Returns the number of blocks of all requests."""
    def replay(
        self,
        *,
        host_chunks: int,
        tier_chunks: int = 0,
        eviction_policy: str = "lru",
        tier_eviction_policy: str = "lru",
        write_policy: str = "write_through",
        kill_after: int = 0,
        recent_requests: int = 50,
        keep_host_memory: bool = False,
        hints: npt.NDArray[np.float64] | None = None,
        late_hints: bool = False,
        prefetch: bool = True,
        tier_chunks_per_second: float = 0.0,
    ) -> dict[str, Any]:
        """Returns the number of requests, and these counts of blocks:

        blocks, host_hits, tier_hits, stored, declined, evicted, written, tier_declined, tier_evicted,
        prefetched (from the tier, before a hinted return) and prefetched_used; for a kill also killed_with,
        recent_blocks, recent_hits, blocks_after, hits_after. host_hits_of and tier_hits_of are arrays with
        the hits of each request. ``hints``, for merged sessions: when the
        session of each request is expected back, seconds; 0: unknown; inf: never. ``late_hints``: they come
        at the end of the requests, which otherwise carry them. ``prefetch``: prompts that a hint expects
        back are read from the tier before their return, at ``tier_chunks_per_second`` (0: at once).
        """
    def optimal_hits(self, capacity: int) -> int:
        """Returns the hits of an optimal cache of this size, which knows the future."""

def merge_sessions(
    *,
    session_ends: npt.NDArray[np.uint32],
    streams: npt.NDArray[np.uint32],
    durations: npt.NDArray[np.float64],
    pauses: npt.NDArray[np.float64],
    common: npt.NDArray[np.uint32],
    new_ends: npt.NDArray[np.uint64],
    new_blocks: npt.NDArray[np.uint64],
    order: npt.NDArray[np.uint32],
    active: int,
    max_pause: float,
    chunk_blocks: int,
) -> dict[str, Any]:
    """Merges agent sessions in a closed loop (csrc/replay/agent_sessions.h).

    Returns: trace; for each of its requests, requests (position in the arrays), ends and returns_at
    (seconds); needed_chunks; and different_chunks.
    """

class RankWorker:
    def __init__(
        self,
        region: HostRegion,
        rank: int,
        metrics: Metrics,
        *,
        copier: str,  # "host" | "cuda"
        tensors: Sequence[tuple[int, int, int]],  # (address of block 0, number of blocks, block stride)
        groups: Sequence[Sequence[tuple[int, int]]],  # per position: (tensor index, page bytes)
        blocks_per_chunk: int,
        area: int,
        threads: int = 2,
        device: int = -1,
        tail_blocks: Sequence[int] = (),  # per position: the last blocks of a chunk that a row holds; 0: all
        holds_states: Sequence[bool] = (),  # per position: only the last block of a chunk is kept
        shards_per_area: int = 1,  # equal parts of each page, which a row holds one after the other
        kernel_blocks: int = 8,  # blocks (of 256 threads) of the CUDA copier's kernels
        pin_progress: Callable[[int, int], object] | None = None,  # (bytes done, total bytes)
        keep_alive: Any = None,
    ) -> None: ...
    def submit(
        self,
        job_id: int,
        ticket: int,
        store: bool,
        block_ids: npt.NDArray[np.int32] | npt.NDArray[np.int64],
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
        rows: npt.NDArray[np.uint32],
        group_rows: Sequence[int],
        expedited: bool = False,
        compute_stream: int = 0,  # cudaStream_t of the computation; 0: the default stream
    ) -> None: ...
    def poll(self) -> list[tuple[int, int, float]]:
        """Returns the finished jobs: (job id, bytes, seconds). Their tickets are already reported."""
    def wait(self, job_ids: Sequence[int] | set[int]) -> None: ...
    def describe(self) -> str: ...
    def close(self) -> None: ...

class FsRoot:
    """A root on disk, for the commands that read and repair it without vLLM."""

    def __init__(self, root_dir: str) -> None:
        """Raises ValueError if it is not a root of this project."""
    def stat(self) -> dict[str, Any]:
        """Returns bytes, records, temporaries, namespaces, unreadable.

        namespaces: list of {id, json, epoch, bytes, records, oldest, newest, open}; times in unix
        seconds; open: True if a process has it open. unreadable: list of {path, message} of the directories
        that cannot be read; all figures are without their contents.
        """
    def is_open(self) -> bool:
        """Returns True if some process has a namespace open."""
    def records(
        self, namespace: str | None = None, all_epochs: bool = False, strict: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Yields {namespace, epoch, key (hex), bytes, mtime (unix seconds), path} of each record, without
        opening it. ``all_epochs``: includes epochs that a reset left unused. ``strict``: raises RuntimeError
        for a directory that cannot be read, instead of skipping it."""
    def verify(
        self,
        repair: bool = False,
        progress: Callable[[int, int], None] | None = None,
        encryption_key_files: Sequence[str] = (),
    ) -> list[dict[str, Any]]:
        """Reads every record, and decrypts encrypted ones with these keys. Returns {path, kind, message,
        removed} of each damaged record, and of each directory that cannot be read."""
    def evict(
        self,
        *,
        target_bytes: int,
        dead_before: float = 0.0,
        dry_run: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        """Removes records of all namespaces until the root uses ``target_bytes`` (as du): dead ones first,
        then by age.

        ``dead_before``: unix seconds; a namespace that no process has open and that was last used before is
        dead. Calls ``progress`` with the bytes freed so far. Returns {bytes_before, bytes_freed, dead_bytes,
        records, dead_namespaces}.
        """
    def purge(self, namespace: str | None = None) -> tuple[int, int]:
        """Removes the records of one namespace, or all. Returns (records, bytes) removed. Raises RuntimeError
        if a record cannot be removed or a directory cannot be read; all other records are removed."""
    def startup_epoch(self, namespace: str) -> int | None:
        """Returns the epoch that newly started processes use; None if there is none, or a reset made the
        newest. Raises RuntimeError if the namespace cannot be read."""
    def remove(self, paths: Sequence[str]) -> int:
        """Removes record files; returns the number of those that existed. Raises RuntimeError if some cannot
        be removed; all others are removed."""

def read_record_file(
    path: str,
    namespace: str,
    encryption_key_files: Sequence[str] = (),
    into: WholeRecord | None = None,
) -> tuple[str, str, WholeRecord | None]:
    """Reads and verifies a record file. Returns (ok | not_found | corrupt | ..., the problem, the record).
    ``into``: as in RemoteRecords.read."""

def record_created(path: str) -> float:
    """Returns the write time in a record's header, in unix seconds; 0.0 if it cannot be read."""

def record_tenant(path: str) -> str | None:
    """Returns the tenant in a record's header; "": none. None if the record is missing or has no valid
    header. Raises RuntimeError if it cannot be read."""

def record_loss(path: str) -> tuple[bool, int, int, float, float, float] | None:
    """Returns what a record's header says, the fields of ``kv_offload.losses.StatedLoss``. None if the header
    cannot be read."""

def directory_usage(path: str) -> int:
    """Returns the bytes that a directory uses on disk: from a root's own ledger if it can be trusted, else
    counted as ``du`` does; 0 if it is missing. Writes nothing."""

def probe_disk(directory: str, total_bytes: int, record_bytes: int) -> dict[str, Any]:
    """Writes and reads temporary records in a new directory below ``directory``, which is not a root. Returns
    {o_direct, write_bytes_per_second, read_bytes_per_second}."""

def probe_root(root_dir: str, max_bytes: int, total_bytes: int, record_bytes: int) -> dict[str, Any] | None:
    """Writes and reads temporary records within ``max_bytes`` of a root, without eviction.

    Returns the same as probe_disk, or None if the records do not fit, or if the root takes more than a minute
    to count. If this process is killed, the next start of a server removes them.
    """

class ReservedSpace:
    """Keeps bytes of a root free while it exists, for files without a name, without eviction."""

    def __init__(self, root_dir: str, max_bytes: int, bytes: int) -> None:
        """Raises RuntimeError if they are not free."""
