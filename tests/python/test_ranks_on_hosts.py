# SPDX-License-Identifier: Apache-2.0
"""Engines whose ranks span several emulated hosts, through vLLM's real scheduler, for each release."""

import pytest
from vllm_trees import MINORS

pytestmark = pytest.mark.timeout(1800)  # as run_under; a check also waits for those started before it


@pytest.mark.release_check("oracle/check_hosts.py")
@pytest.mark.parametrize("minor", MINORS)
def test_engines_on_several_hosts_load_only_right_bytes(minor: str, check_output: str) -> None:
    print(check_output)


@pytest.mark.release_check("oracle/check_dcp.py")
@pytest.mark.parametrize("minor", MINORS)
def test_ranks_that_hold_some_tokens_of_a_block_load_only_right_bytes(minor: str, check_output: str) -> None:
    print(check_output)
