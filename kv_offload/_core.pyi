# SPDX-License-Identifier: Apache-2.0
"""The C++ core. No logic lives in the bindings; every call that can take time releases the GIL.

Errors: ValueError for wrong arguments, ResourceError for missing resources of the machine.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__version__: str

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
    """Bytes meant by ``"32GiB"``, ``"32Gi"``, ``"32G"`` (10^9), ``"1048576"``; see kv_offload.sizes."""

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
def kept_regions(shm_directory: str = "/dev/shm") -> list[tuple[str, int, bool]]: ...  # name, bytes, held
def sweep_leftovers(shm_directory: str = "/dev/shm") -> list[str]: ...
def measure_copy(total_bytes: int, threads: int) -> float:
    """Bytes per second of the host copier between two buffers of ``total_bytes``."""

class Metrics:
    def __init__(self) -> None: ...
    def drain(self) -> list[tuple[str, str, tuple[str, ...], float | list[float]]]:
        """Changes since the last call: (name, type, label values, increase | value | observations)."""
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
    ) -> HostRegion: ...
    def wait_for_ranks(self, timeout_seconds: float) -> None:
        """Raises ResourceError naming the ranks that did not attach in time."""
    def geometry(self, rank: int) -> tuple[list[int], str]: ...
    @property
    def num_areas(self) -> int: ...
    @property
    def area_bytes(self) -> int: ...
    @property
    def swept(self) -> list[str]: ...
    def area(self, index: int) -> npt.NDArray[np.uint8]:
        """The area's bytes, shape (area_bytes,), writable, no copy. For tests and tools."""
    def prefer_node(self, index: int, node: int) -> str:
        """Take the area's memory from a NUMA node; before ``prefault``. "" or what speaks against it."""
    def prefault(
        self, index: int, threads: int, progress: Callable[[int, int], None] | None = None
    ) -> None: ...
    @property
    def fetching(self) -> bool:
        """Whether a request waits for records of a tier, as the scheduler's cache tells all processes."""
    def report(self, rank: int, ticket: int, failed_groups: int) -> None: ...
    def result(self, ticket: int) -> int | None:
        """None while pending, else the bit set of failed group positions."""

class TierSpec:
    """What TieredCache opens; opening (and its checks) happens in TieredCache's constructor."""

    write_policy: str  # write_through | on_evict | reuse:N | read_only; "write_through" until it is set
    encryption_key_files: list[str]  # 32 bytes each, read when it is opened; the first encrypts, all decrypt
    compress: str  # auto | none | zstd; "none" until it is set
    elements: Sequence[str]  # bfloat16 | float16 | bytes, by position of the group; bytes where none is said
    memory_outlives: bool  # the region is kept: no read may continue after the process ends. Default: False

def measure_codec() -> tuple[float, float]:
    """Bytes per second that one core encodes and decodes, of numbers like K and V in bfloat16."""

def codec_advice(
    *,
    encode_bytes_per_second: float,
    decode_bytes_per_second: float,
    read_bytes_per_second: float,
    write_bytes_per_second: float,
) -> str:
    """What compress "auto" would do on such a tier, and why."""

def encryption_key_ids(paths: list[str]) -> list[str]:
    """The id of each key, in hex. RuntimeError or ValueError: a file cannot be used, and what to change."""

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
    """A tier of records on a Redis or Valkey server. write_policy "read_only": it also removes nothing
    there."""

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
    """What a server or the nodes of its cluster are, how fast, and what a record takes there; records=0:
    without writing. RuntimeError: refused, or silent."""

def redis_has_tls() -> bool: ...

class RemoteRecord:
    """What lies under a name: a record with all three parts, in hex; the name of an epoch with namespace_id
    alone; something else."""

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
        """Bytes that it takes there."""

    @property
    def used(self) -> float:
        """Unix seconds; 0: the server does not say."""

    @property
    def written(self) -> float: ...

