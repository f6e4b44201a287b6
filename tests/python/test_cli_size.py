# SPDX-License-Identifier: Apache-2.0
"""kv-offload size: the bytes per token of a model, against known figures of real models."""

import json
import math
import sys
import types

import pytest
from typer.testing import CliRunner

from kv_offload.cli import app
from kv_offload.model_shape import DTYPE_BYTES, model_shape

GIB = 1 << 30
LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_size": 7168,
    "torch_dtype": "bfloat16",
}
GEMMA_3 = {
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_size": 2560,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
    "torch_dtype": "bfloat16",
}


def run(*arguments, status=0):
    result = CliRunner().invoke(app, ["size", *(str(argument) for argument in arguments)])
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    return result


@pytest.fixture
def config(tmp_path):
    def write(content):
        path = tmp_path / "config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def sized(path, *arguments):
    return json.loads(run(path, "--json", *arguments).stdout)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (LLAMA_8B, 131_072),  # 32 layers x 8 heads x (128 + 128) values x 2 bytes
        (LLAMA_8B | {"num_key_value_heads": None}, 524_288),  # without grouped heads
        (LLAMA_8B | {"head_dim": 64}, 65_536),
        (LLAMA_8B | {"torch_dtype": "float32"}, 131_072),  # served in bfloat16
        (DEEPSEEK_V3, 70_272),  # 61 layers x (512 + 64) values x 2 bytes; K and V share them
        (DEEPSEEK_V3 | {"index_head_dim": 128}, 70_272 + 61 * 132),
        (GEMMA_3, 12 * 4 * 512 * 2),
        ({**LLAMA_8B, "num_kv_shared_layers": 12}, 81_920),
        ({**LLAMA_8B, "layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8}, 32_768),
        ({**LLAMA_8B, "hybrid_override_pattern": "M-*M" * 8}, 32_768),
        ({**LLAMA_8B, "attn_layer_period": 8, "attn_layer_offset": 4}, 16_384),
    ],
)
def test_bytes_per_token_match_the_model_config(config, content, expected):
    facts = sized(config(content))
    assert facts["bytes_per_token"]["bfloat16"] == expected


def test_groups_and_dtypes_add_up(config):
    facts = sized(config(GEMMA_3))
    assert {(group["name"], group["layers"]) for group in facts["groups"]} == {
        ("sliding attention (1,024 tokens)", 10),
        ("full attention", 2),
    }
    for dtype in ("bfloat16", "fp8"):
        parts = [group["bytes_per_token"][dtype] for group in facts["groups"]]
        assert sum(parts) == facts["bytes_per_token"][dtype]
    assert facts["bytes_per_token"]["bfloat16"] == 2 * facts["bytes_per_token"]["fp8"]


def test_groups_are_split_as_vllm_does():
    # Ten windowed and two full layers: groups of two layers each, so that all blocks have one size.
    chunks = model_shape(GEMMA_3).geometry("bfloat16").groups
    assert [chunk.shard_bytes for chunk in chunks] == [(2 * 4 * 512 * 2 * 16,)] * 6


QWEN_3_NEXT = {  # Qwen3-Next-80B-A3B: 36 layers of a gated delta net, 12 of attention
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "torch_dtype": "bfloat16",
}
GRANITE_4 = {  # Mamba 2
    "num_hidden_layers": 40,
    "layer_types": (["mamba"] * 9 + ["attention"]) * 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "torch_dtype": "bfloat16",
}
JAMBA = {  # Mamba 1
    "num_hidden_layers": 32,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "torch_dtype": "bfloat16",
}
LFM_2 = {
    "num_hidden_layers": 16,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 2048,
    "conv_L_cache": 3,
    "torch_dtype": "bfloat16",
}


def vllms_state(content, ranks):
    """Returns the bytes of one layer's state on one rank, by vLLM's own arithmetic, in bfloat16."""
    utils = pytest.importorskip(
        "vllm.model_executor.layers.mamba.mamba_utils", reason="vLLM is not installed"
    )
    shapes = utils.MambaStateShapeCalculator
    if "linear_num_value_heads" in content:
        found = shapes.gated_delta_net_state_shape(ranks, 16, 32, 128, 128, 4)
    elif "mamba_n_heads" in content:
        found = shapes.mamba2_state_shape(ranks, 128 * 64, 1, 128, 64, 128, 4)
    elif "mamba_expand" in content:
        found = shapes.mamba1_state_shape(ranks, 2 * 4096, 16, 4)
    else:
        found = shapes.short_conv_state_shape(ranks, 2048, 3)
    return sum(2 * math.prod(shape) for shape in found)


@pytest.mark.parametrize("content", [QWEN_3_NEXT, GRANITE_4, JAMBA, LFM_2])
def test_the_size_of_a_state_equals_vllms(content):
    (state,) = model_shape(content).states
    assert state.state_bytes(DTYPE_BYTES, "bfloat16") == vllms_state(content, 1)


