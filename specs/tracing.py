# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans of finished requests, through the tracer that vLLM configures in this process.

vLLM's engine core creates a global tracer provider (exporter, batches, sampler, resource) if its
``--otlp-traces-endpoint`` or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set (0.31 to 0.33). This module adds one
tree of spans per request to it:

    kv_offload.request         from its arrival in the scheduler to its end
      kv_offload.lookup        from the first lookup to the load, or to the last lookup
        kv_offload.decision    load, partial or recompute, with the estimates behind it
        kv_offload.read TIER   from the submission of the first read to the end of the last one
      kv_offload.load          from host memory to the device

The core records all times. The scheduler's thread only appends the finished request to a bounded queue, and a
thread of its own builds the spans. If the request has trace headers, its tree continues that trace; otherwise
the tree is a trace of its own. Nothing here imports opentelemetry while vLLM's tracing is off.
"""

import functools
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kv_offload.log import get_logger

if TYPE_CHECKING:
    from kv_offload._core import Metrics, RequestReport

logger = get_logger(__name__)

DROPPED = "kv_offload_dropped_traces_total"
ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"  # vLLM sets it from --otlp-traces-endpoint
MAX_QUEUED = 4096  # finished requests; about 1 KiB each
_POLL_SECONDS = 0.5  # the scheduler's thread must not wake the other one
CLOSE_SECONDS = 5.0  # how long close() waits for the exporter
_HOST = "cpu"
# vLLM appends this to a request's id to make the scheduler's id. Its own spans have the id without it.
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


class FinishedRequest(NamedTuple):
    """The data that the spans of a request are built from. It contains no prompt."""

    request_id: str
    headers: Mapping[str, str] | None  # W3C trace context
    prompt_tokens: int
    status: Any  # vLLM's RequestStatus at the end; None: unknown
    report: Any  # packed; all times are in it, in nanoseconds of CLOCK_MONOTONIC
    last: Any  # packed: the report whose end is that of the request; None: the same


class RequestTracer:
    """Collects finished requests and sends their spans to OpenTelemetry in a separate thread.

    ``finish`` is for the scheduler's thread. It never waits and does as little as possible: the core records
    all times. A process forked from this one traces nothing.
    """

    def __init__(
        self,
        provider: Any,
        metrics: "Metrics",
        tiers: Sequence[str] = (),
        attributes: Mapping[str, str] | None = None,
        *,
        max_queued: int = MAX_QUEUED,
        unpack: "Callable[[Any], RequestReport] | None" = None,
    ) -> None:
        """``provider``: OpenTelemetry's TracerProvider. ``attributes``: of each tree's first span.

        ``unpack`` converts the reports that ``finish`` gets; default: from TieredCache.end_traced_request.
        """
        from kv_offload import __version__, _core

        self._provider = provider
        self._tracer = provider.get_tracer("kv_offload", __version__)
        self._metrics = metrics
        self._places = (_HOST, *tiers)
        self._attributes = dict(attributes or {})
        self._max_queued = max_queued
        self._unpack = unpack or _core.RequestReport
        self._finished: deque[tuple[Any, ...]] = deque()  # fields of FinishedRequest
        self._closing = threading.Event()
        self._warned = False
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self.arriving: Any = None  # vLLM's Request of the next request that begins: see watch_requests

    # ---- scheduler's thread

    def finish(self, request: Any, request_id: str, report: Any, last: Any = None) -> None:
        """Queues the spans of a request. Drops and counts them if the queue is full.

        ``request``: vLLM's Request; None if vLLM did not hand it over. The queue does not keep it. ``last``:
        the report at the end of the request, if ``report`` is that of an earlier time.
        """
        if len(self._finished) >= self._max_queued:
            self._metrics.add(DROPPED, (), 1)
        elif request is None or request.request_id != request_id:
            self._finished.append((request_id, None, 0, None, report, last))
        else:
            self._finished.append(
                (request_id, request.trace_headers, request.num_prompt_tokens, request.status, report, last)
            )

    # ---- own thread

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, name="kv-offload-traces", daemon=True)
        self._thread.start()

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Exports what is queued, for at most ``timeout`` seconds, and ends the thread. Idempotent."""
        if self._thread is None or os.getpid() != self._pid:
            return
        self._closing.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("tracing: the exporter did not finish within %.0f s; spans are lost", timeout)
        self._thread = None

    def _run(self) -> None:
        while not self._closing.wait(_POLL_SECONDS):
            self.drain()
        self.drain()
        self._provider.force_flush(int(CLOSE_SECONDS * 1000))

    def drain(self) -> None:
        """Builds the spans of all queued requests."""
        to_unix = time.time_ns() - time.monotonic_ns()
        while self._finished:
            finished = FinishedRequest._make(self._finished.popleft())
            try:
                report = self._unpack(finished.report)
                last = report if finished.last is None else self._unpack(finished.last)
                self._emit(finished, report, last.ended, to_unix)
            except Exception as error:  # a provider of the user's must not end the thread
                if not self._warned:
                    self._warned = True
                    logger.warning("tracing: spans cannot be created (%s: %s)", type(error).__name__, error)
            time.sleep(0)  # lets the scheduler's thread have the GIL

    def _emit(self, request: FinishedRequest, report: "RequestReport", ended: int, to_unix: int) -> None:
        from opentelemetry import trace as api
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = Context()
        if request.headers:
            parent = TraceContextTextMapPropagator().extract(request.headers, parent)
        root = self._tracer.start_span(
            "kv_offload.request",
            parent,
            attributes=self._request_attributes(request, report),
            start_time=report.begun + to_unix,
        )
        if root.is_recording() and report.first_lookup > 0:
            self._emit_lookup(report, api.set_span_in_context(root, parent), to_unix)
        root.end(ended + to_unix)

    def _emit_lookup(self, report: "RequestReport", under: Any, to_unix: int) -> None:
        from opentelemetry.trace import set_span_in_context

        ended = report.loads[0][0] if report.loads else report.last_lookup
        lookup = self._tracer.start_span(
            "kv_offload.lookup",
            under,
            attributes=self._lookup_attributes(report),
            start_time=report.first_lookup + to_unix,
        )
        context = set_span_in_context(lookup, under)
        if report.choice:
            self._emit_decision(report, context, to_unix)
        for read in report.reads:
            self._emit_read(read, report.begun, context, to_unix)
        lookup.end(max(ended, report.first_lookup) + to_unix)
        for load_began, load_ended in report.loads:
            span = self._tracer.start_span(
                "kv_offload.load",
                under,
                attributes={"kv_offload.load.complete": load_ended > 0},
                start_time=load_began + to_unix,
            )
            span.end((load_ended or report.ended) + to_unix)

    def _emit_decision(self, report: "RequestReport", context: Any, to_unix: int) -> None:
        attributes: dict[str, Any] = {"kv_offload.decision": report.choice}
        if report.load_seconds > 0 and report.compute_seconds > 0:
            attributes["kv_offload.decision.load_seconds"] = report.load_seconds
            attributes["kv_offload.decision.compute_seconds"] = report.compute_seconds
        when = report.decided + to_unix
        self._tracer.start_span("kv_offload.decision", context, attributes=attributes, start_time=when).end(
            when
        )

    def _emit_read(
        self, read: tuple[int, int, int, str, int, int, int], earliest: int, context: Any, to_unix: int
    ) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        tier, arrived, failed, failure, num_bytes, began, ended = read
        name = self._places[1 + tier]
        attributes: dict[str, Any] = {
            "kv_offload.tier": name,
            "kv_offload.read.chunks": arrived,
            "kv_offload.read.bytes": num_bytes,
        }
        if name.split("-")[0] == "redis":
            attributes["db.system.name"] = "redis"
        if failed:
            attributes |= {"kv_offload.read.failed_chunks": failed, "error.type": failure}
        # Another request may have begun to read a chunk of this one earlier.
        span = self._tracer.start_span(
            f"kv_offload.read {name}",
            context,
            kind=SpanKind.CLIENT,
            attributes=attributes,
            start_time=max(began, earliest) + to_unix,
        )
        if failed:
            span.set_status(
                Status(StatusCode.ERROR, f"{failed} of {arrived + failed} reads failed: {failure}")
            )
        span.end(max(ended, earliest) + to_unix)

    def _request_attributes(self, request: FinishedRequest, report: "RequestReport") -> dict[str, Any]:
        attributes: dict[str, Any] = {
            **self._attributes,
            "gen_ai.request.id": _RANDOM_SUFFIX.sub("", request.request_id),
            "kv_offload.request_id": request.request_id,
            "gen_ai.usage.cache_read.input_tokens": sum(report.hit_tokens),
        }
        if request.prompt_tokens:
            attributes["gen_ai.usage.input_tokens"] = request.prompt_tokens
        if request.status is not None:
            attributes["gen_ai.response.finish_reasons"] = [_finish_reason(request.status)]
        return attributes

    def _lookup_attributes(self, report: "RequestReport") -> dict[str, Any]:
        attributes: dict[str, Any] = {"kv_offload.waited_seconds": report.waited_seconds}
        for name, tokens in zip(self._places, report.hit_tokens, strict=False):
            if tokens:
                attributes[f"kv_offload.hit_tokens.{name}"] = tokens
        if report.hit_tokens[-1]:
            attributes["kv_offload.hit_tokens.neighbour"] = report.hit_tokens[-1]
        for reason, tokens in report.miss_tokens.items():
            attributes[f"kv_offload.miss_tokens.{reason}"] = tokens
        if report.unfinished_reads:
            attributes["kv_offload.unfinished_reads"] = report.unfinished_reads
        return attributes


