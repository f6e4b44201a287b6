# SPDX-License-Identifier: Apache-2.0
"""Runs contract/check_*.py: the adapter against the real base classes of each supported vLLM."""

import pytest
from vllm_trees import MINORS

pytestmark = pytest.mark.timeout(1800)  # as run_under; a check also waits for those started before it


@pytest.mark.release_check("contract")
@pytest.mark.parametrize("minor", MINORS)
def test_manager_worker_and_spec_keep_vllms_contract(minor: str, check_output: str) -> None:
    print(check_output)
