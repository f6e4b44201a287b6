# SPDX-License-Identifier: Apache-2.0
"""Measures the TTFT of previously computed prompts on a GPU.

    python benchmarks/reload_gpu.py                                  # Llama 8B's shape, 2K-32K tokens
    python benchmarks/reload_gpu.py --only kv_offload                # one system; joined with earlier results
    python benchmarks/reload_gpu.py --model small --only kv_offload  # compares the responses
    python benchmarks/reload_gpu.py --device cpu --model small       # tries the benchmark without a GPU

Serves a model with vLLM, one server after the other: without a connector, with this plugin and with vLLM's
TieringOffloadingSpec. On a GPU all servers capture full CUDA graphs for decoding (--graphs NONE turns them
off). Each prompt is computed, then requested again after vLLM's own cache was emptied, so that host memory
serves it. After a restart it is requested again from disk, with the page cache dropped. Nothing is written
during a measurement. Times are whole requests for one token. "together" prompts are requested at the same
time, with 64-token responses.

The 8B model has dummy weights, with which any cache content gives similar text, so it is only for times. The
responses of "small" depend on every cached token, so the log-probabilities of its first token are compared.
On a GPU it is served in bfloat16, as real models are, so that vLLM picks the same attention backend.

Results are written after each system and joined with those of earlier runs of the same setup, so an
interrupted run keeps its measurements. Before the first server starts, the benchmark checks that /dev/shm and
the disk have enough space.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from local_server import Answer, LocalServer
from prompt_reload import drop_from_page_cache
from reporting import describe_machine, draw_bars, echo, read_results, write_results
from same_for_all import SYSTEMS, bytes_below, connector, environment
from tiny_model import make_model

from kv_offload.sizes import parse_byte_size

SHM = Path("/dev/shm")  # both connectors' host memory
WAIT_SECONDS = 60  # timeout for copies in flight
GIB = 2**30
SHM_RESERVE = GIB  # bytes of /dev/shm reserved for vLLM's own queues
# Full graphs of decoding, so that the machine needs neither inductor nor a compiler.
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
ANSWER = 64  # tokens per response of "together" prompts
VOCABULARY = 2048  # of the tokenizer of both models
# The published shape of Llama 3.1 8B: 128 KiB of KV per token.
SHAPE_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
# Tokens of a prompt -> number of prompts.
PROMPTS = {"8b": {2048: 3, 8192: 3, 32768: 2}, "small": {1024: 3, 4096: 3}}
TOGETHER = {"8b": (8192, 8), "small": (2048, 4)}
# Bytes of KV per token, in the dtype that is served on a GPU or a CPU.
KV_BYTES = {"8b": 128 * 1024, "small": 8 * 1024}
WARM_UP_TOKENS = (512, 1024)  # short, so that they store little


@dataclass
class Setup:
    model: Path
    kind: str
    device: str
    directory: Path
    host_bytes: str
    arguments: list[str]
    start_seconds: float
    write_seconds: float
    graphs: bool

    def written_bytes(self) -> int:
        """Returns an upper bound on the KV bytes that one system writes to its directory."""
        tokens, count = TOGETHER[self.kind]
        together = count * (tokens + ANSWER)
        single = sum(tokens * count for tokens, count in PROMPTS[self.kind].items())
        return (together + single + sum(WARM_UP_TOKENS)) * KV_BYTES[self.kind]

    def max_bytes(self) -> int:
        """Returns the size limit of a directory: 25% more than is written, so that nothing is evicted."""
        return max(GIB, self.written_bytes() * 5 // 4)

    def missing_room(self, systems: Sequence[str]) -> str | None:
        """Returns a text on the space that is too small and how to change it; None if everything fits."""
        if not any(system != "none" for system in systems):
            return None
        wanted, free = parse_byte_size(self.host_bytes) + SHM_RESERVE, shutil.disk_usage(SHM).free
        if free < wanted:
            return (
                f"host memory of {self.host_bytes} needs {wanted / GIB:.1f} GiB in {SHM}, which has "
                f"{free / GIB:.1f} free: enlarge it (mount -o remount,size=SIZE {SHM}) or lower --host"
            )
        wanted, free = self.max_bytes(), shutil.disk_usage(self.directory).free
        if free < wanted:
            return (
                f"up to {wanted / GIB:.1f} GiB are written below {self.directory}, which has "
                f"{free / GIB:.1f} free: pass a --directory on a larger disk"
            )
        return None

    def prompts(self, seed: int) -> list[list[int]]:
        draw = random.Random(seed)
        return [
            [draw.randrange(2, VOCABULARY) for _ in range(tokens)]
            for tokens, count in PROMPTS[self.kind].items()
            for _ in range(count)
        ]

    def together(self) -> list[list[int]]:
        draw = random.Random(2)
        tokens, count = TOGETHER[self.kind]
        return [[draw.randrange(2, VOCABULARY) for _ in range(tokens)] for _ in range(count)]

    def connector(self, name: str) -> dict[str, Any] | None:
        config = connector(name, self.host_bytes, self.directory / name, self.max_bytes())
        if config is None:
            return None
        extra = config["kv_connector_extra_config"]
        if name == "kv_offload" and self.kind == "8b":
            extra["model_id"] = "made-up weights"  # dummy weights have no identity of their own
        if name == "vllm" and self.device == "cuda":  # its own worker supports CUDA
            extra["spec_name"] = "TieringOffloadingSpec"
            del extra["spec_module_path"]
        return config

    def serve(self, name: str, run: str) -> LocalServer:
        return LocalServer(
            self.model,
            self.directory / f"{name}-{run}.log",
            kv_transfer=self.connector(name),
            max_model_len=max(PROMPTS[self.kind]) + 128,
            arguments=self.arguments,
            eager=not self.graphs,
            # PYTHONHASHSEED keeps block hashes equal after a restart. Dev mode allows resetting vLLM's cache.
            environment=environment() | {"PYTHONHASHSEED": "0", "VLLM_SERVER_DEV_MODE": "1"},
            start_seconds=self.start_seconds,
        )


@dataclass
class Times:
    """Seconds of each one-token request and its tokens that were not computed, by kind of measurement."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    together: dict[str, float] = field(default_factory=dict)
    # RMS difference of the first token's log-probabilities, reloaded vs. computed; None: not compared.
    worst_difference: float | None = None
    other_tokens: int = 0  # responses with another token; near-ties of dummy weights flip occasionally
    start_seconds: list[float] = field(default_factory=list)
    written_bytes: int = 0
    beside_writes: bool = False  # writes were still running during the measurement
    copier: str = ""


