# SPDX-License-Identifier: Apache-2.0
"""The metrics of the core. csrc/metrics/definitions.cc is the only list of them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_offload._core import MetricDefinition


def metric_definitions(worker: bool = False) -> "list[MetricDefinition]":
    """Returns the metrics on vLLM's /metrics page, or those that only a worker's own page has."""
    from kv_offload import _core

    return [definition for definition in _core.metric_definitions() if definition.worker == worker]
