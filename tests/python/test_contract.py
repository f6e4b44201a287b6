"""The adapter against the real base classes of each supported vLLM: contract/check_*.py."""

import pytest
from vllm_trees import MINORS

pytestmark = pytest.mark.timeout(1800)  # as run_under: one waits for those begun before it, beside servers


@pytest.mark.beside("contract")
@pytest.mark.parametrize("minor", MINORS)
def test_manager_worker_and_spec_keep_vllms_contract(minor: str, beside: str) -> None:
    print(beside)
