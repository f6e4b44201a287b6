# SPDX-License-Identifier: Apache-2.0
"""Runs checks that each need their own vLLM release, concurrently: one per processor.

A test marked ``beside(file, minor)``, or ``beside(file)`` with a parameter ``minor``, gets the output of that
file under that release from the fixture ``beside``. The first such test starts the runs of all selected
tests. Each run is a process of its own; the runs share only the files that they read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from vllm_trees import run_under, trees

Check = tuple[str, str]  # (file, release)


def check_of(item: Any) -> Check | None:
    marker = item.get_closest_marker("beside")
    if marker is None:
        return None
    file, *minor = marker.args
    return file, minor[0] if minor else item.callspec.params["minor"]


@pytest.fixture(scope="session")
def checks(request: pytest.FixtureRequest) -> Iterator[dict[Check, Future[str]]]:
    pool = ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0)))
    found = trees()
    wanted = dict.fromkeys(check for item in request.session.items if (check := check_of(item)))
    try:
        yield {
            (file, minor): pool.submit(run_under, found[minor], file)
            for file, minor in wanted
            if minor in found
        }
    finally:
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def beside(request: pytest.FixtureRequest, checks: dict[Check, Future[str]]) -> str:
    """Returns the output of this test's check; raises AssertionError with the output if the check failed."""
    check = check_of(request.node)
    assert check is not None
    if check not in checks:
        pytest.skip(f"vLLM {check[1]} is neither installed nor unpacked in .cache/vllm-{check[1]}")
    return checks[check].result()
