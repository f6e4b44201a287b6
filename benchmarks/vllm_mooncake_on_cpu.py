# SPDX-License-Identifier: Apache-2.0
"""vLLM's own MooncakeStoreConnector on the CPU platform, for comparison.

It runs as it is but for one thing: before it reads vLLM's cache it waits for an event of CUDA. On CPU the
forward pass has ended by then, so there is nothing to wait for. Used by remote_reload.py through
``kv_connector_module_path``.
"""

from __future__ import annotations

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import MooncakeStoreConnector


class NothingToWaitFor:
    """In the place of torch.cuda.Event."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class CpuMooncakeStoreConnector(MooncakeStoreConnector):  # type: ignore[misc]
    """MooncakeStoreConnector where no event of CUDA can be made."""

    torch.cuda.Event = NothingToWaitFor
