# SPDX-License-Identifier: Apache-2.0
"""Creates a small language model locally: config, tokenizer and weights, without downloads.

The weights are random, but scaled so that the answers depend on every cached token: each projection keeps
unit variance, the attention logits have a standard deviation of about two, and the attention output is as
large as the residual. So a wrong chunk in the KV cache changes the log-probabilities visibly. (With weights
of vanishing size, as dummy loaders make them, any cache gives the same text and a check proves nothing.)

    python examples/tiny_model.py DIRECTORY [--kind small|large|sliding]
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 2048
LOGIT_STD = 2.0  # of the attention logits
HEAD_STD = 2.0  # of the output logits: spreads the candidates, so that greedy choices are not ties

REPETITION = 2.0


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model; ``sliding`` makes it Gemma-3-like, with every third layer global."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    max_tokens: int
    context: int  # tokens at which the attention output is as large as the residual
    dtype: torch.dtype
    sliding: int = 0


SHAPES = {
    # 8 KiB of KV per token; float32, so that two runs of one prompt differ by rounding only (1e-5).
    "small": Shape(256, 4, 8, 4, 64, 512, 8192, 2048, torch.float32),
    # For timing: 16 KiB of KV per token.
    "large": Shape(512, 8, 8, 8, 64, 1408, 40960, 8192, torch.bfloat16),
    "sliding": Shape(256, 6, 8, 4, 64, 512, 8192, 2048, torch.float32, sliding=512),
}


def make_model(
    directory: str | Path, kind: str = "small", seed: int = 0, dtype: torch.dtype | None = None
) -> Path:
    """Writes the model ``kind`` into ``directory`` (created if missing) and returns it.

    The same kind, seed and ``dtype`` (default: the kind's own) give the same bytes. Raises KeyError for an
    unknown kind.
    """
    shape = SHAPES[kind] if dtype is None else replace(SHAPES[kind], dtype=dtype)
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    _make_tokenizer(root, shape)
    _write_json(root / "config.json", _config(shape))
    save_file(_make_weights(shape, seed), str(root / "model.safetensors"), metadata={"format": "pt"})
    return root


def _make_tokenizer(root: Path, shape: Shape) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(inspect.getsource(argparse).splitlines(), trainer)
    tokenizer.save(str(root / "tokenizer.json"))
    _write_json(
        root / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "model_max_length": shape.max_tokens,
        },
    )


def _config(shape: Shape) -> dict[str, Any]:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_tokens,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": str(shape.dtype).removeprefix("torch."),
    }
    if shape.sliding:
        every_third = ["sliding_attention", "sliding_attention", "full_attention"]
        config |= {
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            "sliding_window": shape.sliding,
            "layer_types": [every_third[layer % 3] for layer in range(shape.layers)],
            "query_pre_attn_scalar": shape.head_dim,
        }
    return config


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _make_weights(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))
        return values.to(shape.dtype)

    def norm(width: int, gain: float = 1.0) -> torch.Tensor:
        # Gemma's norms multiply by one plus their weight.
        return torch.full((width,), gain - 1.0 if shape.sliding else gain, dtype=shape.dtype)

    embedding_gain = 1.0 if shape.sliding else math.sqrt(shape.hidden)  # Gemma multiplies by sqrt(hidden)
    embedding = matrix(VOCABULARY, shape.hidden, embedding_gain)
    # Lowers the probability of repeating a token; otherwise the text is one repeated word.
    head = matrix(VOCABULARY, shape.hidden, HEAD_STD) - embedding * (REPETITION / embedding_gain)
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": norm(shape.hidden),
        "lm_head.weight": head,
    }
    # A softmax over n logits of standard deviation s averages about n / exp(s^2) values.
    averaged = max(1.0, shape.context / math.exp(LOGIT_STD**2))
    q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        gain = 1.0 if shape.sliding else math.sqrt(LOGIT_STD)
        weights[attention + "q_proj.weight"] = matrix(q_width, shape.hidden, gain)
        weights[attention + "k_proj.weight"] = matrix(kv_width, shape.hidden, gain)
        weights[attention + "v_proj.weight"] = matrix(kv_width, shape.hidden)
        weights[attention + "o_proj.weight"] = matrix(shape.hidden, q_width, math.sqrt(averaged))
        weights[prefix + "mlp.gate_proj.weight"] = matrix(shape.mlp, shape.hidden)
        weights[prefix + "mlp.up_proj.weight"] = matrix(shape.mlp, shape.hidden)
        weights[prefix + "mlp.down_proj.weight"] = matrix(shape.hidden, shape.mlp)
        weights[prefix + "input_layernorm.weight"] = norm(shape.hidden)
        weights[prefix + "post_attention_layernorm.weight"] = norm(shape.hidden)
        if shape.sliding:
            weights[prefix + "pre_feedforward_layernorm.weight"] = norm(shape.hidden)
            weights[prefix + "post_feedforward_layernorm.weight"] = norm(shape.hidden)
            weights[attention + "q_norm.weight"] = norm(shape.head_dim, math.sqrt(LOGIT_STD))
            weights[attention + "k_norm.weight"] = norm(shape.head_dim, math.sqrt(LOGIT_STD))
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("--kind", choices=sorted(SHAPES), default="small")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_model(arguments.directory, arguments.kind, arguments.seed))


if __name__ == "__main__":
    main()
