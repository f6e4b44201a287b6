# SPDX-License-Identifier: Apache-2.0
"""tests/mutants/run.py: its parts cover all mutants, and rewording a comment breaks none."""

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def runner():
    path = Path(__file__).resolve().parents[1] / "mutants" / "run.py"
    sys.path.insert(0, str(path.parent))  # as for a script
    spec = importlib.util.spec_from_file_location("mutants_run", path)
    # dataclasses look the module up
    module = sys.modules["mutants_run"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutants_run"]
    sys.path.remove(str(path.parent))


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


@pytest.mark.parametrize(
    ("file", "text", "find", "replace", "expected"),
    [
        # a comment was reworded, and the line was wrapped
        ("a.cc", "  f(a,\n    b);  // new\n", "  f(a, b);  // old\n", "  g();\n", "  g();  // new\n"),
        ("a.h", "x /* new */ = 1;", "x = 1;", "x = 2;", "x = 2;"),
        ("a.py", "  # new\n  f(a)  # new\n  g()\n", "  f(a)  # old\n  g()\n", "  g()\n", "  # new\n  g()\n"),
        # a text that occurs as it is written is replaced as it is written
        ("a.cc", "  f();  // why\n", "  f();  // why\n", "", ""),
        ("a.md", "one two", "one", "1", "1 two"),
    ],
)  # fmt: skip
def test_a_fault_is_planted_where_its_code_occurs(runner, file, text, find, replace, expected):
    assert runner.anchors.plant(text, find, replace, file) == expected


@pytest.mark.parametrize(
    ("file", "text", "find"),
    [
        ("a.cc", 'say("f(a, b)");', "f(a,  b)"),  # a string is one token
        ("a.py", "if a:\n    f()\nf()\n", "if a:\n  f()\n"),  # indented differently
        ("a.cc", "f(); /*f();*/", "// f();"),  # only a comment
        ("a.md", "one\ntwo", "one two"),  # not code
    ],
)
def test_other_code_is_no_place_for_a_fault(runner, file, text, find):
    assert runner.anchors.places(text, find, file) == []


def test_code_that_occurs_twice_has_two_places(runner):
    assert len(runner.anchors.places("f(a); f( a );", "f(a );", "a.cc")) == 2


@pytest.mark.parametrize(
    ("test", "tests", "expected"),
    [
        ("A.b", "A.b", True),
        ("A.bc", "A.b", False),
        ("A.bc", "A.b*", True),
        ("A.bc", "A.b?", True),
        ("AxB.c", "A.c:*B.c", True),
        ("P/A.b/0", "P/A.b/0", True),
        ("A.b", "A.*-A.b", False),
        ("A.b", "-A.c*:B.*", True),
        ("A.b", "-A.c*:A.*", False),
        ("A.b", "a.b:A+b", False),
    ],
)
def test_a_filter_selects_the_tests_that_googletest_selects(runner, test, tests, expected):
    assert runner.is_selected(test, tests) is expected
