# SPDX-License-Identifier: Apache-2.0
"""Sizes as people write them: ``32GiB``, ``32Gi``, ``500 GB``. The C++ core reads and writes them; the
configuration, the command line and the server all come here.
"""

import math


def parse_byte_size(value: object) -> int:
    """Bytes meant by an int, a float or a text such as ``"32GiB"``.

    A number without a unit is bytes, and below 1 MiB refused: it was hardly meant so. Raises ValueError
    naming what was given and what is possible.
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
    """``32.0 GiB`` for people; whole bytes below 1 KiB."""
    from kv_offload import _core

    return _core.format_bytes(count)
