# SPDX-License-Identifier: Apache-2.0
"""What every command does the same way: errors in one sentence, tables, JSON.

Importing this module loads neither rich nor the C++ core: ``--help`` and completion need none of them.
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
    """Say what is wrong on stderr and end with ``status``."""
    say(sentence)
    raise typer.Exit(status)


def say(sentence: str) -> None:
    """A sentence on stderr."""
    typer.echo(f"kv-offload: {printable(sentence, _LINE_END)}", err=True)


def plain_errors(command: Callable[P, R]) -> Callable[P, R]:
    """``command`` with one sentence for each error instead of a traceback. Exit status: 2 for wrong use, 1
    for what the machine refuses."""

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
    """What an error says, the file first when it names one."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def console(stderr: bool = False) -> "Console":
    """A console as wide as the terminal, or as COLUMNS says; wide where nobody reads it on a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    known = stream.isatty() or "COLUMNS" in os.environ
    return _console_type()(stderr=stderr, width=None if known else _WIDTH_WITHOUT_TERMINAL, highlight=False)


@functools.cache
def _console_type() -> "type[Console]":
    """A Console that escapes what a terminal would obey. All output of commands goes through it or ``say``;
    line ends within outside text are escaped where it is read (``add_row``, ``exposition.Page``)."""
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
    """A table. ``right``: columns of numbers. ``fold``: columns of long text, which fold where the terminal
    is narrow instead of losing their end; all others keep to one line, their header included."""
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
    """A row of plain text: brackets in it are no markup, and a cell is one line."""
    from rich.markup import escape

    to.add_row(*(escape(printable(cell)) for cell in cells))


def shortened(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters; an ellipsis in the place of its end."""
    return text if len(text) <= width else f"{text[: max(1, width - 1)]}…"


def escape(text: str) -> str:
    """``text`` with its brackets kept from being markup."""
    from rich.markup import escape as of_rich

    return of_rich(text)


def rate(bytes_per_second: float) -> str:
    """A speed for people: 1.2 GiB/s."""
    from kv_offload.sizes import format_bytes

    return f"{format_bytes(int(bytes_per_second))}/s"


def print_json(value: Any, indent: int | None = 2) -> None:
    typer.echo(json.dumps(value, indent=indent, default=str))
