# SPDX-License-Identifier: Apache-2.0
"""``kv-offload why URL|LOG``: explains why little or nothing was loaded."""

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kv_offload.cli.server import PREFIX, metrics_url, scrape
from kv_offload.cli.terminal import OK, PROBLEM, console, plain_errors, print_json

if TYPE_CHECKING:
    from kv_offload.diagnosis import Diagnosis

_ADDRESS = re.compile(r"[a-z]+://.*|localhost(/.*)?|\S+:[0-9]+(/.*)?")


@plain_errors
def why(
    source: Annotated[
        str,
        typer.Argument(
            metavar="URL|LOG",
            help="A running server, or a file with its log or its saved metrics page; - reads standard "
            "input.",
        ),
    ] = "http://127.0.0.1:8000/metrics",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of sentences.")] = False,
) -> None:
    """Explain why little or nothing is loaded, from metrics or a log.

    For each cause: how many tokens, what it means, what to change; the largest first. Metrics know the
    misses by reason since the server's start. A log shows problems at start (a changing hash seed, a
    refused configuration), and the warning of a server that stores and never hits. With
    VLLM_LOGGING_LEVEL=DEBUG it shows each request.

    \b
    Examples:
      kv-offload why http://gpu-7:8000
      kv-offload why server.log
      kubectl logs deploy/vllm | kv-offload why - --json

    Exit status: 0 tokens were loaded; 1 none were, or the server cannot be reached; 2 wrong usage.
    """
    found = diagnose(source)
    if as_json:
        print_json({"source": source, "verdict": found.verdict} | asdict(found))
    else:
        _print(found)
    raise typer.Exit(OK if found.hit_tokens else PROBLEM)


def diagnose(source: str) -> "Diagnosis":
    """Diagnoses ``source``. Raises ValueError if it is neither a file nor an address."""
    from kv_offload.diagnosis import from_metrics

    if source == "-":
        return _diagnose_text(sys.stdin)
    if os.path.isfile(source):
        with open(source, encoding="utf-8", errors="replace") as file:
            return _diagnose_text(file)
    if not _ADDRESS.fullmatch(source):
        raise ValueError(
            f"{source}: no such file; give a log, or the address of a server such as http://host:8000"
        )
    return from_metrics(scrape(metrics_url(source)))


def _diagnose_text(lines: Iterable[str]) -> "Diagnosis":
    """Returns the findings of a saved metrics page or a log. A page is recognised by its first lines."""
    from kv_offload.diagnosis import from_log, from_metrics
    from kv_offload.exposition import Page

    given = list(lines)
    if any(line.startswith(("# HELP ", "# TYPE ", PREFIX)) for line in given[:50]):
        return from_metrics(Page("".join(given)))
    return from_log(given)


def _print(found: "Diagnosis") -> None:
    from rich.padding import Padding
    from rich.text import Text

    out = console()
    out.print(found.verdict, markup=False)
    for number, finding in enumerate(found.findings, 1):
        out.print(f"\n{number}. {finding.cause}", markup=False)
        for part in (finding.text, finding.advice):
            out.print(Padding(Text(as_sentence(part)), (0, 0, 0, 3)))


def as_sentence(text: str) -> str:
    """Adds a capital letter and a full stop."""
    return f"{text[0].upper()}{text[1:].rstrip('.')}."
