# SPDX-License-Identifier: Apache-2.0
"""Measures the scheduler thread's time per request for OpenTelemetry spans.

    python benchmarks/tracing.py [--requests 2000] [--rounds 30]

One manager serves the same requests without a tracer (the baseline) and with one: each looks up four chunks
that are hits, loads them and ends. Timed are all calls of the manager but lookups. Requests with and without
a tracer take turns in pairs, in a random order, so that both see the same machine. Each round yields the two
medians of its requests, because other processes interrupt some of them; the result is the median over the
rounds.

- on: no thread builds spans meanwhile.
- thread: the thread that builds spans runs as on a server, and its exporter discards them.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))

import adapter
from reporting import describe_machine, echo, interval_of_median, write_results

adapter.use_specs()

from kv_offload.specs.tracing import RequestTracer  # noqa: E402
from manager_calls import Ours, make_keys  # noqa: E402
from opentelemetry.sdk.trace import TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult  # noqa: E402
from vllm.v1.kv_offload.base import ReqContext  # noqa: E402

CHUNKS = 4
LIMIT_US = 2.0  # the requirement


class Discard(SpanExporter):
    """Counts the spans."""

    def __init__(self) -> None:
        self.spans = 0

    def export(self, spans: Any) -> SpanExportResult:
        self.spans += len(spans)
        return SpanExportResult.SUCCESS


class Requests:
    """A manager with resident chunks, which serves identical requests."""

    def __init__(self) -> None:
        self.made = Ours(8192, "prefix")
        self.manager = self.made.manager
        self.keys = make_keys(0, CHUNKS)
        request = ReqContext(req_id="store")
        self.manager.on_new_request(request)
        for index, key in enumerate(self.keys):
            request.set_offload_key_position(key, 16 * (index + 1))
        output = self.manager.prepare_store(self.keys, request)
        self.made.copied(output.store_spec)
        self.manager.complete_store(set(self.keys), request)
        self.manager.on_request_finished(request)
        self.made.end_step()

    def serve(self, number: int, arriving: Any) -> float:
        """Serves one request; returns the seconds of the calls that tracing adds to."""
        manager, keys = self.manager, self.keys
        tracer = manager.tracer
        request = ReqContext(req_id=arriving.request_id)
        for index, key in enumerate(keys):
            request.set_offload_key_position(key, 16 * (index + 1))
        began = time.perf_counter_ns()
        if tracer is not None:
            tracer.arriving = arriving
        manager.on_new_request(request)
        between = time.perf_counter_ns()
        for key in keys:
            manager.lookup(key, request)
        again = time.perf_counter_ns()
        spec = manager.prepare_load(keys, request)
        loading = time.perf_counter_ns()
        self.made.copied(spec)
        copied = time.perf_counter_ns()
        manager.complete_load(keys, request)
        manager.on_request_finished(request)
        ended = time.perf_counter_ns()
        self.made.end_step()
        return (between - began + loading - again + ended - copied) / 1e9

    def round(self, count: int, tracer: RequestTracer, random: Random) -> tuple[float, float]:
        """Returns the medians of the seconds per request, without and with the tracer."""
        arriving = make_arriving(2 * count)
        gc.collect()
        spent: dict[bool, list[float]] = {False: [], True: []}
        is_traced = False
        for number, each in enumerate(arriving):
            is_traced = random.random() < 0.5 if number % 2 == 0 else not is_traced
            self.manager.tracer = tracer if is_traced else None
            spent[is_traced].append(self.serve(number, each))
            # On a server, a few requests are queued when the spans are built.
            if number % 100 == 99:
                tracer.drain()
        self.manager.tracer = None
        return statistics.median(spent[False]), statistics.median(spent[True])


def make_arriving(count: int) -> list[Any]:
    """Returns what the tracer reads of vLLM's requests."""
    return [
        SimpleNamespace(
            request_id=f"cmpl-{number:032x}",
            trace_headers={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
            num_prompt_tokens=16 * CHUNKS,
            status=7,
        )
        for number in range(count)
    ]


def measure(requests: int, rounds: int) -> dict[str, Any]:
    """Returns the microseconds per request without and with tracing."""
    served = Requests()
    exporter = Discard()
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    times: dict[str, list[float]] = {"off": [], "on": [], "thread": []}
    added: dict[str, list[float]] = {"on": [], "thread": []}
    ratios = []
    random = Random(0)
    gc.freeze()
    for number in range(rounds + 1):
        for kind, differences in added.items():
            tracer = RequestTracer(provider, served.made.manager._metrics, max_queued=2 * requests)
            if kind == "thread":
                tracer.start()
            off, on = (seconds * 1e6 for seconds in served.round(requests, tracer, random))
            tracer.drain()
            tracer.close()
            if number == 0:
                continue  # warm-up
            times["off"].append(off)
            times[kind].append(on)
            differences.append(on - off)
            if kind == "on":
                ratios.append(on / off)
    assert exporter.spans > 0
    return {
        "requests": requests,
        "rounds": rounds,
        "us_per_request": {kind: statistics.median(values) for kind, values in times.items()},
        "added_us": {
            kind: {"median": statistics.median(values), "interval": interval_of_median(values)}
            for kind, values in added.items()
        },
        "ratio": statistics.median(ratios),
        "limit_us": LIMIT_US,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    print(describe_machine()["text"])
    echo(f"{options.rounds} rounds of {options.requests} requests")
    found = measure(options.requests, options.rounds)
    for kind, spent in found["us_per_request"].items():
        print(f"{kind:7} {spent:8.2f} us a request")
    for kind, each in found["added_us"].items():
        low, high = each["interval"]
        print(f"{kind:7} adds {each['median']:.2f} us (95%: {low:.2f} to {high:.2f})")
    print(f"ratio of the calls: {found['ratio']:.3f}")
    write_results("tracing", found)


if __name__ == "__main__":
    main()
