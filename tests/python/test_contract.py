"""The adapter against the real base classes of each supported vLLM: contract/check_*.py."""

import pytest
from vllm_trees import MINORS, run_under, trees


@pytest.mark.parametrize("minor", MINORS)
def test_manager_worker_and_spec_keep_vllms_contract(minor: str) -> None:
    tree = trees().get(minor)
    if tree is None:
        pytest.skip(f"vLLM {minor} is neither installed nor unpacked in .cache/vllm-{minor}")
    print(run_under(tree, "contract"))
