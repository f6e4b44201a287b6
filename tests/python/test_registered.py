# SPDX-License-Identifier: Apache-2.0
"""tests/cpp/check_registered.py: no test of the core is left out, with or without sanitizers."""

import importlib.util
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[1] / "cpp" / "check_registered.py"
ASKING = '#include "test_iterations.h"\n\nTEST(Asks, does_less) { testing::rounds(100); }\n'


def check(monkeypatch: pytest.MonkeyPatch, directory: Path, listing: str, *options: str) -> int:
    program = directory / "program"
    program.write_text(f"#!/bin/sh\nprintf '{listing}'\n")
    program.chmod(0o755)
    spec = importlib.util.spec_from_file_location("check_registered", CHECK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [str(CHECK), str(program), str(directory), *options])
    return module.main()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "asks_test.cc").write_text(ASKING)
    (tmp_path / "other_test.cc").write_text("TEST_F(Other, is_there) {}\n")
    return tmp_path


def test_all_tests_are_required(monkeypatch, sources, capsys):
    assert check(monkeypatch, sources, "Asks.\\n  does_less\\nOther.\\n  is_there\\n") == 0
    assert check(monkeypatch, sources, "Asks.\\n  does_less\\n") == 1
    assert "Other.is_there is not in" in capsys.readouterr().out


def test_without_sanitizers_tests_with_reduced_iterations_are_required(monkeypatch, sources, capsys):
    assert check(monkeypatch, sources, "Asks.\\n  does_less\\n", "--plain") == 0
    assert check(monkeypatch, sources, "Other.\\n  is_there\\n", "--plain") == 1
    assert "Asks.does_less is not in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fixture.h", '#include "test_iterations.h"\n'),
        ("fixture.h", '#include "test_iterations.h"\nTEST(Asks, less) {}\n'),
        ("fixture.cc", '#include "test_iterations.h"\nint steps() { return testing::rounds(100); }\n'),
        (
            "asks_test.cc",
            '#include "fixture.h"\nTEST(Asks, less) { if (testing::kSanitized) GTEST_SKIP(); }\n',
        ),
        ("asks_test.cc", "#if defined(__SANITIZE_THREAD__)\n#endif\nTEST(Asks, less) {}\n"),
    ],
)
def test_unknown_files_must_not_check_for_sanitizers(monkeypatch, sources, capsys, name, text):
    (sources / name).write_text(text)
    listing = "Asks.\\n  does_less\\n  less\\nOther.\\n  is_there\\n"
    assert check(monkeypatch, sources, listing) == 1
    assert f"{name}: checks for a sanitizer" in capsys.readouterr().out
