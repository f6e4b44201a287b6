# SPDX-License-Identifier: Apache-2.0
"""The vLLM adapter: the only code of this project that imports vLLM. Installed as ``kv_offload.specs``.

``spec_module_path: kv_offload.specs`` makes vLLM ask this module for ``KVOffloadSpec``; vLLM and the
adapter are imported only then, so that the plugin entry point costs nothing where it is not used.
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
