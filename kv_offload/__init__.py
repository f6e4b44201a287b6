# SPDX-License-Identifier: Apache-2.0
"""KV-cache offloading for vLLM.

Importing this package loads neither the C++ core nor numpy; its modules do so when they need to.
"""

from typing import Any

__version__: str


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("vllm-kv-offload")
        except PackageNotFoundError:
            return "0+source"  # a checkout that is on the path but not installed
    if name == "_core":
        from importlib import import_module

        try:
            return import_module("kv_offload._core")
        except ModuleNotFoundError as error:
            if error.name != "kv_offload._core":
                raise
            raise ImportError(
                f"kv_offload was imported from {__path__[0]}, which has no compiled core. If the package is "
                "installed, a source checkout hides it: run from another directory, or set PYTHONSAFEPATH=1 "
                "and remove the checkout from PYTHONPATH. Otherwise install it: pip install ."
            ) from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