class RemoteRecords:
    """Records under a prefix of a server or a bucket, for the commands. RuntimeError: refused, or silent."""

    def page(self, namespace_id: str, start: bytes, sizes: bool) -> tuple[list[RemoteRecord], bytes]:
        """A page and where to go on (b"" at the end) of one namespace or, of "", all."""

    def written(self, record: RemoteRecord) -> float:
        """As its header says; 0: unknown, or to look would count as a use."""

    def verify(self, record: RemoteRecord, repair: bool) -> tuple[str, str, bool]:
        """Reads all of it: (ok | not_found | corrupt | ..., what is wrong, was it removed)."""

    def use_keys(self, encryption_key_files: list[str]) -> None:
        """Sets the keys with which verify() decrypts records."""

    def remove(self, records: list[RemoteRecord]) -> tuple[int, int, str]:
        """Returns (records, bytes) removed, and the error that stopped it; "" if all were removed."""

    @property
    def takes_threads(self) -> bool: ...
    @property
    def keeps_versions(self) -> bool: ...

def redis_records(
    server: RedisServer, *, key_prefix: str, deadline_seconds: float, page: int = 512
) -> RemoteRecords:
    """One thread at a time. RuntimeError: the server does not answer, refuses us, or is a cluster's node."""

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
    """A tier of records in a bucket. write_policy "read_only": it also removes nothing there."""

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
    """How fast a bucket answers; records=0: without writing. RuntimeError: refused, or silent."""

def ask_s3_bucket(bucket: S3Bucket, query: str, deadline_seconds: float) -> tuple[int, str, bytes]:
    """What the store says of the bucket itself, to "lifecycle=" or "versioning=": the status, the code of an
    error, and the text. RuntimeError: nothing."""

class MooncakeTier(TierSpec):
    """A tier of objects in a Mooncake Store, through a client process: ``command``, which first receives
    ``setup``. write_policy "read_only": it also removes nothing there."""

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
    """Probes a store and its speed; records=0: without writing. Raises RuntimeError if it is unusable."""

def s3_unavailable_reason() -> str:
    """Why no bucket can be used in this process: no OpenSSL at build time, no libcurl now. Empty: one can."""

def s3_library_version() -> str:
    """The libcurl that was loaded, such as "7.88.1 (/usr/lib/libcurl.so.4)"; empty without one."""

def s3_records(bucket: S3Bucket, *, prefix: str, deadline_seconds: float, page: int = 1000) -> RemoteRecords:
    """Any thread. RuntimeError: this build has no s3 tier."""

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
    ) -> int: ...
    def end_request(self, request: int) -> None: ...
    def admit(self, request: int) -> None:
        """The request was scheduled and waits for no more records. Loads and stores imply it."""
    def make_lookup(
        self,
        results: tuple[Any, Any, Any, Any],
        handle_of: Callable[[Any], int],
        span_of: Callable[[Any, bytes], tuple[int, int] | None] | None = None,
        part_of: Callable[[Any, bytes], int] | None = None,
    ) -> Callable[[bytes, Any], Any]:
        """A builtin ``lookup(key, context)`` returning one of results = (miss, hit, pending, retry).

        ``handle_of(context)`` gives the request handle; it is asked again only when another context
        object than last time is passed. Then ``span_of(context, key)`` gives the ends, in tokens, of the
        chunk asked for and of the request's last whole chunk, unless they are known. ``part_of(context,
        key)``, where it is given, is asked for each key: tokens of the part of a chunk that it is of, 0 of
        a whole one. Call
        ``forget_context`` when a request ends.
        """
    def report(self, request: int) -> dict[str, Any]:
        """What became of a request, also after its end until another one begins.

        hit_tokens: {tier: tokens}, miss_tokens: {reason: tokens}, choice: load, partial, recompute or "",
        load_seconds and compute_seconds (what that was decided on, 0 = unknown), waited_seconds.
        """
    def lookup_counts(self) -> list[tuple[int, int]]:
        """(chunks that lookups found, chunks that they missed) of each group position, since the start."""
    def forget_context(self) -> None: ...
    def lookup(self, request: int, key: bytes) -> int:
        """Returns 0 miss, 1 hit, 2 pending, 3 retry. Slower than make_lookup's function."""
    def load_source(self, key: bytes) -> int:
        """-1: host memory, else the index of the tier whose bytes a hit came from."""
    def prepare_load(
        self, request: int, keys: Sequence[bytes]
    ) -> tuple[int, npt.NDArray[np.uint32], tuple[int, ...]]:
        """(ticket, rows in the order of the keys, rows per group position)."""
    def complete_load(self, keys: Sequence[bytes] | set[bytes]) -> None: ...
    def prepare_store(
        self, request: int, keys: Sequence[bytes], depths: Sequence[int] | None = None
    ) -> tuple[list[bytes], int, npt.NDArray[np.uint32], tuple[int, ...], list[bytes]]:
        """(accepted keys, ticket, rows, rows per group position, evicted keys)."""
    def complete_store(self, keys: Sequence[bytes] | set[bytes], success: bool = True) -> None: ...
    def end_step(self) -> None: ...
    def has_pending_work(self) -> bool: ...
    def reset(self) -> None: ...
    def abandon_jobs(self) -> None:
        """Discard stores under way; pin chunks being loaded until the ranks have reported; keep the rest."""
    def absent(self, keys: Iterable[bytes]) -> list[bytes]:
        """Returns the keys that are neither in host memory nor being fetched."""
    def take_events(self) -> list[tuple[list[bytes], bool, bool, str]]:
        """(keys, on storage, removed, tier name)."""
    def publish_gauges(self) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def tier_stats(self, tier: int) -> dict[str, Any]:
        """Figures of one tier. Running totals among them: "rebuilds", how often the directory of a tier or a
        file that it needs was made again because another program had removed it, and "lost_bytes", the bytes
        of records that other programs removed."""
    def close(self) -> None: ...

