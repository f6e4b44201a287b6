# SPDX-License-Identifier: Apache-2.0
"""``kv-offload warm FILE``: brings prompts into a running server's cache before they are needed."""

import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kv_offload.cli.terminal import OK, PROBLEM, USAGE, console, echo, fail, plain_errors, print_json

if TYPE_CHECKING:
    from kv_offload.prompt_file import Prompt
    from kv_offload.warming import Outcome, Sender, Server

_KEY_VARIABLE = "OPENAI_API_KEY"
_MOST_FAILURES_SHOWN = 5


@plain_errors
def warm(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Prompts, one JSON object per line; - reads standard input.",
            show_default=False,
        ),
    ],
    url: Annotated[
        str, typer.Option(metavar="URL", help="Address of the server, without /v1.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Model for lines without one. Default: the server's only model.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, help="Requests sent at a time.")] = 4,
    limit: Annotated[
        int, typer.Option("--limit", "-l", metavar="N", min=0, help="Send the first N prompts; 0: all.")
    ] = 0,
    api_key_env: Annotated[
        str, typer.Option(metavar="NAME", help="Environment variable with the server's API key, if any.")
    ] = _KEY_VARIABLE,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=86_400, help="Longest wait for a response.")
    ] = 600,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of sentences.")] = False,
) -> None:
    """Load prompts into a running server's cache before requests do.

    Sends each prompt with max_tokens 1. After a restart the server loads stored prompts from its tiers into
    host memory; it computes and stores all others. Works with any OpenAI-compatible server.

    A line is a request body with prompt (one text, or one list of token ids) or messages, or a line of
    OpenAI's batch format. Other keys (tools, cache_salt, kv_transfer_params, ...) are sent unchanged.
    Invalid lines are listed, and then nothing is sent. Responses 429 and 503, and connection resets, are
    retried. Proxies set in the environment are not used.

    \b
    Examples:
      kv-offload warm system_prompts.jsonl
      kv-offload warm agents.jsonl --url http://gpu-7:8000 --concurrency 8 --json
      head -100 requests.jsonl | kv-offload warm -

    Exit status: 0 all prompts were processed; 1 some were not, or the server cannot be reached; 2 wrong
    usage.
    """
    from kv_offload.interrupts import Interrupts
    from kv_offload.warming import Sender, Server

    server = Server(url, _api_key(api_key_env), timeout)
    prompts = _read(file, limit)
    if model is None and any("model" not in prompt.body for prompt in prompts):
        model = _only_model(server)
    sender = Sender(server, prompts, model or "", concurrency)
    totals = Totals(len(prompts))
    began = time.monotonic()
    with Interrupts(sender.interrupt) as interrupts:  # an exception could lose one that was read
        _receive(sender, totals)
    totals.interrupted = interrupts.is_set()
    for outcome in sender.stop():
        totals.add(outcome)
    totals.seconds = time.monotonic() - began
    if as_json:
        print_json(totals.report(server.url))
    else:
        _print(totals)
    if sender.unreachable is not None:
        echo(str(sender.unreachable))
    raise typer.Exit(OK if totals.done == totals.prompts else PROBLEM)


@dataclass
class Totals:
    """Sums over all outcomes. cached_tokens, hit_tokens: None until a response reports them."""

    prompts: int
    done: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    hit_tokens: dict[str, int] | None = None
    seconds: float = 0.0
    interrupted: bool = False
    failures: "list[Outcome]" = field(default_factory=list)

    def add(self, outcome: "Outcome") -> None:
        if outcome.error:
            self.failures.append(outcome)
            return
        self.done += 1
        self.prompt_tokens += outcome.prompt_tokens
        if outcome.cached_tokens is not None:
            self.cached_tokens = (self.cached_tokens or 0) + outcome.cached_tokens
        if outcome.hit_tokens is not None:
            self.hit_tokens = self.hit_tokens or {}
            for tier, tokens in outcome.hit_tokens.items():
                self.hit_tokens[tier] = self.hit_tokens.get(tier, 0) + tokens

    @property
    def unsent(self) -> int:
        """Prompts that were not sent, or whose request was aborted."""
        return self.prompts - self.done - len(self.failures)

    @property
    def tokens_per_second(self) -> float:
        return self.prompt_tokens / self.seconds if self.seconds else 0.0

    def report(self, url: str) -> dict[str, Any]:
        return {
            "url": url,
            "prompts": self.prompts,
            "processed": self.done,
            "failed": len(self.failures),
            "not_processed": self.unsent,
            "interrupted": self.interrupted,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "hit_tokens": self.hit_tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "failures": [{"line": failed.line, "message": failed.error} for failed in self.failures],
        }


