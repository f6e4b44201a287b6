# SPDX-License-Identifier: Apache-2.0
"""Measures how much faster a prompt's KV is loaded from host memory than recomputed.

    python benchmarks/copy_prefill.py                  # on a GPU: Llama 8B's shape, 1K-64K tokens
    python benchmarks/copy_prefill.py --device cpu     # tries the benchmark with a small model on the host

Baseline, in the same run: prefill by transformers' Llama with random weights (bfloat16, scaled dot-product
attention, chunks of 8K tokens), without the overhead of a server. The comparison is the load of the same
prompt's KV by this project's copier from pinned host memory, in vLLM's layer-major layout (one page per layer
and 16-token block, blocks shuffled). Rounds alternate, and medians are compared. After the last round of a
length, the benchmark compares the loaded bytes with the stored bytes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reporting import echo, write_results
from transformers import LlamaConfig, LlamaModel
from transformers.cache_utils import DynamicCache

from kv_offload import _core

BLOCK = 16  # tokens
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
CHUNK = 8192  # tokens per prefill chunk
SHAPES = {
    # The published shape of Llama 3.1 8B.
    "8b": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    ),
    "tiny": LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
        max_position_embeddings=131072,
    ),
}


def page_bytes(shape: LlamaConfig) -> int:
    """Returns the bytes of keys and values of one layer and block."""
    head = shape.hidden_size // shape.num_attention_heads
    return int(BLOCK * 2 * shape.num_key_value_heads * head * 2)


class Cache:
    """A KV cache on the device, its copy in host memory, and the copier between them."""

    def __init__(self, shape: LlamaConfig, tokens: int, device: torch.device) -> None:
        self.page = page_bytes(shape)
        self.layers = shape.num_hidden_layers
        self.blocks = tokens // BLOCK
        self.tensors = [
            torch.randint(0, 256, (self.blocks, self.page), dtype=torch.uint8, device=device)
            for _ in range(self.layers)
        ]
        row = self.page * self.layers
        self.region = _core.HostRegion.attach_worker(
            f"benchmark-{uuid.uuid4()}", self.blocks * row, 1, 1, 0, [row], "{}"
        )
        self.step = row // 4096
        self.job = 0
        began = time.perf_counter()
        self.worker = _core.RankWorker(
            self.region,
            0,
            _core.Metrics(),
            copier="cuda" if device.type == "cuda" else "host",
            tensors=[(tensor.data_ptr(), self.blocks, self.page) for tensor in self.tensors],
            groups=[[(layer, self.page) for layer in range(self.layers)]],
            blocks_per_chunk=1,
            area=0,
            device=0 if device.type == "cuda" else -1,
            keep_alive=self.tensors,
        )
        self.started_seconds = time.perf_counter() - began
        self.ids = np.array(random.Random(1).sample(range(self.blocks), self.blocks), dtype=np.int64)

    def copy(self, tokens: int, store: bool) -> float:
        """Copies the prompt's blocks and returns the seconds that this took."""
        count = tokens // BLOCK
        self.job += 1
        rows = (np.arange(count) * self.step).astype(np.uint32)
        began = time.perf_counter()
        self.worker.submit(self.job, self.job, store, self.ids[:count], [count], [0], rows, [count])
        self.worker.wait([self.job])
        seconds = time.perf_counter() - began
        ended = self.worker.poll()
        assert [job for job, _, _ in ended] == [self.job]
        assert self.region.result(self.job) == 0
        return seconds

    def digest(self, tokens: int) -> list[int]:
        """Returns a checksum of the prompt's blocks per layer."""
        ids = torch.from_numpy(self.ids[: tokens // BLOCK]).to(self.tensors[0].device)
        weights = torch.arange(1, self.page // 8 + 1, device=ids.device)
        return [int((tensor[ids].view(torch.int64) * weights).sum()) for tensor in self.tensors]

    def wipe(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()


def prefill(model: LlamaModel, tokens: torch.Tensor, synchronize: Callable[[], None]) -> float:
    """Returns the seconds of the whole prompt's prefill, without logits."""
    synchronize()
    began = time.perf_counter()
    past = DynamicCache()
    with torch.inference_mode():
        for first in range(0, tokens.shape[1], CHUNK):
            past = model(
                tokens[:, first : first + CHUNK], past_key_values=past, use_cache=True
            ).past_key_values
    synchronize()
    return time.perf_counter() - began


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.5))
    lengths = [row["tokens"] for row in rows]
    for name in ("prefill", "load"):
        axis.loglog(lengths, [row[f"{name}_seconds"] for row in rows], "o-", label=name)
    for row in rows:
        axis.annotate(f"{row['factor']:.0f}x", (row["tokens"], row["load_seconds"]))
    axis.set(xlabel="prompt, tokens", ylabel="seconds")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="tokens of the longest prompt")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "no CUDA device on this machine (--device cpu tries the benchmark without one)", file=sys.stderr
        )
        return 2
    on_gpu = options.device == "cuda"
    device = torch.device(options.device)
    shape = SHAPES["8b" if on_gpu else "tiny"]
    lengths = [length for length in LENGTHS if length <= options.longest]
    name = torch.cuda.get_device_name() if on_gpu else "host"
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaModel(shape).eval()
        torch.set_default_dtype(torch.float32)
    cache = Cache(shape, lengths[-1], device)
    echo(f"{name}, {cache.worker.describe()}; copier made in {cache.started_seconds:.2f} s")
    synchronize: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None
    rows = []
    for length in lengths:
        tokens = torch.randint(0, shape.vocab_size, (1, length), device=device)
        expected = cache.digest(length)
        cache.copy(length, store=True)
        computed, loaded = [], []
        for number in range(options.rounds + 1):  # the first one warms up
            computed.append(prefill(model, tokens, synchronize))
            if number == options.rounds:
                cache.wipe()
                synchronize()
            loaded.append(cache.copy(length, store=False))
        if cache.digest(length) != expected:
            raise RuntimeError(f"{length} tokens: the loaded bytes are not those that were stored")
        seconds = statistics.median(computed[1:]), statistics.median(loaded[1:])
        load_bytes = length // BLOCK * cache.page * cache.layers
        rows.append(
            {
                "tokens": length,
                "bytes": load_bytes,
                "prefill_seconds": seconds[0],
                "load_seconds": seconds[1],
                "factor": seconds[0] / seconds[1],
            }
        )
        echo(
            f"{length:6} tokens: prefill {seconds[0] * 1e3:9.1f} ms, load {seconds[1] * 1e3:8.2f} ms "
            f"({load_bytes / seconds[1] / 1e9:.1f} GB/s), {seconds[0] / seconds[1]:.1f} times faster"
        )
        for tensor in cache.tensors:  # the next length must start from different bytes
            tensor.random_(0, 256)
    if not on_gpu:
        echo("tried only: nothing is kept")
        return 0
    title = f"{name}: Llama 8B's shape, prefill by transformers, load by kv_offload"
    write_results(
        "copy_prefill-" + "-".join(name.lower().split()),
        {"device": name, "copier": cache.worker.describe(), "rows": rows},
        lambda path: draw(rows, title, path),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
