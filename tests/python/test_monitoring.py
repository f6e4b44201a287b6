# SPDX-License-Identifier: Apache-2.0
"""examples/monitoring: rules pass their unit tests, every dashboard query runs on a live Prometheus."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_offload import _core

EXAMPLE_LABELS = {
    "tier": "fs",
    "reason": "not_stored",
    "op": "read",
    "kind": "io",
    "choice": "load",
    "direction": "load",
    "mode": "direct",
}
MONITORING = Path(__file__).resolve().parents[2] / "examples" / "monitoring"

sys.path.insert(0, str(MONITORING.parent))

import local_prometheus  # noqa: E402
import local_server  # noqa: E402


def load_dashboard() -> Any:
    spec = importlib.util.spec_from_file_location("monitoring_dashboard", MONITORING / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("promtool")
    assert tool is not None, "promtool is missing: apt install prometheus"
    return subprocess.run(
        [tool, *arguments], cwd=MONITORING, capture_output=True, text=True, check=False, timeout=240
    )


@pytest.fixture(scope="module")
def busy_core() -> Iterator[str]:
    """Yields host:port of the core's own /metrics; every metric has values that grow continuously."""
    metrics = _core.Metrics()
    address = f"127.0.0.1:{local_server.free_port()}"
    metrics.expose(address)
    ended = threading.Event()

    def serve() -> None:
        while not ended.wait(0.1):
            for definition in _core.metric_definitions():
                labels = [EXAMPLE_LABELS.get(label, "x") for label in definition.labels]
                if definition.type == "gauge":
                    metrics.set(definition.name, labels, 4.0)
                elif definition.type == "counter":
                    metrics.add(definition.name, labels, 8)
                else:
                    metrics.observe(definition.name, labels, 0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    yield address
    ended.set()
    thread.join()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory, busy_core: str) -> Iterator[str]:
    """Yields the base URL of a Prometheus that scrapes the core."""
    with local_prometheus.prometheus(busy_core, tmp_path_factory.mktemp("prometheus")) as base:
        yield base


def query(base: str, expression: str) -> dict[str, Any]:
    for variable, value in {"$__rate_interval": "1m", "$job": ".*", "$engine": ".*"}.items():
        expression = expression.replace(variable, value)
    url = f"{base}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(url, timeout=240) as answer:
            return json.load(answer)  # type: ignore[no-any-return]
    except urllib.error.HTTPError as error:
        return json.load(error)  # type: ignore[no-any-return]


def test_rules_and_configuration_are_valid() -> None:
    for arguments in (("check", "rules", "rules.yml"), ("check", "config", "prometheus.yml")):
        done = promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr


def test_rules_pass_their_unit_tests() -> None:
    done = promtool("test", "rules", "rules_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_broken_rule_fails_the_unit_tests(tmp_path: Path) -> None:
    for name in ("rules.yml", "rules_test.yml"):
        text = (MONITORING / name).read_text()
        (tmp_path / name).write_text(
            text.replace('kind="corrupt"', 'kind="typo"') if name == "rules.yml" else text
        )
    done = promtool("test", "rules", str(tmp_path / "rules_test.yml"))
    assert done.returncode != 0


def test_every_dashboard_query_returns_scraped_data(prometheus: str) -> None:
    left = [expression for panel in load_dashboard().panels() for expression in panel.queries.values()]
    assert len(left) > 15
    deadline = time.monotonic() + 240
    while left and time.monotonic() < deadline:
        for expression in list(left):
            answer = query(prometheus, expression)
            assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
            values = [float(row["value"][1]) for row in answer["data"]["result"]]
            if values and all(value > 0 for value in values):
                left.remove(expression)
        time.sleep(0.2)
    assert left == [], "these panels are empty although every metric exists and grows"


PANELS_NEEDED = (
    "hit_tokens",
    "miss_tokens",
    "saved_seconds",
    "tier_bytes",
    "tier_capacity_tokens",
    "read_record_bytes",
    "write_record_bytes",
    "queue_depth",
    "failures",
    "decisions",
)


@pytest.mark.parametrize("metric", PANELS_NEEDED)
def test_the_dashboard_shows_each_needed_metric(metric: str) -> None:
    panels = load_dashboard().panels()
    assert any(f"kv_offload_{metric}" in text for panel in panels for text in panel.queries.values())


def test_a_query_with_a_mistake_is_reported(prometheus: str) -> None:
    assert query(prometheus, "sum by (tier) (rate(kv_offload_hit_tokens_total))")["status"] == "error"


def test_the_dashboard_file_matches_the_code() -> None:
    assert json.loads((MONITORING / "dashboard.json").read_text()) == load_dashboard().dashboard()


def not_of_grafana(written: Any) -> list[str]:
    """Lists properties of a dashboard that Grafana's own types (generated from its schema) do not accept."""
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()  # the options of each kind of panel
    kept = json.loads(JSONEncoder().encode(Dashboard.from_json(json.loads(json.dumps(written)))))
    return list(differences(written, kept, "dashboard"))


def differences(written: Any, kept: Any, place: str) -> Iterator[str]:
    if isinstance(written, dict) and isinstance(kept, dict):
        for key, value in written.items():
            yield from differences(value, kept.get(key), f"{place}.{key}")
    elif isinstance(written, list) and isinstance(kept, list) and len(written) == len(kept):
        for number, pair in enumerate(zip(written, kept, strict=True)):
            yield from differences(*pair, f"{place}[{number}]")
    elif written != kept:
        yield f"{place}: {written!r} became {kept!r}"


def test_the_dashboard_matches_grafanas_schema() -> None:
    written = load_dashboard().dashboard()
    assert not_of_grafana(written) == []
    written["panels"][0]["fieldConfig"]["defaults"]["units"] = "s"  # negative control: the property is "unit"
    written["titel"] = "KV offload"
    assert len(not_of_grafana(written)) == 2


def test_dashboard_and_rules_use_only_metrics_that_exist() -> None:
    known = {definition.name for definition in _core.metric_definitions()}
    text = (MONITORING / "dashboard.json").read_text() + (MONITORING / "rules.yml").read_text()
    for name in sorted(set(re.findall(r"\bkv_offload_[a-z_]+", text))):
        base = re.sub(r"_(sum|count|bucket)$", "", name)
        assert name in known or base in known or name in {"kv_offload_records", "kv_offload_alerts"}, name
