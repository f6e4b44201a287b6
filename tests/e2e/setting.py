# SPDX-License-Identifier: Apache-2.0
"""Shared by the end-to-end tests: paths, sizes, and the answers without the connector."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_server import Answer, LocalServer, kv_transfer_config

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# The scripts call `python` and `kv-offload`; they must find those of the running interpreter.
SCRIPT_ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
PROMPT_BLOCKS = 24
GPU_BLOCKS = 40  # holds one prompt and a part of another, so that each prompt evicts the previous one
PROMPTS = 6

Serve = Callable[..., LocalServer]


@dataclass(frozen=True)
class Reference:
    """Prompts, and the answers of a server without the connector."""

    prompts: list[list[int]]
    answers: list[Answer]


def patient_config(cpu_bytes: str, root: Path, **tier: Any) -> dict[str, Any]:
    """Returns a configuration for tests that count hits: it loads every chunk that exists, and a machine that
    stalls for a minute changes nothing. ``tier`` holds further options of the disk tier.
    """
    config = kv_transfer_config(cpu_bytes, root, load_policy="always", lookup_timeout_ms=240_000)
    config["kv_connector_extra_config"]["secondary_tiers"][0] |= {"op_timeout_ms": 240_000, **tier}
    return config
