# SPDX-License-Identifier: Apache-2.0
"""Doctor, vLLM's parser and vLLM's factories agree: oracle/check_transfer_configs.py under each release."""

import pytest
from vllm_trees import MINORS

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.release_check("oracle/check_transfer_configs.py")
@pytest.mark.parametrize("minor", MINORS)
def test_doctor_and_vllm_agree_on_configurations_of_operators(minor: str, check_output: str) -> None:
    print(check_output)
