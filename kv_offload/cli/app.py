"""The commands and the options they share."""

from typing import Annotated

import typer

import kv_offload
from kv_offload.cli import (
    bench_command,
    config_command,
    doctor_command,
    evict_command,
    replay_command,
    root_commands,
    size_command,
    top_command,
)

app = typer.Typer(
    name="kv-offload",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    help="KV-cache offloading for vLLM: write its configuration, ask what this machine can give, look "
    "after a root on disk. None of it needs vLLM.",
    epilog="Exit status: 0 all is well; 1 something is damaged or refused; 2 the command was used wrongly.",
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


app.command("config")(config_command.config)
app.command("doctor")(doctor_command.doctor)
app.command("size")(size_command.size)
app.command("bench")(bench_command.bench)
app.command("top")(top_command.top)
app.command("stat")(root_commands.stat)
app.command("ls")(root_commands.ls)
app.command("verify")(root_commands.verify)
app.command("purge")(root_commands.purge)
app.command("evict")(evict_command.evict)
app.command("replay")(replay_command.replay)
