# SPDX-License-Identifier: Apache-2.0
"""The scheduler side: vLLM's OffloadingManager on top of the core's TieredCache. Thin; no loop over keys."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kv_offload.config import REQUEST_SETTINGS
from kv_offload.hints import ACTION_TYPES, document_of
from kv_offload.log import get_logger
from kv_offload.tenants import TenantTable, client_of

from . import compat
from .compat import LookupResult, OffloadingManager, PrepareStoreOutput, RequestOffloadingContext
from .events import AdvertisedChunks, TierEvents
from .hints import METRIC as HINTS_METRIC
from .hints import HintExecutor
from .idle import EngineWaker
from .load_spec import RowLoadStoreSpec, no_rows
from .report import report_text
from .request import HintReader, RequestState
from .tracing import RequestTracer
from .watch import (
    CodecWatch,
    DivergenceWatch,
    HitWatch,
    HostWatch,
    NeighbourWatch,
    RemovalsWatch,
    ResetWatch,
    Surroundings,
)

if TYPE_CHECKING:
    from kv_offload._core import Metrics, TieredCache

logger = get_logger(__name__)

_GAUGE_SECONDS = 0.5


@dataclass(frozen=True)
class ManagerOptions:
    """Settings of the manager, in addition to the cache and its metrics."""

    tiers: Mapping[str, str] = field(default_factory=dict)  # name of each tier below -> LOCAL or REMOTE
    parts_of: int | None = None  # tokens per chunk if vLLM looks up partial chunks (--prefix-match-unit)
    resumed_is_new: bool = False  # vLLM schedules a preempted request as new (its second model runner)
    publishes_events: bool = False  # vLLM publishes KV events
    publishes_while_idle: bool = False  # also the removals that other servers cause while vLLM is idle
    event_tiers: Mapping[str, TierEvents] = field(default_factory=dict)  # the tiers that publish them
    info: Mapping[str, str] = field(default_factory=dict)  # labels of vllm:kv_offload_config_info
    # request settings and types of hints that requests may send
    request_hints: Set[str] = frozenset((*REQUEST_SETTINGS, *ACTION_TYPES))
    tenants: TenantTable | None = None  # None: all requests share host memory
    remote_wait_seconds: float = 0.0  # default for requests without this hint
    fixed_weights: bool = False  # a cache reset keeps the cache
    shares_host_memory: bool = False
    shared_number: int | None = None  # under which other engines of this host know this one
    expects_neighbours: bool = False  # other replicas should run on this host
    describes_events: bool = (
        False  # vLLM tracks the payload of each chunk's events (self_describing_kv_events)
    )
    surroundings: Surroundings = field(default_factory=Surroundings)


class KVOffloadManager(OffloadingManager):
    """Translates vLLM's calls into calls of the core, which makes every decision.

    Single-threaded (the scheduler's thread). Each instance has a builtin of the core as its ``lookup``,
    because vLLM calls it for each key of each waiting request in each step.
    """

    def __init__(
        self,
        cache: "TieredCache",
        metrics: "Metrics",
        options: ManagerOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
        tracer: RequestTracer | None = None,
        hosts: HostWatch | None = None,
    ) -> None:
        self._cache = cache
        self.tracer = tracer  # closed by shutdown()
        self._hosts = hosts  # of an engine on several hosts; closed by shutdown()
        self._metrics = metrics
        self._options = options or ManagerOptions()
        self._clock = clock
        self._localities = tuple(self._options.tiers.values())
        self._next_gauges = 0.0
        sources = ("cpu", *self._options.tiers, *(("neighbour",) if self._options.shares_host_memory else ()))
        self._watch = HitWatch(metrics, sources, cache, self._options.surroundings)
        self._divergence = DivergenceWatch(cache, tuple(self._options.tiers))
        self._codecs = CodecWatch(cache, tuple(self._options.tiers))
        self._removals = RemovalsWatch(cache, tuple(self._options.tiers))
        self._neighbours = (
            NeighbourWatch(cache, self._options.expects_neighbours)
            if self._options.shares_host_memory
            else None
        )
        if self._options.shared_number is not None:
            logger.info(
                "share_host_memory: other engines of this host know this one as neighbour %d",
                self._options.shared_number,
            )
        self._publish_sharing(True)
        self._resets = ResetWatch(cache, tuple(self._options.tiers))
        self._live: dict[str, RequestState] = {}
        self._epoch = 0
        self._closed = False
        self.at_shutdown: Callable[[], None] = lambda: None  # called first, before the cache is closed
        self._hints = HintReader(allowed=self._options.request_hints, clock=clock)
        self._session_hints = HintExecutor(
            cache, self._count_hints, self._options.request_hints, self._hints.log_rejected
        )
        results = (LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.RETRY)
        self._results = results
        self._sources = compat.load_sources()
        self._stops_resumed_sessions = compat.misplaces_session_blocks()
        self.lookup = cache.make_lookup(  # type: ignore[method-assign,assignment]
            results, self._handle_of, compat.asked_span, _part_of(self._options.parts_of)
        )
        self._advertised = AdvertisedChunks(self._options.event_tiers, cache.absent)
        self._waker = EngineWaker(cache, self) if self._options.publishes_while_idle else None
        if self._options.describes_events:
            # Kept host memory: vLLM has no payloads of these chunks. They are published when they are loaded.
            self._cache.take_events()
        self._loaded: list[bytes] = []  # chunks of this step's loads, if vLLM publishes events
        self._unstored: list[bytes] = []  # vLLM may track payloads of these, although they are absent
        # Completed stores that are neither published nor known to have failed: with ranks on other hosts, the
        # report of a failure may follow.
        self._unreported: set[bytes] = set()
        if self._options.describes_events and compat.tracks_pending_hits():
            self.lookup = self._noting_pending_hits(self.lookup)  # type: ignore[method-assign,assignment]

    # ---- requests

    def on_new_request(self, req_context: Any) -> Any:
        """Begins a request. A request ID may be reused; its context is always new."""
        self._begin(req_context)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Ends a request: no more lookups or offers. Its jobs may still complete later."""
        state = req_context.get_state(RequestState)
        if state is None or state.handle < 0:
            return
        if state.hints is not None:
            self._session_hints.finish(state.hints, compat.first_key(req_context), state.handle)
        if self.tracer is None:
            self._cache.end_request(state.handle)
        else:
            report = self._cache.end_traced_request(state.handle)
            if state.until_stopped is None:
                self.tracer.finish(state.request, req_context.req_id, report)
            else:
                self.tracer.finish(state.request, req_context.req_id, state.until_stopped, report)
            state.request = None  # it holds the prompt
        self._unstored += state.pending
        state.pending.clear()
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("Request %s: %s", req_context.req_id, report_text(self._report(state)))
        state.handle = -1
        if self._live.get(req_context.req_id) is state:
            del self._live[req_context.req_id]
        self._cache.forget_context()

    def report_of(self, request_id: str) -> dict[str, Any] | None:
        """Returns the report on a request so far (TieredCache.report); None if the request has ended."""
        state = self._live.get(request_id)
        return None if state is None else self._report(state)

    def _report(self, state: RequestState) -> dict[str, Any]:
        report = self._cache.report(state.handle)
        if state.hints is not None:
            report = {**report, "hints": self._session_hints.report(state.hints)}
        if self._options.tenants is not None:
            report = {**report, "tenant": self._options.tenants.names[state.tenant]}
        return report

    def _count_hints(self, type: str, outcome: str, number: int) -> None:
        self._metrics.add(HINTS_METRIC, (type, outcome), number)

    def _begin(self, req_context: Any) -> RequestState:
        load_from_cpu, load_tiers = compat.tiers_allowed(req_context, self._localities)
        allowed: dict[str, Any] = {
            "load_from_cpu": load_from_cpu,
            "load_tiers": load_tiers,
            "remote_wait_seconds": self._options.remote_wait_seconds,
        }
        tenant = self._tenant_of(req_context)
        if tenant:
            allowed["tenant"] = tenant
        hints = self._hints.read(req_context.kv_transfer_params)
        earlier = req_context.get_state(RequestState)
        if earlier is not None:  # it was ended by a reset of vLLM's: its hints are executed once
            of_session = earlier.hints
        else:
            envelope = compat.hints_envelope(req_context)
            of_session = self._session_hints.read(
                req_context.kv_transfer_params, envelope, self._client_of(tenant)
            )
        if of_session is not None:
            hints["family"] = of_session.family
            hints["client"] = of_session.client
            hints["returns_in"] = of_session.returns_in
        handle = self._cache.begin_request(req_context.req_id, **(allowed | hints))
        state = RequestState(handle, self._epoch, hints=of_session, tenant=tenant)
        if self.tracer is not None:
            state.request = self.tracer.arriving
            self.tracer.arriving = None
        self._live[req_context.req_id] = state
        req_context.set_state(state)
        return state

    def _tenant_of(self, req_context: Any) -> int:
        """Returns the number of the request's tenant; 0: no configured one."""
        if self._options.tenants is None:
            return 0
        envelope = compat.hints_envelope(req_context)
        document = None if envelope is None else document_of(envelope)
        client = client_of(req_context.kv_transfer_params, document)
        return self._options.tenants.number_of(compat.cache_salt(req_context), client)

    def _client_of(self, tenant: int) -> str:
        """Returns the client of the tenant's requests that name none."""
        if self._options.tenants is None or tenant == 0:
            return ""
        return f"tenant {self._options.tenants.names[tenant]}"

    def _state(self, req_context: Any) -> RequestState:
        state: RequestState | None = req_context.get_state(RequestState)
        if state is None or state.handle < 0:
            return self._begin(req_context)
        return state

    def _handle_of(self, req_context: Any) -> int:
        """Returns the core's handle of a looked-up request, and records the current epoch in its state.

        After a reset the core calls this for each request again, including those that it knew.
        """
        state = self._state(req_context)
        state.epoch = self._epoch
        return state.handle

    # ---- lookup and load

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Returns whether a chunk is loadable now. Instances replace this method with the core's builtin."""
        return self._results[self._cache.lookup(self._handle_of(req_context), key)]

    def _noting_pending_hits(self, lookup: Callable[[bytes, Any], Any]) -> Callable[[bytes, Any], Any]:
        """Wraps ``lookup`` to record the keys of pending hits, because their chunks may never arrive."""
        pending = LookupResult.HIT_PENDING

        def noting(key: bytes, req_context: Any) -> Any:
            result = lookup(key, req_context)
            if result is pending:
                self._state(req_context).pending.add(key)
            return result

        return noting

    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        """Returns the source of a hit: host memory, or the disk that the bytes were read from."""
        assert self._sources is not None  # vLLM 0.31 does not call this
        host, disk = self._sources
        return host if self._cache.load_source(key) < 0 else disk

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> RowLoadStoreSpec:
        """Pins the chunks and returns their rows. All of them must have been hits in this step."""
        ticket, rows, group_rows = self._cache.prepare_load(self._handle_of(req_context), _sequence(keys))
        if self._options.publishes_events:
            self._loaded += keys
        return RowLoadStoreSpec(ticket, rows, group_rows)

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """Ends a load after all ranks have finished it."""
        state = req_context.get_state(RequestState)
        self._cache.complete_load(keys, -1 if state is None else state.handle)  # type: ignore[arg-type]

    # ---- store

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> Any:
        """Allocates rows for the new chunks of ``keys``, as many from the left as fit.

        Never returns None: vLLM would log a warning in each step in which not all chunks fit.
        """
        state = self._state(req_context)
        offered = _sequence(keys)
        if not offered or not self._may_store(state):
            self._cache.admit(state.handle)
            return PrepareStoreOutput([], no_rows(), [])
        depths = _depths(offered, req_context)
        accepted, ticket, rows, group_rows, evicted = self._cache.prepare_store(state.handle, offered, depths)
        return PrepareStoreOutput(accepted, RowLoadStoreSpec(ticket, rows, group_rows), evicted)

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        """Ends a store after all ranks have reported. The region holds the copies' results, by ticket."""
        self._cache.complete_store(keys, success)  # type: ignore[arg-type]
        if self._options.describes_events:
            failed = self._cache.absent(keys)
            self._unstored += failed
            if self._hosts is not None:
                self._unreported.update(set(keys).difference(failed))

    def _may_store(self, state: RequestState) -> bool:
        """True if no reset happened since the request was last looked up.

        A request that was running or loading during a reset used the state from before it, possibly the old
        weights. Also, vLLM 0.32 and 0.33 offer all its chunks again, including those whose blocks left a
        window and now hold other bytes. vLLM looks up a request when none of it is computed, so a request
        that was waiting or preempted may store.
        """
        return state.epoch == self._epoch

    # ---- step, reset, end

    def on_schedule_end(self, context: Any) -> None:
        """Ends a step: admits the scheduled requests, polls the tiers, plans loads, applies deadlines."""
        for request_id in context.preempted_req_ids:
            if (state := self._live.get(request_id)) is not None:
                self._cache.preempt(state.handle)
                if self._options.resumed_is_new:
                    state.started = False
        for request_id in context.new_req_ids:
            if (state := self._live.get(request_id)) is not None:
                if state.started and self._stops_resumed_sessions:
                    self._stop_caching(request_id, state)
                self._cache.admit(state.handle)
                state.started = True
        self._cache.end_step()

    def _stop_caching(self, request_id: str, state: RequestState) -> None:
        """Stops all stores and loads of a request: a resumed streaming-input session.

        vLLM schedules that session as new again although it was not preempted. From this step on, vLLM 0.31
        and 0.32 offer its chunks with blocks that hold other chunks. In 0.31 its keys may also belong to
        another prompt.
        """
        if self.tracer is None:
            self._cache.end_request(state.handle)
        else:
            report = self._cache.end_traced_request(state.handle)
            state.until_stopped = state.until_stopped or report
        state.handle = self._cache.begin_request(
            request_id, load_from_cpu=False, load_tiers=0, skip_store=True
        )

    def has_pending_work(self) -> bool:
        """True if a request waits for us or removals are to be published; vLLM then steps an idle engine."""
        if self._cache.has_pending_work() or self._advertised.has_withdrawals():
            return True
        return self._waker is not None and self._waker.needs_step()

    def reset_cache(self) -> None:
        """Invalidates all chunks in memory and on every tier.

        With fixed weights it only abandons the jobs, which vLLM drops. vLLM calls it before weight changes,
        sleep and pause, and does not report the reason.
        """
        self._epoch += 1
        if self._options.fixed_weights:
            self._resets.report_kept()
            self._cache.abandon_jobs()
        else:
            self._resets.report_forgotten()
            self._publish_sharing(False)
            self._cache.reset()
        self._cache.forget_context()
        self._unstored.clear()  # vLLM drops all payloads itself
        self._unreported.clear()
        self._loaded.clear()
        # Drops the changes that are not published yet: vLLM drops the payloads of the stored chunks, and the
        # removals follow from withdraw_all.
        self._cache.take_events()
        # With fixed weights too: vLLM's own reset has cleared the routers' view of this server.
        self._advertised.withdraw_all()

    def _publish_sharing(self, shares: bool) -> None:
        if self._options.shared_number is not None:
            number = str(self._options.shared_number)
            self._metrics.set("kv_offload_shared_memory_info", [number], int(shares))

    def on_reset_flushed(self) -> None:
        """Does nothing. vLLM 0.33 calls it when the jobs from before the reset have ended.

        The ranks report that too, by ticket.
        """

    def shutdown(self) -> None:
        """Drops queued writes, waits for running operations and closes the tiers. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._waker is not None:
                self._waker.stop()
            self.at_shutdown()
            self._cache.close()
            if self._hosts is not None:
                self._hosts.close()
            if self.tracer is not None:
                self.tracer.close()

    # ---- reports

    def take_events(self) -> Iterable[Any]:
        """Yields the KV events of host memory and of every tier that publishes them."""
        if self._waker is not None:
            self._waker.end_wakeup()
        changes = self._cache.take_events()
        if self._unreported:
            for keys, on_tier, removed, _ in changes:
                if not on_tier and not removed:
                    self._unreported.difference_update(keys)
        if self._options.describes_events:
            for keys, on_tier, removed, _ in changes:
                if not on_tier and removed:  # not advertised, but found by a request: no removal is published
                    self._unstored += self._advertised.unknown(keys)
        yield from self._advertised.translate(changes)
        if self._loaded:
            missing = set(self._cache.absent(self._loaded))
            yield from self._advertised.found([key for key in self._loaded if key not in missing])
            self._loaded.clear()
        if self._unstored:
            unstored = self._cache.absent(self._unstored)
            if unstored:
                yield compat.untrack_event(unstored)
            # Those that are neither absent nor advertised are still being stored or read.
            self._unstored = self._advertised.unknown(set(self._unstored).difference(unstored))

    def get_stats(self) -> Any | None:
        """Returns the changes of our metrics since the last call, or None. Called in every step."""
        now = self._clock()
        if now >= self._next_gauges:
            self._next_gauges = now + _GAUGE_SECONDS
            self._cache.publish_gauges()
            self._watch.poll(now)
            self._divergence.poll()
            self._codecs.poll()
            self._removals.poll()
            if self._neighbours is not None:
                self._neighbours.poll(now)
            # No result arrives from a lost host, and the set may be large then.
            if self._hosts is not None and self._hosts.poll():
                self._note_late_failures()
        changes = self._metrics.drain()
        if not changes:
            return None
        stats = compat.new_stats()
        for name, kind, labels, value in changes:
            if isinstance(value, list):
                for observation in value:
                    stats.observe_histogram(name, observation, labels)
            elif kind == "counter":
                stats.increase_counter(name, value, labels)
            else:
                stats.set_gauge(name, value, labels)
        return stats

    def _note_late_failures(self) -> None:
        failed = self._cache.absent(self._unreported)
        self._unreported.difference_update(failed)
        self._unstored += failed

    def config_info(self) -> Sequence[Mapping[str, str]]:
        """Returns the labels of ``vllm:kv_offload_config_info`` (0.33)."""
        return [dict(self._options.info)]


def _sequence(keys: Collection[bytes]) -> Sequence[bytes]:
    return keys if isinstance(keys, (list, tuple)) else list(keys)


def _part_of(chunk_tokens: int | None) -> Callable[[Any, bytes], int] | None:
    """Returns a function from a key to the tokens of its partial chunk; 0 for a whole chunk.

    A partial chunk is detected by its end, which is not a chunk boundary.
    """
    if chunk_tokens is None:
        return None
    return lambda req_context, key: (req_context.get_offload_key_position(key) or 0) % chunk_tokens


def _depths(keys: Sequence[bytes], req_context: Any) -> list[int] | None:
    """Returns the prefix length of each key in tokens; None unless vLLM knows it for all keys."""
    depths = list(map(req_context.get_offload_key_position, keys))
    return None if None in depths else depths
