# SPDX-License-Identifier: Apache-2.0
"""The metrics of the core, by name. Their only list is csrc/metrics/metrics.h."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_offload._core import MetricDefinition


def metric_definitions(worker: bool = False) -> "list[MetricDefinition]":
    """Definitions of what vLLM's /metrics shows, or of what only a worker's own /metrics does."""
    from kv_offload import _core

    return [definition for definition in _core.metric_definitions() if definition.worker == worker]
