# SPDX-License-Identifier: Apache-2.0
"""Writes prometheus-rule.yaml, the rules of rules.yml as an object of the Prometheus Operator.

    python examples/monitoring/prometheus_rule.py

Kustomize cannot put a file into an object, so the rules are repeated there. A test compares the two.
"""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
HEAD = """\
# Written by prometheus_rule.py from rules.yml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: kv-offload
  labels: {release: kube-prometheus-stack}
spec:
"""


def prometheus_rule() -> str:
    """Returns the object as YAML text, with the comments of rules.yml."""
    rules = (FOLDER / "rules.yml").read_text(encoding="utf-8")
    return HEAD + "".join(f"  {line}" if line.strip() else line for line in rules.splitlines(keepends=True))


if __name__ == "__main__":
    (FOLDER / "prometheus-rule.yaml").write_text(prometheus_rule(), encoding="utf-8")
