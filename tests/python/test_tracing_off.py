# SPDX-License-Identifier: Apache-2.0
"""A server without tracing never imports OpenTelemetry."""

import os
import subprocess
import sys
from pathlib import Path

TRACING = Path(__file__).resolve().parents[2] / "specs" / "tracing.py"
CODE = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("tracing", {str(TRACING)!r})
module = sys.modules["tracing"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert module.make_tracer(None, [], "m") is None
print(*(name for name in sys.modules if name.startswith("opentelemetry")))
"""


def test_a_process_without_tracing_imports_nothing_of_opentelemetry() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
