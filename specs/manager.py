# SPDX-License-Identifier: Apache-2.0
"""The scheduler side: a thin OffloadingManager over the core's TieredCache, without loops over keys."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kv_offload.log import get_logger

from . import compat
from .compat import LookupResult, OffloadingManager, PrepareStoreOutput, RequestOffloadingContext
from .load_spec import RowLoadStoreSpec, no_rows
from .report import report_text
from .request import HintReader, RequestState
from .watch import CodecWatch, DivergenceWatch, HitWatch, ResetWatch, Surroundings

if TYPE_CHECKING:
    from kv_offload._core import Metrics, TieredCache

logger = get_logger(__name__)

_GAUGE_SECONDS = 0.5


@dataclass(frozen=True)
class ManagerOptions:
    """The manager's settings, in addition to the cache and its metrics."""

    tiers: Mapping[str, str] = field(default_factory=dict)  # name of each tier below -> LOCAL or REMOTE
    parts_of: int | None = None  # tokens of a chunk if vLLM looks up parts of chunks (--prefix-match-unit)
    resumed_is_new: bool = False  # vLLM schedules a preempted request as a new one (its second model runner)
    event_tiers: Set[str] = frozenset()  # names of tiers that publish KV events
    self_evicting_tiers: Set[str] = frozenset()  # names of tiers whose servers evict records without notice
    info: Mapping[str, str] = field(default_factory=dict)  # labels of vllm:kv_offload_config_info
    request_hints: bool = True  # requests may set load_policy, priority, a wait and the skip flags
    remote_wait_seconds: float = 0.0  # default for requests that set no wait
    fixed_weights: bool = False  # a cache reset keeps the cache
    describes_events: bool = (
        False  # vLLM tracks the payload of each chunk's events (self_describing_kv_events)
    )
    surroundings: Surroundings = field(default_factory=Surroundings)


