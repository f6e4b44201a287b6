# SPDX-License-Identifier: Apache-2.0
"""Output shared by all commands: one-sentence errors, tables, JSON.

Importing this module loads neither rich nor the C++ core, because ``--help`` and completion need neither.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import typer

from kv_offload.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.table import Table

P = ParamSpec("P")
R = TypeVar("R")

OK, PROBLEM, USAGE = 0, 1, 2
_WIDTH_WITHOUT_TERMINAL = 160
_LINE_END = "\n"


def fail(sentence: str, status: int) -> NoReturn:
    """Prints the error on stderr and exits with ``status``."""
    echo(sentence)
    raise typer.Exit(status)


def echo(sentence: str) -> None:
    """Prints a sentence on stderr."""
    typer.echo(f"kv-offload: {printable(sentence, _LINE_END)}", err=True)


def plain_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Wraps ``command`` to print one sentence for each error instead of a traceback. Exit status: 2 for wrong
    use, 1 for errors of the machine."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise  # BrokenPipeError: the reader of our output has ended
        except (ValueError, OverflowError) as error:  # the latter: a number such as inf
            fail(str(error), USAGE)
        except ImportError as error:
            fail(f"the C++ core cannot be loaded ({error}); install vllm-kv-offload again", PROBLEM)
        except (OSError, RuntimeError) as error:
            fail(sentence(error), PROBLEM)

    return run


def sentence(error: Exception) -> str:
    """Returns the text of an error, after its file if it has one."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def console(stderr: bool = False) -> "Console":
    """Returns a console as wide as the terminal or COLUMNS; wide if the output is not a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    known = stream.isatty() or "COLUMNS" in os.environ
    return _console_type()(stderr=stderr, width=None if known else _WIDTH_WITHOUT_TERMINAL, highlight=False)


@functools.cache
def _console_type() -> "type[Console]":
    """Returns a Console class that escapes terminal control characters. All output goes through it or
    ``echo``. ``add_row`` and ``exposition.Page`` escape line ends within foreign text."""
    from rich.console import Console
    from rich.segment import Segment

    class PlainConsole(Console):
        def render(
            self, renderable: "RenderableType", options: "ConsoleOptions | None" = None
        ) -> "Iterator[Segment]":
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else printable(text, _LINE_END), style, control)

    return PlainConsole


def table(title: str, *columns: str, right: tuple[str, ...] = (), fold: tuple[str, ...] = ()) -> "Table":
    """Returns a table. ``right``: columns of numbers. ``fold``: columns of long text, which wrap in a narrow
    terminal instead of being cut; all other columns, headers included, stay on one line."""
    from rich.table import Table

    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(
            column,
            justify="right" if column in right else "left",
            overflow="fold",
            no_wrap=column not in fold,
        )
    return made


def add_row(to: "Table", *cells: str) -> None:
    """Adds a row of plain text: brackets are not markup, and each cell is one line."""
    from rich.markup import escape

    to.add_row(*(escape(printable(cell)) for cell in cells))


def shortened(text: str, width: int) -> str:
    """Cuts ``text`` to ``width`` characters, with an ellipsis at the end."""
    return text if len(text) <= width else f"{text[: max(1, width - 1)]}…"


def escape(text: str) -> str:
    """Escapes brackets in ``text``, so that they are not markup."""
    from rich.markup import escape as of_rich

    return of_rich(text)


def rate(bytes_per_second: float) -> str:
    """Formats a speed: 1.2 GiB/s."""
    from kv_offload.sizes import format_bytes

    return f"{format_bytes(int(bytes_per_second))}/s"


def print_json(value: Any, indent: int | None = 2) -> None:
    typer.echo(json.dumps(value, indent=indent, default=str))
