# SPDX-License-Identifier: Apache-2.0
"""The commands and the options they share.

A command's module is imported when the command, its help or its completion is requested: the list of commands
imports none of them.
"""

from importlib import import_module
from typing import Annotated, Any

import typer
import typer.core
import typer.main

import kv_offload

# Name, module, the first line of its help (a test compares it with the command's own).
COMMANDS = (
    ("config", "config_command", "Write the JSON for vllm serve --kv-transfer-config, checked."),
    ("doctor", "doctor_command", "Check whether this machine can serve, or how a server is doing."),
    ("size", "size_command", "Show how large a model's KV cache is, and when loading pays off."),
    ("bench", "bench_command", "Measure a tier and memory copies against their raw speed."),
    ("calibrate", "calibrate_command", "Calibrate lossy compression for a model; needs torch."),
    ("top", "top_command", "Show a running server live: tiers, hits, speeds, misses."),
    ("why", "why_command", "Explain why little or nothing is loaded, from metrics or a log."),
    ("warm", "warm_command", "Load prompts into a running server's cache before requests do."),
    ("stat", "root_commands", "Show what a root holds: bytes, records, and each namespace."),
    ("ls", "root_commands", "List the records of a root, most recently used first."),
    ("verify", "root_commands", "Check every record of a root: length, header, key, checksums."),
    ("purge", "root_commands", "Remove the records of one namespace, of one tenant, or of all."),
    ("evict", "evict_command", "Remove records until a root is below its limit."),
    ("copy", "copy_command", "Copy the records of a namespace from one tier into another."),
    ("replay", "replay_command", "Replay requests or agent sessions against caches of other sizes."),
)
_MODULES = {name: module for name, module, _ in COMMANDS}
_SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # plain help: importing rich takes as long as everything else
    "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 100},
}


class LazyGroup(typer.core.TyperGroup):
    """A group whose commands are stand-ins until one is called."""

    def resolve_command(self, ctx: Any, args: Any) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and name in _MODULES:
            command = load_command(name)
        return name, command, rest


def load_command(name: str) -> Any:
    """Imports a command with its options."""
    module = import_module(f"kv_offload.cli.{_MODULES[name]}")
    alone = typer.Typer(**_SETTINGS)
    alone.command(name)(getattr(module, name))
    return typer.main.get_command(alone)


app = typer.Typer(
    name="kv-offload",
    cls=LazyGroup,
    no_args_is_help=True,
    **_SETTINGS | {"add_completion": True},
    help="KV-cache offloading for vLLM: write its configuration, check this machine, watch a "
    "server, and manage its directories. No command needs vLLM.",
    epilog="Exit status: 0 success; 1 something is damaged or refused; 2 wrong usage."
    "\n\n\b\nShell completion: kv-offload --install-completion, then open a new shell.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kv-offload {kv_offload.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _placeholder() -> None:
    """Never called: ``LazyGroup`` puts the command in its place."""


for _name, _, _summary in COMMANDS:
    app.command(_name, help=_summary)(_placeholder)
