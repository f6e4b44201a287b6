# SPDX-License-Identifier: Apache-2.0
"""The vLLM adapter: the only code of this project that imports vLLM. Installed as ``kv_offload.specs``.

With ``spec_module_path: kv_offload.specs``, vLLM looks up ``KVOffloadSpec`` in this module. Only that lookup
imports vLLM and the adapter, so the plugin entry point is free if unused.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .spec import KVOffloadSpec

__all__ = ["KVOffloadSpec"]


def __getattr__(name: str) -> Any:
    if name == "KVOffloadSpec":
        from .spec import KVOffloadSpec

        return KVOffloadSpec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
