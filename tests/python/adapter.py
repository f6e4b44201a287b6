"""Makes ``kv_offload.specs`` and a core importable from a checkout, for checks that run under any vLLM."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

SPECS = Path(__file__).parent.parent.parent / "specs"


def use_specs() -> None:
    """``kv_offload.specs`` is the top-level ``specs/``; an installed package has it already."""
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


def has_real_core() -> bool:
    return importlib.util.find_spec("kv_offload._core") is not None


def use_core(name: str | None = None) -> Any:
    """Put "real" (the extension) or "plain" (plain_core.py) under kv_offload._core; by default the real one,
    plain where it is not built. KV_OFFLOAD_TEST_CORE overrides. Returns the module."""
    import kv_offload

    name = name or os.environ.get("KV_OFFLOAD_TEST_CORE") or ("real" if has_real_core() else "plain")
    if name == "plain":
        import plain_core

        module = plain_core.as_module()
        sys.modules["kv_offload._core"] = module
        kv_offload._core = module  # type: ignore[attr-defined]
        return module
    from kv_offload import _core

    return _core


def is_plain(core: Any) -> bool:
    return getattr(core, "is_plain", False)