@pytest.mark.parametrize(
    ("content", "block", "groups"),
    [(QWEN_3_NEXT, 544, 4), (GRANITE_4, 528, 10), (JAMBA, 80, 8), (LFM_2, 16, 3)],
)
def test_tokens_per_tier_count_the_states(config, content, block, groups):
    """All blocks are as large as the state (vLLM raises the block size); each group has one per block."""
    facts = sized(config(content), "--cpu", "1GiB")
    assert facts["tokens_per_chunk"] == facts["tokens_per_block"] == block
    (attention,) = facts["groups"]
    (state,) = facts["states"]
    per_token = attention["bytes_per_token"]["bfloat16"] // attention["layers"]
    assert (block - 16) * per_token < state["bytes"]["bfloat16"] <= max(block, 16) * per_token
    layers = attention["layers"] + state["layers"]
    assert facts["tiers"][0]["tokens"] == pytest.approx(GIB / (layers * per_token), rel=0.01)
    assert len(model_shape(content).geometry("bfloat16").groups) == groups


def test_a_state_of_unknown_size_is_noted(config):
    facts = sized(config({**LLAMA_8B, "layer_types": ["mamba"] * 24 + ["full_attention"] * 8}))
    assert "24 mamba layers keep a state of a size not known here; it is not counted" in facts["notes"]


def test_the_text_output_shows_states(config):
    text = " ".join(run(config(QWEN_3_NEXT)).output.split())
    assert "and 36 layers with a state (linear_attention) of 1.0 MiB each, one per block" in text
    assert "uses blocks of 544 tokens" in text


def test_tokens_per_tier_and_per_gib(config):
    facts = sized(config(LLAMA_8B), "--cpu", "32GiB", "--disk-size", "500GiB", "--disk-size", "1TiB")
    assert facts["tokens_per_gib"]["memory"] == 8192
    assert [(tier["name"], tier["tokens"]) for tier in facts["tiers"]] == [
        ("cpu", 262_144),
        ("fs", 500 * GIB * 16 // ((2 << 20) + 4096)),
        ("fs-2", 1024 * GIB * 16 // ((2 << 20) + 4096)),
    ]


def test_size_shows_the_tiers_of_a_configuration(config, tmp_path):
    tier = {"type": "fs", "root_dir": str(tmp_path / "kv"), "max_bytes": "10GiB"}
    extra = {"spec_name": "KVOffloadSpec", "cpu_bytes_to_use": "1GiB", "secondary_tiers": [tier]}
    facts = sized(config(LLAMA_8B), "--config", json.dumps(extra))
    assert [(tier["name"], tier["bytes"]) for tier in facts["tiers"]] == [("cpu", GIB), ("fs", 10 * GIB)]


def test_a_disk_that_is_smaller_than_host_memory_is_noted(config):
    model = config(LLAMA_8B)
    (note,) = sized(model, "--cpu", "32GiB", "--disk-size", "31GiB", "--disk-size", "32GiB")["notes"]
    assert note.startswith("fs holds 31.0 GiB, host memory 32.0 GiB: ")
    assert sized(model, "--disk-size", "1GiB")["notes"] == []


def test_chunks_longer_than_a_sliding_window_are_noted(config):
    model = config(GEMMA_3)
    assert sized(model, "--blocks-per-chunk", 64)["notes"] == []
    (note,) = sized(model, "--blocks-per-chunk", 65)["notes"]
    assert note.startswith("chunks of 1,040 tokens are longer than the sliding window of 1,024: ")
    assert "the last 64 of 65 blocks" not in sized(model, "--blocks-per-chunk", 128)["notes"][0]
    assert "the last 64 of 128 blocks" in sized(model, "--blocks-per-chunk", 128)["notes"][0]
    # Longer by less than a block: all blocks are stored.
    assert sized(model, "--block-size", 48, "--blocks-per-chunk", 22)["notes"] == []


def test_more_ranks_than_heads_copy_them_but_mla_is_kept_once(config):
    assert sized(config(LLAMA_8B), "-t", 8)["bytes_per_token"]["bfloat16"] == 131_072
    assert sized(config(LLAMA_8B), "-t", 16)["bytes_per_token"]["bfloat16"] == 262_144
    assert sized(config(DEEPSEEK_V3), "-t", 8)["bytes_per_token"]["bfloat16"] == 70_272


def test_break_even_is_bytes_per_token_times_prefill(config):
    facts = sized(config(LLAMA_8B), "--prefill", 8000, "--kv-dtype", "fp8")
    assert facts["break_even"] == [{"prefill_tokens_per_second": 8000, "bytes_per_second": 8000 * 65_536}]


def test_the_text_output_shows_bytes_speed_and_capacity(config):
    text = " ".join(run(config(LLAMA_8B), "--cpu", "1GiB", "--prefill", "8192").output.split())
    for part in ("a token takes 128.0 KiB in bfloat16", "8,192 tokens/s 1.0 GiB/s", "cpu 1.0 GiB 8,192"):
        assert part in text


def test_a_model_in_the_local_hub_cache_is_sized(config, tmp_path, monkeypatch):
    folder = tmp_path / "hub" / "models--org--small"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("c0ffee")
    (folder / "snapshots" / "c0ffee").mkdir(parents=True)
    (folder / "snapshots" / "c0ffee" / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert sized("org/small")["bytes_per_token"]["bfloat16"] == 131_072


def test_a_state_of_unknown_dtype_is_counted_with_the_dtype_of_the_cache(config):
    plain = sized(config(GRANITE_4))
    facts = sized(config(GRANITE_4 | {"mamba_ssm_dtype": "fp7"}))
    assert facts["states"] == plain["states"]
    assert any("'fp7', not known here" in note for note in facts["notes"])
    assert sized(config(GRANITE_4 | {"mamba_ssm_dtype": "torch.float32"})) == sized(
        config(GRANITE_4 | {"mamba_ssm_dtype": "float32"})
    )


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ({}, "it has no num_hidden_layers"),
        ({**LLAMA_8B, "layer_types": ["quantum"] * 32}, "layers of an unknown kind: quantum"),
        ({**LLAMA_8B, "layer_types": ["mamba"] * 32}, "no layer has a KV cache for each token"),
        ({**LLAMA_8B, "hidden_size": None}, "it has no hidden_size"),
        ({**LLAMA_8B, "num_key_value_heads": [8, 8]}, "config.json cannot be interpreted"),
        ({**LLAMA_8B, "layer_types": 32}, "config.json cannot be interpreted"),
        ({"text_config": "none"}, "config.json cannot be interpreted"),
    ],
)
def test_a_model_that_cannot_be_sized_is_explained(config, content, part):
    result = run(config(content), status=2)
    assert result.stderr.startswith("kv-offload: ")
    assert part in result.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--kv-dtype", "fp3"], "possible: auto, float32"),
        (["--cpu", "1gig"], "is not a size"),
        (["--cpu", "1GiB", "--config", '{"cpu_bytes_to_use": 1}'], "leave out --cpu"),
        (["--prefill", "inf"], "infinity"),
    ],
)
def test_wrong_options_are_refused(config, arguments, part):
    assert part in run(config(LLAMA_8B), *arguments, status=2).stderr


