# SPDX-License-Identifier: Apache-2.0
"""The worker side: copies between one rank's cache blocks and its area of the host region."""

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kv_offload.config import OffloadConfig
from kv_offload.config_compat import multi_connector_problems
from kv_offload.log import get_logger
from kv_offload.machine import no_copier
from kv_offload.sizes import format_bytes

from . import compat
from .bound_factors import HostCalibration, layer_ranges_of
from .canonical import CanonicalPages, canonical_pages
from .compat import OffloadingWorker, TransferResult
from .hosts import connect_rank, hosts_of, ranks_per_area, refuse_on_several_hosts, serve_tiers
from .identity import groups_of_states, keep_for, share_for, worker_fingerprint
from .kv_runs import head_orders_of, kv_runs_of
from .load_spec import RowLoadStoreSpec
from .message_wait import wait_for_messages
from .windows import log_long_chunks, windows_of

if TYPE_CHECKING:
    from kv_offload._core import HostAgent, HostRegion, Metrics, RankWorker

logger = get_logger(__name__)

_PROGRESS_SECONDS = 3.0


class KVOffloadWorker(OffloadingWorker):
    """Passes jobs to the core and results to vLLM. Single-threaded (the model runner's thread).

    vLLM's interface allows no failures here. The region records a failed store under its ticket, and its
    chunks never become hits. A load reads pinned host memory, so storage errors cannot affect it.
    """

    def __init__(
        self,
        rank_worker: "RankWorker",
        region: "HostRegion",
        metrics: "Metrics",
        compute_stream: Callable[[], int] | None = None,
        stores: bool = True,
    ) -> None:
        self._rank_worker = rank_worker
        # False: another rank stores the same bytes. With a canonical layout and with ranks on several hosts,
        # vLLM sends stores to every rank.
        self._stores = stores
        self._left_out: list[int] = []  # store jobs skipped for that reason, not yet reported
        self._running: set[int] = set()  # the core's jobs, not yet reported
        self._compute_stream = compute_stream  # the CUDA stream that copies wait for; None on the CPU
        self.at_shutdown: Callable[[], None] = lambda: None  # shutdown() calls it first; must be idempotent
        self.agent: HostAgent | None = None  # of the first rank of a host without the scheduler
        self.region = region
        self.metrics = metrics  # this process's metrics; vLLM cannot collect metrics of workers

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: RowLoadStoreSpec) -> bool:
        """Starts copies from cache blocks to rows. Never blocks, always returns True."""
        if self._stores:
            self._submit(job_id, True, src_spec, dst_spec)
        else:
            self._left_out.append(job_id)
        return True

    def submit_load(
        self, job_id: int, src_spec: RowLoadStoreSpec, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Starts copies from rows to cache blocks. Never blocks, always returns True.

        ``expedited``: vLLM waits for the load in this step.
        """
        self._submit(job_id, False, dst_spec, src_spec, expedited)
        return True

    def _submit(
        self, job_id: int, store: bool, blocks: Any, rows: RowLoadStoreSpec, expedited: bool = False
    ) -> None:
        self._running.add(job_id)
        stream = {} if self._compute_stream is None else {"compute_stream": self._compute_stream()}
        self._rank_worker.submit(
            job_id,
            rows.ticket,
            store,
            blocks.block_ids,
            blocks.group_sizes,
            blocks.block_indices,
            rows.rows,
            rows.group_rows,
            expedited,
            **stream,
        )

    def get_finished(self) -> list[Any]:
        """Returns the TransferResults of the jobs that ended since the last call."""
        left_out, self._left_out = self._left_out, []
        ended = self._rank_worker.poll()
        self._running.difference_update(job_id for job_id, _, _ in ended)
        return [TransferResult(job_id, True) for job_id in left_out] + [
            TransferResult(job_id, True, size, seconds) for job_id, size, seconds in ended
        ]

    def wait(self, job_ids: set[int]) -> None:
        """Blocks until these jobs no longer access cache memory. IDs may be finished or unknown."""
        self._rank_worker.wait(job_ids)

    def finish(self) -> None:
        """Blocks until no job accesses cache memory."""
        self._rank_worker.wait(self._running)

    def describe(self) -> str:
        """Returns the name of the copier and its mode."""
        return self._rank_worker.describe()

    def shutdown(self) -> None:
        """Waits for running copies and releases the memory. Idempotent."""
        self.at_shutdown()
        self._rank_worker.close()
        if self.agent is not None:
            self.agent.close()  # after the last report


def make_worker(config: Any, options: OffloadConfig, replicated: bool, kv_caches: Any) -> KVOffloadWorker:
    """Attaches this rank to the engine's region and starts its copier.

    Raises ValueError for an unsupported setup (such as an unknown device), ResourceError if
    the machine lacks a resource or another host does not join. Both texts say what to change.
    """
    from kv_offload import _core

    parallel = config.parallel
    hosts = hosts_of(config)
    refuse_on_several_hosts(hosts, options, config)
    refuse_external_launcher()
    refuse_several_offloading_connectors()
    if config.parallel.rank == 0:
        log_offloading_size()
    tensors = [entry.tensor for entry in kv_caches.tensors]
    pages = [[ref.page_size_bytes for ref in refs] for refs in kv_caches.group_data_refs]
    holds_states = groups_of_states(config)
    windows = windows_of(config)
    copier, device = choose_copier(tensors)
    canonical = (
        canonical_pages(config, kv_caches, replicated) if getattr(config, "canonical_layout", False) else None
    )
    shards = canonical.shards_per_area if isinstance(canonical, CanonicalPages) else 1
    sharing = ranks_per_area(hosts, config, replicated)
    area = parallel.rank // sharing
    is_calibrated = options.calibration_file() is not None
    if parallel.rank == 0:
        log_long_chunks(config, windows)
    if parallel.rank == (0 if hosts is None else hosts.first_rank):  # once per host
        _check_roots(options)
    region = _core.HostRegion.attach_worker(
        config.engine_id if hosts is None else hosts.region_id(config.engine_id),
        options.cpu_bytes_to_use,
        parallel.world_size // sharing,
        parallel.world_size,
        parallel.rank,
        [
            sum(sizes) * (1 if states else tail or config.cache.blocks_per_chunk) // shards
            for sizes, states, tail in zip(pages, holds_states, windows.tail_blocks, strict=True)
        ],
        worker_fingerprint(
            config,
            tensors[0].device.type,
            copier,
            pages,
            min(tensor.shape[0] for tensor in tensors),
            canonical,
            kv_runs_of(config, kv_caches),
            # The control page has little room, so only if they are used.
            head_orders=head_orders_of(config, kv_caches) if is_calibrated else (),
            layers=layer_ranges_of(config) if is_calibrated else (),
        ),
        huge_pages=options.huge_pages,
        keep_for=keep_for(config, options),
        share_for=share_for(config, options),
        first_rank=0 if hosts is None else hosts.first_rank,
        local_ranks=0 if hosts is None else hosts.ranks_each,
    )
    agent = connect_rank(hosts, region, config)
    if hosts is not None and agent is not None:  # also without tiers: it then refuses the scheduler's order
        serve_tiers(agent, hosts, options, HostCalibration(options, region, hosts.ranks, parallel))
    for name in region.swept:
        logger.warning("removed %s from shared memory: left by an engine that has ended", name)
    first = parallel.rank % sharing == 0
    ranks_here = parallel.world_size if hosts is None else hosts.ranks_each
    _prepare_memory(region, area, ranks_here, copier, device, options.prefault, first)
    metrics = _core.Metrics()
    address = options.metrics_address(parallel.rank, parallel.world_size, parallel.data_parallel_index)
    if address is not None:
        metrics.expose(address)
    rank_worker = _core.RankWorker(
        region,
        parallel.rank,
        metrics,
        copier=copier,
        tensors=[(t.data_ptr(), t.shape[0], t.stride(0) * t.element_size()) for t in tensors],
        groups=[
            [(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in kv_caches.group_data_refs
        ],
        blocks_per_chunk=config.cache.blocks_per_chunk,
        area=area,
        threads=options.copy_threads,
        device=device,
        holds_states=holds_states,
        shards_per_area=shards,
        tail_blocks=windows.tail_blocks,
        kernel_blocks=options.copy_kernel_blocks,
        pin_progress=progress_logger(time.monotonic(), what="pinning host memory"),
        keep_alive=tensors,
    )
    logger.info("rank %d copies with %s", parallel.rank, rank_worker.describe())
    metrics.set("kv_offload_copy_info", [rank_worker.describe()], 1)
    worker = KVOffloadWorker(rank_worker, region, metrics, _compute_stream_of(copier, device), stores=first)
    worker.agent = agent
    worker.at_shutdown = wait_for_messages(options.wait_while_loading, copier, region, worker)
    return worker


def refuse_external_launcher() -> None:
    """Raises ValueError if each rank of this engine has its own scheduler (external_launcher)."""
    parallel = getattr(compat.current_vllm_config(), "parallel_config", None)
    launcher = getattr(parallel, "distributed_executor_backend", None)
    ranks = getattr(parallel, "world_size", 1)
    if launcher == "external_launcher" and isinstance(ranks, int) and ranks > 1:
        raise ValueError(
            f'distributed_executor_backend "external_launcher" starts a scheduler in each of the {ranks} '
            'ranks, and KVOffloadSpec needs one for all: use "mp", or tensor_parallel_size 1 for each process'
        )


def refuse_several_offloading_connectors() -> None:
    """Raises ValueError if vLLM's MultiConnector contains a second OffloadingConnector."""
    transfer = getattr(compat.current_vllm_config(), "kv_transfer_config", None)
    if getattr(transfer, "kv_connector", None) != "MultiConnector":
        return
    problems = multi_connector_problems(
        {"kv_connector_extra_config": getattr(transfer, "kv_connector_extra_config", None)}
    )
    if problems:
        raise ValueError(problems[0])


def log_offloading_size() -> None:
    """Logs the effect of --kv-offloading-size: vLLM silently overwrites parts of --kv-transfer-config."""
    size = getattr(getattr(compat.current_vllm_config(), "cache_config", None), "kv_offloading_size", None)
    if size is not None:
        logger.info(
            "--kv-offloading-size %g sets cpu_bytes_to_use to %s and kv_connector to OffloadingConnector; "
            "their values in --kv-transfer-config are ignored",
            size,
            format_bytes(int(size * (1 << 30))),
        )


def choose_copier(tensors: list[Any]) -> tuple[str, int]:
    """Returns (the core's copier, device ordinal or -1) for these cache tensors. Raises ValueError."""
    from kv_offload import _core

    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) != 1:
        raise ValueError(
            f"the KV cache is on {len(devices)} devices ({', '.join(devices)}); one is supported"
        )
    device = tensors[0].device
    if device.type == "cpu":
        return "host", -1
    if device.type != "cuda":
        raise ValueError(f"the KV cache is on {devices[0]}; supported are cpu and cuda")
    reason = _core.cuda_unavailable_reason()
    if reason:
        raise ValueError(no_copier(devices[0], reason))
    if device.index is not None:
        return "cuda", device.index
    import torch

    return "cuda", torch.cuda.current_device()


