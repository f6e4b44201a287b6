# SPDX-License-Identifier: Apache-2.0
"""Resets, sleep, weight updates and event payloads, through vLLM's real scheduler, for each release."""

import pytest
from vllm_trees import MINORS

pytestmark = pytest.mark.timeout(1800)  # as run_under; a check also waits for those started before it


@pytest.mark.release_check("oracle/check_life_cycles.py")
@pytest.mark.parametrize("minor", MINORS)
def test_resets_sleeps_and_weight_updates_load_only_valid_chunks(minor: str, check_output: str) -> None:
    print(check_output)