def test_a_missing_model_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert "no such file or directory" in run(tmp_path / "none", status=2).stderr
    assert "has no config.json" in run(tmp_path, status=2).stderr


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """huggingface_hub with an answer that the test chooses; the local cache is empty."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))

    def answer(ask, download, offline=False):
        package = types.ModuleType("huggingface_hub")
        package.constants = types.SimpleNamespace(HF_HUB_OFFLINE=offline)
        package.hf_hub_url = lambda name, file: f"hub:{name}/{file}"
        package.get_hf_file_metadata, package.hf_hub_download = ask, download
        monkeypatch.setitem(sys.modules, "huggingface_hub", package)

    return answer


def test_the_config_of_a_name_is_downloaded(hub, config):
    asked = []
    path = str(config(LLAMA_8B))
    hub(lambda url, timeout: asked.append(url), lambda *given, **_: asked.append(given) or path)
    facts = sized("org/model")
    assert (facts["model"], facts["bytes_per_token"]["bfloat16"]) == ("org/model", 131_072)
    assert asked == ["hub:org/model/config.json", ("org/model", "config.json")], (
        "only config.json may be downloaded"
    )


class ConnectError(Exception):
    """An error of an HTTP library: not an OSError, and without a message."""


def unreachable(url, timeout):
    assert timeout <= 5
    raise ConnectError("We couldn't connect to the hub\nand more" if "org/model" in url else "")


def tried_for_long(*_, **__):
    pytest.fail("hf_hub_download was called: it retries for 20 s without a network")


@pytest.mark.parametrize(
    ("offline", "part"),
    [(True, "HF_HUB_OFFLINE is set"), (False, "cannot be downloaded (We couldn't connect to the hub)")],
)
def test_a_name_without_a_network_is_reported(hub, offline, part):
    hub(unreachable, tried_for_long, offline)
    told = run("org/model", status=1).stderr
    assert "org/model: no such directory, and not in the local cache of the Hugging Face hub" in told
    assert part in told
    assert "give a model directory or a config.json" in told


def test_an_error_without_a_message_is_named(hub):
    hub(unreachable, tried_for_long)
    assert "cannot be downloaded (ConnectError)" in run("org/other", status=1).stderr


def test_a_name_without_huggingface_hub_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "huggingface_hub is not installed" in run("org/model", status=1).stderr
