# SPDX-License-Identifier: Apache-2.0
"""Sizes such as ``32GiB``, ``32Gi``, ``500 GB``. The C++ core parses and formats them; the configuration, the
command line and the server all use this module.
"""

import math


def parse_byte_size(value: object) -> int:
    """Returns the bytes for an int, a float or a text such as ``"32GiB"``.

    A number without a unit means bytes. Below 1 MiB it is refused, because it is probably a mistake. Raises
    ValueError naming the value and the possible forms.
    """
    from kv_offload import _core

    text = value
    if isinstance(value, int) and not isinstance(value, bool):
        text = str(value)
    elif isinstance(value, float) and math.isfinite(value):  # vLLM's --kv-offloading-size: GiB times 2^30
        text = str(int(value))
    if not isinstance(text, str):
        raise ValueError(f"{value!r} is not a size; write a text such as '32GiB', or bytes")
    return _core.parse_byte_size(text)


def format_bytes(count: int) -> str:
    """Formats a size, such as ``32.0 GiB``; whole bytes below 1 KiB."""
    from kv_offload import _core

    return _core.format_bytes(count)
