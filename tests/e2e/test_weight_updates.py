# SPDX-License-Identifier: Apache-2.0
"""Sleep, pause and weight updates of a real server: the records that stay valid, and those that must not.

On CPU vLLM frees no memory when it sleeps, but it pauses, resets and wakes up as on a GPU.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import waiting
from answers import BLOCK, NOISE, assert_same, make_prompts
from local_server import Answer, LocalServer, ServerError, difference
from setting import Serve, patient_config

BLOCKS = 8  # per prompt
PROMPTS = make_prompts(2, BLOCKS, seed=11)


def config(root: Path, **extra: Any) -> dict[str, Any]:
    made = patient_config("256MiB", root)
    made["kv_connector_extra_config"] |= extra
    return made


def ask_all(server: LocalServer) -> list[Answer]:
    return [server.ask(prompt) for prompt in PROMPTS]


def cached_blocks(answers: list[Answer]) -> list[int]:
    return [answer.cached_tokens // BLOCK for answer in answers]


def sleep(server: LocalServer) -> None:
    server.post("/sleep?level=1")
    server.post("/wake_up")


def pause(server: LocalServer) -> None:
    server.post("/pause")
    server.post("/resume")


def reload_weights(server: LocalServer) -> None:
    server.post("/collective_rpc", {"method": "reload_weights"})


WAYS: list[Callable[[LocalServer], None]] = [sleep, pause]


def test_with_fixed_weights_sleep_and_pause_keep_all_chunks(
    start: Serve, model: Path, tmp_path: Path
) -> None:
    kept = config(tmp_path, fixed_weights=True)
    with start(model, kept) as server:
        first = ask_all(server)
        waiting.recorded(tmp_path, 2 * BLOCKS, server)
        for way in WAYS:
            way(server)
            again = ask_all(server)
            assert cached_blocks(again) == [BLOCKS, BLOCKS]
            assert_same(again, first)
        with pytest.raises(ServerError, match="fixed_weights"):
            reload_weights(server)
    with start(model, kept) as server:
        after = ask_all(server)
        assert cached_blocks(after) == [BLOCKS, BLOCKS]
        assert_same(after, first)


def test_by_default_no_record_survives_a_weight_update(start: Serve, model: Path, tmp_path: Path) -> None:
    changing = tmp_path / "model"
    shutil.copytree(model, changing)
    with start(changing, config(tmp_path / "root")) as server:
        old = ask_all(server)
        for way in WAYS:
            way(server)
            assert cached_blocks(ask_all(server)) == [0, 0]
        server.post("/pause")
        negate_output_projection(changing)
        reload_weights(server)
        server.post("/resume")
        new = ask_all(server)
        assert cached_blocks(new) == [0, 0]
        assert min(difference(one, other) for one, other in zip(new, old, strict=True)) > NOISE
        assert "vLLM reset the KV cache" in server.log_file.read_text()
    with start(changing, config(tmp_path / "root")) as server:
        assert_same(ask_all(server), new)


def negate_output_projection(model: Path) -> None:
    """Replaces the weights in place, under the same names."""
    from safetensors.torch import load_file, save_file

    file = model / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.0.self_attn.v_proj.weight"
    save_file(weights | {name: -weights[name]}, file, metadata={"format": "pt"})
