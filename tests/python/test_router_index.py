# SPDX-License-Identifier: Apache-2.0
"""An index that is rebuilt from KV events, through vLLM's real scheduler, for each release."""

import pytest
from vllm_trees import MINORS

pytestmark = pytest.mark.timeout(1800)  # as run_under; a check also waits for those started before it


@pytest.mark.release_check("oracle/check_router_index.py")
@pytest.mark.parametrize("minor", MINORS)
def test_every_advertised_prefix_is_a_hit(minor: str, check_output: str) -> None:
    print(check_output)
