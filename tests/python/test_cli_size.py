"""kv-offload size: what a token of a model takes, against figures known for real models."""

import json

import pytest
from typer.testing import CliRunner

from kv_offload.cli import app
from kv_offload.model_shape import model_shape

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
        (LLAMA_8B | {"num_key_value_heads": None}, 524_288),  # all heads keep their own
        (LLAMA_8B | {"head_dim": 64}, 65_536),
        (LLAMA_8B | {"torch_dtype": "float32"}, 131_072),  # served in bfloat16
        (DEEPSEEK_V3, 70_272),  # 61 layers x (512 + 64) values x 2 bytes, no second half for values
        (DEEPSEEK_V3 | {"index_head_dim": 128}, 70_272 + 61 * 132),
        (GEMMA_3, 12 * 4 * 512 * 2),
        ({**LLAMA_8B, "num_kv_shared_layers": 12}, 81_920),
        ({**LLAMA_8B, "layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8}, 32_768),
        ({**LLAMA_8B, "hybrid_override_pattern": "M-*M" * 8}, 32_768),
        ({**LLAMA_8B, "attn_layer_period": 8, "attn_layer_offset": 4}, 16_384),
    ],
)
def test_bytes_per_token(config, content, expected):
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
    # Ten windowed and two full layers: groups of two layers each, so that all blocks are of one size.
    chunks = model_shape(GEMMA_3).geometry("bfloat16").groups
    assert [chunk.shard_bytes for chunk in chunks] == [(2 * 4 * 512 * 2 * 16,)] * 6


def test_tokens_per_tier_and_per_gib(config):
    facts = sized(config(LLAMA_8B), "--cpu", "32GiB", "--disk-size", "500GiB", "--disk-size", "1TiB")
    assert facts["tokens_per_gib"]["memory"] == 8192
    assert [(tier["name"], tier["tokens"]) for tier in facts["tiers"]] == [
        ("cpu", 262_144),
        ("fs", 500 * GIB * 16 // ((2 << 20) + 4096)),
        ("fs-2", 1024 * GIB * 16 // ((2 << 20) + 4096)),
    ]


def test_tiers_of_a_configuration(config, tmp_path):
    tier = {"type": "fs", "root_dir": str(tmp_path / "kv"), "max_bytes": "10GiB"}
    extra = {"spec_name": "KVOffloadSpec", "cpu_bytes_to_use": "1GiB", "secondary_tiers": [tier]}
    facts = sized(config(LLAMA_8B), "--config", json.dumps(extra))
    assert [(tier["name"], tier["bytes"]) for tier in facts["tiers"]] == [("cpu", GIB), ("fs", 10 * GIB)]


def test_more_ranks_than_heads_copy_them_but_mla_is_kept_once(config):
    assert sized(config(LLAMA_8B), "-t", 8)["bytes_per_token"]["bfloat16"] == 131_072
    assert sized(config(LLAMA_8B), "-t", 16)["bytes_per_token"]["bfloat16"] == 262_144
    assert sized(config(DEEPSEEK_V3), "-t", 8)["bytes_per_token"]["bfloat16"] == 70_272


def test_break_even_is_bytes_per_token_times_prefill(config):
    facts = sized(config(LLAMA_8B), "--prefill", 8000, "--kv-dtype", "fp8")
    assert facts["break_even"] == [{"prefill_tokens_per_second": 8000, "bytes_per_second": 8000 * 65_536}]


def test_for_people(config):
    text = " ".join(run(config(LLAMA_8B), "--cpu", "1GiB", "--prefill", "8192").output.split())
    for part in ("a token takes 128.0 KiB in bfloat16", "8,192 tokens/s 1.0 GiB/s", "cpu 1.0 GiB 8,192"):
        assert part in text


def test_a_model_of_the_local_cache_of_the_hub(config, tmp_path, monkeypatch):
    folder = tmp_path / "hub" / "models--org--small"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("c0ffee")
    (folder / "snapshots" / "c0ffee").mkdir(parents=True)
    (folder / "snapshots" / "c0ffee" / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert sized("org/small")["bytes_per_token"]["bfloat16"] == 131_072


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ({}, "it has no num_hidden_layers"),
        ({**LLAMA_8B, "layer_types": ["quantum"] * 32}, "layers of an unknown kind: quantum"),
        ({**LLAMA_8B, "layer_types": ["mamba"] * 32}, "no layer keeps anything for each token"),
        ({**LLAMA_8B, "hidden_size": None}, "it has no hidden_size"),
    ],
)
def test_what_cannot_be_sized_is_told(config, content, part):
    result = run(config(content), status=2)
    assert result.stderr.startswith("kv-offload: ")
    assert part in result.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--kv-dtype", "fp3"], "possible: auto, float32"),
        (["--cpu", "1gig"], "is not a size"),
        (["--cpu", "1GiB", "--config", '{"cpu_bytes_to_use": 1}'], "without --cpu"),
    ],
)
def test_wrong_options(config, arguments, part):
    assert part in run(config(LLAMA_8B), *arguments, status=2).stderr


def test_a_model_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert "no such file or directory" in run(tmp_path / "none", status=2).stderr
    assert "has no config.json" in run(tmp_path, status=2).stderr
