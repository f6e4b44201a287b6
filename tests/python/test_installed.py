# SPDX-License-Identifier: Apache-2.0
"""A source checkout on the path, without the compiled core."""

import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "kv_offload"


def test_a_checkout_that_hides_the_installed_package_is_named(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "kv_offload", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from kv_offload import _core"
    # -I -S: without the site packages, where an editable install would provide kv_offload for any checkout.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: kv_offload was imported from " + str(tmp_path / "kv_offload"))
    assert "PYTHONSAFEPATH=1" in last
