"""Sizes as people write them: ``32GiB``, ``500 GB``, ``1073741824``."""

import math
import re

# The same units and the same reading as parse_byte_size in csrc/base/types.cc; a test compares both.
_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_NUMBER = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NAMES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_byte_size(value: object) -> int:
    """Bytes meant by an int, a whole float or a text such as ``"32GiB"``.

    Raises ValueError naming what was given and what is possible.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63:
        return value
    # vLLM's --kv-offloading-size arrives as a float of bytes.
    if isinstance(value, float) and value.is_integer() and 0 <= value < 2.0**63:
        return int(value)
    if isinstance(value, str):
        size = _parse_text(value)
        if size is not None:
            return size
    raise ValueError(
        f"{value!r} is not a size; write bytes or a number with "
        "KiB, MiB, GiB, TiB, KB, MB, GB or TB, such as 32GiB"
    )


def _parse_text(text: str) -> int | None:
    number = _NUMBER.match(text)
    if number is None:
        return None
    factor = _UNITS.get(text[number.end() :].replace(" ", "").lower())
    if factor is None:
        return None
    size = float(number.group()) * factor
    if not math.isfinite(size) or size < 0 or size >= 2.0**63:
        return None
    return int(size)


def format_bytes(count: int) -> str:
    """``32.0 GiB`` for people; whole bytes below 1 KiB."""
    value, unit = float(count), 0
    while value >= 1024 and unit + 1 < len(_NAMES):
        value /= 1024
        unit += 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {_NAMES[unit]}"
