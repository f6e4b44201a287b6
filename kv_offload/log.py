# SPDX-License-Identifier: Apache-2.0
"""Loggers below vLLM's, so that our lines have its format, level and destination.

vLLM configures only the logger ``vllm``. A child of it does not need to import vLLM, and outside vLLM it
behaves like any logger.
"""

import logging

ROOT = "vllm.kv_offload"


def get_logger(name: str) -> logging.Logger:
    """Returns the logger of one of our modules: ``get_logger(__name__)``."""
    tail = name.removeprefix("kv_offload").lstrip(".")
    return logging.getLogger(f"{ROOT}.{tail}" if tail else ROOT)
