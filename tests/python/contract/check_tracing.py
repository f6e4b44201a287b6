# SPDX-License-Identifier: Apache-2.0
"""Run by test_contract.py under each vLLM release: the spans of requests, in an in-memory exporter."""

import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapter
import pytest
from opentelemetry import trace as api
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

adapter.use_specs()

from kv_offload.specs import tracing  # noqa: E402
from kv_offload.specs.request import RequestState  # noqa: E402
from kv_offload.specs.tracing import RequestTracer, make_tracer, watch_requests  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (  # noqa: E402
    OffloadingConnectorScheduler,
)
from vllm.v1.request import Request, RequestStatus  # noqa: E402

from contract.check_manager import HIT, MISS, PENDING, Engine  # noqa: E402
from contract.parts import context, keys  # noqa: E402
from kv_offload import _core  # noqa: E402

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Traced:
    """An engine whose requests are traced, and the spans that were exported."""

    def __init__(self, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.engine = Engine(**options)
        self.manager = self.engine.manager
        self.tracer = RequestTracer(
            provider, self.manager._metrics, list(self.manager._options.tiers), {"gen_ai.request.model": "m"}
        )
        self.manager.tracer = self.tracer

    def arrive(self, name: str = "r", headers: dict[str, str] | None = None) -> Any:
        """Adds a request as vLLM's connector does; returns its context."""
        request = SimpleNamespace(
            request_id=name, trace_headers=headers, num_prompt_tokens=48, status=RequestStatus.RUNNING
        )
        self.tracer.arriving = self.request = request
        return self.engine.request(name)

    def finish(self, context: Any, status: Any = RequestStatus.FINISHED_STOPPED) -> dict[str, ReadableSpan]:
        """Ends a request; returns its spans by name."""
        self.request.status = status
        self.manager.on_request_finished(context)
        self.exporter.clear()
        self.tracer.drain()
        spans = self.exporter.get_finished_spans()
        assert len({span.name for span in spans}) == len(spans)
        return {span.name: span for span in spans}

    def load(self, hits: list[bytes], context: Any) -> None:
        output = self.manager.prepare_load(hits, context)
        self.engine.copy(output, list(range(len(hits))), store=False)
        self.manager.complete_load(set(hits), context)


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    yield made
    made.engine.stop()


@pytest.fixture
def on_disk(tmp_path: Path, vllm_config: Any) -> Iterator[Callable[[], Traced]]:
    """Returns engines one after another on one directory."""
    running: list[Traced] = []

    def start() -> Traced:
        while running:
            running.pop().engine.stop()
        tier = {"type": "fs", "root_dir": str(tmp_path / "root"), "max_bytes": "16MiB"}
        running.append(Traced(secondary_tiers=[tier], model_id="m", lookup_timeout_ms=60_000))
        step_until(running[-1], lambda tier: tier["scan_complete"])
        return running[-1]

    yield start
    while running:
        running.pop().engine.stop()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def step_until(traced: Traced, done: Callable[[dict[str, Any]], bool]) -> None:
    """Steps the engine until its tier's figures fit."""
    while not done(traced.manager._cache.tier_stats(0)):
        traced.engine.end_step()


def write(traced: Traced, wanted: list[bytes]) -> None:
    """Stores chunks until their records are on the tier."""
    traced.engine.store(wanted, traced.engine.request("writer"))
    step_until(traced, lambda tier: tier["chunks"] == len(wanted))


def wait_for_hits(traced: Traced, wanted: list[bytes], request: Any) -> None:
    """Steps the engine until no lookup is pending."""
    while PENDING in (found := traced.engine.lookup(wanted, request)):
        traced.engine.end_step()
    assert found == [HIT] * len(wanted)


def test_a_miss_has_a_lookup_and_no_load(traced: Traced) -> None:
    request = traced.arrive("cmpl-1-0123abcd")
    assert traced.engine.lookup(keys(1, 2), request) == [MISS, MISS]
    spans = traced.finish(request)
    assert set(spans) == {"kv_offload.request", "kv_offload.lookup"}
    root, lookup = spans["kv_offload.request"], spans["kv_offload.lookup"]
    assert parent_of(root) is None
    assert parent_of(lookup) == root.context.span_id
    assert attributes(root) == {
        "gen_ai.request.model": "m",
        "gen_ai.request.id": "cmpl-1",
        "kv_offload.request_id": "cmpl-1-0123abcd",
        "gen_ai.usage.input_tokens": 48,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("stop",),
    }
    assert attributes(lookup)["kv_offload.miss_tokens.not_stored"] == 32


def test_a_hit_in_host_memory_has_a_lookup_and_a_load_in_order(traced: Traced) -> None:
    traced.engine.store(keys(1, 2), traced.engine.request("a"))
    request = traced.arrive("b")
    assert traced.engine.lookup(keys(1, 2), request) == [HIT, HIT]
    traced.load(keys(1, 2), request)
    spans = traced.finish(request)
    assert set(spans) == {"kv_offload.request", "kv_offload.lookup", "kv_offload.load"}
    root, lookup, load = (spans[f"kv_offload.{name}"] for name in ("request", "lookup", "load"))
    assert attributes(lookup)["kv_offload.hit_tokens.cpu"] == 32
    assert attributes(root)["gen_ai.usage.cache_read.input_tokens"] == 32
    assert attributes(load) == {"kv_offload.load.complete": True}
    assert parent_of(load) == root.context.span_id
    times = (
        root.start_time,
        lookup.start_time,
        lookup.end_time,
        load.start_time,
        load.end_time,
        root.end_time,
    )
    assert list(times) == sorted(times)


def test_a_hit_on_disk_has_a_decision_and_a_read_below_the_lookup(on_disk: Callable[[], Traced]) -> None:
    write(on_disk(), keys(1, 2))
    second = on_disk()
    request = second.arrive("b")
    wait_for_hits(second, keys(1, 2), request)
    second.load(keys(1, 2), request)
    spans = second.finish(request)
    lookup, read = spans["kv_offload.lookup"], spans["kv_offload.read fs"]
    decision = spans["kv_offload.decision"]
    assert attributes(lookup)["kv_offload.hit_tokens.fs"] == 32
    assert attributes(lookup)["kv_offload.waited_seconds"] > 0
    assert attributes(decision)["kv_offload.decision"] == "load"
    assert attributes(read) == {
        "kv_offload.tier": "fs",
        "kv_offload.read.chunks": 2,
        "kv_offload.read.bytes": 2 * 4096,
    }
    assert {parent_of(decision), parent_of(read)} == {lookup.context.span_id}
    assert read.kind is api.SpanKind.CLIENT
    times = (lookup.start_time, decision.start_time, read.start_time, read.end_time, lookup.end_time)
    assert list(times) == sorted(times)


def test_a_failed_read_is_an_error_with_its_reason(on_disk: Callable[[], Traced], tmp_path: Path) -> None:
    write(on_disk(), keys(1))
    second = on_disk()
    (record,) = (tmp_path / "root").rglob("*.rec")
    damaged = bytearray(record.read_bytes())
    damaged[-100] ^= 1
    record.write_bytes(damaged)
    request = second.arrive("b")
    while (found := second.engine.lookup(keys(1), request)) == [PENDING]:
        second.engine.end_step()
    assert found == [MISS]
    spans = second.finish(request)
    read = spans["kv_offload.read fs"]
    assert read.status.status_code is StatusCode.ERROR
    assert attributes(read)["error.type"] == "corrupt"
    assert attributes(read)["kv_offload.read.failed_chunks"] == 1
    assert attributes(read)["kv_offload.read.bytes"] == 0
    assert attributes(spans["kv_offload.lookup"])["kv_offload.miss_tokens.corrupt"] == 16
    assert "kv_offload.load" not in spans


def test_a_request_cancelled_while_it_reads_has_its_unfinished_reads(on_disk: Callable[[], Traced]) -> None:
    write(on_disk(), keys(1, 2))
    second = on_disk()
    request = second.arrive("b")
    assert second.engine.lookup(keys(1, 2), request) == [PENDING, PENDING]
    second.engine.end_step()
    spans = second.finish(request, RequestStatus.FINISHED_ABORTED)
    assert attributes(spans["kv_offload.request"])["gen_ai.response.finish_reasons"] == ("abort",)
    assert attributes(spans["kv_offload.lookup"])["kv_offload.unfinished_reads"] == 2
    assert "kv_offload.load" not in spans


def test_a_load_that_outlives_its_request_is_incomplete(traced: Traced) -> None:
    traced.engine.store(keys(1), traced.engine.request("a"))
    request = traced.arrive("b")
    traced.engine.lookup(keys(1), request)
    output = traced.manager.prepare_load(keys(1), request)
    spans = traced.finish(request, RequestStatus.FINISHED_ABORTED)
    load = spans["kv_offload.load"]
    assert attributes(load) == {"kv_offload.load.complete": False}
    assert load.end_time == spans["kv_offload.request"].end_time
    traced.engine.copy(output, [0], store=False)
    traced.manager.complete_load(set(keys(1)), request)


def test_each_load_of_a_preempted_request_has_a_span(traced: Traced) -> None:
    traced.engine.store(keys(1), traced.engine.request("a"))
    request = traced.arrive("b")
    for _ in range(5):
        traced.engine.lookup(keys(1), request)
        traced.load(keys(1), request)
        traced.engine.end_step()
    traced.manager.on_request_finished(request)
    traced.tracer.drain()
    loads = [span for span in traced.exporter.get_finished_spans() if span.name == "kv_offload.load"]
    assert len(loads) == 4, "the report has the first four"
    assert all(attributes(load) == {"kv_offload.load.complete": True} for load in loads)
    times = [time for load in loads for time in (load.start_time, load.end_time)]
    assert times == sorted(times)


def test_the_end_of_a_load_is_not_that_of_the_next_request(traced: Traced) -> None:
    traced.engine.store(keys(1), traced.engine.request("a"))
    request = traced.arrive("b")
    traced.engine.lookup(keys(1), request)
    first = traced.manager.prepare_load(keys(1), request)
    traced.finish(request, RequestStatus.FINISHED_ABORTED)
    following = traced.arrive("c")  # has the handle of the first one
    traced.engine.lookup(keys(1), following)
    second = traced.manager.prepare_load(keys(1), following)
    traced.engine.copy(first, [0], store=False)
    traced.manager.complete_load(set(keys(1)), request)
    load = traced.finish(following)["kv_offload.load"]
    assert attributes(load) == {"kv_offload.load.complete": False}
    traced.engine.copy(second, [0], store=False)
    traced.manager.complete_load(set(keys(1)), following)


def test_a_load_ends_that_of_its_own_request(traced: Traced) -> None:
    traced.engine.store(keys(1), traced.engine.request("a"))
    requests = [traced.arrive("b"), traced.arrive("c")]
    outputs = []
    for request in requests:
        traced.engine.lookup(keys(1), request)
        outputs.append(traced.manager.prepare_load(keys(1), request))
    traced.engine.copy(outputs[1], [0], store=False)
    traced.manager.complete_load(set(keys(1)), requests[1])
    assert attributes(traced.finish(requests[1])["kv_offload.load"]) == {"kv_offload.load.complete": True}
    assert attributes(traced.finish(requests[0])["kv_offload.load"]) == {"kv_offload.load.complete": False}
    traced.engine.copy(outputs[0], [0], store=False)
    traced.manager.complete_load(set(keys(1)), requests[0])


def test_a_session_whose_caching_is_stopped_has_the_spans_from_before(traced: Traced) -> None:
    traced.engine.store(keys(1), traced.engine.request("a"))
    request = traced.arrive("b")
    traced.engine.lookup(keys(1), request)
    traced.load(keys(1), request)
    for _ in range(2):  # a session may be resumed several times
        traced.manager._stop_caching("b", request.get_state(RequestState))
    resumed = time.time_ns()
    spans = traced.finish(request)
    assert {"kv_offload.request", "kv_offload.lookup", "kv_offload.load"} <= set(spans)
    assert spans["kv_offload.request"].start_time < spans["kv_offload.load"].end_time < resumed
    assert spans["kv_offload.request"].end_time >= resumed


def test_the_prompt_is_not_kept_after_the_end_of_a_request(traced: Traced) -> None:
    request = traced.arrive()
    assert traced.tracer.arriving is None
    assert request.get_state(RequestState).request is traced.request
    traced.manager.on_request_finished(request)
    assert request.get_state(RequestState).request is None
    assert all(part is not traced.request for part in traced.tracer._finished[0])


def report(**fields: Any) -> Any:
    """A report of the core, for outcomes that need a slow device."""
    usual = {
        "hit_tokens": (0, 0),
        "miss_tokens": {},
        "choice": "",
        "load_seconds": 0.0,
        "compute_seconds": 0.0,
        "waited_seconds": 0.0,
        "begun": 500,
        "ended": 3_000,
        "first_lookup": 1_000,
        "last_lookup": 2_000,
        "decided": 0,
        "reads": [],
        "unfinished_reads": 0,
        "loads": [],
    }
    return SimpleNamespace(**(usual | fields))


def finish_with(traced: Traced, made: Any) -> dict[str, ReadableSpan]:
    traced.tracer._unpack = lambda packed: packed
    traced.tracer.finish(None, "r", made)
    traced.tracer.drain()
    return {span.name: span for span in traced.exporter.get_finished_spans()}


def test_a_decision_to_recompute_has_both_estimates(traced: Traced) -> None:
    spans = finish_with(
        traced,
        report(
            choice="recompute",
            load_seconds=2.0,
            compute_seconds=0.5,
            decided=1_500,
            miss_tokens={"recompute_cheaper": 512},
        ),
    )
    assert set(spans) == {"kv_offload.request", "kv_offload.lookup", "kv_offload.decision"}
    assert attributes(spans["kv_offload.decision"]) == {
        "kv_offload.decision": "recompute",
        "kv_offload.decision.load_seconds": 2.0,
        "kv_offload.decision.compute_seconds": 0.5,
    }
    assert attributes(spans["kv_offload.lookup"])["kv_offload.miss_tokens.recompute_cheaper"] == 512


def test_reads_of_a_redis_tier_name_the_database(traced: Traced) -> None:
    traced.tracer._places = ("cpu", "fs", "redis-2")
    spans = finish_with(traced, report(reads=[(1, 3, 0, "", 99, 1_000, 1_500)]))
    assert attributes(spans["kv_offload.read redis-2"])["db.system.name"] == "redis"


def test_a_request_without_lookup_has_one_span(traced: Traced) -> None:
    request = traced.arrive()
    assert set(traced.finish(request)) == {"kv_offload.request"}


def test_a_request_with_trace_headers_continues_their_trace(traced: Traced) -> None:
    request = traced.arrive(headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
    root = traced.finish(request)["kv_offload.request"]
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{parent_of(root):016x}" == SPAN


def test_requests_without_trace_headers_have_traces_of_their_own(traced: Traced) -> None:
    roots = [traced.finish(traced.arrive(name))["kv_offload.request"] for name in ("a", "b")]
    assert [parent_of(root) for root in roots] == [None, None]
    assert len({root.context.trace_id for root in roots}) == 2


def test_a_request_of_a_trace_that_is_not_sampled_has_no_spans(traced: Traced) -> None:
    request = traced.arrive(headers={"traceparent": f"00-{TRACE}-{SPAN}-00"})
    traced.engine.lookup(keys(1), request)
    assert traced.finish(request) == {}


def test_headers_of_another_request_are_not_used(traced: Traced) -> None:
    traced.tracer.arriving = SimpleNamespace(
        request_id="other", trace_headers={"traceparent": f"00-{TRACE}-{SPAN}-01"}
    )
    request = context("r")
    traced.manager.on_new_request(request)
    traced.manager.on_request_finished(request)
    traced.tracer.drain()
    (root,) = traced.exporter.get_finished_spans()
    assert root.parent is None


def test_requests_beyond_the_queue_are_dropped_and_counted() -> None:
    metrics = _core.Metrics()
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = RequestTracer(provider, metrics, max_queued=2, unpack=lambda packed: packed)
    for number in range(5):
        tracer.finish(None, str(number), report())
    tracer.drain()
    roots = [span for span in exporter.get_finished_spans() if span.name == "kv_offload.request"]
    assert [attributes(root)["gen_ai.request.id"] for root in roots] == ["0", "1"]
    assert metrics.value(tracing.DROPPED, ()) == 3


class HangingExporter(SpanExporter):
    """Blocks in its first export until ``released``."""

    def __init__(self) -> None:
        self.entered, self.released = threading.Event(), threading.Event()

    def export(self, spans: Any) -> SpanExportResult:
        self.entered.set()
        self.released.wait()
        return SpanExportResult.SUCCESS


def test_a_hanging_exporter_blocks_neither_requests_nor_the_shutdown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exporter = HangingExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    metrics = _core.Metrics()
    tracer = RequestTracer(provider, metrics, max_queued=3, unpack=lambda packed: packed)
    tracer.start()
    tracer.finish(None, "0", report())
    exporter.entered.wait()
    for number in range(10):
        tracer.finish(None, str(number), report())
    assert metrics.value(tracing.DROPPED, ()) == 7
    tracer.close(timeout=0.05)
    assert "did not finish" in caplog.text
    exporter.released.set()


def test_close_exports_queued_spans() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = RequestTracer(provider, _core.Metrics(), unpack=lambda packed: packed)
    tracer.start()
    tracer.finish(None, "r", report())
    tracer.close(timeout=240)
    assert [span.name for span in exporter.get_finished_spans()] == [
        "kv_offload.lookup",
        "kv_offload.request",
    ]
    tracer.close()


def test_the_shutdown_of_the_manager_closes_the_tracer(traced: Traced) -> None:
    traced.tracer.start()
    request = traced.arrive()
    traced.manager.on_request_finished(request)
    traced.engine.stop()
    assert [span.name for span in traced.exporter.get_finished_spans()] == ["kv_offload.request"]


def test_an_error_of_the_provider_does_not_end_the_thread(
    traced: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    broken = report()
    del broken.hit_tokens
    finish_with(traced, broken)
    finish_with(traced, broken)
    assert caplog.text.count("spans cannot be created (AttributeError") == 1
    assert "kv_offload.request" in finish_with(traced, report())


def test_a_forked_process_neither_hangs_nor_exports(traced: Traced) -> None:
    traced.tracer.start()
    child = os.fork()
    if child == 0:
        traced.tracer.finish(None, "r", report())
        traced.tracer.close()
        os._exit(len(traced.exporter.get_finished_spans()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    traced.tracer.close(timeout=240)


# ---- on and off


def test_tracing_is_off_without_an_endpoint(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(tracing.ENDPOINT, raising=False)
    assert make_tracer(_core.Metrics(), [], "m") is None
    monkeypatch.setenv(tracing.ENDPOINT, "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert make_tracer(_core.Metrics(), [], "m") is None
    assert caplog.messages == [], "nobody asked for tracing"


def test_a_missing_library_is_a_warning_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(tracing.ENDPOINT, "http://127.0.0.1:1")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry", None)
    assert make_tracer(_core.Metrics(), [], "m") is None
    assert "Install opentelemetry-api, opentelemetry-sdk and opentelemetry-exporter-otlp" in caplog.text


def test_an_endpoint_without_a_tracer_of_vllm_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(tracing.ENDPOINT, "http://127.0.0.1:1")
    monkeypatch.setattr(api, "get_tracer_provider", api.ProxyTracerProvider)
    assert make_tracer(_core.Metrics(), [], "m") is None
    assert "Start the server with --otlp-traces-endpoint" in caplog.text


def test_tracing_is_on_with_vllms_tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracing.ENDPOINT, "http://127.0.0.1:1")
    monkeypatch.setattr(api, "get_tracer_provider", TracerProvider)
    monkeypatch.setattr(OffloadingConnectorScheduler, "on_new_request", lambda self, request: None)
    tracer = make_tracer(_core.Metrics(), [], "m")
    assert tracer is not None
    tracer.close(timeout=240)


def test_the_manager_of_an_untraced_server_has_no_tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tracing.ENDPOINT, raising=False)
    engine = Engine()
    assert engine.manager.tracer is None
    engine.stop()


# ---- what vLLM hands over


def test_the_connector_hands_over_each_request_once_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        OffloadingConnectorScheduler,
        "on_new_request",
        lambda self, request: seen.append(self.manager.tracer.arriving),
    )
    watch_requests()
    wrapped = OffloadingConnectorScheduler.on_new_request
    watch_requests()
    assert OffloadingConnectorScheduler.on_new_request is wrapped
    side = SimpleNamespace(manager=SimpleNamespace(tracer=SimpleNamespace(arriving=None)))
    OffloadingConnectorScheduler.on_new_request(side, "a request")  # type: ignore[arg-type]
    assert seen == ["a request"]


def test_another_spec_with_the_same_connector_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        OffloadingConnectorScheduler, "on_new_request", lambda self, request: seen.append(request)
    )
    watch_requests()
    side = SimpleNamespace(manager=SimpleNamespace())
    OffloadingConnectorScheduler.on_new_request(side, "a request")  # type: ignore[arg-type]
    assert seen == ["a request"]


def test_vllms_request_has_what_the_tracer_reads() -> None:
    assert list(inspect.signature(OffloadingConnectorScheduler.on_new_request).parameters) == [
        "self",
        "request",
    ]
    assert "trace_headers" in inspect.signature(Request).parameters
    source = inspect.getsource(Request.__init__)
    for name in ("trace_headers", "num_prompt_tokens", "status", "request_id"):
        assert f"self.{name}" in source, name
    assert tracing._finish_reason(RequestStatus.FINISHED_ABORTED) == "abort"
