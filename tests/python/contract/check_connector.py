# SPDX-License-Identifier: Apache-2.0
"""Run by test_contract.py under each vLLM release: the connector that reports in responses."""

from types import SimpleNamespace
from typing import Any

import adapter
import pytest

adapter.use_specs()

from kv_offload.specs.connector import ReportingConnector  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (  # noqa: E402
    OffloadingConnector,
)


class Finishing:
    """vLLM's scheduler side, reduced to the end of requests."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager

    def request_finished(self, request: Any) -> tuple[bool, None]:
        return False, None


def _connector(manager: Any) -> Any:
    made = ReportingConnector.__new__(ReportingConnector)
    made.connector_scheduler = Finishing(manager)
    return made


@pytest.mark.parametrize("verb", ["request_finished", "request_finished_all_groups"])
def test_a_response_carries_the_report(verb: str) -> None:
    assert hasattr(OffloadingConnector, verb)
    manager = SimpleNamespace(report_of=lambda request_id: {"hit_tokens": {request_id: 16}})
    answer = getattr(_connector(manager), verb)(SimpleNamespace(request_id="r"), ([1, 2],))
    assert answer == (False, {"kv_offload": {"hit_tokens": {"r": 16}}})


@pytest.mark.parametrize("manager", [SimpleNamespace(report_of=lambda request_id: None), SimpleNamespace()])
def test_without_a_report_the_response_is_vllms_own(manager: Any) -> None:
    assert _connector(manager).request_finished(SimpleNamespace(request_id="r"), [1]) == (False, None)