def _api_key(variable: str) -> str:
    """Returns the API key; empty if there is none. Its value is never part of an error."""
    key = os.environ.get(variable, "").strip()
    if not key and variable != _KEY_VARIABLE:
        raise ValueError(f"the environment variable {variable} of --api-key-env is not set or empty")
    if not (key.isascii() and key.isprintable()) and key:
        raise ValueError(f"the API key in {variable} has characters that an HTTP header cannot contain")
    return key


def _read(file: str, limit: int) -> "list[Prompt]":
    from kv_offload.prompt_file import read_prompts

    if file == "-":
        return read_prompts(sys.stdin.buffer, "standard input", limit)
    try:
        with open(file, "rb") as lines:
            return read_prompts(lines, file, limit)
    except OSError as error:
        fail(f"{file}: {error.strerror}; give a file of prompts, or - for standard input", USAGE)


def _only_model(server: "Server") -> str:
    names = server.models()
    if len(names) != 1:
        listed = ", ".join(names) or "none"
        fail(f"{server.url} serves {len(names)} models ({listed}); choose one with --model", USAGE)
    return names[0]


def _receive(sender: "Sender", totals: Totals) -> None:
    """Adds all outcomes to ``totals``, with a progress bar on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("warming"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console(stderr=True),
        transient=True,
    ) as progress:
        bar = progress.add_task("", total=totals.prompts)
        for outcome in sender.outcomes():
            totals.add(outcome)
            progress.advance(bar)


def _print(totals: Totals) -> None:
    out = console()
    lines = [
        f"{totals.done:,} of {totals.prompts:,} prompts processed: {totals.prompt_tokens:,} tokens in "
        f"{totals.seconds:.1f} s, {totals.tokens_per_second:,.0f} tokens/s"
    ]
    if totals.done:
        lines += _found(totals)
    if totals.unsent:
        why = "interrupted" if totals.interrupted else "the server became unreachable"
        lines.append(f"{totals.unsent:,} not processed: {why}")
    if totals.failures:
        lines.append(f"{len(totals.failures):,} failed:")
        lines += _failures(totals.failures)
    for line in lines:
        out.print(line, markup=False)


def _found(totals: Totals) -> list[str]:
    """Describes how many tokens were found in a cache."""
    lines = []
    if totals.cached_tokens is None:
        lines.append(
            "cached tokens: the server does not report them; vLLM does with --enable-prompt-tokens-details"
        )
    else:
        share = 100 * totals.cached_tokens / totals.prompt_tokens if totals.prompt_tokens else 0.0
        lines.append(
            f"cached tokens: {totals.cached_tokens:,} ({share:.1f}%), found in vLLM's cache or a tier"
        )
    if totals.hit_tokens is not None:
        tiers = ", ".join(f"{tier} {tokens:,}" for tier, tokens in sorted(totals.hit_tokens.items()))
        lines.append(f"hit tokens by tier: {tiers or 'none'}")
    return lines


def _failures(failures: "Iterable[Outcome]") -> list[str]:
    first = sorted(failures, key=lambda failed: failed.line)
    lines = [f"  line {failed.line}: {failed.error}" for failed in first[:_MOST_FAILURES_SHOWN]]
    more = len(first) - len(lines)
    return [*lines, f"  and {more:,} more"] if more else lines
