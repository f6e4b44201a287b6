# SPDX-License-Identifier: Apache-2.0
"""A five-minute demonstration: vLLM reloads evicted prompts from host memory, and from disk after a restart.

    python examples/demo.py [--directory DIR] [--prompts 4] [--tokens 8064]

Creates a small model and serves it with vLLM on CPU. vLLM's own cache holds only one prompt, so each prompt
evicts the previous one. Needs vLLM and this package in the running Python
(examples/demo.sh sets up both).
"""

from __future__ import annotations

import argparse
import platform
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from local_server import Answer, LocalServer, kv_transfer_config
from rich.console import Console
from rich.table import Table

BLOCK = 128  # tokens in a block of vLLM's cache on CPU
console = Console()


@contextmanager
def step(what: str) -> Iterator[None]:
    """Shows the current step and its elapsed time; leaves a line with the total time."""
    began = time.monotonic()
    done = threading.Event()
    status = console.status(what)

    def tick() -> None:
        printed = began
        while not done.wait(1.0):
            elapsed = time.monotonic() - began
            status.update(f"{what} [dim]{elapsed:.0f} s[/dim]")
            if not console.is_terminal and time.monotonic() - printed >= 15:
                printed = time.monotonic()
                console.print(f"  ... {what}: {elapsed:.0f} s")

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        with status:
            yield
    finally:
        done.set()
        ticker.join()
    console.print(f"[green]done[/green] {what} [dim]({time.monotonic() - began:.1f} s)[/dim]")


def make_prompts(count: int, tokens: int) -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(2, 2048) for _ in range(tokens)] for _ in range(count)]


def ask_all(server: LocalServer, prompts: Sequence[Sequence[int]], what: str) -> list[Answer]:
    answers = []
    for number, prompt in enumerate(prompts, 1):
        with step(f"{what}: prompt {number} of {len(prompts)}, {len(prompt)} tokens"):
            answers.append(server.ask(prompt, max_tokens=16))
    return answers


def wait_until_recorded(server: LocalServer, chunks: int, seconds: float = 120) -> None:
    """Waits until the chunks are written, which happens after the answer; a stopped server drops queued
    chunks."""
    deadline = time.monotonic() + seconds
    while server.metric("kv_offload_tier_chunks", tier="fs") < chunks and time.monotonic() < deadline:
        server.ask([2] * 16, max_tokens=1)  # an idle engine publishes no metrics
        time.sleep(0.3)


def show(prompts: Sequence[Sequence[int]], runs: Sequence[Sequence[Answer]]) -> bool:
    """Prints the table. Returns True if all runs gave the same answers and computed nothing twice."""
    table = Table(title=f"Seconds to an answer of 16 tokens, vLLM on CPU ({platform.machine()})")
    table.add_column("prompt tokens", justify="right")
    table.add_column("computed", justify="right")
    table.add_column("from host memory", justify="right")
    table.add_column("from disk,\nafter restart", justify="right")
    table.add_column("not computed\n(host / disk)", justify="right")
    table.add_column("same text", justify="center")
    all_same = True
    for prompt, computed, host, disk in zip(prompts, *runs, strict=True):
        same = computed.token_ids == host.token_ids == disk.token_ids
        all_same &= same
        table.add_row(
            f"{len(prompt)}",
            f"{computed.seconds:.2f}",
            f"{host.seconds:.2f}  ({computed.seconds / host.seconds:.0f}x)",
            f"{disk.seconds:.2f}  ({computed.seconds / disk.seconds:.0f}x)",
            f"{host.cached_tokens} / {disk.cached_tokens}",
            "[green]yes[/green]" if same else "[red]NO[/red]",
        )
    console.print(table)
    enough = 0.9 * sum(len(prompt) for prompt in prompts)
    reloaded = all(sum(answer.cached_tokens for answer in run) >= enough for run in runs[1:])
    if not reloaded:
        console.print("[red]Not everything was reloaded: see the servers' logs.[/red]")
    return all_same and reloaded


def demonstrate(directory: Path, prompt_count: int, tokens: int) -> bool:
    from tiny_model import make_model

    with step("making a small model: config, tokenizer, random weights"):
        model = make_model(directory / "model")
    prompts = make_prompts(prompt_count, tokens)
    server = LocalServer(
        model,
        directory / "server.log",
        blocks=tokens // BLOCK + 8,
        # On a busy machine, computing may look faster or the disk slower.
        kv_transfer=kv_transfer_config(
            "1GiB", directory / "kv", "4GiB", load_policy="always", lookup_timeout_ms=60_000
        ),
        max_model_len=tokens + BLOCK,
    )
    console.print(f"[dim]{' '.join(server.command())}[/dim]")
    console.print(f"[dim]log: {server.log_file}[/dim]")
    try:
        with step("starting vLLM with the plugin"):
            server.start()
        with step("first request of all (vLLM compiles its helpers)"):
            server.ask([2] * tokens, max_tokens=16)
        computed = ask_all(server, prompts, "computing")
        host = ask_all(server, prompts, "asking again, evicted from vLLM's cache")
        with step("letting the last records reach the disk"):
            prompts_asked = prompt_count + 1  # with the first request of all
            wait_until_recorded(server, prompts_asked * (tokens // BLOCK))
        with step("stopping vLLM"):
            server.stop()
        with step("starting vLLM again, on the same directory"):
            server.start()
        with step("first request of all"):
            server.ask([3] * tokens, max_tokens=16)
        disk = ask_all(server, prompts, "asking after the restart")
        hits = {tier: server.metric("kv_offload_hit_tokens_total", tier=tier) for tier in ("cpu", "fs")}
        console.print(f"[dim]/metrics after the restart: kv_offload_hit_tokens_total {hits}[/dim]")
    finally:
        server.stop()
    return show(prompts, [computed, host, disk])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, help="kept afterwards; default: a temporary one, removed")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8064)
    arguments = parser.parse_args()
    if arguments.directory is not None:
        return 0 if demonstrate(arguments.directory, arguments.prompts, arguments.tokens) else 1
    with tempfile.TemporaryDirectory(prefix="kv-offload-demo-") as directory:
        return 0 if demonstrate(Path(directory), arguments.prompts, arguments.tokens) else 1


if __name__ == "__main__":
    raise SystemExit(main())
