# SPDX-License-Identifier: Apache-2.0
"""The command ``kv-offload``: configuration, checks of this machine, and management of a root, without vLLM.

Exit status: 0 success, 1 something is damaged or refused, 2 wrong usage.
"""

from kv_offload.cli.app import app


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="kv-offload")


__all__ = ["app", "main"]