class Trace:
    """Prompts as block numbers, for replays without memory or storage behind them."""

    def __init__(self, ends: npt.NDArray[np.uint32], blocks: npt.NDArray[np.uint64]) -> None:
        """blocks of all requests, one after the other; ends of each request's part of them."""
    def __len__(self) -> int: ...
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
    ) -> dict[str, int]:
        """requests; the rest in blocks.

        blocks, host_hits, tier_hits, stored, declined, evicted, written, tier_declined, tier_evicted; of a
        kill killed_with, recent_blocks, recent_hits, blocks_after, hits_after.
        """
    def optimal_hits(self, capacity: int) -> int:
        """Returns the hits of an optimal cache of this size, which knows the future."""

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
        holds_states: Sequence[bool] = (),  # per position: of a chunk only the last block is kept
        shards_per_area: int = 1,  # equal parts of each page, which a row holds one after the other
        kernel_blocks: int = 8,  # blocks (of 256 threads) of the CUDA copier's kernels
        pin_progress: Callable[[int, int], object] | None = None,  # (bytes done, bytes in all)
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
        """Finished jobs: (job id, bytes, seconds). Their tickets are already reported."""
    def wait(self, job_ids: Sequence[int] | set[int]) -> None: ...
    def describe(self) -> str: ...
    def close(self) -> None: ...

class FsRoot:
    """A root on disk, read and mended without vLLM (the CLI)."""

    def __init__(self, root_dir: str) -> None:
        """Raises ValueError if it is not a root of this project."""
    def stat(self) -> dict[str, Any]:
        """bytes, records, temporaries, namespaces.

        namespaces: list of {id, json, epoch, bytes, records, oldest, newest, open}; times in unix
        seconds; open: some process has it open.
        """
    def records(self, namespace: str | None = None) -> Iterator[dict[str, Any]]:
        """{namespace, epoch, key (hex), bytes, mtime (unix seconds), path} of each record, unopened."""
    def verify(
        self,
        repair: bool = False,
        progress: Callable[[int, int], None] | None = None,
        encryption_key_files: Sequence[str] = (),
    ) -> list[dict[str, Any]]:
        """Reads every record and, with these keys, opens it if it is encrypted; {path, kind, message,
        removed} for each that is damaged."""
    def evict(
        self,
        *,
        target_bytes: int,
        dead_before: float = 0.0,
        dry_run: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        """Removes until the root takes ``target_bytes`` (as du): dead first, then by age, all namespaces.

        ``dead_before``: unix seconds; a namespace that no process has open and that was last used before is
        dead. ``progress`` is given the bytes freed so far. Gives {bytes_before, bytes_freed, dead_bytes,
        records, dead_namespaces}.
        """
    def purge(self, namespace: str | None = None) -> tuple[int, int]:
        """Removes the records of one namespace, or all: (records, bytes) removed."""

def record_created(path: str) -> float:
    """When a record was written, in unix seconds, from its header; 0.0 when that cannot be read."""

def directory_usage(path: str) -> int:
    """Bytes that a directory takes on disk: a root's own ledger where it can be trusted, else counted, as
    ``du``; 0 when it is not there. Writes nothing.
    """

def probe_disk(directory: str, total_bytes: int, record_bytes: int) -> dict[str, Any]:
    """Writes and reads temporary records: {o_direct, write_bytes_per_second, read_bytes_per_second}."""
