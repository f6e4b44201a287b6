# SPDX-License-Identifier: Apache-2.0
"""vLLM's own MooncakeStoreConnector on the CPU platform, for comparison.

It is unchanged except for one thing: before it reads vLLM's cache, it waits for a CUDA event. On CPU the
forward pass has ended by then, so the wait is not necessary. remote_reload.py uses it through
``kv_connector_module_path``.
"""

from __future__ import annotations

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import MooncakeStoreConnector


class NothingToWaitFor:
    """Replaces torch.cuda.Event."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class CpuMooncakeStoreConnector(MooncakeStoreConnector):  # type: ignore[misc]
    """MooncakeStoreConnector for platforms without CUDA events."""

    torch.cuda.Event = NothingToWaitFor
