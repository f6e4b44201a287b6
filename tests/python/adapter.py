# SPDX-License-Identifier: Apache-2.0
"""Makes ``kv_offload.specs`` importable from a checkout, for checks that run under any vLLM."""

import importlib.util
import os
import sys
from pathlib import Path

SPECS = Path(__file__).parent.parent.parent / "specs"


def _install(name: str, path: str | Path, search: list[str] | None = None) -> None:
    """Loads the file at ``path`` as ``kv_offload.<name>``, also when the package is installed."""
    import kv_offload

    full_name = f"kv_offload.{name}"
    spec = importlib.util.spec_from_file_location(full_name, path, submodule_search_locations=search)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module
    spec.loader.exec_module(module)
    setattr(kv_offload, name, module)


def use_specs() -> None:
    """Maps ``kv_offload.specs`` to the top-level ``specs/``, unless an installed package provides it.

    KV_OFFLOAD_TEST_CORE names another build of the core (one with sanitizers).
    """
    if other_core := os.environ.get("KV_OFFLOAD_TEST_CORE"):
        _install("_core", other_core)
    if importlib.util.find_spec("kv_offload.specs") is None:
        _install("specs", SPECS / "__init__.py", [str(SPECS)])
