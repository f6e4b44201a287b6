# SPDX-License-Identifier: Apache-2.0
"""Runs checks that each need their own vLLM release, concurrently: one per processor.

A test marked ``release_check(file, minor)``, or ``release_check(file)`` with a parameter ``minor``, gets the
output of that file under that release from the fixture ``check_output``. The first such test starts the runs
of all selected tests. Each run has its own process, a fork of one that has imported its release.

Under other releases than the installed one, only the contract is checked, unless KV_OFFLOAD_RELEASES is
``all`` (stage ``releases`` of tests/run.sh) or the test is named, as in ``test_oracle.py::test_x[0.31]``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from vllm_trees import Release, installed_minor, trees

Check = tuple[str, str]  # (file, release)


def check_of(item: Any) -> Check | None:
    marker = item.get_closest_marker("release_check")
    if marker is None:
        return None
    file, *minor = marker.args
    return file, minor[0] if minor else item.callspec.params["minor"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("KV_OFFLOAD_RELEASES") == "all" or any("[" in name for name in config.args):
        return
    installed = installed_minor()
    left = [
        item
        for item in items
        if (check := check_of(item)) is not None and check[0] != "contract" and check[1] != installed
    ]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="session")
def checks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Check, Future[str]]]:
    found = trees()
    wanted = dict.fromkeys(check for item in request.session.items if (check := check_of(item)))
    with ExitStack() as stack:
        releases = {
            minor: stack.enter_context(Release(found[minor], tmp_path_factory.mktemp(f"vllm-{minor}-")))
            for minor in dict.fromkeys(minor for _, minor in wanted)
            if minor in found
        }
        pool = ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0)))
        stack.callback(pool.shutdown, cancel_futures=True)
        yield {
            (file, minor): pool.submit(releases[minor].run, file)
            for file, minor in wanted
            if minor in releases
        }


@pytest.fixture
def check_output(request: pytest.FixtureRequest, checks: dict[Check, Future[str]]) -> str:
    """Returns the output of this test's check; raises AssertionError with the output if the check failed."""
    check = check_of(request.node)
    assert check is not None
    if check not in checks:
        pytest.skip(f"vLLM {check[1]} is neither installed nor unpacked in .cache/vllm-{check[1]}")
    return checks[check].result()