def ask_all(server: LocalServer, prompts: list[list[int]], what: str, times: Times) -> list[Answer]:
    answers = [server.ask(prompt, max_tokens=1) for prompt in prompts]
    times.seconds[what] = [answer.seconds for answer in answers]
    times.tokens[what] = [answer.cached_tokens for answer in answers]
    for prompt, answer in zip(prompts, answers, strict=True):
        echo(f"  {what}: {len(prompt):6} tokens {answer.seconds:.4f} s, {answer.cached_tokens} reloaded")
    return answers


def ask_together(server: LocalServer, prompts: list[list[int]], what: str, times: Times) -> None:
    with ThreadPoolExecutor(len(prompts)) as pool:
        began = time.perf_counter()
        answers = list(pool.map(lambda prompt: server.ask(prompt, max_tokens=ANSWER), prompts))
        times.together[what] = time.perf_counter() - began
    reloaded = sum(answer.cached_tokens for answer in answers)
    echo(f"  {what}, together: {times.together[what]:.3f} s, {reloaded} tokens reloaded")


def empty_its_cache(server: LocalServer) -> None:
    """Empties vLLM's own prefix cache. vLLM refuses that while blocks are being stored, so it retries."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not server.post("/reset_prefix_cache")["success"]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"vLLM's cache is not empty after {WAIT_SECONDS} s")
        time.sleep(0.2)


def wait_until_written(root: Path, server: LocalServer, seconds: float, times: Times) -> int:
    """Waits until nothing was added for two seconds, and returns the bytes below ``root``.

    After ``seconds`` it returns the bytes so far and records in ``times`` that writes were still running.
    """
    deadline, last, since = time.monotonic() + seconds, -1, time.monotonic()
    while time.monotonic() - since < 2:
        if time.monotonic() > deadline:
            echo(f"  still writing after {seconds:g} s, {last / 2**30:.1f} GiB: writes disturb later figures")
            times.beside_writes = True
            break
        server.ask([2] * 8, max_tokens=1)  # vLLM reports ended jobs only in its steps
        if (now := bytes_below(root)) != last:
            last, since = now, time.monotonic()
        time.sleep(0.1)
    return last


def warm_up(server: LocalServer, setup: Setup) -> None:
    """Makes vLLM compile its kernels. All servers get the same prompts, so a restarted one loads them."""
    draw = random.Random(3)
    for tokens in WARM_UP_TOKENS:
        server.ask([draw.randrange(2, VOCABULARY) for _ in range(tokens)], max_tokens=4)


def measure(setup: Setup, name: str) -> Times:
    times, prompts, together = Times(), setup.prompts(1), setup.together()
    root = setup.directory / name
    root.mkdir()
    echo(f"{name}: starting")
    with setup.serve(name, "first") as server:
        times.start_seconds.append(server.boot_seconds)
        warm_up(server, setup)
        computed = ask_all(server, prompts, "computed", times)
        ask_together(server, together, "computed", times)
        if name == "none":
            return times
        times.written_bytes = wait_until_written(root, server, setup.write_seconds, times)
        empty_its_cache(server)
        host = ask_all(server, prompts, "host", times)
        empty_its_cache(server)
        ask_together(server, together, "host", times)
        (setup.directory / f"{name}.metrics").write_text(server.get("/metrics"))
        for line in server.log_file.read_text(errors="replace").splitlines():
            if "cuda:" in line and "rates" in line:
                times.copier = line[line.index("cuda:") :]
    drop_from_page_cache(root)
    echo(f"{name}: starting again over {times.written_bytes / 2**30:.1f} GiB")
    with setup.serve(name, "again") as server:
        times.start_seconds.append(server.boot_seconds)
        warm_up(server, setup)
        wait_until_written(root, server, setup.write_seconds, times)
        disk = ask_all(server, prompts, "disk", times)
        (setup.directory / f"{name}-again.metrics").write_text(server.get("/metrics"))
    shutil.rmtree(root)  # free the space for the next system
    compare(computed * 2, host + disk, times)
    echo(
        f"{name}: log-probabilities after a reload differ by at most {times.worst_difference}, "
        f"{times.other_tokens} answers have another token"
    )
    return times


def compare(computed: Sequence[Answer], reloaded: Sequence[Answer], times: Times) -> None:
    """Records how much reloaded responses differ from computed ones.

    Compares only first tokens: their candidates depend on the same prompt, whichever candidate was chosen.
    """
    differences = []
    for one, other in zip(computed, reloaded, strict=True):
        times.other_tokens += one.token_ids[:1] != other.token_ids[:1]
        left, right = one.top[0], other.top[0]
        shared = left.keys() & right.keys()
        if not shared:
            raise RuntimeError(f"the answers have no candidate in common: {sorted(left)} and {sorted(right)}")
        differences.append(math.sqrt(statistics.mean((left[token] - right[token]) ** 2 for token in shared)))
    times.worst_difference = max(differences)


def make_8b(directory: Path) -> Path:
    """Writes the 8B config and the small model's tokenizer. vLLM makes the weights (--load-format dummy)."""
    make_model(directory, "small")
    (directory / "model.safetensors").unlink()
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | SHAPE_8B))
    return directory


