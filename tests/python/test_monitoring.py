"""examples/monitoring: rules pass their unit tests, every dashboard query runs on a live Prometheus."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_offload import _core

MONITORING = Path(__file__).resolve().parents[2] / "examples" / "monitoring"


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
        [tool, *arguments], cwd=MONITORING, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a Prometheus that scrapes nothing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "empty.yml").write_text("scrape_configs: []\n")
    server = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'empty.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    base = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 30
    while True:
        try:
            urllib.request.urlopen(f"{base}/-/ready", timeout=2).close()
            break
        except OSError:
            assert server.poll() is None, "prometheus ended at once"
            assert time.monotonic() < deadline, "prometheus was not ready in 30 s"
            time.sleep(0.1)
    yield base
    server.terminate()
    server.wait(timeout=20)


def query(base: str, expression: str) -> dict[str, Any]:
    for variable, value in {"$__rate_interval": "1m", "$job": ".*", "$engine": ".*"}.items():
        expression = expression.replace(variable, value)
    url = f"{base}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
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


def test_every_dashboard_query_runs(prometheus: str) -> None:
    queries = [expression for panel in load_dashboard().panels() for expression in panel.queries.values()]
    assert len(queries) > 15
    for expression in queries:
        answer = query(prometheus, expression)
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"


def test_a_query_with_a_mistake_is_told(prometheus: str) -> None:
    assert query(prometheus, "sum by (tier) (rate(kv_offload_hit_tokens_total))")["status"] == "error"


def test_the_dashboard_file_is_what_the_code_makes() -> None:
    assert json.loads((MONITORING / "dashboard.json").read_text()) == load_dashboard().dashboard()


def test_dashboard_and_rules_use_only_metrics_that_exist() -> None:
    known = {definition.name for definition in _core.metric_definitions()}
    text = (MONITORING / "dashboard.json").read_text() + (MONITORING / "rules.yml").read_text()
    for name in sorted(set(re.findall(r"\bkv_offload_[a-z_]+", text))):
        base = re.sub(r"_(sum|count|bucket)$", "", name)
        assert name in known or base in known or name in {"kv_offload_records", "kv_offload_alerts"}, name
