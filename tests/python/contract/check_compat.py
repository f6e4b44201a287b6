# SPDX-License-Identifier: Apache-2.0
"""Run by test_contract.py under each vLLM release: interface changes that must be refused."""

from types import SimpleNamespace
from typing import Any

import adapter
import pytest

adapter.use_specs()

from kv_offload.specs import compat  # noqa: E402
from vllm.v1.kv_offload import base, config  # noqa: E402


def changed(name: str, **methods: Any) -> Any:
    """Returns vLLM's module ``base`` with a class ``name`` that has other methods."""
    kind = type(name, (getattr(base, name),), methods)
    if hasattr(getattr(base, name), "__abstractmethods__"):
        kind.__abstractmethods__ = getattr(base, name).__abstractmethods__
    return SimpleNamespace(**{**vars(base), name: kind})


def test_the_interface_of_this_release_is_supported() -> None:
    assert compat.shape_problems(base, config) == []


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (
            lambda hashed, group: group.to_bytes(4, "big") + hashed,
            "make_offload_key returns 04050607010203 for hash 010203 and group 04050607",
        ),
        (
            lambda hashed, group: hashed + group.to_bytes(4, "little"),
            "make_offload_key returns 01020307060504 for hash 010203 and group 04050607",
        ),
        (lambda hashed: hashed, "make_offload_key fails (TypeError"),
    ],
)
def test_keys_of_another_form_are_refused(made: Any, problem: str) -> None:
    """The core splits a key into hash and group: with another format it would take a part of the hash for the
    group.
    """
    other = SimpleNamespace(**{**vars(base), "make_offload_key": made})
    (found,) = compat.shape_problems(other, config)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("name", "methods", "problem"),
    [
        (
            "OffloadingWorker",
            {"submit_store": lambda self, job_id, src_spec, dst_spec, stream: True},
            "OffloadingWorker.submit_store takes job_id, src_spec, dst_spec, stream",
        ),
        (
            "OffloadingWorker",
            {"submit_load": lambda self, src_spec, dst_spec: True},
            "OffloadingWorker.submit_load takes src_spec, dst_spec",
        ),
        (
            "OffloadingManager",
            {"lookup": lambda self, keys, req_context: None},
            "OffloadingManager.lookup takes keys, req_context",
        ),
        (
            "ReqContext",
            {"get_offload_key_position": lambda self, key, group: None},
            "ReqContext.get_offload_key_position takes key, group",
        ),
    ],
)
def test_a_method_with_other_arguments_is_refused_by_name(
    name: str, methods: dict[str, Any], problem: str
) -> None:
    assert compat.shape_problems(changed(name, **methods), config) == [problem]
