# SPDX-License-Identifier: Apache-2.0
"""Makes foreign text safe for a terminal: metric labels, namespace.json, file names, server replies."""


def printable(text: str, keep: str = "") -> str:
    """Escapes each unprintable character in ``text``, so that it can neither move the cursor nor start a
    line.

    ``keep``: characters that are not escaped.
    """
    return "".join(
        sign if sign.isprintable() or sign in keep else sign.encode("unicode_escape").decode("ascii")
        for sign in text
    )
