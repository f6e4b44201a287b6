# SPDX-License-Identifier: Apache-2.0
"""Groups tests for pytest-xdist: tests that share a server, a process or files run on one worker.

The end-to-end tests form one group, except the demonstration, which shares nothing with them. The checks that
need other vLLM releases (the marker ``release_check``) form another, because the first of them starts all
processes. Every other file is a group. Each test of a ``check_*.py``, which only such a check run collects,
is a separate group. With --no-loadscope-reorder, groups start in collection order.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
# readline, which pytest imports, sets this for pytest-xdist processes; the user did not ask for it here.
os.environ.pop("COLUMNS", None)


@cache
def group_of_file(file: Path) -> str:
    if file.is_relative_to(HERE / "e2e"):
        return "e2e"
    if "pytest.mark.release_check" in file.read_text(encoding="utf-8"):
        return "releases"
    return str(file)


def group(test: str) -> str:
    """Returns the group of a test, which is named as in pytest's output."""
    file, _, name = test.partition("::")
    if Path(file).name.startswith("check_"):
        return test  # the processes of this separate run share nothing
    return "demonstration" if name.startswith("test_demo_") else group_of_file(HERE.parent / file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

        def remove_node(self, node: Any) -> str | None:
            """Fails a test that killed its worker, once: a rerun would kill the next worker too."""
            work = self.assigned_work[node]
            crashed = next((test for unit in work.values() for test, done in unit.items() if not done), None)
            if crashed is not None:
                work[group(crashed)][crashed] = True
            for name in [name for name, unit in work.items() if all(unit.values())]:
                del work[name]
            super().remove_node(node)
            return crashed

    return Scheduling(config, log)