def medians(setup: Setup, times: Times) -> dict[str, dict[str, float]]:
    """Returns the median seconds by kind of measurement and prompt length."""
    lengths = [len(prompt) for prompt in setup.prompts(1)]
    return {
        what: {
            str(tokens): statistics.median(
                value for length, value in zip(lengths, seconds, strict=True) if length == tokens
            )
            for tokens in PROMPTS[setup.kind]
        }
        for what, seconds in times.seconds.items()
    }


def draw(path: Path, rows: dict[str, dict[str, dict[str, float]]], title: str) -> None:
    bars = []
    for tokens, baseline in rows["none"]["computed"].items():
        bars.append((f"{tokens} tokens: computed, no connector", baseline, f"{baseline * 1e3:.0f} ms"))
        for name, label in (("kv_offload", "kv_offload"), ("vllm", "vLLM tiering")):
            for what in ("host", "disk") if name in rows else ():
                seconds = rows[name][what][tokens]
                text = f"{seconds * 1e3:.0f} ms ({baseline / seconds:.1f}x)"
                bars.append((f"{tokens} tokens: {label}, {what}", seconds, text))
    draw_bars(path, bars, "seconds to the first token", title)


def vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


def keep(setup: Setup, device: str, measured: Mapping[str, Times]) -> Path:
    """Writes the results so far, joined with those of earlier runs of the same setup."""
    header = {
        "device": device,
        "vllm": vllm_version(),
        "model": setup.kind,
        "host": setup.host_bytes,
        "graphs": setup.graphs,
        "arguments": setup.arguments,
    }
    name = f"reload_gpu-{setup.kind}-{'-'.join(device.lower().split())}"
    medians_of = {system: medians(setup, times) for system, times in measured.items()}
    systems = {system: asdict(times) for system, times in measured.items()}
    earlier = read_results(name)
    if earlier is not None and all(earlier.get(key) == value for key, value in header.items()):
        medians_of = earlier["medians"] | medians_of
        systems = earlier["systems"] | systems
    title = f"Prompts computed and reloaded, {device}"
    return write_results(
        name,
        {**header, "medians": medians_of, "systems": systems},
        (lambda path: draw(path, medians_of, title)) if "none" in medians_of else None,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=tuple(PROMPTS), default="8b")
    parser.add_argument("--host", default="40960MiB", help="host memory of a connector, in MiB")
    parser.add_argument("--only", choices=SYSTEMS, action="append", help="measure this system (repeatable)")
    parser.add_argument("--graphs", choices=("FULL_DECODE_ONLY", "NONE"), default="FULL_DECODE_ONLY")
    parser.add_argument("--directory", type=Path, help="where the tiers are; default: a temporary one")
    parser.add_argument("--keep-logs", type=Path, help="a folder for the servers' logs and metrics")
    parser.add_argument("--start-seconds", type=float, default=300, help="in which a server must be up")
    parser.add_argument(
        "--write-seconds", type=float, default=120, help="at most, for the disk before a restart"
    )
    parser.add_argument("arguments", nargs="*", help="further ones for vLLM, after --")
    options = parser.parse_args()
    gpu = "host"
    if options.device == "cuda":
        if not torch.cuda.is_available():
            print("no CUDA device on this machine (--device cpu tries the benchmark)", file=sys.stderr)
            return 2
        gpu = torch.cuda.get_device_name()
    graphs = options.device == "cuda" and options.graphs != "NONE"
    graph_arguments = ["--compilation-config", json.dumps(GRAPHS)]
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="reload-gpu-") as name:
        directory = Path(name).resolve()
        if options.model == "8b":
            model, dummy = make_8b(directory / "model"), ["--load-format", "dummy"]
        else:
            # Real models are served in bfloat16. On a CPU the dtype does not change the backend.
            dtype = torch.bfloat16 if options.device == "cuda" else None
            model, dummy = make_model(directory / "model", options.model, dtype=dtype), []
        setup = Setup(
            model=model,
            kind=options.model,
            device=options.device,
            directory=directory,
            host_bytes=options.host,
            arguments=[*dummy, *(graph_arguments if graphs else []), *options.arguments],
            start_seconds=options.start_seconds,
            write_seconds=options.write_seconds,
            graphs=graphs,
        )
        systems = options.only or SYSTEMS
        if missing := setup.missing_room(systems):
            print(missing, file=sys.stderr)
            return 2
        results: dict[str, Times] = {}
        try:
            for system in systems:
                results[system] = measure(setup, system)
                if options.device == "cuda":
                    keep(setup, gpu, results)
        finally:
            if options.keep_logs:
                options.keep_logs.mkdir(parents=True, exist_ok=True)
                for path in [*directory.glob("*.log"), *directory.glob("*.metrics")]:
                    with contextlib.suppress(OSError):
                        (options.keep_logs / path.name).write_bytes(path.read_bytes()[-2_000_000:])
    rows = {system: medians(setup, times) for system, times in results.items()}
    for system, by_what in rows.items():
        for what, by_length in by_what.items():
            text = ", ".join(f"{tokens}: {seconds * 1e3:.1f} ms" for tokens, seconds in by_length.items())
            together = results[system].together.get(what)
            echo(f"{system:10} {what:9} {text}" + (f"; together {together:.3f} s" if together else ""))
    echo(f"{gpu}, {describe_machine()['text']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