class KVOffloadManager(OffloadingManager):
    """Translates vLLM's calls into calls of the core, which makes every decision.

    Runs on the scheduler thread only. ``lookup`` is a builtin of the core, set on the instance, because vLLM
    calls it for each key of each waiting request in each step.
    """

    def __init__(
        self,
        cache: "TieredCache",
        metrics: "Metrics",
        options: ManagerOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._metrics = metrics
        self._options = options or ManagerOptions()
        self._clock = clock
        self._localities = tuple(self._options.tiers.values())
        self._next_gauges = 0.0
        self._watch = HitWatch(metrics, ("cpu", *self._options.tiers), cache, self._options.surroundings)
        self._divergence = DivergenceWatch(cache, tuple(self._options.tiers))
        self._codecs = CodecWatch(cache, tuple(self._options.tiers))
        self._resets = ResetWatch(cache, tuple(self._options.tiers))
        self._live: dict[str, RequestState] = {}
        self._epoch = 0
        self._closed = False
        self.at_shutdown: Callable[[], None] = lambda: None  # runs first
        self._hints = HintReader(allowed=self._options.request_hints, clock=clock)
        results = (LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.RETRY)
        self._results = results
        self._sources = compat.load_sources()
        self._turns_sessions_away = compat.mistakes_blocks_of_sessions()
        self.lookup = cache.make_lookup(  # type: ignore[method-assign,assignment]
            results, self._handle_of, compat.asked_span, _part_of(self._options.parts_of)
        )
        self._unstored: list[bytes] = []  # keys of chunks whose payloads vLLM may track needlessly
        if self._options.describes_events and compat.tracks_pending_hits():
            self.lookup = self._noting_pending_hits(self.lookup)  # type: ignore[method-assign,assignment]

    # ---- requests

    def on_new_request(self, req_context: Any) -> Any:
        """Starts a request. Its id may be reused; its context is new."""
        self._begin(req_context)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Ends a request: no lookups or stores follow, but its jobs may still complete."""
        state = req_context.get_state(RequestState)
        if state is None or state.handle < 0:
            return
        self._cache.end_request(state.handle)
        self._unstored += state.pending
        state.pending.clear()
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("Request %s: %s", req_context.req_id, report_text(self._cache.report(state.handle)))
        state.handle = -1
        if self._live.get(req_context.req_id) is state:
            del self._live[req_context.req_id]
        self._cache.forget_context()

    def report_of(self, request_id: str) -> dict[str, Any] | None:
        """Returns the report of a request so far (TieredCache.report); None if it is no longer known."""
        state = self._live.get(request_id)
        return None if state is None else self._cache.report(state.handle)

    def _begin(self, req_context: Any) -> RequestState:
        load_from_cpu, load_tiers = compat.tiers_allowed(req_context, self._localities)
        allowed = {
            "load_from_cpu": load_from_cpu,
            "load_tiers": load_tiers,
            "remote_wait_seconds": self._options.remote_wait_seconds,
        }
        hints = self._hints.read(req_context.kv_transfer_params)
        handle = self._cache.begin_request(req_context.req_id, **(allowed | hints))
        state = RequestState(handle, self._epoch)
        self._live[req_context.req_id] = state
        req_context.set_state(state)
        return state

    def _state(self, req_context: Any) -> RequestState:
        state: RequestState | None = req_context.get_state(RequestState)
        if state is None or state.handle < 0:
            return self._begin(req_context)
        return state

    def _handle_of(self, req_context: Any) -> int:
        """Returns the handle of a request in a lookup. After a reset, the core calls it for each
        request, even a known one."""
        state = self._state(req_context)
        state.epoch = self._epoch
        return state.handle

    # ---- lookup and load

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Returns whether the chunk can be loaded now. The core's builtin replaces this method on each
        instance."""
        return self._results[self._cache.lookup(self._handle_of(req_context), key)]

    def _noting_pending_hits(self, lookup: Callable[[bytes, Any], Any]) -> Callable[[bytes, Any], Any]:
        """Wraps ``lookup`` to record the keys of pending hits, which may never complete."""
        pending = LookupResult.HIT_PENDING

        def noting(key: bytes, req_context: Any) -> Any:
            result = lookup(key, req_context)
            if result is pending:
                self._state(req_context).pending.add(key)
            return result

        return noting

    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        """Returns the source of a hit: host memory, or the disk that it was fetched from."""
        assert self._sources is not None  # vLLM 0.31 does not call this
        host, disk = self._sources
        return host if self._cache.load_source(key) < 0 else disk

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> RowLoadStoreSpec:
        """Pins chunks that were all hits in this step, and returns their rows."""
        ticket, rows, group_rows = self._cache.prepare_load(self._handle_of(req_context), _sequence(keys))
        return RowLoadStoreSpec(ticket, rows, group_rows)

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """Ends a load: all ranks have loaded the chunks."""
        self._cache.complete_load(keys)  # type: ignore[arg-type]

    # ---- store

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> Any:
        """Returns rows for the new chunks of ``keys``, as many from the left as fit.

        Never returns None, because vLLM would then log a warning in each step.
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
        """Ends a store: all ranks have reported. The region holds the result of the copies under the
        ticket."""
        self._cache.complete_store(keys, success)  # type: ignore[arg-type]
        if self._options.describes_events:
            self._unstored += self._cache.absent(keys)

    def _may_store(self, state: RequestState) -> bool:
        """True if no reset happened since the request was last looked up.

        A request that ran or loaded during a reset was computed with the old state, possibly with old
        weights. vLLM 0.32 and 0.33 also offer all its chunks again, including chunks whose blocks left a
        window and now hold other bytes. vLLM looks up a request when none of it is computed, so a request
        that waited or was preempted may store.
        """
        return state.epoch == self._epoch

    # ---- step, reset, end

    def on_schedule_end(self, context: Any) -> None:
        """Polls the tiers, plans loads of waiting requests, and ends expired waits."""
        if self._options.resumed_is_new:
            for request_id in context.preempted_req_ids:
                if (state := self._live.get(request_id)) is not None:
                    state.started = False
        for request_id in context.new_req_ids:
            if (state := self._live.get(request_id)) is not None:
                if state.started and self._turns_sessions_away:
                    self._turn_away(request_id, state)
                self._cache.admit(state.handle)
                state.started = True
        self._cache.end_step()

    def _turn_away(self, request_id: str, state: RequestState) -> None:
        """Stops all stores and loads of a request: a continued session of streaming input, which is scheduled
        as new although it was not resumed. From this step on, vLLM 0.31 and 0.32 offer its chunks with the
        blocks of other chunks; in 0.31 its keys may also belong to another prompt."""
        self._cache.end_request(state.handle)
        state.handle = self._cache.begin_request(
            request_id, load_from_cpu=False, load_tiers=0, skip_store=True
        )

    def has_pending_work(self) -> bool:
        """True if a request waits for us, which keeps an idle engine stepping."""
        return self._cache.has_pending_work()

    def reset_cache(self) -> None:
        """Invalidates host memory and every tier; with fixed weights only the jobs, which vLLM drops.

        vLLM calls it before weights change, and for sleep and pause, without giving the reason.
        """
        self._epoch += 1
        if self._options.fixed_weights:
            self._resets.report_kept()
            self._cache.abandon_jobs()
        else:
            self._resets.report_forgotten()
            self._cache.reset()
        self._cache.forget_context()
        self._unstored.clear()  # vLLM drops all payloads itself

    def on_reset_flushed(self) -> None:
        """vLLM 0.33: the jobs from before the reset ended. Needs no action: the ranks report that by
        ticket."""

    def shutdown(self) -> None:
        """Drops queued writes, waits for running operations, closes the tiers. Idempotent."""
        if not self._closed:
            self._closed = True
            self.at_shutdown()
            self._cache.close()

    # ---- reports

    def take_events(self) -> Iterable[Any]:
        """Returns the KV events of host memory and of every tier that publishes them."""
        if unstored := self._cache.absent(self._unstored):  # others may have been stored since
            yield from compat.untrack_events(unstored)
        self._unstored.clear()
        for keys, on_storage, removed, tier in self._cache.take_events():
            if not on_storage:
                yield compat.make_event(keys, removed=removed)
            elif tier in self._options.event_tiers:
                yield compat.make_event(
                    keys,
                    removed=removed,
                    tier=tier,
                    locality=self._options.tiers[tier],
                    removal_expected=tier not in self._options.self_evicting_tiers,
                )

    def get_stats(self) -> Any | None:
        """Returns the changes of our metrics since the last call, or None. Called in every step."""
        now = self._clock()
        if now >= self._next_gauges:
            self._next_gauges = now + _GAUGE_SECONDS
            self._cache.publish_gauges()
            self._watch.look(now)
            self._divergence.look()
            self._codecs.look()
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

    def config_info(self) -> Sequence[Mapping[str, str]]:
        """Returns the labels of ``vllm:kv_offload_config_info`` (0.33)."""
        return [dict(self._options.info)]


def _sequence(keys: Collection[bytes]) -> Sequence[bytes]:
    return keys if isinstance(keys, (list, tuple)) else list(keys)


def _part_of(chunk_tokens: int | None) -> Callable[[Any, bytes], int] | None:
    """Returns the tokens in the part of a chunk that a key covers; 0 for a whole chunk. A part ends where no
    chunk does."""
    if chunk_tokens is None:
        return None
    return lambda req_context, key: (req_context.get_offload_key_position(key) or 0) % chunk_tokens


def _depths(keys: Sequence[bytes], req_context: Any) -> list[int] | None:
    """Returns the prefix length of each key in tokens; None unless vLLM knows all of them."""
    depths = list(map(req_context.get_offload_key_position, keys))
    return None if None in depths else depths
