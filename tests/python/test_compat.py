# SPDX-License-Identifier: Apache-2.0
"""An unsupported vLLM: other specs still work, ours is refused with one sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_trees import ROOT, TESTS

BASE = """
from abc import ABC, abstractmethod
class OffloadingManager(ABC):
    @abstractmethod
    def lookup(self, key): ...
class OffloadingSpec(ABC): ...
"""
FACTORY = """
class OffloadingSpecFactory:
    registered = []
    @classmethod
    def register_spec(cls, name, module_path, class_name):
        if name in cls.registered:
            raise ValueError("registered")
        cls.registered.append(name)
"""


def _vllm(root: Path, version: str, **modules: str) -> Path:
    """Creates a vllm package with only these modules below vllm.v1.kv_offload."""
    package = root / "vllm" / "v1" / "kv_offload"
    package.mkdir(parents=True)
    (root / "vllm" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (root / "vllm" / "v1" / "__init__.py").touch()
    (package / "__init__.py").touch()
    for name, text in modules.items():
        (package / f"{name}.py").write_text(text)
    return root


def _run(tree: Path, program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(tree), str(TESTS), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", f"import adapter; adapter.use_specs()\n{program}"],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


USE = "from kv_offload.specs import KVOffloadSpec"


@pytest.mark.parametrize("version", ["0.29.1", "0.34.0", "1.2.3"])
def test_another_release_is_refused_with_the_supported_ones(tmp_path: Path, version: str) -> None:
    result = _run(_vllm(tmp_path, version, base=BASE, config=""), USE)
    last = result.stderr.strip().splitlines()[-1]
    assert "UnsupportedVllmError: KVOffloadSpec supports vLLM 0.31, 0.32 and 0.33" in last
    assert f"this is vLLM {version}" in last


def test_another_interface_is_refused_with_the_difference(tmp_path: Path) -> None:
    result = _run(_vllm(tmp_path, "0.33.1", base=BASE, config=""), USE)
    last = result.stderr.strip().splitlines()[-1]
    assert "OffloadingManager asks for lookup" in last
    assert "OffloadingConfig has no" in last


def test_a_vllm_without_offloading_specs_is_refused_in_the_same_way(tmp_path: Path) -> None:
    result = _run(_vllm(tmp_path, "0.32.0"), USE)
    last = result.stderr.strip().splitlines()[-1]
    assert "UnsupportedVllmError" in last
    assert "importing its kv_offload fails" in last


def test_an_untested_release_can_be_allowed_and_its_interface_is_checked(tmp_path: Path) -> None:
    result = _run(_vllm(tmp_path, "0.40.0", base=BASE, config=""), USE, KV_OFFLOAD_ALLOW_UNTESTED_VLLM="1")
    assert "OffloadingManager asks for lookup" in result.stderr


@pytest.mark.parametrize("modules", [{}, {"factory": FACTORY, "base": BASE, "config": ""}])
def test_the_plugin_never_stops_an_unsupported_vllm(tmp_path: Path, modules: dict[str, str]) -> None:
    result = _run(
        _vllm(tmp_path, "0.99.0", **modules),
        "from kv_offload.specs.plugin import register; register(); register()",
    )
    assert result.returncode == 0, result.stderr
