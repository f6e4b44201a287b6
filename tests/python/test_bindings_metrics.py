# SPDX-License-Identifier: Apache-2.0
"""csrc/bindings/bind_metrics.cc"""

import socket
import urllib.request

import pytest

from kv_offload import _core


@pytest.fixture
def metrics():
    return _core.Metrics()


def definition(kind):
    return next(d for d in _core.metric_definitions() if d.type == kind and d.labels and not d.worker)


def test_definitions_contain_all_fields_that_vllm_needs():
    definitions = _core.metric_definitions()
    assert len({d.name for d in definitions}) == len(definitions)
    for d in definitions:
        assert d.name.startswith("kv_offload_")
        assert d.type in ("counter", "gauge", "histogram")
        assert d.documentation
        assert isinstance(d.labels, tuple)
        assert bool(d.buckets) == (d.type == "histogram")
        assert isinstance(d.worker, bool)


@pytest.mark.parametrize("kind", ["counter", "gauge", "histogram"])
def test_changes_are_drained_once(metrics, kind):
    d = definition(kind)
    labels = [f"value {i}" for i in range(len(d.labels))]
    record = {"counter": metrics.add, "gauge": metrics.set, "histogram": metrics.observe}[kind]
    record(d.name, labels, 2.5)
    changes = [c for c in metrics.drain() if c[0] == d.name]
    assert changes == [(d.name, kind, tuple(labels), [2.5] if kind == "histogram" else 2.5)]
    assert [c for c in metrics.drain() if c[0] == d.name] == []


def test_a_counter_increases_by_one_by_default(metrics):
    d = definition("counter")
    labels = ["x"] * len(d.labels)
    metrics.add(d.name, labels)
    metrics.add(d.name, labels, 2)
    assert metrics.value(d.name, labels) == 3


def test_an_unknown_name_is_an_error(metrics):
    with pytest.raises(RuntimeError, match="kv_offload_no_such_thing"):
        metrics.add("kv_offload_no_such_thing", [])


def test_the_text_is_in_prometheus_format(metrics):
    d = definition("gauge")
    metrics.set(d.name, ["x"] * len(d.labels), 7)
    assert f"# TYPE {d.name} gauge" in metrics.text()


def test_the_registry_is_served_over_http(metrics):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    metrics.expose(f"127.0.0.1:{port}")
    d = definition("gauge")
    metrics.set(d.name, ["x"] * len(d.labels), 7)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=240) as answer:
        assert d.name in answer.read().decode()


def test_an_address_in_use_is_named(metrics):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(_core.ResourceError, match=address):
            metrics.expose(address)
