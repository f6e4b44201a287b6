# SPDX-License-Identifier: Apache-2.0
"""Finds the vLLM releases to test against, and runs a test file under each of them.

The installed vLLM is one release. Unpacked wheels of others (their pure-Python part is enough) are
directories named in KV_OFFLOAD_VLLM_TREES, separated by ``:``, or ``.cache/vllm-<minor>`` of the checkout.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from forked_process import Zygote

from kv_offload.vllm_versions import RELEASES

TESTS = Path(__file__).parent
ROOT = TESTS.parent.parent
MINORS = RELEASES
# What the checks import, except this project. Importing takes ten seconds of CPU time.
MODULES = (
    "pytest",
    "vllm.config",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.worker.kv_connector_model_runner_mixin",
)


def _minor_of(tree: Path) -> str | None:
    try:
        text = (tree / "vllm" / "_version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    version = text.split("__version__ = version = ")[-1].split("'")[1]
    return ".".join(version.split(".")[:2])


def installed_tree() -> Path | None:
    """Returns the directory of the installed vLLM."""
    installed = importlib.util.find_spec("vllm")
    if installed is None or installed.origin is None:
        return None
    return Path(installed.origin).parent.parent


def installed_minor() -> str | None:
    """Returns the minor release of the installed vLLM, such as "0.32"."""
    tree = installed_tree()
    return None if tree is None else _minor_of(tree)


def trees() -> dict[str, Path]:
    """Maps a minor release to the directory to put on the path."""
    named = [Path(part) for part in os.environ.get("KV_OFFLOAD_VLLM_TREES", "").split(os.pathsep) if part]
    named += [path for minor in MINORS if (path := ROOT / ".cache" / f"vllm-{minor}").is_dir()]
    if (installed := installed_tree()) is not None:
        named.append(installed)
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


def environment_of(tree: Path) -> dict[str, str]:
    """Returns the environment of a process whose vLLM is ``tree``."""
    # The checkout's kv_offload would hide an installed package that has the compiled core.
    checkout = [] if is_installed() else [str(ROOT)]
    path = os.pathsep.join([str(tree), str(TESTS), *checkout, os.environ.get("PYTHONPATH", "")])
    return (
        os.environ
        | {"PYTHONPATH": path, "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
        | {"OMP_NUM_THREADS": "1"}  # several run concurrently: threads that wait for each other would spin
        # vLLM caches the properties of model classes here and forgets those of other releases. To find them
        # again, it starts a process that takes ten seconds of CPU time.
        | {"VLLM_CACHE_ROOT": str(ROOT / "build" / "vllm-cache" / (_minor_of(tree) or "unknown"))}
    )


class Release:
    """Runs ``check_*.py`` with pytest, each in a process of its own whose vLLM is ``tree``.

    The processes are forks of one that has imported that vLLM. Use it as a context manager.
    """

    def __init__(self, tree: Path, logs: Path) -> None:
        self.tree, self.logs = tree, logs
        self.environment = environment_of(tree)
        self.zygote = Zygote(logs / "zygote.log", self.environment, MODULES)

    def __enter__(self) -> Release:
        self.zygote.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.zygote.__exit__(*error)

    def run(self, file: str, timeout: float = 1800) -> str:
        """Returns the output; raises AssertionError with it when a check fails or none ran."""
        log = self.logs / f"{file.replace('/', '-')}.log"
        run = self.zygote.start(pytest_command(file), self.environment, log, TESTS)
        try:
            code = run.wait(timeout)
        finally:
            run.terminate()
        return _output(log.read_text(errors="replace"), code, file, self.tree)


def pytest_command(file: str, *arguments: str) -> list[str]:
    command = ["pytest", str(TESTS / file), "-q", "-ra", "-p", "no:cacheprovider", "--no-header"]
    return [*command, "-o", "python_files=check_*.py", "-o", "filterwarnings=default", *arguments]


def _output(text: str, code: int, file: str, tree: Path) -> str:
    assert code == 0, f"{file} under {tree}:\n{text[-12000:]}"
    return text


def run_under(tree: Path, file: str, *arguments: str, timeout: float = 1800, **environment: str) -> str:
    """As Release.run, in a process that imports vLLM itself, with arguments of pytest and an environment."""
    result = subprocess.run(
        [sys.executable, "-m", *pytest_command(file, *arguments)],
        cwd=TESTS,
        env=environment_of(tree) | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    return _output(result.stdout, result.returncode, file, tree)
