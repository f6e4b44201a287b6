"""What every command does the same way: errors in one sentence, tables, JSON."""

import functools
import json
import sys
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kv_offload.sizes import format_bytes

P = ParamSpec("P")
R = TypeVar("R")

OK, PROBLEM, USAGE = 0, 1, 2


def fail(sentence: str, status: int) -> NoReturn:
    """Say what is wrong on stderr and end with ``status``."""
    typer.echo(f"kv-offload: {sentence}", err=True)
    raise typer.Exit(status)


def told(command: Callable[P, R]) -> Callable[P, R]:
    """Errors of ``command`` as one sentence instead of a traceback: what the caller gave wrong ends with
    2, what the machine refuses with 1."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise  # the last: who reads us has seen enough
        except ValueError as error:
            fail(str(error), USAGE)
        except ImportError as error:
            fail(f"the C++ core cannot be loaded ({error}); install vllm-kv-offload again", PROBLEM)
        except (OSError, RuntimeError) as error:
            fail(sentence(error), PROBLEM)

    return run


def sentence(error: Exception) -> str:
    """What an error says, the file first when it names one."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def console(stderr: bool = False) -> Console:
    """A console that does not cut lines when nobody reads it on a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 160, highlight=False)


def table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table whose long cells fold instead of losing their end; ``right`` names columns of numbers."""
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(
            column, justify="right" if column in right else "left", overflow="fold", no_wrap=column in right
        )
    return made


def add_row(to: Table, *cells: str) -> None:
    """A row of plain text: brackets in it are no markup."""
    to.add_row(*(escape(cell) for cell in cells))


def rate(bytes_per_second: float) -> str:
    """A speed for people: 1.2 GiB/s."""
    return f"{format_bytes(int(bytes_per_second))}/s"


def print_json(value: Any, indent: int | None = 2) -> None:
    typer.echo(json.dumps(value, indent=indent, default=str))
