"""Checks that need a vLLM release of their own, side by side: as many as there are processors.

A test that is marked ``beside(file, minor)``, or ``beside(file)`` and has a parameter ``minor``, takes the
output of that file under that release from ``beside``. The first such test begins the runs of all that were
selected; each is a process of its own and shares nothing with the others but the files that they read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from vllm_trees import run_under, trees

Check = tuple[str, str]  # file, release


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
    """The output of the check of this test; AssertionError with it when it failed."""
    check = check_of(request.node)
    assert check is not None
    if check not in checks:
        pytest.skip(f"vLLM {check[1]} is neither installed nor unpacked in .cache/vllm-{check[1]}")
    return checks[check].result()
