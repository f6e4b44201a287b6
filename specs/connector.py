# SPDX-License-Identifier: Apache-2.0
"""vLLM's OffloadingConnector, with a report in each response.

In vLLM only a connector can add to a response's ``kv_transfer_params``, and its OffloadingConnector adds
nothing (0.31 to 0.33). This subclass changes nothing else. Select it with

    "kv_connector": "ReportingConnector", "kv_connector_module_path": "kv_offload.specs.connector"

and a response then carries {"kv_offload": {"hit_tokens": {"fs": 3072}, "miss_tokens": {"not_stored": 512},
"choice": "load", "load_seconds": ..., "compute_seconds": ..., "waited_seconds": ...}}.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

Answer = tuple[bool, dict[str, Any] | None]


class ReportingConnector(OffloadingConnector):
    """OffloadingConnector that adds our manager's report to each response."""

    def request_finished(self, request: Any, block_ids: list[int]) -> Answer:
        """As vLLM's, with the report."""
        return self._with_report(request, super().request_finished(request, block_ids))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Answer:
        """As vLLM's, with the report."""
        return self._with_report(request, super().request_finished_all_groups(request, block_ids))

    def _with_report(self, request: Any, answer: Answer) -> Answer:
        keep_blocks, params = answer
        report_of = getattr(getattr(self.connector_scheduler, "manager", None), "report_of", None)
        report = report_of(request.request_id) if report_of is not None else None
        if report is None:
            return answer
        return keep_blocks, {**(params or {}), "kv_offload": report}
