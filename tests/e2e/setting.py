"""What the end-to-end tests share: where things are, sizes, and the answers without the connector."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_server import Answer, LocalServer, kv_transfer_config

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# The scripts call `python` and `kv-offload`: those of the running interpreter.
SCRIPT_ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
PROMPT_BLOCKS = 24
GPU_BLOCKS = 40  # one prompt at a time, and a rest: each prompt pushes the one before out
PROMPTS = 6

Serve = Callable[..., LocalServer]


@dataclass(frozen=True)
class Reference:
    """Prompts and what the server without the connector says to them."""

    prompts: list[list[int]]
    answers: list[Answer]


def patient_config(cpu_bytes: str, root: Path, **tier: Any) -> dict[str, Any]:
    """For tests that count what comes back: all that is there is loaded, and a machine that stands still for
    a minute makes no difference. ``tier``: further options of the disk."""
    config = kv_transfer_config(cpu_bytes, root, load_policy="always", lookup_deadline_ms=240_000)
    config["kv_connector_extra_config"]["secondary_tiers"][0] |= {"op_deadline_ms": 240_000, **tier}
    return config
