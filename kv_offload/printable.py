# SPDX-License-Identifier: Apache-2.0
"""Text that others wrote, for a terminal: metric labels, namespace.json, file names, replies of servers."""


def printable(text: str, keep: str = "") -> str:
    """``text`` with each character that is not printed escaped, so that it can neither move the cursor nor
    begin a line; ``keep``: characters that stay."""
    return "".join(
        sign if sign.isprintable() or sign in keep else sign.encode("unicode_escape").decode("ascii")
        for sign in text
    )
