# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several contract checks need."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapter
import pytest
import torch

adapter.use_specs()

from kv_offload.specs import compat  # noqa: E402


@pytest.fixture
def vllm_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The parts of a VllmConfig that a worker reads, with the fields that matter."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    layer = SimpleNamespace(
        attn_backend=SimpleNamespace(get_name=lambda: "CPU_ATTN", customize_spec=lambda spec: spec),
        get_kv_cache_spec=lambda _: spec,
    )
    made = SimpleNamespace(
        model_config=SimpleNamespace(
            revision="abc", dtype="torch.bfloat16", quantization=None, hf_overrides={}, max_model_len=100
        ),
        load_config=SimpleNamespace(download_dir=str(tmp_path)),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256", cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context={"layer.0": layer}),
        parallel_config=SimpleNamespace(nnodes_within_dp=1),
        speculative_config=None,
    )
    monkeypatch.setattr(compat, "current_vllm_config", lambda: made)
    return made
