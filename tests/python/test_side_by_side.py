# SPDX-License-Identifier: Apache-2.0
"""tests/conftest.py: all tests run, even if one of them crashes its worker."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
SIDE_BY_SIDE = ("-n", "2", "--dist", "loadscope", "--no-loadscope-reorder")
CRASHES = """import os, pytest
@pytest.mark.parametrize("number", range(6))
def test_of_a_file(number):
    if number == 2: os._exit(0)
"""


def outcome(tree: Path, *options: str) -> tuple[int, list[str]]:
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *SIDE_BY_SIDE, *options]
    done = subprocess.run([*command, "tests/e2e", "tests/python"], cwd=tree, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


def make_tree(tree: Path, **files: str) -> Path:
    (tree / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    for folder in ("e2e", "python"):
        (tree / "tests" / folder).mkdir(parents=True)
    shutil.copy(TESTS / "conftest.py", tree / "tests")
    for name, text in files.items():
        folder, _, file = name.partition("_")
        (tree / "tests" / folder / f"test_{file}.py").write_text(text)
    return tree


def test_a_test_that_crashes_its_process_fails_once_and_the_others_run(tmp_path: Path) -> None:
    passes = "def test_one(): pass\ndef test_two(): pass\n"
    tree = make_tree(
        tmp_path, python_crashes=CRASHES, python_other=passes, e2e_first=passes, e2e_second=passes
    )
    status, lines = outcome(tree)
    assert status == 1
    assert "1 failed, 11 passed" in lines[-1]


def test_files_of_a_server_run_in_one_process_in_sequence(tmp_path: Path) -> None:
    """Files of one group run in sequence; other files run concurrently."""
    passes = "def test_one(): pass\ndef test_two(): pass\n"
    tree = make_tree(tmp_path, e2e_first=passes, e2e_second=passes, python_other=passes)
    _, lines = outcome(tree)
    workers = {line.split()[0] for line in lines if "PASSED" in line and "tests/e2e" in line}
    assert len(workers) == 1, lines