def _compute_stream_of(copier: str, device: int) -> Callable[[], int] | None:
    """Returns a function that returns the handle of vLLM's compute stream. Called at every submit."""
    if copier != "cuda":
        return None
    import torch

    return lambda: int(torch.cuda.current_stream(device).cuda_stream)


def _check_roots(options: OffloadConfig) -> None:
    problems = [problem for tier in options.secondary_tiers for problem in tier.problems()]
    if problems:
        raise ValueError("; ".join(problems))


def _prepare_memory(
    region: "HostRegion",
    area: int,
    world_size: int,
    copier: str,
    device: int,
    prefault: bool,
    first: bool = True,
) -> None:
    """Binds this rank's area to its GPU's NUMA node, then populates it, because pages do not move later.

    Only the first rank populates an area that all ranks share. The other ranks still set the NUMA policy
    before they pin: the policy belongs to the area, and pages are allocated when any rank pins them. If the
    GPUs are on several nodes, any of them will do, because some GPUs copy across nodes anyway.
    """
    from kv_offload import _core

    if copier == "cuda":
        refused = region.prefer_node(area, _core.cuda_numa_node(device))
        if refused and first:
            logger.info("host memory of area %d is not placed near its GPU: %s", area, refused)
    if prefault and first:
        _prefault(region, area, world_size)


def _prefault(region: "HostRegion", area: int, world_size: int) -> None:
    """Populates this rank's area now, so that stores do not wait for pages. Logs progress."""
    threads = max(1, min(8, (os.cpu_count() or 1) // world_size))
    started = time.monotonic()
    region.prefault(area, threads, progress_logger(started))
    logger.info(
        "area %d: %s of host memory ready in %.1f s",
        area,
        format_bytes(region.area_bytes),
        time.monotonic() - started,
    )


def progress_logger(
    started: float, clock: Callable[[], float] = time.monotonic, what: str = "preparing host memory"
) -> Callable[[int, int], None]:
    """Returns a callback (done, total), in bytes, that logs at most once every few seconds."""
    next_line = started + _PROGRESS_SECONDS

    def progress(done: int, total: int) -> None:
        nonlocal next_line
        if clock() < next_line:
            return
        next_line = clock() + _PROGRESS_SECONDS
        logger.info("%s: %s of %s", what, format_bytes(done), format_bytes(total))

    return progress
