"""Makes ``kv_offload.specs`` importable from a checkout, for checks that run under any vLLM."""

import importlib.util
import os
import sys
from pathlib import Path

SPECS = Path(__file__).parent.parent.parent / "specs"


def use_core(path: str) -> None:
    """Take the extension at ``path`` for ``kv_offload._core``, whatever is installed."""
    import kv_offload

    spec = importlib.util.spec_from_file_location("kv_offload._core", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kv_offload._core"] = module
    spec.loader.exec_module(module)
    kv_offload._core = module  # type: ignore[attr-defined]


def use_specs() -> None:
    """``kv_offload.specs`` is the top-level ``specs/``; an installed package has it already.

    KV_OFFLOAD_TEST_CORE names another build of the core to take (one with sanitizers).
    """
    if other_core := os.environ.get("KV_OFFLOAD_TEST_CORE"):
        use_core(other_core)
    if importlib.util.find_spec("kv_offload.specs") is not None:
        return
    import kv_offload

    spec = importlib.util.spec_from_file_location(
        "kv_offload.specs", SPECS / "__init__.py", submodule_search_locations=[str(SPECS)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kv_offload.specs"] = module
    spec.loader.exec_module(module)
    kv_offload.specs = module  # type: ignore[attr-defined]
