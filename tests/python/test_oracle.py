"""Every byte that a request reads is checked, through vLLM's real scheduler, for each release."""

import pytest
from vllm_trees import MINORS, run_under, trees


@pytest.mark.parametrize("minor", MINORS)
def test_byte_oracle(minor: str) -> None:
    tree = trees().get(minor)
    if tree is None:
        pytest.skip(f"vLLM {minor} is neither installed nor unpacked in .cache/vllm-{minor}")
    print(run_under(tree, "oracle/check_oracle.py"))


def test_records_are_shared_exactly_where_their_bytes_are_equal() -> None:
    tree = trees().get("0.32")
    if tree is None:
        pytest.skip("vLLM 0.32 is neither installed nor unpacked")
    print(run_under(tree, "oracle/check_identity.py"))
