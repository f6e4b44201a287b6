# SPDX-License-Identifier: Apache-2.0
"""Writes the Grafana dashboard (dashboard.json) of the plugin.

The dashboard is code so that its queries can be tested. ``panels()`` is the only list of titles and PromQL.
The file that Grafana imports and the test that runs every query against a live Prometheus both use it.

    python dashboard.py > dashboard.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

SELECTOR = '{job=~"$job", engine=~"$engine"}'


@dataclass(frozen=True)
class Panel:
    """One graph: its title, unit (Grafana's name) and queries (legend -> PromQL)."""

    title: str
    unit: str
    queries: dict[str, str]
    description: str = ""
    stack: bool = False
    width: int = 12
    extra: dict[str, Any] = field(default_factory=dict)


def panels() -> list[Panel]:
    """Returns all panels: first the benefit, then the causes of misses, capacity, and slow operations."""

    def rate(metric: str, by: str) -> str:
        return f"sum by ({by}) (rate({metric}{SELECTOR}[$__rate_interval]))"

    return [
        Panel(
            "Hit tokens by tier",
            "short",
            {"{{tier}}": rate("kv_offload_hit_tokens_total", "tier")},
            "Prompt tokens that were loaded instead of computed, by the tier that their bytes came from.",
            True,
        ),
        Panel(
            "Miss tokens by reason",
            "short",
            {"{{reason}}": rate("kv_offload_miss_tokens_total", "reason")},
            "Prompt tokens that were computed, by the reason of the miss.",
            True,
        ),
        Panel(
            "Hit rate",
            "percentunit",
            {
                "hits": "sum(rate(kv_offload_hit_tokens_total%s[$__rate_interval])) / "
                "(sum(rate(kv_offload_hit_tokens_total%s[$__rate_interval])) + "
                "sum(rate(kv_offload_miss_tokens_total%s[$__rate_interval])))" % ((SELECTOR,) * 3)
            },
        ),
        Panel(
            "Prefill seconds saved",
            "s",
            {"saved": f"sum(increase(kv_offload_saved_seconds_total{SELECTOR}[$__rate_interval]))"},
            "Net prefill time saved: compute avoided minus load time.",
        ),
        Panel(
            "Tier fill",
            "percentunit",
            {
                "{{tier}}": f"max by (tier) (kv_offload_tier_bytes{SELECTOR}"
                f" / kv_offload_tier_capacity_bytes{SELECTOR})"
            },
        ),
        Panel("Bytes held", "bytes", {"{{tier}}": f"sum by (tier) (kv_offload_tier_bytes{SELECTOR})"}),
        Panel(
            "Capacity and content in tokens",
            "short",
            {
                "{{tier}} capacity": f"sum by (tier) (kv_offload_tier_capacity_tokens{SELECTOR})",
                "{{tier}} held": f"sum by (tier) (kv_offload_tier_capacity_tokens{SELECTOR} * "
                f"kv_offload_tier_bytes{SELECTOR} / kv_offload_tier_capacity_bytes{SELECTOR})",
            },
            "Tokens of this model. The bytes of a directory include those of all servers that share it.",
        ),
        Panel("Chunks held", "short", {"{{tier}}": f"sum by (tier) (kv_offload_tier_chunks{SELECTOR})"}),
        Panel("Evicted", "Bps", {"{{tier}}": rate("kv_offload_evicted_bytes_total", "tier")}),
        Panel(
            "Tier throughput",
            "Bps",
            {
                "read {{tier}}": rate("kv_offload_read_record_bytes_total", "tier"),
                "write {{tier}}": rate("kv_offload_write_record_bytes_total", "tier"),
            },
        ),
        Panel(
            "Read latency (p50, p99)",
            "s",
            {
                f"p{q}": f"histogram_quantile({q / 100}, sum by (le) "
                f"(rate(kv_offload_read_seconds_bucket{SELECTOR}[$__rate_interval])))"
                for q in (50, 99)
            },
        ),
        Panel(
            "Queue depth",
            "short",
            {"{{tier}} {{op}}": f"sum by (tier, op) (kv_offload_queue_depth{SELECTOR})"},
        ),
        Panel(
            "Oldest operation",
            "s",
            {"{{tier}} {{op}}": f"max by (tier, op) (kv_offload_oldest_op_seconds{SELECTOR})"},
            "Above op_timeout_ms, the tier is taken out of service for a while.",
        ),
        Panel(
            "Failures",
            "short",
            {"{{tier}} {{op}} {{kind}}": rate("kv_offload_failures_total", "tier, op, kind")},
            "Each failure is a chunk that was computed again or not stored. No wrong byte was used.",
        ),
        Panel(
            "Dropped", "Bps", {"{{tier}} {{reason}}": rate("kv_offload_dropped_bytes_total", "tier, reason")}
        ),
        Panel(
            "Load or recompute",
            "short",
            {"{{choice}}": rate("kv_offload_decisions_total", "choice")},
            "",
            True,
        ),
    ]


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's JSON model (schema 39)."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    drawn, x, y = [], 0, 0
    for number, panel in enumerate(panels(), start=1):
        if x + panel.width > 24:
            x, y = 0, y + 8
        drawn.append(
            {
                "id": number,
                "type": "timeseries",
                "title": panel.title,
                "description": panel.description,
                "datasource": source,
                "gridPos": {"h": 8, "w": panel.width, "x": x, "y": y},
                "fieldConfig": {
                    "defaults": {
                        "unit": panel.unit,
                        "min": 0,
                        "custom": {
                            "fillOpacity": 20,
                            "stacking": {"mode": "normal" if panel.stack else "none"},
                        },
                    },
                    "overrides": [],
                },
                "targets": [
                    {"refId": chr(ord("A") + i), "datasource": source, "expr": expr, "legendFormat": legend}
                    for i, (legend, expr) in enumerate(panel.queries.items())
                ],
            }
        )
        x += panel.width

    def variable(name: str, query: str) -> dict[str, Any]:
        return {
            "name": name,
            "type": "query",
            "datasource": source,
            "includeAll": True,
            "multi": True,
            "query": {"query": query, "refId": name},
            "current": {"text": "All", "value": "$__all"},
        }

    return {
        "title": "vLLM KV offload",
        "uid": "vllm-kv-offload",
        "schemaVersion": 39,
        "tags": ["vllm", "kv-offload"],
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "15s",
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                variable("job", "label_values(kv_offload_tier_capacity_bytes, job)"),
                variable("engine", "label_values(kv_offload_tier_capacity_bytes, engine)"),
            ]
        },
        "panels": drawn,
    }


if __name__ == "__main__":
    json.dump(dashboard(), sys.stdout, indent=1)
    sys.stdout.write("\n")
