"""With pytest-xdist: which tests stay together, because they share a server, a process or files.

The end-to-end tests do, less the demonstration, which has nothing of theirs. So do the checks under releases
of vLLM (the marker ``beside``: the process of the first begins them all). Every other file is by itself,
except that each test of a ``check_*.py``, which only such a run collects, is a group of its own.
Groups begin in the order in which they are found, given --no-loadscope-reorder.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
# readline, which pytest imports, sets it for the processes of pytest-xdist; here it is no user's wish.
os.environ.pop("COLUMNS", None)


@cache
def group_of_file(file: Path) -> str:
    if file.is_relative_to(HERE / "e2e"):
        return "e2e"
    if "pytest.mark.beside" in file.read_text(encoding="utf-8"):
        return "releases"
    return str(file)


def group(test: str) -> str:
    """Of a test, named as in pytest's output."""
    file, _, name = test.partition("::")
    if Path(file).name.startswith("check_"):
        return test  # a run of its own over many processes, whose tests share nothing
    return "demonstration" if name.startswith("test_demo_") else group_of_file(HERE.parent / file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

        def remove_node(self, node: Any) -> str | None:
            """A test that ended its process fails once: begun again, it keeps those after it from running."""
            work = self.assigned_work[node]
            crashed = next((test for unit in work.values() for test, done in unit.items() if not done), None)
            if crashed is not None:
                work[group(crashed)][crashed] = True
            for name in [name for name, unit in work.items() if all(unit.values())]:
                del work[name]
            super().remove_node(node)
            return crashed

    return Scheduling(config, log)
