# SPDX-License-Identifier: Apache-2.0
"""Checks every byte that a request reads, through vLLM's real scheduler, for each release."""

import os
from pathlib import Path

import pytest
import torch
from vllm_trees import MINORS, run_under, trees

pytestmark = pytest.mark.timeout(1800)  # as run_under; a check also waits for those started before it


def tree_of(minor: str) -> Path:
    tree = trees().get(minor)
    if tree is None:
        pytest.skip(f"vLLM {minor} is neither installed nor unpacked in .cache/vllm-{minor}")
    return tree


@pytest.mark.release_check("oracle/check_oracle.py")
@pytest.mark.parametrize("minor", MINORS)
def test_byte_exactness_holds_in_each_release(minor: str, check_output: str) -> None:
    print(check_output)


@pytest.mark.release_check("oracle/check_found.py")
@pytest.mark.parametrize("minor", MINORS)
def test_no_token_is_lost_compared_with_an_unbounded_manager(minor: str, check_output: str) -> None:
    print(check_output)


@pytest.mark.release_check("oracle/check_inputs.py")
@pytest.mark.parametrize("minor", MINORS)
def test_bytes_of_images_embeddings_and_shared_layers_are_right(minor: str, check_output: str) -> None:
    print(check_output)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("minor", MINORS)
def test_byte_exactness_holds_with_caches_on_a_gpu(minor: str) -> None:
    device = {"KV_OFFLOAD_ORACLE_DEVICE": "cuda", "VLLM_TARGET_DEVICE": "cuda"}
    print(run_under(tree_of(minor), "oracle/check_oracle.py", "-n", str(workers()), **device))


def workers() -> int:
    """Returns the number of processes that share one GPU: each takes about 1.5 GiB of its memory."""
    return max(1, min(12, len(os.sched_getaffinity(0)) - 2))


@pytest.mark.release_check("oracle/check_canonical.py", "0.32")
def test_records_of_the_canonical_layout_are_the_same_for_any_number_of_ranks(check_output: str) -> None:
    print(check_output)


@pytest.mark.release_check("oracle/check_identity.py", "0.32")
def test_records_are_shared_exactly_where_their_bytes_are_equal(check_output: str) -> None:
    print(check_output)
