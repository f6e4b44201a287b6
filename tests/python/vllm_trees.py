# SPDX-License-Identifier: Apache-2.0
"""Finds the vLLM releases to test against, and runs a test file under each of them.

The installed vLLM is one release. Unpacked wheels of others (their pure-Python part is enough) are
directories named in KV_OFFLOAD_VLLM_TREES, separated by ``:``, or ``.cache/vllm-<minor>`` of the checkout.
"""

import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from kv_offload.vllm_versions import RELEASES

TESTS = Path(__file__).parent
ROOT = TESTS.parent.parent
MINORS = RELEASES


def _minor_of(tree: Path) -> str | None:
    try:
        text = (tree / "vllm" / "_version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    version = text.split("__version__ = version = ")[-1].split("'")[1]
    return ".".join(version.split(".")[:2])


def trees() -> dict[str, Path]:
    """Maps a minor release to the directory to put on the path."""
    named = [Path(part) for part in os.environ.get("KV_OFFLOAD_VLLM_TREES", "").split(os.pathsep) if part]
    named += [path for minor in MINORS if (path := ROOT / ".cache" / f"vllm-{minor}").is_dir()]
    installed = importlib.util.find_spec("vllm")
    if installed is not None and installed.origin is not None:
        named.append(Path(installed.origin).parent.parent)
    found: dict[str, Path] = {}
    for tree in named:
        minor = _minor_of(tree)
        if minor is not None:
            found.setdefault(minor, tree)
    return found


@cache
def is_installed() -> bool:
    """True if the package with its core is importable without the checkout on the path."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('kv_offload._core') is None)"
    return (
        subprocess.run([sys.executable, "-P", "-c", code], cwd=TESTS, stderr=subprocess.DEVNULL).returncode
        == 0
    )


def run_under(tree: Path, file: str, *arguments: str, timeout: float = 1800, **environment: str) -> str:
    """Runs one ``check_*.py`` with pytest, in a process of its own whose vLLM is ``tree``. Returns its
    output; raises AssertionError with the output when a check fails or none ran.
    """
    command = [sys.executable, "-m", "pytest", str(TESTS / file), "-q", "-ra", "-p", "no:cacheprovider"]
    command += ["-o", "python_files=check_*.py", "-o", "filterwarnings=default", "--no-header", *arguments]
    # The checkout's kv_offload would hide an installed package that has the compiled core.
    checkout = [] if is_installed() else [str(ROOT)]
    path = os.pathsep.join([str(tree), str(TESTS), *checkout, os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        command,
        cwd=TESTS,
        env=os.environ
        | {"PYTHONPATH": path, "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
        | {"OMP_NUM_THREADS": "1"}  # several run concurrently: threads that wait for each other would spin
        | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, f"{file} under {tree}:\n{result.stdout[-12000:]}"
    return result.stdout
