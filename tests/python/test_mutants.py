# SPDX-License-Identifier: Apache-2.0
"""tests/mutants/run.py: its parts cover all mutants."""

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def runner():
    path = Path(__file__).resolve().parents[1] / "mutants" / "run.py"
    spec = importlib.util.spec_from_file_location("mutants_run", path)
    # dataclasses look the module up
    module = sys.modules["mutants_run"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutants_run"]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 859])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_the_parts_together_are_all_mutants_in_order(runner, count, n):
    whole = list(range(count))
    parts = [runner.part_of(whole, f"{k}/{n}") for k in range(1, n + 1)]
    assert [one for part in parts for one in part] == whole
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("part", ["0/8", "9/8", "8", "a/b", "1/2/3", ""])
def test_a_part_that_does_not_exist_is_refused(runner, part):
    with pytest.raises(runner.NotPlantedError, match="1 <= K <= N"):
        runner.part_of([1, 2, 3], part)