def _finish_reason(status: Any) -> str:
    """Returns vLLM's word for the end of a request, such as "stop" or "abort"."""
    get_finished_reason = getattr(type(status), "get_finished_reason", None)
    reason = None if get_finished_reason is None else get_finished_reason(status)
    return str(getattr(status, "name", status)) if reason is None else str(reason)


def make_tracer(metrics: "Metrics", tiers: Sequence[str], model: str) -> RequestTracer | None:
    """Returns a running tracer if vLLM traces in this process; otherwise None.

    Warns if vLLM was asked to trace and this process cannot.
    """
    if not os.environ.get(ENDPOINT) or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    try:
        from opentelemetry import trace
    except ImportError as error:
        logger.warning(
            "%s is set, but there are no spans of the KV cache: %s. Install opentelemetry-api, "
            "opentelemetry-sdk and opentelemetry-exporter-otlp in vLLM's environment",
            ENDPOINT,
            error,
        )
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):
        logger.warning(
            "%s is set, but vLLM has configured no tracer in this process, so there are no spans of the KV "
            "cache. Start the server with --otlp-traces-endpoint, and install opentelemetry-sdk and "
            "opentelemetry-exporter-otlp",
            ENDPOINT,
        )
        return None
    tracer = RequestTracer(provider, metrics, tiers, {"gen_ai.request.model": model} if model else None)
    watch_requests()
    tracer.start()
    logger.info("tracing: each request has a tree of spans, sent to %s", os.environ[ENDPOINT])
    return tracer


def watch_requests() -> None:
    """Makes vLLM's connector hand each new Request to the manager's tracer. Idempotent.

    The ReqContext that a manager gets has neither the trace headers nor the status at the end. The connector
    has both, so its method is wrapped. Without the wrapper each tree is a trace of its own.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler

    original = OffloadingConnectorScheduler.on_new_request
    if hasattr(original, "kv_offload_traced"):
        return

    @functools.wraps(original)
    def on_new_request(self: Any, request: Any) -> None:
        tracer = getattr(self.manager, "tracer", None)
        if tracer is not None:
            tracer.arriving = request
        original(self, request)

    on_new_request.kv_offload_traced = True  # type: ignore[attr-defined]
    OffloadingConnectorScheduler.on_new_request = on_new_request
