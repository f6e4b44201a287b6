# SPDX-License-Identifier: Apache-2.0
"""tests/license_headers.py, which the lint stage runs: a source file without its licence is reported."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

LINE = "SPDX-License-Identifier: Apache-2.0"


@pytest.fixture(scope="module")
def headers():
    path = Path(__file__).resolve().parents[1] / "license_headers.py"
    spec = importlib.util.spec_from_file_location("license_headers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "pyproject.toml").write_text('[project]\nlicense = "Apache-2.0"\n')
    (tmp_path / ".gitignore").write_text("built.py\n")
    (tmp_path / "built.py").write_text("import os\n")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "notes.md").write_text("No source file.\n")
    (tmp_path / "good.cc").write_text(f"// {LINE}\nint one() {{ return 1; }}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("a.cc", "int i;\n", f"// {LINE}\nint i;\n"),
        ("a.cu", "// Kernels.\n", f"// {LINE}\n// Kernels.\n"),
        ("a.h", "// SPDX-License-Identifier: MIT\n", f"// {LINE}\n// SPDX-License-Identifier: MIT\n"),
        ("a.py", '"""Doc."""\n', f'# {LINE}\n"""Doc."""\n'),
        ("a.sh", "#!/usr/bin/env bash\n# Builds.\n", f"#!/usr/bin/env bash\n# {LINE}\n# Builds.\n"),
        (".ci/run", "#!/bin/sh\n", f"#!/bin/sh\n# {LINE}\n"),
        ("x/CMakeLists.txt", "project(x)\n", f"# {LINE}\nproject(x)\n"),
    ],
)
def test_a_source_file_without_a_licence_is_reported_and_gets_one(headers, tree, capsys, name, before, after):
    path = tree / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(before)
    assert headers.main([], tree) == 1
    assert capsys.readouterr().out.startswith(f"{name}: ")
    assert headers.main(["--add"], tree) == 0
    assert path.read_text() == after
    assert headers.main([], tree) == 0
    assert headers.main(["--add"], tree) == 0
    assert path.read_text() == after


def test_other_files_need_no_licence(headers, tree, capsys):
    assert headers.main([], tree) == 0
    assert capsys.readouterr().out == ""
    assert (tree / "built.py").read_text() == "import os\n"
