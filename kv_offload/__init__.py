"""KV-cache offloading for vLLM.

Importing this package loads neither the C++ core nor numpy; its modules do so when they need to.
"""

__version__: str


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("vllm-kv-offload")
        except PackageNotFoundError:
            return "0+source"  # a checkout that is on the path but not installed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
