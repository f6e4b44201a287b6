# SPDX-License-Identifier: Apache-2.0
"""Loggers under vLLM's own, so that our lines carry its format, level and destination.

vLLM configures the logger ``vllm`` and no other; a child of it needs no import of vLLM, and outside
vLLM it behaves like any logger.
"""

import logging

ROOT = "vllm.kv_offload"


def get_logger(name: str) -> logging.Logger:
    """The logger of one of our modules: ``get_logger(__name__)``."""
    tail = name.removeprefix("kv_offload").lstrip(".")
    return logging.getLogger(f"{ROOT}.{tail}" if tail else ROOT)
